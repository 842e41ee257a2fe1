package host

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/place"
)

// loadWatch says which load is not over within its limit: with the stacks of all goroutines, and with what is in the index.
type loadWatch struct {
	limit time.Duration
	p     *placement

	since []atomic.Int64 // when the load began of each of those who load, in Unix ns; 0: none is under way
}

func newLoadWatch(loaders int, limit time.Duration, p *placement) *loadWatch {
	return &loadWatch{limit: limit, p: p, since: make([]atomic.Int64, loaders)}
}

// begin notes that somebody's load begins, and end that it is over.
func (w *loadWatch) begin(loader int) { w.since[loader].Store(time.Now().UnixNano()) }
func (w *loadWatch) end(loader int)   { w.since[loader].Store(0) }

// start looks at the loads from now on, until the test is over or over is called. say is not called after that.
func (w *loadWatch) start(t *testing.T, say func(string)) (over func()) {
	t.Helper()
	done, looked := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(looked)
		w.run(done, say)
	}()
	over = sync.OnceFunc(func() {
		close(done)
		<-looked
	})
	t.Cleanup(over)
	return over
}

// run looks at the loads until done is closed, or until it has said that one is late.
func (w *loadWatch) run(done <-chan struct{}, say func(string)) {
	tick := time.NewTicker(min(w.limit, time.Second))
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case now := <-tick.C:
			for i := range w.since {
				if at := w.since[i].Load(); at != 0 && now.UnixNano()-at > int64(w.limit) {
					say(w.dump(i, now.Sub(time.Unix(0, at))))
					return
				}
			}
		}
	}
}

// dump is what everybody does while somebody loads. The index comes last, and only if it answers: one of the goroutines may have its lock.
func (w *loadWatch) dump(loader int, took time.Duration) string {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	answer := make(chan string, 1)
	go func() { answer <- indexOf(w.p) }()
	index := "the index does not answer"
	select {
	case index = <-answer:
	case <-time.After(10 * time.Second):
	}
	return fmt.Sprintf("load of %d has been under way for %v, the limit is %v\n%s\n%s", loader, took, w.limit, stacks, index)
}

// indexOf lists the slots that are or were in use, and whether the index has what lies there.
func indexOf(p *placement) string {
	if !p.enter() {
		return "nothing is found now"
	}
	defer p.leave()
	arena, slots := p.kv.Region(0), p.kv.Layout().Blocks
	var out strings.Builder
	fmt.Fprintf(&out, "%d blocks are in the index, of %d slots", p.host.Resident(), slots)
	for s := range slots {
		header := arena[4096+128*s:][:128]
		if w := binary.LittleEndian.Uint64(header); w != 0 {
			fmt.Fprintf(&out, "\nslot %d: generation %d, state %d, key %x, in the index: %v", s, w>>8, w&0xff, header[16:24], p.host.Knows(place.Slot(s)))
		}
	}
	return out.String()
}

// A load that is held up is named, with what it waits for, and with what the index has.
func TestLoadWatch(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	bs := r.fill(keys(1, 3), 0)
	slots := r.save(0, bs...)
	for i := range bs {
		bs[i].ID += placedBlocks / 2
	}
	w := newLoadWatch(2, 20*time.Millisecond, r.p)
	hands := r.ranks[0].hands
	for range cap(hands) { // as if others copied
		hands <- struct{}{}
	}
	w.begin(1)
	over := make(chan bool, 1)
	go func() { over <- r.p.load(t.Context(), r.ranks[0], 0, bs) }()
	require.Eventually(t, func() bool {
		stacks := make([]byte, 1<<20)
		return strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "(*rank).hold")
	}, time.Minute, time.Millisecond, "the load waits")
	done, said := make(chan struct{}), make(chan string, 1)
	defer close(done)
	go w.run(done, func(text string) { said <- text })
	select {
	case text := <-said:
		require.Contains(t, text, "load of 1 ")
		require.Contains(t, text, "(*placement).load")
		require.Contains(t, text, "(*rank).hold")
		require.Contains(t, text, "\n3 blocks are in the index")
		for _, s := range slots {
			require.Regexp(t, fmt.Sprintf(`\nslot %d: generation \d+, state 3, key [0-9a-f]{16}, in the index: true`, s), text)
		}
	case <-time.After(time.Minute):
		require.FailNow(t, "nobody noticed")
	}
	for range cap(hands) {
		<-hands
	}
	require.True(t, <-over, "it goes on")
}
