package lookupbuffertest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
)

// rig is one buffer under test.
type rig struct {
	T
	Harness
	Ends
	rand *rand.Rand
}

func open(t T, h Harness) *rig {
	r := &rig{T: t, Harness: h, Ends: h.Open(t), rand: rand.New(rand.NewPCG(1, 2))}
	t.Cleanup(func() {
		_ = r.Insert.Close()
		_ = r.Select.Close()
	})
	return r
}

// content is a block's bytes, a function of its number and version.
func content(number uint64, version byte, size int) []byte {
	seed := [32]byte{version}
	binary.LittleEndian.PutUint64(seed[1:], number)
	b := make([]byte, size)
	_, _ = rand.NewChaCha8(seed).Read(b) // never fails
	return b
}

func key(number uint64) (k connector.StoreKey) {
	copy(k[:], content(number, 'k', len(k)))
	return k
}

const blockBytes = 40_000

// item is a block of the usual size, in two spans.
func item(number uint64) connector.Item {
	return connector.Item{Key: key(number), Spans: [][]byte{content(number, 0, blockBytes)[:1000], content(number, 0, blockBytes)[1000:]}}
}

// room is memory for a block, in other spans than those it was inserted from.
func room(number uint64) connector.Item {
	b := make([]byte, blockBytes)
	return connector.Item{Key: key(number), Spans: [][]byte{b[:30_000], nil, b[30_000:]}}
}

func rooms(numbers ...uint64) []connector.Item {
	out := make([]connector.Item, len(numbers))
	for i, n := range numbers {
		out[i] = room(n)
	}
	return out
}

func (r *rig) insert(numbers ...uint64) {
	items := make([]connector.Item, len(numbers))
	for i, n := range numbers {
		items[i] = item(n)
	}
	require.NoError(r, r.Insert.Insert(r.Context(), items))
	for _, n := range numbers {
		require.True(r, r.found(n, soon), "block %d was inserted and is not found", n)
	}
}

// found reports whether a block is there or arrives within the given time: between two processes it is on
// its way for a while.
func (r *rig) found(number uint64, within time.Duration) bool {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(within); ; {
		n, err := r.Select.Lookup(r.Context(), [][]connector.StoreKey{{key(number)}})
		require.NoError(r, err)
		require.Len(r, n, 1)
		if n[0] == 1 || time.Now().After(end) {
			return n[0] == 1
		}
		select {
		case <-tick.C:
		case <-r.Context().Done():
			require.NoError(r, r.Context().Err())
		}
	}
}

// holds requires the items to hold the blocks that were inserted.
func (r *rig) holds(version byte, items []connector.Item, numbers ...uint64) {
	for i, n := range numbers {
		require.True(r, bytes.Equal(content(n, version, blockBytes), bytes.Join(items[i].Spans, nil)), "block %d is not what was inserted", n)
	}
}

// take selects blocks that are there.
func (r *rig) take(numbers ...uint64) {
	ctx, cancel := context.WithTimeout(r.Context(), soon)
	defer cancel()
	to := rooms(numbers...)
	require.NoError(r, r.Select.DropSelect(ctx, to))
	r.holds(0, to, numbers...)
}

// failed requires an error that names the items.
func (r *rig) failed(err, want error, items ...int) {
	require.ErrorIs(r, err, want)
	var named *connector.ItemError
	require.ErrorAs(r, err, &named)
	require.ElementsMatch(r, items, named.Items)
}

func selects(t T, h Harness) {
	r := open(t, h)
	r.insert(1, 2, 3)
	r.take(2, 1)
	for _, n := range []uint64{1, 2} {
		require.Equal(r, h.Keep, r.found(n, 0), "block %d after it was selected", n)
	}
	r.take(3)
	require.NoError(r, r.Select.DropSelect(r.Context(), nil))
	require.NoError(r, r.Insert.Insert(r.Context(), nil))
}

func lookup(t T, h Harness) {
	r := open(t, h)
	r.insert(1, 2, 4)
	for range 2 { // twice, because Lookup has no side effects
		n, err := r.Select.Lookup(r.Context(), [][]connector.StoreKey{
			{key(1), key(2), key(3), key(4)}, {}, {key(3), key(1)}, {key(4), key(4), key(2)},
		})
		require.NoError(r, err)
		require.Equal(r, []int{2, 0, 0, 3}, n)
	}
	n, err := r.Select.Lookup(r.Context(), nil)
	require.NoError(r, err)
	require.Empty(r, n)
}

