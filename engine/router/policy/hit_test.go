package policy

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// someHit is any hit, also one that makes no sense.
func someHit(t *rapid.T, least, most int) Hit {
	n := rapid.IntRange(least, most)
	return Hit{n.Draw(t, "engine"), n.Draw(t, "node"), n.Draw(t, "shared"), n.Draw(t, "store")}
}

func TestHit(t *testing.T) {
	for _, tt := range []struct {
		h            Hit
		node, shared int
		says         string
	}{
		{Hit{}, 0, 0, "0 of 100 tokens"},
		{Hit{Engine: 64}, 0, 0, "64 of 100 tokens"},
		{Hit{Engine: 64, Node: 64, Shared: 48}, 0, 0, "64 of 100 tokens"},
		{Hit{Engine: 16, Node: 32, Shared: 80}, 16, 48, "80 of 100 tokens (engine 16, node 16, shared 48)"},
		{Hit{Node: 32, Shared: 16}, 32, 0, "32 of 100 tokens (engine 0, node 32, shared 0)"},
	} {
		node, shared := tt.h.stored()
		require.Equal(t, []int{tt.node, tt.shared}, []int{node, shared}, tt.h)
		require.Equal(t, tt.says, tt.h.of(100))
		require.Equal(t, tt.h.Tokens(), max(tt.h.Engine, 0)+node+shared)
	}
	require.Equal(t, Hit{Node: 100, Shared: 7, Store: 100}, Hit{Engine: -1, Node: 101, Shared: 7, Store: 101}.within(100))
}

// hits is what each instance is believed to hold of a prompt.
func hits(p *Policy, r *Request) (list []Hit) {
	p.look(r)
	for i := range p.instances {
		list = append(list, p.instances[i].hit)
	}
	return list
}

// TestSharedStoreCountsForAll: what lies in a store that instances share counts for each that loads from there, however the
// router has come to know of it: by the word of another instance, or because one that saves there has answered. An
// instance that was asked itself is believed.
func TestSharedStoreCountsForAll(t *testing.T) {
	prompt := NewPrompt(1, nil, make([]byte, 10*PieceBytes))
	ask := func(held ...Held) *Request {
		return &Request{Prompt: prompt, Tokens: 100, Held: held, Standing: all}
	}
	p := made(t, Config{Policy: PDAware}, 0, 4)
	p.Shares(2, true, false)
	require.Equal(t, []Hit{{Engine: 10, Node: 20, Shared: 60}, {}, {}, {}}, hits(p, ask(Held{Place: 0, Hit: Hit{Engine: 10, Node: 20, Shared: 60}})),
		"others lack what only that instance and its node have")
	word := Held{Place: 0, Hit: Hit{Engine: 10, Node: 20, Shared: 60, Store: 60}}
	require.Equal(t, []Hit{word.Hit, {Shared: 60}, {}, {Shared: 60}}, hits(p, ask(word)))
	sure := Held{Place: 3, Hit: Hit{Engine: 50, Node: 50}, Sure: true}
	require.Equal(t, []Hit{word.Hit, {Shared: 60}, {}, sure.Hit}, hits(p, ask(word, sure)))
	require.Equal(t, make([]Hit, 4), hits(p, ask()))

	// An answer of an instance that saves is in the store, also after that instance has been started again.
	only := func(place int) *Request {
		r := ask()
		r.Standing = func(i int) Standing { return map[bool]Standing{false: Out}[i == place] }
		return r
	}
	c, ok := p.Choose(only(1))
	require.True(t, ok)
	answered(p, c)
	require.Equal(t, []Hit{{}, {Engine: 100}, {}, {}}, hits(p, ask()), "it does not save")
	c, ok = p.Choose(only(2))
	require.True(t, ok)
	require.Equal(t, []Hit{{}, {Engine: 100}, {Engine: 100}, {}}, hits(p, ask()), "it has not answered")
	answered(p, c)
	p.Forget(2)
	require.Equal(t, []Hit{{Shared: 100}, {Engine: 100, Shared: 100}, {}, {Shared: 100}}, hits(p, ask()))
	require.Equal(t, 1.0, p.Known(only(0)))

	p = made(t, Config{Policy: PDAware}, 0, 2)
	p.Told(&prompt, 0, Hit{Engine: 20, Node: 40, Shared: 80}, 100)
	require.Equal(t, []Hit{{Engine: 20}, {}}, hits(p, ask()), "what the store has of the beginning is not known")
	p.Told(&prompt, 0, Hit{Engine: 20, Node: 40, Shared: 80, Store: 80}, 100)
	require.Equal(t, []Hit{{Engine: 20, Shared: 80}, {Shared: 80}}, hits(p, ask()), "what the store of a node has is its instances' word")
	require.NoError(t, p.Use(Config{}))
	require.Equal(t, make([]Hit, 2), hits(p, ask()))
}

// What an instance has loaded by ticket it does not save: it is in the shared store only if the prefill instance saves it.
func TestLoadedByTicketIsNotSaved(t *testing.T) {
	for _, saves := range []bool{true, false} {
		p := made(t, Config{Policy: PrefixAware}, 1, 2)
		p.Shares(0, saves, true)
		p.Shares(1, true, true)
		ask := func() *Request {
			return &Request{Prompt: NewPrompt(1, nil, make([]byte, 10*PieceBytes)), Tokens: 100, Standing: func(place int) Standing {
				return map[bool]Standing{true: Out}[place == 2]
			}}
		}
		c, ok := p.Choose(ask())
		require.True(t, ok)
		require.NotNil(t, c.Prefill)
		answered(p, c)
		require.Equal(t, Hit{Shared: map[bool]int{true: 100}[saves]}, hits(p, ask())[2])
	}
}

