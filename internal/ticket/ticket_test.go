package ticket

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/keyring"
)

var (
	key   = bytes.Repeat([]byte{7}, 32)
	ring  = keyring.Of(key)
	model = connector.NewFingerprint("model")
	shape = connector.NewFingerprint("shape")
)

func envelope() *Envelope {
	return &Envelope{
		Engine: "p-0", Epoch: 5, Hold: 9, Tokens: 100, Model: model, Shape: shape,
		Lease: 30 * time.Second, Consumers: 1, Nonce: [16]byte{1}, Plugin: []byte("plugin bytes"),
	}
}

func seal(t require.TestingT, e *Envelope) []byte {
	data, err := Seal(ring, e)
	require.NoError(t, err)
	return data
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := &Envelope{
			Engine: "x" + rapid.StringN(0, -1, MaxEngine-1).Draw(t, "engine"), Epoch: rapid.Uint64().Draw(t, "epoch"),
			Hold: connector.HoldID(rapid.Uint64().Draw(t, "hold")), Tokens: rapid.IntRange(0, math.MaxInt32).Draw(t, "tokens"),
			Lease: time.Duration(rapid.Int64Min(0).Draw(t, "lease")), Consumers: rapid.IntRange(0, MaxConsumers).Draw(t, "consumers"),
		}
		copy(e.Model[:], rapid.SliceOf(rapid.Byte()).Draw(t, "model"))
		copy(e.Nonce[:], rapid.SliceOf(rapid.Byte()).Draw(t, "nonce"))
		if rapid.Bool().Draw(t, "cut") {
			e.Cut = Cut{Base: connector.NewFingerprint("base"), BlockTokens: rapid.IntRange(1, math.MaxInt32).Draw(t, "size"), Ranks: rapid.IntRange(0, MaxRanks).Draw(t, "ranks")}
			copy(e.Cut.Last[:], rapid.SliceOf(rapid.Byte()).Draw(t, "last"))
			copy(e.Cut.Tail[:], rapid.SliceOf(rapid.Byte()).Draw(t, "tail"))
			e.ShapeText = rapid.StringN(0, -1, MaxShape).Draw(t, "shape text")
		}
		if p := rapid.SliceOfN(rapid.Byte(), 0, 100).Draw(t, "plugin"); len(p) > 0 {
			e.Plugin = p
		}
		got, err := Open(ring, seal(t, e))
		require.NoError(t, err)
		require.Equal(t, e, got)
	})
}

func TestSealDrawsNonce(t *testing.T) {
	a, b := envelope(), envelope()
	a.Nonce, b.Nonce = [16]byte{}, [16]byte{}
	require.NotEqual(t, seal(t, a), seal(t, b))
	require.NotEqual(t, a.Nonce, b.Nonce)
}

func TestLimits(t *testing.T) {
	e := envelope()
	e.Engine, e.Plugin, e.ShapeText = strings.Repeat("e", MaxEngine), make([]byte, MaxPlugin), strings.Repeat("s", MaxShape)
	e.Cut = Cut{Base: connector.NewFingerprint("base"), BlockTokens: 1}
	data, err := Seal(&keyring.Ring{Keys: ring.Keys}, e) // with the key's id
	require.NoError(t, err)
	require.Len(t, data, MaxSize)
	_, err = Open(ring, data)
	require.NoError(t, err)
	for field, change := range map[string]func(*Envelope){
		"engine": func(e *Envelope) { e.Engine += "e" }, "tokens": func(e *Envelope) { e.Tokens = -1 },
		"consumers": func(e *Envelope) { e.Consumers = MaxConsumers + 1 }, "lease": func(e *Envelope) { e.Lease = -1 },
		"plugin":     func(e *Envelope) { e.Plugin = make([]byte, MaxPlugin+1) },
		"shape text": func(e *Envelope) { e.ShapeText += "s" },
	} {
		changed := *e
		change(&changed)
		_, err := Seal(ring, &changed)
		require.ErrorIs(t, err, connector.ErrIncompatible, field)
		require.ErrorContains(t, err, field)
	}
	_, err = Seal(keyring.Of(key[:15]), envelope())
	require.ErrorIs(t, err, connector.ErrIncompatible)
	_, err = Open(keyring.Of(nil), seal(t, envelope()))
	require.ErrorIs(t, err, ErrForged)
}

