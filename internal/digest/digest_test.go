package digest

import (
	"bytes"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/keyring"
)

var (
	model = connector.NewFingerprint("model")
	shape = connector.NewFingerprint("shape")
	whole = connector.Shard{Rank: 0, World: 1}
)

// cache is a paged cache with digests, filled at random: two groups, strided segments.
func cache(t testing.TB, seed uint64) *connector.KV {
	layout := connector.Layout{
		Name: "test", Blocks: 8,
		Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}, {BlockTokens: 16, Policy: connector.PolicyAll}},
		Segments: []connector.Segment{
			{Layer: 0, Group: 0, Offset: 0, BlockStride: 512, Bytes: 256},
			{Layer: 1, Group: 0, Offset: 256, BlockStride: 512, Bytes: 256},
			{Layer: 2, Group: 1, Offset: 4096, BlockStride: 100, Bytes: 100},
		},
	}
	layout, size := WithSegments(layout, 4096+800)
	region := make([]byte, size)
	random := rand.New(rand.NewPCG(seed, 1))
	for i := range region {
		region[i] = byte(random.Uint32())
	}
	kv, err := connector.NewKV(layout, [][]byte{region})
	require.NoError(t, err)
	return kv
}

func block(id int, group uint16) connector.Block {
	return connector.Block{Key: connector.BlockKey{1, byte(id)}, ID: connector.BlockID(id), Group: group}
}

// ringOf has keys whose bytes are one letter each, the first letter's first.
func ringOf(letters string) *keyring.Ring {
	ring := &keyring.Ring{}
	for i := range letters {
		secret := bytes.Repeat([]byte{letters[i]}, keyring.MinKey)
		ring.Keys = append(ring.Keys, keyring.Key{ID: keyring.ID(secret), Secret: secret})
	}
	return ring
}

// by are the keys of a ring that does not change.
func by(letters string) Keys { return Keyed(keyring.Fixed(ringOf(letters)), nil) }

// hasher is one of this model and shape.
func hasher(keys Keys) *Hasher { return New(keys, model, shape, whole) }

// hashers are the kinds.
func hashers() map[string]*Hasher {
	return map[string]*Hasher{
		"xxh3":   hasher(XXH3()),
		"keyed":  hasher(by("ab")),
		"tenant": hasher(Keyed(keyring.Fixed(ringOf("ab")), []byte("t"))),
	}
}

func TestWithSegments(t *testing.T) {
	l := cache(t, 1).Layout()
	require.Len(t, l.Segments, 5)
	require.Equal(t, connector.Segment{Layer: connector.DigestLayer, Group: 0, Offset: 4928, BlockStride: 48, Bytes: 48}, l.Segments[3])
	require.Equal(t, connector.Segment{Layer: connector.DigestLayer, Group: 1, Offset: 5312, BlockStride: 32, Bytes: 32}, l.Segments[4])

	plain := connector.Layout{Blocks: 2, Groups: make([]connector.Group, 1), Segments: make([]connector.Segment, 1, 9)}
	_, size := WithSegments(plain, 64)
	require.EqualValues(t, 64+64, size)
	require.Len(t, plain.Segments[:2:9], 2)
	require.Zero(t, plain.Segments[:2:9][1], "the argument's array is not written")
}

func TestMakeThenCheck(t *testing.T) {
	for name, h := range hashers() {
		kv := cache(t, 2)
		for id := range 8 {
			for group := range uint16(2) {
				require.Error(t, h.Check(kv, block(id, group)), name)
				require.NoError(t, h.Make(kv, block(id, group)), name)
			}
		}
		for id := range 8 { // making one did not touch another
			require.NoError(t, h.Check(kv, block(id, 0)), name)
			require.NoError(t, h.Check(kv, block(id, 1)), name)
		}
	}
}

// Any change of any bit of a block, its digests included, is noticed, and only there.
func TestEveryDamageIsNoticed(t *testing.T) {
	for name, h := range hashers() {
		rapid.Check(t, func(t *rapid.T) {
			kv := cacheOf(t, rapid.Uint64().Draw(t, "seed"))
			b := block(rapid.IntRange(0, 7).Draw(t, "block"), rapid.Uint16Max(1).Draw(t, "group"))
			require.NoError(t, h.Make(kv, b))
			spans, err := kv.Spans(b)
			require.NoError(t, err)
			which := rapid.IntRange(0, len(spans)-1).Draw(t, "span")
			span := spans[which]
			at := rapid.IntRange(0, len(span)-1).Draw(t, "at")
			span[at] ^= rapid.ByteMin(1).Draw(t, "flip")
			err = h.Check(kv, b)
			require.Error(t, err, name)
			if which < len(spans)-1 || at >= headerSize { // a header may name another key or edition then
				require.ErrorIs(t, err, connector.ErrCorrupt, name)
			}
		})
	}
}

