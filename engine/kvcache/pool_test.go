package kvcache

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvport/kvport/connector"
)

func key(n int) connector.BlockKey { return connector.BlockKey{byte(n), byte(n >> 8), 1} }

func alloc(t require.TestingT, p *Pool) connector.BlockID {
	id, ok := p.Alloc()
	require.True(t, ok)
	return id
}

func TestReuseIsLeastRecentlyUsedFirst(t *testing.T) {
	p := New(3)
	a, b, c := alloc(t, p), alloc(t, p), alloc(t, p)
	_, ok := p.Alloc()
	require.False(t, ok, "more blocks than there are")

	p.Publish(a, 0, key(1))
	p.Publish(b, 0, key(2))
	p.Unref(b)
	p.Unref(a)
	p.Unref(c) // without content: goes first although it was freed last
	require.Equal(t, []connector.BlockID{c, b, a}, []connector.BlockID{alloc(t, p), alloc(t, p), alloc(t, p)})
	require.NoError(t, p.Check())
}

func TestCachedContentIsFoundUntilReused(t *testing.T) {
	p := New(2)
	a := alloc(t, p)
	p.Publish(a, 0, key(1))
	p.Unref(a)
	got, ok := p.Lookup(0, key(1))
	require.True(t, ok)
	require.Equal(t, a, got)
	_, ok = p.Lookup(1, key(1))
	require.False(t, ok, "groups do not share content")

	p.Ref(a) // a hit takes it off the free list
	require.NotEqual(t, a, alloc(t, p))
	_, ok = p.Alloc()
	require.False(t, ok)
	p.Unref(a)
	require.Equal(t, a, alloc(t, p))
	_, ok = p.Lookup(0, key(1))
	require.False(t, ok, "reused for something else")
}

func TestSecondCopyStaysUnpublished(t *testing.T) {
	p := New(2)
	a, b := alloc(t, p), alloc(t, p)
	p.Publish(a, 0, key(1))
	p.Publish(b, 0, key(1))
	got, _ := p.Lookup(0, key(1))
	require.Equal(t, a, got)
	p.Unref(a)
	p.Unref(b)
	require.Equal(t, b, alloc(t, p), "the copy is worth nothing")
	require.NoError(t, p.Check())
}

func TestEveryClaimKeepsABlock(t *testing.T) {
	for name, claim := range map[string]struct {
		take, drop func(*Pool, connector.BlockID)
		state      State
		settling   int
	}{
		"reference": {(*Pool).Ref, (*Pool).Unref, Used, 0},
		"pin":       {(*Pool).Pin, (*Pool).Unpin, Pinned, 1},
		"hold":      {(*Pool).Hold, (*Pool).Unhold, Held, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := New(1)
			a := alloc(t, p)
			claim.take(p, a)
			claim.take(p, a)
			p.Unref(a)
			claim.drop(p, a)
			require.Equal(t, 1, p.Counts()[claim.state])
			require.Equal(t, claim.settling, p.Settling())
			_, ok := p.Alloc()
			require.False(t, ok)
			claim.drop(p, a)
			require.Equal(t, a, alloc(t, p))
			require.NoError(t, p.Check())
		})
	}
}

// A lost block stays pinned, whatever else ends, and nobody waits for it.
func TestLost(t *testing.T) {
	p := New(2)
	a := alloc(t, p)
	p.Pin(a)
	p.Unref(a)
	require.Equal(t, 1, p.Settling())
	p.Lose(a)
	p.Lose(a)
	require.Equal(t, 1, p.Lost())
	require.Zero(t, p.Settling())
	require.Equal(t, 1, p.Counts()[Pinned])
	require.NoError(t, p.Check())
}

func TestForget(t *testing.T) {
	p := New(2)
	a, b := alloc(t, p), alloc(t, p)
	p.Publish(a, 0, key(1))
	p.Publish(b, 0, key(2))
	p.Unref(a)
	p.Forget()
	for n := range 3 {
		_, ok := p.Lookup(0, key(n))
		require.False(t, ok)
	}
	require.NoError(t, p.Check())
}

// TestProperties plays random owners against a model: each owner knows which blocks it claims.
func TestProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := New(rapid.IntRange(1, 12).Draw(t, "blocks"))
		claims := [3][]connector.BlockID{} // references, pins, holds
		drop := [3]func(connector.BlockID){p.Unref, p.Unpin, p.Unhold}
		owned := func() map[connector.BlockID]bool {
			m := map[connector.BlockID]bool{}
			for _, c := range claims {
				for _, id := range c {
					m[id] = true
				}
			}
			return m
		}
		pick := func(ids []connector.BlockID) int { return rapid.IntRange(0, len(ids)-1).Draw(t, "which") }
		t.Repeat(map[string]func(*rapid.T){
			"alloc": func(t *rapid.T) {
				before := owned()
				id, ok := p.Alloc()
				require.Equal(t, len(before) < p.Size(), ok)
				if ok {
					require.False(t, before[id], "block %d has two owners", id)
					claims[0] = append(claims[0], id)
				}
			},
			"hit": func(t *rapid.T) {
				if id, ok := p.Lookup(0, key(rapid.IntRange(0, 9).Draw(t, "key"))); ok {
					p.Ref(id)
					claims[0] = append(claims[0], id)
				}
			},
			"publish": func(t *rapid.T) {
				if len(claims[0]) > 0 {
					p.Publish(claims[0][pick(claims[0])], 0, key(rapid.IntRange(0, 9).Draw(t, "key")))
				}
			},
			"claim": func(t *rapid.T) {
				if len(claims[0]) > 0 {
					id := claims[0][pick(claims[0])]
					kind := rapid.IntRange(1, 2).Draw(t, "kind")
					[]func(connector.BlockID){nil, p.Pin, p.Hold}[kind](id)
					claims[kind] = append(claims[kind], id)
				}
			},
			"drop": func(t *rapid.T) {
				kind := rapid.IntRange(0, 2).Draw(t, "kind")
				if c := claims[kind]; len(c) > 0 {
					i := pick(c)
					drop[kind](c[i])
					claims[kind] = append(c[:i:i], c[i+1:]...)
				}
			},
			"": func(t *rapid.T) {
				require.NoError(t, p.Check())
				require.Equal(t, p.Size(), p.Available()+len(owned()), "free + owned = total")
			},
		})
	})
}