// No byte of a ticket can be changed, dropped or added, and no other key opens it.
func TestForged(t *testing.T) {
	data := seal(t, envelope())
	for i := range data {
		bad := bytes.Clone(data)
		bad[i] ^= 1
		_, err := Open(ring, bad)
		require.ErrorIs(t, err, ErrForged, "byte %d changed", i)
		_, err = Open(ring, data[:i])
		require.ErrorIs(t, err, ErrForged, "cut at %d", i)
	}
	for name, bad := range map[string][]byte{
		"longer": append(bytes.Clone(data), 0), "nothing": nil, "huge": make([]byte, MaxSize+1),
	} {
		_, err := Open(ring, bad)
		require.ErrorIs(t, err, ErrForged, name)
	}
	_, err := Open(keyring.Of(bytes.Repeat([]byte{8}, 32)), data)
	require.ErrorIs(t, err, ErrForged, "other key")
}

// Also a body that is signed with our key is read strictly.
func TestSignedNonsense(t *testing.T) {
	resign := func(change func([]byte)) []byte {
		data := seal(t, envelope())
		body := data[:len(data)-32]
		change(body)
		return append(body, sign(key, body)...)
	}
	for name, change := range map[string]func([]byte){
		"version":   func(b []byte) { b[0] = 2 },
		"tokens":    func(b []byte) { binary.BigEndian.PutUint32(b[17:], math.MaxUint32) },
		"consumers": func(b []byte) { binary.BigEndian.PutUint32(b[21:], math.MaxUint32) },
		"lease":     func(b []byte) { binary.BigEndian.PutUint64(b[25:], math.MaxUint64) },
		"engine":    func(b []byte) { binary.BigEndian.PutUint32(b[113:], math.MaxUint32) },
		"plugin":    func(b []byte) { binary.BigEndian.PutUint32(b[117:], 3) },
	} {
		_, err := Open(ring, resign(change))
		require.ErrorIs(t, err, ErrForged, name)
	}
	_, err := Open(ring, resign(func([]byte) {}))
	require.NoError(t, err)
}

func TestGuardCountsUses(t *testing.T) {
	g := NewGuard(model, shape)
	e := envelope()
	e.Consumers = 2
	for range 72 { // one request is matched many times
		require.NoError(t, g.Check(e, "a"))
	}
	require.NoError(t, g.Check(e, "b"))
	require.ErrorIs(t, g.Check(e, "c"), ErrReplayed)
	require.NoError(t, g.Check(e, "a"), "a refusal does not end what was allowed")

	once := envelope()
	once.Nonce, once.Consumers = [16]byte{2}, 0
	require.NoError(t, g.Check(once, "a"))
	require.ErrorIs(t, g.Check(once, "b"), ErrReplayed)
}

func TestGuardRefusesOthers(t *testing.T) {
	g := NewGuard(model, shape)
	e := envelope()
	e.Model = shape
	require.ErrorIs(t, g.Check(e, "a"), connector.ErrIncompatible)
	e = envelope()
	e.Shape = model
	require.ErrorIs(t, g.Check(e, "a"), connector.ErrIncompatible)
}

func TestGuardReshapes(t *testing.T) {
	base := connector.NewFingerprint("base")
	e := envelope()
	e.Cut = Cut{Base: base, BlockTokens: 16, Ranks: 2}
	for name, c := range map[string]struct {
		base   connector.Fingerprint
		change func(*Envelope)
		says   string
	}{
		"both can":    {base, nil, ""},
		"we cannot":   {connector.Fingerprint{}, nil, "we cannot cut"},
		"it cannot":   {base, func(e *Envelope) { e.Cut = Cut{} }, "it cannot cut"},
		"neither can": {connector.Fingerprint{}, func(e *Envelope) { e.Cut = Cut{} }, "neither"},
		"other base":  {connector.NewFingerprint("other"), nil, "more than"},
		"a weak hold": {base, func(e *Envelope) { e.Lease = 0 }, "more than"},
		"no ranks":    {base, func(e *Envelope) { e.Cut.Ranks = 0 }, "how many ranks"},
		"other model": {base, func(e *Envelope) { e.Model[0]++ }, "model"},
	} {
		g := NewGuard(e.Model, connector.NewFingerprint("another shape"))
		g.Reshape(c.base)
		changed := *e
		if c.change != nil {
			c.change(&changed)
		}
		err := g.Check(&changed, "r")
		if c.says == "" {
			require.NoError(t, err, name)
			continue
		}
		require.ErrorIs(t, err, connector.ErrIncompatible, name)
		require.ErrorContains(t, err, c.says, name)
	}
}

