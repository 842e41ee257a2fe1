package tier

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// hanging is a tier below whose server never answers: a write takes as long as its context lives.
type hanging struct {
	sizes
	began chan struct{}
	ended int // writes that are over
}

func (h *hanging) Put(ctx context.Context, _ []connector.Item) error {
	h.began <- struct{}{}
	<-ctx.Done()
	h.ended++
	return ctx.Err()
}

// What is written behind waits for nobody but the tier below, so Reset and Close end it: else it would keep them, and then every
// call behind them, from blocks that are in memory.
func TestLowerTierThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lower := &hanging{began: make(chan struct{})}
		s := open(t, Options{MemoryBytes: ArenaBytes(32, blockBytes), Lower: lower, AdmitAfter: 1})
		puts(t, s, 1)
		<-lower.began
		require.True(t, present(t, s, 1), "in memory")
		began := time.Now()
		_, err := s.Reset(t.Context())
		require.NoError(t, err)
		require.Equal(t, closeWait, time.Since(began), "Reset waits no longer for the write")
		synctest.Wait()
		require.Equal(t, 1, lower.ended)
		require.False(t, present(t, s, 1))

		puts(t, s, 2)
		<-lower.began
		require.NoError(t, gets(t, s, 2))
		require.NoError(t, s.Close())
		require.Equal(t, 2*closeWait, time.Since(began))
		require.Equal(t, 2, lower.ended)
		require.ErrorIs(t, s.Flush(t.Context()), errClosed)
	})
}

// Whoever waits for a block that was to be fetched ahead does not wait for it when the Store is closed: nobody fetches it then.
func TestFetchAheadEndsWithClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t, Options{MemoryBytes: ArenaBytes(32, blockBytes), SameSize: true, Prefetch: 2, Lower: &sizes{seen: map[int]int{}}})
		require.Len(t, s.below.staged.start([]connector.StoreKey{storeKey(1)}), 1)
		require.NoError(t, s.Close())
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.False(t, s.below.fromStaged(ctx, empty(1)))
		require.NoError(t, ctx.Err())
	})
}

// slow is a tier below whose server takes its time for a write.
type slow struct {
	panicking
	takes time.Duration
	wrote error // how the last write ended
}

func (s *slow) Put(ctx context.Context, _ []connector.Item) error {
	select {
	case <-time.After(s.takes):
	case <-ctx.Done():
	}
	s.wrote = ctx.Err()
	return s.wrote
}

// A write behind that ends by itself is not ended by a Reset: a server that has got it might do it later.
func TestResetWaitsForTheLowerTier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lower := &slow{takes: closeWait / 2, wrote: context.Canceled}
		s := open(t, Options{MemoryBytes: ArenaBytes(32, blockBytes), Lower: lower, AdmitAfter: 1})
		puts(t, s, 1)
		synctest.Wait()
		began := time.Now()
		_, err := s.Reset(t.Context())
		require.NoError(t, err)
		require.Equal(t, lower.takes, time.Since(began))
		require.NoError(t, lower.wrote)
		require.NoError(t, s.Close())
	})
}

// silent is a tier below that says it has everything, and whose first reads wait for their contexts.
type silent struct {
	panicking
	silent atomic.Int32 // reads that hang
	asked  atomic.Int32
}

func (s *silent) Get(ctx context.Context, _ []connector.Item) error {
	s.asked.Add(1)
	if s.silent.Add(-1) >= 0 {
		<-ctx.Done()
		return ctx.Err()
	}
	return connector.ErrGone
}

// A read ahead that hangs costs its own patience, and not that of the loads behind it: they ask for their blocks themselves.
func TestFetchAheadThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lower := &silent{}
		lower.silent.Store(1)
		s := open(t, Options{MemoryBytes: ArenaBytes(32, blockBytes), SameSize: true, Prefetch: 4, Lower: lower})
		s.below.prefetch([]connector.StoreKey{storeKey(1), storeKey(2), storeKey(3), storeKey(4)})
		began := time.Now()
		require.ErrorIs(t, gets(t, s, 4), connector.ErrGone)
		require.Equal(t, fetchWait, time.Since(began))
		require.EqualValues(t, 2, lower.asked.Load(), "blocks 2 and 3 are not fetched behind it")
		require.NoError(t, s.Close())
	})
}

// A block that nobody waits for any more takes no memory and is not fetched.
func TestFetchAheadOfTheUnwanted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lower := &silent{}
		lower.silent.Store(1)
		s := open(t, Options{MemoryBytes: ArenaBytes(32, blockBytes), SameSize: true, Prefetch: 2, Lower: lower})
		var all []*stage
		for n := range uint64(20) { // of which eight are kept
			all = append(all, s.below.staged.start([]connector.StoreKey{storeKey(n)})...)
			s.below.ahead <- all[n : n+1]
			synctest.Wait() // the first is being fetched
		}
		for _, g := range all {
			<-g.done
		}
		for n, g := range all {
			require.Equal(t, n == 0 || n >= 12, g.data != nil, "block %d", n)
		}
		require.EqualValues(t, 9, lower.asked.Load())
		require.NoError(t, s.Close())
	})
}