// TestLoadOrRecompute: prefix_aware and pd_aware prefer a small hit in the own cache to a large one in a slow store, and a
// large one in a fast store to both, as they have measured. A store that does not have what it should is slow.
func TestLoadOrRecompute(t *testing.T) {
	for _, policy := range []Config{{Policy: PDAware}, {Policy: PrefixAware, Weights: map[string]float64{"load": 0}}} {
		for _, kind := range []string{"node", "shared"} {
			for _, tt := range []struct {
				name    string
				seconds float64 // to load 900 tokens, which take 0.9 s to compute
				cached  int     // as the instances say
				want    int
			}{{"slow", 1.2, 900, 0}, {"fast", 0.1, 900, 1}, {"empty", 0.9, 0, 0}} {
				p := made(t, policy, 0, 2)
				stored := Hit{Node: 900}
				if kind == "shared" {
					stored = Hit{Shared: 900}
				}
				now := time.Unix(0, 0)
				serve := func(place int, h Hit, cached int, seconds float64) {
					c, ok := p.Choose(&Request{Tokens: 1000, Held: []Held{{place, h, true}}, Whole: true, Standing: func(i int) Standing {
						return map[bool]Standing{false: Out}[i == place]
					}})
					require.True(t, ok)
					p.Sent(c.Decode, now)
					p.Answered(c.Decode, now.Add(time.Duration(seconds*1e9)), Usage{Prompt: 1000, Cached: cached})
					end(p, c)
				}
				for range 10 {
					for place := range 2 {
						serve(place, Hit{}, 0, 1)
						serve(place, Hit{Engine: 500}, 500, 0.5)
						serve(place, stored, tt.cached, 0.1+tt.seconds)
					}
				}
				r := &Request{Tokens: 1000, Held: []Held{{0, Hit{Engine: 300}, true}, {1, stored, true}}, Whole: true, Explain: true, Standing: all}
				c, ok := p.Choose(r)
				require.True(t, ok)
				require.Equal(t, tt.want, c.Decode.Place, "%s, %s store: %s", p.Name(), tt.name, c.Why)
				if tt.want == 1 {
					require.Contains(t, c.Why, fmt.Sprintf("holds 900 of 1000 tokens (engine 0, node %d, shared %d)", stored.Node, stored.Shared))
				}
			}
		}
	}
}

// measured is rates of any measurements.
func measured(t *rapid.T, places int) rates {
	r := rates{}
	for range rapid.IntRange(0, 30).Draw(t, "measurements") {
		place := rapid.IntRange(0, places-1).Draw(t, "place")
		tokens, seconds := rapid.Float64Range(0, 5000).Draw(t, "tokens"), rapid.Float64Range(0, 5).Draw(t, "seconds")
		r.count++
		if kind := rapid.IntRange(-1, 1).Draw(t, "kind"); kind < 0 {
			one(r.instances.of(place)).add(r.count, tokens, seconds)
			r.all[Decode].add(r.count, tokens, seconds)
		} else {
			one(&r.stores.of(place)[kind]).add(r.count, tokens, seconds)
			r.fetches[kind].add(r.count, tokens, seconds)
		}
	}
	return r
}

// Whatever was measured: a hit saves at most its tokens, and at least those in the own cache. The same tokens save no less
// and load no slower if more of them are in the own cache, and then prefix_aware never takes another instance instead.
func TestNearerProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const places = 4
		learnt := measured(t, places)
		held := make([]Held, places)
		for i := range held {
			held[i] = Held{i, someHit(t, 0, 3000), true}
		}
		choose := func() int {
			p, err := New(Config{Policy: PrefixAware})
			require.NoError(t, err)
			for i := range places {
				p.Add(i, Instance{Role: Decode, Name: fmt.Sprint(i)})
			}
			p.learnt = learnt
			c, ok := p.Choose(&Request{Tokens: 3000, Held: held, Standing: all})
			require.True(t, ok)
			return c.Decode.Place
		}
		place := choose()
		far := held[place].Hit
		near := far
		near.Engine = rapid.IntRange(far.Engine, far.Tokens()).Draw(t, "nearer")
		require.Equal(t, far.Tokens(), near.Tokens())
		for _, h := range []Hit{far, near} {
			saved := learnt.saved(Decode, place, h)
			require.GreaterOrEqual(t, saved, float64(h.Engine))
			require.LessOrEqual(t, saved, float64(h.Tokens()))
		}
		require.GreaterOrEqual(t, learnt.saved(Decode, place, near), learnt.saved(Decode, place, far)-1e-6)
		require.LessOrEqual(t, learnt.fetch(Decode, place, near), learnt.fetch(Decode, place, far)+1e-9)
		held[place].Hit = near
		require.Equal(t, place, choose())
	})
}

// What a load from a store takes is not taken for computing, also when nothing is known about computing yet.
func TestLoadIsNoComputing(t *testing.T) {
	r := rates{}
	leg := &Leg{Place: 1, role: Decode, peer: None, prompt: 8000, Compute: 16, Hit: Hit{Shared: 7984}}
	r.answered(leg, 1.5)
	require.False(t, r.all[Decode].known())
	leg.Hit, leg.Compute = Hit{}, 8000
	r.answered(leg, 1.5)
	require.True(t, r.all[Decode].known())
}