// A ticket of an earlier release whose blocks can be cut is read, and says nothing of ranks.
func TestTicketWithoutRanks(t *testing.T) {
	e := envelope()
	e.Cut = Cut{Base: connector.NewFingerprint("base"), BlockTokens: 16, Last: connector.BlockKey{1}, Tail: connector.BlockKey{2}, Ranks: 3}
	sealed, err := Seal(ring, e)
	require.NoError(t, err)
	body := sealed[:len(sealed)-sha256.Size]
	at := len(body) - len(e.Engine) - len(e.Plugin) - len(e.ShapeText)
	old := slices.Concat([]byte{body[0] - 1}, body[1:at-4], body[at:])
	got, err := Open(ring, append(old, sign(ring.First().Secret, old)...))
	require.NoError(t, err)
	e.Cut.Ranks = 0
	require.Equal(t, e, got)
}

func TestGuardRefusesFormerLives(t *testing.T) {
	g := NewGuard(model, shape)
	ticket := func(engine string, epoch uint64, nonce byte) *Envelope {
		e := envelope()
		e.Engine, e.Epoch, e.Nonce = engine, epoch, [16]byte{nonce}
		return e
	}
	require.NoError(t, g.Check(ticket("p", 5, 1), "a"))
	require.NoError(t, g.Check(ticket("p", 6, 2), "b"))
	require.ErrorIs(t, g.Check(ticket("p", 5, 3), "c"), ErrStale)
	require.ErrorIs(t, g.Check(ticket("p", 5, 1), "a"), ErrStale, "also one that was good before")
	require.NoError(t, g.Check(ticket("q", 1, 4), "d"), "each engine has its own lives")
}

func TestGuardForgetsAfterTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pass := func(d time.Duration) { <-time.NewTimer(d).C } // by the bubble's clock
		g := NewGuard(model, shape)
		e := envelope()
		e.Lease = time.Hour
		require.NoError(t, g.Check(e, "a"))
		pass(2 * time.Hour)
		require.ErrorIs(t, g.Check(e, "b"), ErrReplayed)
		pass(time.Second)
		require.NoError(t, g.Check(e, "b"), "the producer has long released the hold")
		require.Len(t, g.byNonce, 1)
		require.Equal(t, 1, g.uses)
	})
}

func TestGuardIsBounded(t *testing.T) {
	g := NewGuard(model, shape)
	e := envelope()
	for i := range uint64(maxUses + 100) {
		binary.BigEndian.PutUint64(e.Nonce[:], i+1)
		e.Engine = "p" + string(rune('a'+i%5000))
		require.NoError(t, g.Check(e, "a"))
	}
	require.LessOrEqual(t, len(g.byNonce), maxUses)
	require.Len(t, g.order, len(g.byNonce))
	require.LessOrEqual(t, len(g.epochs), maxEngines)
	require.ErrorIs(t, g.Check(e, "b"), ErrReplayed, "the newest are still known")

	many := envelope() // one ticket cannot fill it either
	many.Consumers = MaxConsumers
	for i := range maxUses + 100 {
		require.NoError(t, g.Check(many, connector.RequestID(strings.Repeat("x", i%7)+string(rune(i+0x10000)))))
	}
	require.LessOrEqual(t, g.uses, maxUses)
}

func TestGuardInParallel(t *testing.T) {
	g := NewGuard(model, shape)
	e := envelope()
	e.Consumers = 3
	var all sync.WaitGroup
	var mu sync.Mutex
	allowed := 0
	for i := range 16 {
		all.Go(func() {
			if g.Check(e, connector.RequestID(rune('a'+i))) == nil {
				mu.Lock()
				allowed++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	require.Equal(t, 3, allowed)
}

func FuzzOpen(f *testing.F) {
	byName := &keyring.Ring{Keys: ring.Keys}
	f.Add(seal(f, envelope()), false)
	f.Add(seal(f, &Envelope{Engine: "e"}), true)
	data, err := Seal(byName, envelope())
	require.NoError(f, err)
	f.Add(data, false)
	f.Fuzz(func(t *testing.T, data []byte, signed bool) {
		if signed { // reach the parser behind the signature
			data = append(bytes.Clone(data), sign(key, data)...)
		}
		e, err := Open(ring, data)
		if err != nil {
			if !isForeign(err) {
				require.ErrorIs(t, err, ErrForged)
			}
			return
		}
		require.NoError(t, e.check())
		require.LessOrEqual(t, len(e.Engine)+len(e.Plugin), len(data))
		_, err = Open(keyring.Of(bytes.Repeat([]byte{8}, 32)), data)
		require.True(t, isForeign(err) || errors.Is(err, ErrForged), "another key")
		if e.Nonce == ([16]byte{}) {
			return // Seal would draw another
		}
		by := ring
		if data[0]&named != 0 {
			by = byName
		}
		again, err := Seal(by, e)
		require.NoError(t, err)
		require.Equal(t, data, again, "there is one encoding")
	})
}

func isForeign(err error) bool {
	_, is := errors.AsType[*ForeignKeyError](err)
	return is
}
