package tier

import (
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

var flagKeys = flag.Int("keys", 50_000, "keys of the index in TestIndexOfManyKeys; the promise is for 10000000")

// spread is a key like those of the sdk: a hash.
func spread(n uint64) (k connector.StoreKey) {
	rng := rand.New(rand.NewPCG(n, 77))
	for i := 0; i < len(k); i += 8 {
		binary.LittleEndian.PutUint64(k[i:], rng.Uint64())
	}
	return k
}

// At most 64 bytes a key, of which there are as many again that were evicted and are remembered; and
// lookups hardly notice evictions.
func TestIndexOfManyKeys(t *testing.T) {
	for _, policy := range []string{LRU, ARC, S3FIFO} {
		n := *flagKeys
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		x, err := NewIndex(n, policy)
		require.NoError(t, err)
		for i := range uint64(2 * n) { // the first half is evicted
			store(t, x, spread(i))
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		size := float64(after.HeapAlloc-before.HeapAlloc) / float64(n)
		require.Equal(t, n, x.Len())
		other, err := NewIndex(n/10, policy)
		require.NoError(t, err)
		var took [3][]time.Duration
		var rate float64
		evictions := 0
		for range 5 {
			for i, victim := range []*Index{nil, other, x} {
				stop := evict(t, victim, uint64(2*n+evictions))
				p999, r := lookups(x, n)
				evictions += stop()
				took[i] = append(took[i], p999)
				rate = max(rate, r)
			}
		}
		for i := range took {
			slices.Sort(took[i])
		}
		idle, control, busy := took[0][2], took[1][2], took[2][2]
		t.Logf("%s: %d keys, %.1f bytes a key, %.2f million lookups/s on one core; p99.9 %v idle, %v while another index evicts, %v while it does: %.2f x the control, %.2f x idle; %d evictions",
			policy, n, size, rate/1e6, idle, control, busy, float64(busy)/float64(control), float64(busy)/float64(idle), evictions)
		const fixed = 64 << 10 // what does not grow with the keys: allocations are rounded up, and the test itself has some
		require.LessOrEqual(t, size, 64+fixed/float64(n))
		require.Positive(t, evictions)
		runtime.KeepAlive(x)
	}
}

// evict stores new keys in an index that is full, until stop, which gives their number.
func evict(t *testing.T, x *Index, from uint64) (stop func() int) {
	if x == nil {
		return func() int { return 0 }
	}
	end := make(chan struct{})
	var done sync.WaitGroup
	n := 0
	done.Go(func() {
		for ; ; n++ {
			select {
			case <-end:
				return
			default:
				store(t, x, spread(from+uint64(n)))
			}
		}
	})
	return func() int { close(end); done.Wait(); return n }
}

func store(t *testing.T, x *Index, k connector.StoreKey) {
	id, _, err := x.Reserve(k)
	if err != nil {
		t.Errorf("reserve: %v", err)
		return
	}
	x.Commit(id, k)
}

// lookups looks keys up, half of them present, and gives the p99.9 of one lookup and the rate.
func lookups(x *Index, n int) (p999 time.Duration, rate float64) {
	keys := make([]connector.StoreKey, 1<<16)
	for i := range keys {
		keys[i] = spread(uint64(i) * uint64(2*n) / uint64(len(keys)))
	}
	took := make([]time.Duration, 0, 4*len(keys))
	for range 4 {
		for _, k := range keys {
			begin := time.Now()
			x.Has(k)
			took = append(took, time.Since(begin))
		}
	}
	begin := time.Now()
	for _, k := range keys {
		x.Has(k)
	}
	rate = float64(len(keys)) / time.Since(begin).Seconds()
	slices.Sort(took)
	return took[len(took)*999/1000], rate
}
