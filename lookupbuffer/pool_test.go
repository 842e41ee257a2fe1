package lookupbuffer

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// Pieces never overlap, can all be given back, and merge into the whole pool again.
func TestPool(t *testing.T) {
	for _, size := range []int64{512, 1 << 20, 1<<20 + 4096 + 700, 3 << 19} {
		p, err := NewPool(size)
		require.NoError(t, err)
		rng := rand.New(rand.NewPCG(1, uint64(size)))
		type held struct {
			piece
			with byte
		}
		var all []held
		for range 20_000 {
			if len(all) > 0 && rng.IntN(2) == 0 {
				i := rng.IntN(len(all))
				require.True(t, bytes.Equal(all[i].data, bytes.Repeat([]byte{all[i].with}, len(all[i].data))), "another piece was written")
				p.release(all[i].piece)
				all = append(all[:i], all[i+1:]...)
				continue
			}
			n := 1 + rng.IntN(1<<(1+rng.IntN(17)))
			if m, ok := p.alloc(n); ok {
				require.Len(t, m.data, n)
				h := held{m, byte(rng.Uint32())}
				copy(h.data, bytes.Repeat([]byte{h.with}, n))
				all = append(all, h)
			}
		}
		for _, h := range all {
			p.release(h.piece)
		}
		require.Zero(t, p.Used())
		largest := poolLeast
		for int64(largest)*2 <= p.Size() {
			largest *= 2
		}
		_, ok := p.alloc(largest)
		require.True(t, ok, "a piece of %d bytes of a pool of %d", largest, size)
		_, ok = p.alloc(int(p.Size()) + 1)
		require.False(t, ok)
		require.NoError(t, p.close())
		_, ok = p.alloc(1)
		require.False(t, ok)
	}
	_, err := NewPool(100)
	require.ErrorIs(t, err, connector.ErrIncompatible)
}

func numbered(i, size int) connector.Item {
	var k connector.StoreKey
	binary.LittleEndian.PutUint64(k[:], uint64(i))
	data := bytes.Repeat([]byte{byte(i)}, size)
	return connector.Item{Key: k, Spans: [][]byte{data}}
}

// A full buffer moves its oldest blocks to the pool, where they can be read as before; a full pool drops
// its own oldest blocks.
func TestSpill(t *testing.T) {
	pool, err := NewPool(8 << 10)
	require.NoError(t, err)
	m := NewMemory(Options{Bytes: 4 << 10, Keep: true, Spill: pool})
	const n, size = 20, 1 << 10
	for i := range n {
		require.NoError(t, m.Insert(t.Context(), []connector.Item{numbered(i, size)}))
		require.LessOrEqual(t, m.Bytes(), int64(4<<10))
	}
	require.Equal(t, int64(n-4), m.Spilled())
	for i := range n {
		want := numbered(i, size)
		found, err := m.Read(want.Key, func(data []byte) error {
			require.True(t, bytes.Equal(want.Spans[0], data), "block %d", i)
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, i >= n-12, found, "block %d: 4 in the buffer, 8 in the pool", i)
	}
	require.NoError(t, m.Insert(t.Context(), []connector.Item{{Key: numbered(n-12, 1).Key, Replace: true, Spans: numbered(99, size).Spans}}))
	got := connector.Item{Key: numbered(n-12, 1).Key, Spans: [][]byte{make([]byte, size)}}
	require.NoError(t, m.DropSelect(t.Context(), []connector.Item{got}))
	require.Equal(t, byte(99), got.Spans[0][0], "the replacement of a block in the pool is found")
	require.NoError(t, m.Close())
	require.Zero(t, pool.Size())
}

// A block in the pool stays while it is being read, even if the buffer is closed.
func TestSpillAndReaders(t *testing.T) {
	pool, err := NewPool(4 << 10)
	require.NoError(t, err)
	m := NewMemory(Options{Bytes: 1 << 10, Spill: pool})
	for i := range 3 {
		require.NoError(t, m.Insert(context.Background(), []connector.Item{numbered(i, 1<<10)}))
	}
	found, err := m.Read(numbered(0, 1).Key, func(data []byte) error {
		require.NoError(t, m.Close())
		require.Positive(t, pool.Size())
		require.Equal(t, bytes.Repeat([]byte{0}, 1<<10), data)
		return nil
	})
	require.NoError(t, err)
	require.True(t, found)
	require.Zero(t, pool.Size())
}