func cacheOf(t *rapid.T, seed uint64) *connector.KV {
	layout, size := WithSegments(*smallLayout(), 1024)
	region := make([]byte, size)
	random := rand.New(rand.NewPCG(seed, 1))
	for i := range region {
		region[i] = byte(random.Uint32())
	}
	kv, err := connector.NewKV(layout, [][]byte{region})
	require.NoError(t, err)
	return kv
}

func smallLayout() *connector.Layout {
	return &connector.Layout{
		Blocks: 8,
		Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}, {BlockTokens: 16, Policy: connector.PolicyAll}},
		Segments: []connector.Segment{
			{Layer: 0, Group: 0, Offset: 0, BlockStride: 64, Bytes: 24},
			{Layer: 1, Group: 0, Offset: 24, BlockStride: 64, Bytes: 24},
			{Layer: 2, Group: 1, Offset: 512, BlockStride: 33, Bytes: 33},
		},
	}
}

func TestDamageNamesLayer(t *testing.T) {
	h := hasher(by("a"))
	kv := cache(t, 3)
	require.NoError(t, h.Make(kv, block(5, 0)))
	kv.View(1, 5)[9] ^= 1
	require.ErrorContains(t, h.Check(kv, block(5, 0)), "block 5 of group 0, layer 1")
}

// Bytes that arrive whole but belong to something else are noticed.
func TestDigestIsBound(t *testing.T) {
	kv := cache(t, 4)
	for name, h := range hashers() {
		require.NoError(t, h.Make(kv, block(1, 0)))
		other := block(1, 0)
		other.Key[31] ^= 1
		require.ErrorIs(t, h.Check(kv, other), connector.ErrCorrupt, "%s: key", name)
		moved := block(2, 0) // the block's bytes in another slot, under its own key: fine
		moved.Key = block(1, 0).Key
		for _, s := range kv.Segments(0) {
			copy(kv.View(s, 2), kv.View(s, 1))
		}
		require.NoError(t, h.Check(kv, moved), "%s: slot", name)

		digests := kv.View(3, 1)[headerSize:] // two layers swapped, digests and all
		for i := range Size {
			digests[i], digests[Size+i] = digests[Size+i], digests[i]
		}
		a, b := kv.View(0, 1), kv.View(1, 1)
		for i := range a {
			a[i], b[i] = b[i], a[i]
		}
		require.ErrorIs(t, h.Check(kv, block(1, 0)), connector.ErrCorrupt, "%s: layer", name)
	}

	base := Binding{Key: connector.BlockKey{1}, Layer: 3}
	data := []byte("bytes")
	sums := map[[Size]byte]string{}
	add := func(what string, h *Hasher, data []byte, b Binding) {
		m, err := h.Maker()
		require.NoError(t, err)
		sum := m.Sum(data, &b)
		require.NotContains(t, sums, sum, what)
		sums[sum] = what
	}
	secret := func(text string) Keys { return Keyed(keyring.Fixed(ringOf("a")), []byte(text)) }
	for what, h := range map[string]*Hasher{
		"base":   hasher(by("a")),
		"model":  New(by("a"), shape, shape, whole),
		"shape":  New(by("a"), model, model, whole),
		"rank":   New(by("a"), model, shape, connector.Shard{Rank: 1, World: 2}),
		"world":  New(by("a"), model, shape, connector.Shard{Rank: 0, World: 2}),
		"range":  New(by("a"), model, shape, connector.Shard{Rank: 0, World: 1, First: 1, Count: 2}),
		"key":    hasher(by("b")),
		"tenant": hasher(secret("s")),
		"other":  hasher(secret("t")),
		"xxh3":   hasher(XXH3()),
	} {
		add(what, h, data, base)
	}
	for what, change := range map[string]func(*Binding){
		"key": func(b *Binding) { b.Key[5] = 1 }, "group": func(b *Binding) { b.Group = 1 }, "segment": func(b *Binding) { b.Segment = 1 }, "layer": func(b *Binding) { b.Layer = -1 },
	} {
		bind := base
		change(&bind)
		add(what, hasher(by("a")), data, bind)
		add("xxh3 "+what, hasher(XXH3()), data, bind)
	}
	add("length", hasher(by("a")), append(data, 0), base)
	long := hasher(secret(string(make([]byte, 100)))) // longer than a block of the hash
	add("long tenant", long, data, base)
}

