package place

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// found is a host with 32 resident blocks.
type found struct {
	host *Host
	keys []connector.StoreKey
}

func newBench(b *testing.B) *found {
	g := Geometry{Slots: 64, SlotBytes: 64}
	arena, words := mapShared(b, g.ArenaBytes()), mapShared(b, g.WordsBytes())
	h, err := NewHost(arena, words, g)
	require.NoError(b, err)
	o, err := h.Reopen()
	require.NoError(b, err)
	p, err := Open(arena, words, g, o, now)
	require.NoError(b, err)
	x := &found{host: h}
	for k := range byte(32) {
		s, err := h.Reserve([]Part{{Key: key(k), Length: 64}}, 0, false)
		require.NoError(b, err)
		a := p.Lend(s.Request(), 0)
		_, err = s.Accept(&a, now)
		require.NoError(b, err)
		_, err = s.Publish(0)
		require.NoError(b, err)
		x.keys = append(x.keys, key(k))
	}
	return x
}

// BenchmarkFind is a lookup of 32 keys, each checked against its header.
func BenchmarkFind(b *testing.B) {
	x := newBench(b)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := x.host.Find(x.keys, now); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPin is what a read costs in addition to its copy.
func BenchmarkPin(b *testing.B) {
	x := newBench(b)
	refs, err := x.host.Find(x.keys, now)
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		p, err := x.host.Pin(refs[7])
		if err != nil || p.Release(now) != nil {
			b.Fatal(err)
		}
	}
}
