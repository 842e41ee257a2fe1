package tier

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// Callers get, put, replace and evict at the same time: whatever is served is whole.
func TestConcurrentCalls(t *testing.T) {
	for _, policy := range []string{LRU, ARC, S3FIFO, FIFO} {
		d := disk(t, t.TempDir(), 24)
		s := open(t, Options{MemoryBytes: ArenaBytes(12, blockBytes), Policy: policy, Lower: d, AdmitAfter: 1, SameSize: true, Prefetch: 2, PinAfter: 20})
		var wg sync.WaitGroup
		errs := make([]error, 8)
		for w := range errs {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(w), 3))
				for range 600 {
					errs[w] = errors.Join(errs[w], work(t.Context(), s, rng))
				}
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
		mem, lower := s.Counts()
		t.Logf("%s: memory %+v", policy, mem)
		require.Positive(t, mem.Hits)
		require.Positive(t, mem.Evicted)
		require.Positive(t, lower.Hits)
		require.NoError(t, s.Close())
		require.Empty(t, s.memory.index.pins, "every pin was released")
	}
}

var errWrong = errors.New("wrong bytes")

func work(ctx context.Context, s *Store, rng *rand.Rand) error {
	n := rng.Uint64N(40)
	items := []connector.Item{item(n, 0), item(n+1, 0)}
	switch rng.IntN(6) {
	case 0:
		items[0].Replace = true
		fallthrough
	case 1, 2:
		if err := s.Put(ctx, items); err != nil && !errors.Is(err, ErrPinned) {
			return err
		}
		return nil
	case 3:
		_, err := s.Lookup(ctx, [][]connector.StoreKey{{items[0].Key, items[1].Key}})
		return err
	}
	items = []connector.Item{empty(n), empty(n + 1)}
	err := s.Get(ctx, items)
	bad := map[int]bool{}
	var failed *connector.ItemError
	switch {
	case errors.As(err, &failed):
		for _, i := range failed.Items {
			bad[i] = true
		}
		if !errors.Is(err, connector.ErrGone) {
			return err
		}
	case err != nil:
		return err
	}
	for i, it := range items {
		if !bad[i] && string(got(it)) != string(content(n+uint64(i), 0)) {
			return errWrong
		}
	}
	return nil
}
