package tier

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// turns cuts a trace of conversations wherever a conversation starts again.
func turns(trace []uint64) (out [][]uint64) {
	for i, k := range trace {
		if k == 0 { // the first block of the system prompt
			out = append(out, nil)
		}
		out[len(out)-1] = append(out[len(out)-1], trace[i])
	}
	return out
}

// Blocks that are written together are judged as if they came one by one: neither what is evicted for them nor
// their own places depend on it, but that none evicts another of its own.
func TestBatchesAreJudgedOneByOne(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: nothing here runs beside anything else")
	}
	all := turns(conversations(5, 100, 12)) // none longer than the small queue of S3-FIFO
	for _, policy := range []string{LRU, ARC, S3FIFO, FIFO} {
		one, err := newKeyIndex(1000, policy)
		require.NoError(t, err)
		many, err := newKeyIndex(1000, policy)
		require.NoError(t, err)
		hitsOne, hitsMany, asked := 0, 0, 0
		for _, keys := range all {
			asked += len(keys)
			var missing, ids []uint64
			for _, k := range keys {
				if one.Has(storeKey(k)) {
					one.Touch(storeKey(k))
					hitsOne++
				} else {
					store(t, one, storeKey(k))
				}
				if many.Has(storeKey(k)) {
					many.Touch(storeKey(k))
					hitsMany++
					continue
				}
				id, _, err := many.Reserve(storeKey(k))
				require.NoError(t, err)
				missing, ids = append(missing, k), append(ids, uint64(id))
			}
			for i, k := range missing {
				many.Commit(uint32(ids[i]), storeKey(k))
			}
		}
		t.Logf("%s: %d of %d hits one by one, %d in batches", policy, hitsOne, asked, hitsMany)
		require.InEpsilon(t, hitsOne, hitsMany, 0.01)
	}
}

// What is reserved and given up leaves no trace in the policy.
func TestCancelledReservations(t *testing.T) {
	for _, policy := range []string{LRU, ARC, S3FIFO, FIFO} {
		x, err := newKeyIndex(8, policy)
		require.NoError(t, err)
		for round := range uint64(200) {
			var ids []uint32
			for i := range uint64(8) {
				id, _, err := x.Reserve(storeKey(100 + round*8 + i))
				require.NoError(t, err, "%s", policy)
				ids = append(ids, id)
			}
			_, _, err := x.Reserve(storeKey(1))
			require.ErrorIs(t, err, ErrPinned, "%s: all are reserved", policy)
			for i, id := range ids {
				if i%2 == 0 {
					x.Cancel(id)
				} else {
					x.Commit(id, storeKey(100+round*8+uint64(i)))
				}
			}
			require.Equal(t, 4, x.Len())
		}
	}
}