// waiting starts a selection and returns a channel for its result.
func (r *rig) waiting(ctx context.Context, to []connector.Item) <-chan error {
	done := make(chan error, 1)
	go func() { done <- r.Select.DropSelect(ctx, to) }()
	return done
}

// end waits until a selection ends.
func (r *rig) end(done <-chan error) error {
	select {
	case err := <-done:
		return err
	case <-time.After(2 * soon):
		require.FailNow(r, "a selection does not end")
		return nil
	}
}

// stays requires a selection to wait.
func (r *rig) stays(done <-chan error) {
	select {
	case err := <-done:
		require.FailNow(r, "a selection does not wait for its block", "%v", err)
	case <-time.After(moment):
	}
}

func selectWaits(t T, h Harness) {
	r := open(t, h)
	r.insert(1)
	to := rooms(1, 2)
	done := r.waiting(r.Context(), to)
	r.stays(done)
	r.insertUnseen(2)
	require.NoError(r, r.end(done))
	r.holds(0, to, 1, 2)
}

// insertUnseen inserts a block that a selection may take at once.
func (r *rig) insertUnseen(number uint64) {
	require.NoError(r, r.Insert.Insert(r.Context(), []connector.Item{item(number)}))
}

func notThere(t T, h Harness) {
	r := open(t, h)
	r.insert(1, 3)
	to := rooms(1, 2, 3, 4)
	ctx, cancel := context.WithTimeout(r.Context(), moment)
	defer cancel()
	r.failed(r.end(r.waiting(ctx, to)), context.DeadlineExceeded, 1, 3)
	r.holds(0, []connector.Item{to[0], to[2]}, 1, 3)
	require.Equal(r, h.Keep, r.found(1, 0))
	r.insert(2)
	r.take(2)
}

func cancelled(t T, h Harness) {
	r := open(t, h)
	r.insert(1, 2)
	ctx, cancel := context.WithCancel(r.Context())
	cancel()
	require.ErrorIs(r, r.end(r.waiting(ctx, rooms(1, 2))), context.Canceled)
	require.True(r, r.found(1, 0) && r.found(2, 0), "a cancelled selection removed a block")
	r.take(1, 2)

	ctx, cancel = context.WithCancel(r.Context())
	done := r.waiting(ctx, rooms(3))
	r.stays(done)
	cancel()
	require.ErrorIs(r, r.end(done), context.Canceled)
	r.insert(3) // nobody waits for it any more, so it stays
	r.take(3)
}

func failedPlacement(t T, h Harness) {
	r := open(t, h)
	r.insert(1, 2)
	for _, n := range []int{0, blockBytes - 1, blockBytes + 1} {
		to := []connector.Item{room(2), {Key: key(1), Spans: [][]byte{make([]byte, n)}}}
		if n > 0 {
			to = to[1:]
		}
		err := r.end(r.waiting(r.Context(), to))
		want := connector.ErrIncompatible
		if h.Shared {
			want = connector.ErrOutdated
		}
		r.failed(err, want, len(to)-1)
	}
	require.True(r, r.found(1, 0), "a block that could not be placed is gone")
	r.take(1)
}

func twoSelections(t T, h Harness) {
	r := open(t, h)
	for n := uint64(0); n < 20; n += 2 {
		a, b, c := rooms(n, n+1), rooms(n, n+1), rooms(n)
		waits := []<-chan error{r.waiting(r.Context(), a), r.waiting(r.Context(), b), r.waiting(r.Context(), c)}
		if n == 0 {
			for _, done := range waits {
				r.stays(done)
			}
		} else {
			r.queued()
		}
		r.insertUnseen(n)
		r.insertUnseen(n + 1)
		for i, done := range waits {
			require.NoError(r, r.end(done), "selection %d of block %d", i, n)
		}
		r.holds(0, a, n, n+1)
		r.holds(0, b, n, n+1)
		r.holds(0, c, n)
	}
}

