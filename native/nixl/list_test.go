package nixl

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLists: transfers of listed regions move what transfers of the same regions do, both ways and again.
func TestLists(t *testing.T) {
	const n, size = 200, 4 << 10
	rng := rand.New(rand.NewPCG(7, 8))
	l := open(t)
	a, b := newEnd(t, l, 2*n*size, nil), newEnd(t, l, 2*n*size, nil)
	introduce(t, a, b)
	_, stop := progressUntil(b.Agent)
	defer stop()
	ours, theirs := parts(rng, a.data, n, size), parts(rng, b.data, n, size)
	here, err := a.List(a.backend, "", DRAM, ours...)
	require.NoError(t, err)
	there, err := a.List(a.backend, b.Name(), DRAM, theirs...)
	require.NoError(t, err)
	at := func(e *end, r Region) []byte { return e.data[r.Addr-Bytes(e.data).Addr:][:r.Len] }
	for _, op := range []Op{Read, Write} {
		for range 3 {
			fill(rng, a.data)
			fill(rng, b.data)
			var x, y []int32
			for _, i := range rng.Perm(n)[:50] {
				x = append(x, int32(i))
			}
			for _, i := range rng.Perm(n)[:50] {
				y = append(y, int32(i))
			}
			m, err := here.Make(op, there, x, y)
			require.NoError(t, err)
			require.NoError(t, m.Run(t.Context()))
			for i := range x {
				require.Equal(t, at(a, ours[x[i]]), at(b, theirs[y[i]]))
			}
			fill(rng, a.data)
			require.NoError(t, m.Run(t.Context()), "prepared once, posted again")
			for i := range x {
				require.Equal(t, at(a, ours[x[i]]), at(b, theirs[y[i]]))
			}
			require.NoError(t, m.Close())
		}
	}
	for what, err := range map[string]error{
		"places":  second(here.Make(Read, there, []int32{0}, []int32{n})),
		"none":    second(here.Make(Read, there, nil, nil)),
		"unequal": second(here.Make(Read, there, []int32{0, 1}, []int32{0})),
		"sides":   second(there.Make(Read, here, []int32{0}, []int32{0})),
		"empty":   second(a.List(a.backend, "", DRAM)),
		"backend": second(a.List(nil, "", DRAM, ours...)),
	} {
		require.ErrorIs(t, err, ErrInvalid, what)
	}
	require.ErrorIs(t, second(a.List(a.backend, "nobody", DRAM, ours...)), ErrNotFound)
	require.ErrorIs(t, second(a.List(a.backend, "", DRAM, Region{Addr: 1, Len: 1})), ErrNotFound)
	require.NoError(t, there.Close())
	require.NoError(t, there.Close())
	require.ErrorIs(t, second(here.Make(Read, there, []int32{0}, []int32{0})), ErrClosed)
}

func second[T any](_ T, err error) error { return err }

// BenchmarkPrepare is what a transfer of 256 scattered blocks costs before it is posted, without and with lists.
func BenchmarkPrepare(b *testing.B) {
	const n, size = 512, 4 << 10
	rng := rand.New(rand.NewPCG(9, 10))
	l := open(b)
	x, y := newEnd(b, l, 2*n*size, nil), newEnd(b, l, 2*n*size, nil)
	introduce(b, x, y)
	_, stop := progressUntil(y.Agent)
	defer stop()
	ours, theirs := parts(rng, x.data, n, size), parts(rng, y.data, n, size)
	b.Run("anew", func(b *testing.B) {
		for b.Loop() {
			t, err := x.Prepare(Request{Op: Read, Peer: y.Name(), Backend: x.backend, Local: ours[:256], Remote: theirs[:256]})
			require.NoError(b, err)
			require.NoError(b, t.Close())
		}
	})
	here, err := x.List(x.backend, "", DRAM, ours...)
	require.NoError(b, err)
	there, err := x.List(x.backend, y.Name(), DRAM, theirs...)
	require.NoError(b, err)
	places := make([]int32, 256)
	for i := range places {
		places[i] = int32(i)
	}
	b.Run("listed", func(b *testing.B) {
		for b.Loop() {
			t, err := here.Make(Read, there, places, places)
			require.NoError(b, err)
			require.NoError(b, t.Close())
		}
	})
}