// panicking is a tier below that panics at first, and says that it has everything.
type panicking struct {
	sizes
	most atomic.Int32
}

func (p *panicking) maybe() {
	if p.most.Add(-1) >= 0 {
		panic("a size that it does not know")
	}
}

func (p *panicking) Lookup(_ context.Context, runs [][]connector.StoreKey) (found []int, err error) {
	for _, r := range runs {
		found = append(found, len(r))
	}
	return found, nil
}

func (p *panicking) Get(context.Context, []connector.Item) error {
	p.maybe()
	return connector.ErrGone
}

func (p *panicking) Put(ctx context.Context, items []connector.Item) error {
	p.maybe()
	return p.sizes.Put(ctx, items)
}

// A panic of the tier below in what nobody has called costs its block, not the process.
func TestLowerTierThatPanics(t *testing.T) {
	lower := &panicking{sizes: sizes{seen: map[int]int{}}}
	var lines bytes.Buffer
	o := Options{MemoryBytes: ArenaBytes(32, blockBytes), SameSize: true, Prefetch: 2, Lower: lower, AdmitAfter: 1}
	o.Log = slog.New(slog.NewTextHandler(&lines, nil))
	s := open(t, o)
	lower.most.Store(1)
	puts(t, s, 1)
	require.NoError(t, s.Flush(t.Context()))
	_, below := s.Counts()
	require.EqualValues(t, 1, below.Errors)
	require.Zero(t, below.WriteBacks)
	require.NoError(t, gets(t, s, 1), "it is in memory, and written again")
	require.NoError(t, s.Flush(t.Context()))
	_, below = s.Counts()
	require.EqualValues(t, 1, below.WriteBacks)

	lower.most.Store(1)
	require.True(t, present(t, s, 2))
	require.ErrorIs(t, gets(t, s, 2), connector.ErrGone, "the fetch ahead ends")
	require.NoError(t, s.Close())
	require.Equal(t, 2, strings.Count(lines.String(), "the tier below memory panicked"))
	require.Contains(t, lines.String(), "a size that it does not know")
}

// timed is a tier below that keeps the time of a block apart from its bytes, as a server with times of its own does.
type timed struct {
	mu     sync.Mutex
	blocks map[connector.StoreKey][]byte
	times  map[connector.StoreKey][]byte
	tails  map[int]int // lengths of last spans
}

func (s *timed) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := make([]int, len(runs))
	for i, keys := range runs {
		for found[i] < len(keys) && s.blocks[keys[found[i]]] != nil {
			found[i]++
		}
	}
	return found, nil
}

func (s *timed) Get(_ context.Context, items []connector.Item) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, it := range items {
		data := s.blocks[it.Key]
		if data == nil {
			return connector.ErrGone
		}
		if len(it.Spans[0]) != LowerHeader || it.Size() != LowerHeader+len(data) {
			return connector.ErrOutdated
		}
		copy(it.Spans[0], s.times[it.Key])
		for _, span := range it.Spans[1:] {
			data = data[copy(span, data):]
		}
		s.tails[len(it.Spans[len(it.Spans)-1])]++
	}
	return nil
}

func (s *timed) Put(_ context.Context, items []connector.Item) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, it := range items {
		s.times[it.Key] = bytes.Clone(it.Spans[0])
		s.blocks[it.Key] = bytes.Join(it.Spans[1:], nil)
		s.tails[len(it.Spans[len(it.Spans)-1])]++
	}
	return nil
}

func (s *timed) Close() error { return nil }

// Every item that the tier below sees begins with a span of LowerHeader bytes and ends with the digests: what is written, what is
// read, and what is fetched ahead.
func TestSpansOfTheLowerTier(t *testing.T) {
	lower := &timed{blocks: map[connector.StoreKey][]byte{}, times: map[connector.StoreKey][]byte{}, tails: map[int]int{}}
	const digests = 16 // the last span of item
	s := open(t, Options{
		MemoryBytes: ArenaBytes(2, blockBytes), SameSize: true, Prefetch: 2, Lower: lower, AdmitAfter: 1, TTL: time.Hour, Digests: map[int]int{blockBytes: digests},
	})
	for _, n := range upTo(6) {
		puts(t, s, n)
		require.NoError(t, s.Flush(t.Context()))
	}
	for range 3 {
		for _, n := range upTo(6) {
			require.True(t, present(t, s, n))
			require.NoError(t, gets(t, s, n))
		}
	}
	_, below := s.Counts()
	require.Positive(t, below.Prefetches)
	require.NoError(t, s.Close())
	require.Len(t, lower.tails, 1)
	require.Positive(t, lower.tails[digests])
}

// Writes that begin while somebody waits end at once, whoever of several is through first.
func TestInterruptible(t *testing.T) {
	var i interruptible
	ended := func() bool {
		ctx, end := i.begin(t.Context())
		defer end()
		return ctx.Err() != nil
	}
	require.False(t, ended())
	i.wait(0)
	i.wait(0)
	require.True(t, ended())
	i.resume()
	require.True(t, ended(), "another one still waits")
	i.resume()
	require.False(t, ended())
}