// queued gives goroutines that have just started the time to begin their wait.
func (r *rig) queued() {
	select {
	case <-time.After(moment):
	case <-r.Context().Done():
	}
}

func full(t T, h Harness) {
	r := open(t, h)
	blocks := uint64(4*h.Capacity/blockBytes + 1)
	stored := map[uint64]bool{}
	for n := range blocks {
		began := time.Now()
		err := r.Insert.Insert(r.Context(), []connector.Item{item(n)})
		require.Less(r, time.Since(began), soon, "Insert waits although nobody takes blocks out")
		if err != nil {
			r.failed(err, connector.ErrBusy, 0)
		}
		stored[n] = err == nil
	}
	last, seen := blocks-1, 0
	if stored[last] {
		require.True(r, r.found(last, soon), "the last block was inserted and is not there")
	}
	for n := range blocks {
		if r.found(n, 0) {
			require.True(r, stored[n], "block %d was refused and is there", n)
			seen++
			r.take(n)
		}
	}
	require.Positive(r, seen)
	require.LessOrEqual(r, seen*blockBytes, h.Capacity+h.Capacity/4, "more than the capacity was kept")
}

func roomAgain(t T, h Harness) {
	r := open(t, h)
	for n := range uint64(4 * h.Capacity / blockBytes) {
		r.insert(n)
		r.take(n)
	}
}

func insertTwice(t T, h Harness) {
	r := open(t, h)
	r.insert(1)
	other := connector.Item{Key: key(1), Spans: [][]byte{content(1, 1, blockBytes)}}
	require.NoError(r, r.Insert.Insert(r.Context(), []connector.Item{other}))
	r.insert(2) // between two processes, this block arrives after the first one
	r.take(1)

	r.insert(3)
	other = connector.Item{Key: key(3), Replace: true, Spans: [][]byte{content(3, 1, blockBytes)}}
	require.NoError(r, r.Insert.Insert(r.Context(), []connector.Item{other}))
	r.insert(4)
	to := rooms(3)
	require.NoError(r, r.end(r.waiting(r.Context(), to)))
	r.holds(1, to, 3)
	require.Equal(r, h.Keep, r.found(3, 0), "the replaced block is there as well")
}

func spansReturned(t T, h Harness) {
	r := open(t, h)
	for n := range uint64(10) {
		it := item(n)
		require.NoError(r, r.Insert.Insert(r.Context(), []connector.Item{it}))
		for _, s := range it.Spans {
			clear(s)
		}
	}
	r.take(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
}

func closeWaiting(t T, h Harness) {
	r := open(t, h)
	r.insert(1)
	done := r.waiting(r.Context(), rooms(2))
	r.stays(done)
	require.NoError(r, r.Select.Close())
	require.ErrorIs(r, r.end(done), lookupbuffer.ErrClosed)
	require.NoError(r, r.Insert.Close())
	require.ErrorIs(r, r.Insert.Insert(r.Context(), []connector.Item{item(3)}), lookupbuffer.ErrClosed)
	require.NoError(r, r.Select.Close(), "a second Close")
}

func atOnce(t T, h Harness) {
	r := open(t, h)
	const workers = 4
	each := uint64(40)
	if h.Keep { // selected blocks stay, so all blocks must fit
		each = uint64(h.Capacity / blockBytes / workers)
	}
	var group sync.WaitGroup
	errs := make([]error, 2*workers)
	gate := make(chan struct{}, h.Capacity/blockBytes-1) // so that nothing is dropped
	for w := range uint64(workers) {
		group.Go(func() {
			for i := range each {
				gate <- struct{}{}
				if err := r.Insert.Insert(r.Context(), []connector.Item{item(w*each + i)}); err != nil {
					errs[w] = err
					return
				}
			}
		})
		group.Go(func() {
			for i := range each {
				to := rooms(w*each + i)
				err := r.Select.DropSelect(r.Context(), to)
				<-gate
				if err == nil && !bytes.Equal(content(w*each+i, 0, blockBytes), bytes.Join(to[0].Spans, nil)) {
					err = errors.New("a block is damaged")
				}
				if err != nil {
					errs[workers+w] = err
					return
				}
			}
		})
	}
	group.Wait()
	require.NoError(r, errors.Join(errs...))
}
