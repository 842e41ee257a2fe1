package peer

import (
	"encoding/binary"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// ranges behave like a set of bytes to which only new ones are added.
func TestRanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const size = 8
		var r ranges
		model, all := map[int]bool{}, 0
		for range rapid.IntRange(0, 20).Draw(t, "steps") {
			from := rapid.IntRange(0, size-1).Draw(t, "from")
			to := rapid.IntRange(from+1, size).Draw(t, "to")
			fresh := true
			for i := from; i < to; i++ {
				fresh = fresh && !model[i]
			}
			require.Equal(t, fresh, r.add(from, to))
			for i := from; i < to && fresh; i++ {
				model[i], all = true, all+1
			}
			require.Equal(t, all == size, r.whole(size))
		}
	})
}

// subscribed is a subscription whose link is up, and the room of its consumer.
func subscribed(t *testing.T, peers pipe.Peers) *subscription {
	t.Helper()
	s := newStore(peers, nil, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return &subscription{store: s, partial: map[connector.StoreKey]*partial{}}
}

// take is what happens to a frame of parts.
func (s *subscription) take(parts ...part) error {
	for _, p := range parts {
		if _, err := s.place(&p); err != nil {
			return err
		}
	}
	for _, p := range parts {
		if err := s.arrived(&p); err != nil {
			return err
		}
	}
	return nil
}

// A block is there when all of its bytes are, and parts that overlap are refused, in one frame or in several.
func TestPartsThatOverlap(t *testing.T) {
	k := connector.StoreKey{1}
	at := func(offset, size uint32) part { return part{key: k, total: 8, offset: offset, size: size} }
	for name, frames := range map[string][][]part{
		"in one frame": {{at(0, 4), at(2, 4)}}, "in two": {{at(4, 4)}, {at(0, 2)}, {at(3, 2)}}, "twice": {{at(0, 4)}, {at(0, 4)}},
		"all twice": {{at(0, 8), at(0, 8)}}, "another size": {{at(0, 4)}, {{key: k, total: 9, offset: 4, size: 5}}},
	} {
		t.Run(name, func(t *testing.T) {
			s := subscribed(t, pipe.Peers{Bytes: 64})
			for i, f := range frames {
				err := s.take(f...)
				if i < len(frames)-1 {
					require.NoError(t, err)
					require.False(t, s.store.has(k))
				} else {
					require.ErrorIs(t, err, errMisfit)
				}
			}
		})
	}
	s := subscribed(t, pipe.Peers{Bytes: 64})
	require.NoError(t, s.take(at(6, 2), at(0, 3)))
	require.False(t, s.store.has(k))
	require.NoError(t, s.take(at(3, 3)))
	require.True(t, s.store.has(k))
	require.Empty(t, s.partial)
}

// Blocks of which parts have arrived take half of the buffer at most; parts of others are dropped.
func TestPartsTakeHalf(t *testing.T) {
	s := subscribed(t, pipe.Peers{Bytes: 64})
	at := func(k byte, offset, size uint32) part {
		return part{key: connector.StoreKey{k}, total: 16, offset: offset, size: size}
	}
	for k := range byte(3) {
		require.NoError(t, s.take(at(k, 0, 8)))
	}
	require.Equal(t, int64(32), s.store.memory.Bytes())
	for k := range byte(3) {
		require.NoError(t, s.take(at(k, 8, 8)))
		require.Equal(t, k < 2, s.store.has(connector.StoreKey{k}))
	}
	require.Empty(t, s.partial)
	require.Zero(t, s.store.partial.Load())
	require.NoError(t, s.take(at(2, 0, 16)), "it has room now")
	require.True(t, s.store.has(connector.StoreKey{2}))
	require.NoError(t, s.take(at(3, 0, 8)))
	s.drop(connector.StoreKey{3})
	require.Zero(t, s.store.partial.Load())
}

// A link on which too many blocks are begun ends.
func TestTooManyBegun(t *testing.T) {
	s := subscribed(t, pipe.Peers{Bytes: 64})
	begin := func(n uint32) error {
		p := part{total: 1 << 20, size: 1}
		binary.LittleEndian.PutUint32(p.key[:], n)
		_, err := s.place(&p)
		return err
	}
	for n := range uint32(maxPartial) {
		if err := begin(n); err != nil {
			require.NoError(t, err)
		}
	}
	require.ErrorIs(t, begin(maxPartial), connector.ErrIncompatible)
	require.NoError(t, begin(0), "it has begun")
}

// A block of which no part comes any more is given up, others of that link are not.
func TestPartsThatStayAway(t *testing.T) {
	s := subscribed(t, pipe.Peers{Bytes: 64})
	at := func(k byte, offset uint32) part {
		return part{key: connector.StoreKey{k}, total: 16, offset: offset, size: 8}
	}
	require.NoError(t, s.take(at(1, 0), at(2, 0)))
	for _, b := range s.partial {
		b.grown = b.grown.Add(-partPatience)
	}
	require.NoError(t, s.take(at(2, 8), at(3, 0)))
	s.sweep(time.Now())
	require.NotContains(t, s.partial, connector.StoreKey{1})
	require.Contains(t, s.partial, connector.StoreKey{3})
	require.True(t, s.store.has(connector.StoreKey{2}))
}

// Parts that do not touch take memory for each, which is bounded; a block for which there is no room takes none.
func TestPartsInPieces(t *testing.T) {
	s := subscribed(t, pipe.Peers{Bytes: 1 << 20})
	at := func(k byte, offset uint32) part {
		return part{key: connector.StoreKey{k}, total: 1 << 19, offset: offset, size: 1}
	}
	for n := range uint32(maxRanges) {
		require.NoError(t, s.take(at(1, 2*n)))
	}
	require.ErrorIs(t, s.take(at(1, 2*maxRanges)), errMisfit)
	for n := range uint32(100) {
		require.NoError(t, s.take(at(2, 2*n)))
	}
	none := s.partial[connector.StoreKey{2}]
	require.Nil(t, none.slot)
	require.Empty(t, none.got)
}
