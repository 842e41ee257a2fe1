package place

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

const (
	coldBlocks = 100_000 // that are resident
	coldKeys   = 32      // of blocks that were saved one after the other
)

// cold is a host with many resident blocks, and what its caller touches between two lookups.
type cold struct {
	host   *Host
	blocks []connector.BlockKey
	keys   []connector.StoreKey
	lines  []uint64 // memory of which single lines are read
	other  []byte

	// Of the lookup that comes next.
	at    int
	refs  []Ref
	words []int
	sum   uint64
}

func coldKey(k connector.BlockKey) connector.StoreKey {
	return connector.NewStoreKey(k, connector.Fingerprint{1}, 0, connector.Shard{World: 1})
}

func newCold(b *testing.B) *cold {
	g := Geometry{Slots: coldBlocks, SlotBytes: 64}
	arena := mapShared(b, g.ArenaBytes())
	h, err := NewReader(arena, g)
	require.NoError(b, err)
	o, err := h.Reopen()
	require.NoError(b, err)
	s, _, _, err := OpenShelf(arena, g, ShelfOpening{Epoch: o.Epoch, Serial: h.Draw(coldBlocks)}, now)
	require.NoError(b, err)
	x := &cold{host: h, lines: make([]uint64, 8<<20), other: make([]byte, 16<<20), words: make([]int, 2*coldKeys)}
	for i := range x.lines {
		x.lines[i] = uint64(i)
	}
	for i := range coldBlocks {
		var k connector.BlockKey
		binary.LittleEndian.PutUint64(k[:], uint64(i))
		x.blocks, x.keys = append(x.blocks, k), append(x.keys, coldKey(k))
		s.Begin(Slot(i))
		s.Publish(Slot(i), &Header{Key: x.keys[i], Length: 64})
		require.NoError(b, h.Notice(&Notice{Slots: []Slot{Slot(i)}}, now))
	}
	return x
}

// choose draws what the next lookup looks at.
func (x *cold) choose() {
	x.at = rand.IntN(coldBlocks - coldKeys)
	x.refs = x.host.lookUp(x.keys[x.at : x.at+coldKeys])
	for i := range x.words {
		x.words[i] = rand.IntN(len(x.lines))
	}
}

func (x *cold) read(words []int) bool {
	for _, i := range words {
		x.sum += x.lines[i]
	}
	return true
}

// walk is the caller's own work.
func (x *cold) walk(d time.Duration) {
	for began := time.Now(); time.Since(began) < d; {
		for i := range x.other {
			x.other[i]++
		}
	}
}

// BenchmarkCold is a lookup of 32 keys and its parts, each for itself, after the caller walked through other memory for 20 ms, and hot; and
// as many single lines of memory as there are keys, and twice as many, which no index can be faster than. It is the median, with the
// quarters around it.
func BenchmarkCold(b *testing.B) {
	x := newCold(b)
	for _, part := range []struct {
		name string
		run  func() bool
	}{
		{"nothing", func() bool { return true }},
		{"keys", func() bool {
			for _, k := range x.blocks[x.at : x.at+coldKeys] {
				x.sum += uint64(coldKey(k)[0])
			}
			return true
		}},
		{"index", func() bool { return len(x.host.lookUp(x.keys[x.at:x.at+coldKeys])) == coldKeys }},
		{"headers", func() bool { _, err := x.host.firstGone(x.refs, now); return err == nil }},
		{"run", func() bool { return x.host.Run(x.keys[x.at:x.at+coldKeys], now) == coldKeys }},
		{"32 lines", func() bool { return x.read(x.words[:coldKeys]) }},
		{"64 lines", func() bool { return x.read(x.words) }},
	} {
		b.Run(part.name+"/after 20 ms", func(b *testing.B) { x.measure(b, func() { x.walk(20 * time.Millisecond) }, part.run) })
		b.Run(part.name+"/hot", func(b *testing.B) { x.measure(b, func() { part.run() }, part.run) })
	}
}

func (x *cold) measure(b *testing.B, before func(), run func() bool) {
	var took []float64
	for b.Loop() {
		x.choose()
		before()
		began := time.Now()
		ok := run()
		took = append(took, float64(time.Since(began).Nanoseconds())/1e3)
		if !ok {
			b.Fatal("a block was not found")
		}
	}
	slices.Sort(took)
	b.ReportMetric(0, "ns/op")
	for name, at := range map[string]int{"lower-us": 1, "median-us": 2, "upper-us": 3} {
		b.ReportMetric(took[len(took)*at/4], name)
	}
}