func TestRefuses(t *testing.T) {
	h := hasher(by("a"))
	kv := cache(t, 5)
	partial := connector.Block{ID: 1}
	for name, b := range map[string]connector.Block{"partial": partial, "group": block(1, 2), "block": block(8, 0), "negative": block(-1, 0)} {
		require.ErrorIs(t, h.Make(kv, b), connector.ErrIncompatible, name)
		require.ErrorIs(t, h.Check(kv, b), connector.ErrIncompatible, name)
	}
	bare, err := connector.NewKV(*smallLayout(), [][]byte{make([]byte, 1024)})
	require.NoError(t, err)
	require.ErrorContains(t, h.Check(bare, block(1, 0)), "no digest segment")
}

func TestParallelUse(t *testing.T) {
	for name, h := range hashers() {
		kv := cache(t, 6)
		var all sync.WaitGroup
		for id := range 8 {
			for group := range uint16(2) {
				all.Go(func() {
					for range 50 {
						if err := h.Make(kv, block(id, group)); err != nil {
							t.Error(name, err)
						}
						if err := h.Check(kv, block(id, group)); err != nil {
							t.Error(name, err)
						}
					}
				})
			}
		}
		all.Wait()
	}
}

func TestNoAllocation(t *testing.T) {
	for name, h := range hashers() {
		kv := cache(t, 7)
		require.NoError(t, h.Make(kv, block(1, 0)))
		require.Zero(t, testing.AllocsPerRun(100, func() {
			if h.Check(kv, block(1, 0)) != nil {
				t.Error("damaged")
			}
		}), name)
	}
}

func BenchmarkSum(b *testing.B) {
	for name, h := range hashers() {
		for _, size := range []int{4 << 10, 48 << 10, 1 << 20} {
			b.Run(name+"/"+itoa(size), func(b *testing.B) {
				data := make([]byte, size)
				bind := Binding{Key: connector.BlockKey{1}}
				b.SetBytes(int64(size))
				b.ReportAllocs()
				m, err := h.Maker()
				require.NoError(b, err)
				for b.Loop() {
					m.Sum(data, &bind)
				}
			})
		}
	}
}

func BenchmarkCheckBlock(b *testing.B) {
	const layers, size = 30, 12 << 10 // a 16-token block of SmolLM2-135M
	layout := connector.Layout{Blocks: 1, Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}}}
	for layer := range layers {
		layout.Segments = append(layout.Segments, connector.Segment{Layer: layer, Offset: int64(layer * size), BlockStride: size, Bytes: size})
	}
	layout, total := WithSegments(layout, layers*size)
	kv, err := connector.NewKV(layout, [][]byte{make([]byte, total)})
	require.NoError(b, err)
	h := hasher(by("a"))
	require.NoError(b, h.Make(kv, block(0, 0)))
	b.SetBytes(layers * size)
	b.ReportAllocs()
	for b.Loop() {
		if err := h.Check(kv, block(0, 0)); err != nil {
			b.Fatal(err)
		}
	}
}

func itoa(n int) string {
	if n >= 1<<20 {
		return "1M"
	}
	return map[int]string{4 << 10: "4K", 48 << 10: "48K"}[n]
}

// CheckSegments looks at the segments that it is asked about, and at no others.
func TestCheckSegments(t *testing.T) {
	for name, h := range hashers() {
		kv, b := cache(t, 31), block(1, 0)
		require.NoError(t, h.Make(kv, b))
		segments := kv.Segments(b.Group)
		kv.View(segments[1], b.ID)[0] ^= 1
		require.NoError(t, h.CheckSegments(kv, b, segments[:1]), name)
		require.NoError(t, h.CheckSegments(kv, b, nil), name)
		require.ErrorIs(t, h.CheckSegments(kv, b, segments[1:2]), connector.ErrCorrupt, name)
		require.ErrorIs(t, h.CheckSegments(kv, b, segments), connector.ErrCorrupt, name)
		require.ErrorIs(t, h.CheckSegments(kv, connector.Block{ID: 1}, segments), connector.ErrIncompatible, name)
	}
}
