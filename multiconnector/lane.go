package multiconnector

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

// errSlow says that a child has not answered in time. Its answer is not waited for any more.
var errSlow = errors.New("no answer in time")

// patiencePerKey is what a query's keys add to a child's patience.
const patiencePerKey = 20 * time.Microsecond

// maxLaters bounds the requests for which a lane remembers when Later began.
const maxLaters = 1 << 12

// lane makes the calls of one child's scheduler side, one at a time. A call that takes longer than
// the child's patience goes on alone; until it has returned the child counts as slow, and nobody
// waits for it.
type lane struct {
	child *Child
	side  connector.Scheduler
	life  context.Context //nolint:containedctx // of calls that nobody waits for any more
	turn  chan struct{}   // full while a call runs
	late  atomic.Int64    // when the call that runs becomes slow, in Unix nanoseconds; 0: none runs
	work  sync.WaitGroup

	mu     sync.Mutex
	laters map[connector.RequestID]time.Time // when a child began to say Later
}

func newLane(life context.Context, child *Child, side connector.Scheduler) *lane {
	return &lane{child: child, side: side, life: life, turn: make(chan struct{}, 1), laters: map[connector.RequestID]time.Time{}}
}

// try runs f on the side in its turn and waits for patience at most. When it gives errSlow, f may
// still run: what it writes is not the caller's.
func (l *lane) try(ctx context.Context, patience time.Duration, f func(ctx context.Context, side connector.Scheduler) error) error {
	if l.slow() {
		return errSlow
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case l.turn <- struct{}{}:
	case <-timer.C:
		return errSlow
	case <-ctx.Done():
		return ctx.Err()
	}
	// The call keeps the caller's deadline, but not its end: nobody may stop waiting for all children
	// because one is slow.
	call, cancel := l.life, context.CancelFunc(func() {})
	if d, ok := ctx.Deadline(); ok {
		call, cancel = context.WithDeadline(l.life, d)
	}
	done := make(chan error, 1)
	l.work.Go(func() {
		defer cancel()
		l.late.Store(time.Now().Add(patience).UnixNano())
		err := f(call, l.side)
		l.late.Store(0)
		<-l.turn
		done <- err
	})
	select {
	case err := <-done:
		return err
	case <-timer.C:
		return errSlow
	case <-ctx.Done():
		return ctx.Err()
	}
}

// slow reports whether a call has outlived the child's patience.
func (l *lane) slow() bool {
	late := l.late.Load()
	return late != 0 && time.Now().UnixNano() > late
}

// match asks the child. A child that is slow or fails has nothing; ErrBusy is Later.
func (l *lane) match(ctx context.Context, qs []connector.Query) []connector.Match {
	got := make(chan []connector.Match, 1)
	patience := l.child.Patience
	for i := range qs {
		patience += time.Duration(len(qs[i].Keys)) * patiencePerKey
	}
	err := l.try(ctx, patience, func(ctx context.Context, side connector.Scheduler) error {
		answers, err := side.Match(ctx, qs)
		got <- answers
		return err
	})
	out := make([]connector.Match, len(qs))
	if err == nil {
		if answers := <-got; len(answers) == len(qs) {
			copy(out, answers)
		}
	}
	for i := range out {
		q := &qs[i]
		if out[i].Tokens < 0 || out[i].Tokens > q.Tokens-q.Computed {
			out[i] = connector.Match{} // an answer that no engine could use
		}
		out[i].Later = l.believed(q.Request, out[i].Later || errors.Is(err, connector.ErrBusy))
	}
	return out
}

// believed bounds how long a child may say Later of one request.
func (l *lane) believed(id connector.RequestID, later bool) bool {
	if l.child.Later <= 0 || id == "" {
		return later
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	since, known := l.laters[id]
	switch {
	case !later:
		delete(l.laters, id)
		return false
	case known:
		return time.Since(since) < l.child.Later
	case len(l.laters) >= maxLaters:
		clear(l.laters)
	}
	l.laters[id] = time.Now()
	return true
}

// close waits for the last call and closes the side.
func (l *lane) close() error {
	l.work.Wait()
	return l.child.named(l.side.Close())
}
