package multiconnector

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Runner is how a composite does several things at once, and its clock. Without one it has goroutines and the time of
// day; a simulation has its own, so that equal seeds give equal runs.
type Runner interface {
	// Now is the time.
	Now() time.Time
	// Go runs f beside its caller.
	Go(f func())
	// Wait takes a value of ready, or finds it closed. It gives up with context.DeadlineExceeded when until has come,
	// unless that is zero, and with ctx.Err() when ctx is over.
	Wait(ctx context.Context, ready <-chan struct{}, until time.Time) error
}

// goroutines is the Runner of composites that nobody simulates.
type goroutines struct{}

// Now implements Runner.
func (goroutines) Now() time.Time { return time.Now() }

// Go implements Runner.
func (goroutines) Go(f func()) { go f() }

// Wait implements Runner.
func (goroutines) Wait(ctx context.Context, ready <-chan struct{}, until time.Time) error {
	var late <-chan time.Time
	if !until.IsZero() {
		timer := time.NewTimer(time.Until(until))
		defer timer.Stop()
		late = timer.C
	}
	select {
	case <-ready:
		return nil
	case <-late:
		return context.DeadlineExceeded
	case <-ctx.Done():
		return ctx.Err()
	}
}

// RunOn has a composite use another Runner. It must be called before Scheduler and Worker.
func (m *Multi) RunOn(r Runner) { m.run = r }

// beside runs f on its own and counts it until it returns.
func (m *Multi) beside(work *sync.WaitGroup, f func()) {
	work.Add(1)
	m.run.Go(func() {
		defer work.Done()
		f()
	})
}

// together runs f with every number below n at once and returns when all have returned.
func (m *Multi) together(n int, f func(i int)) {
	done := make(chan struct{}, n)
	for i := range n {
		m.run.Go(func() {
			f(i)
			done <- struct{}{}
		})
	}
	for range n {
		_ = m.run.Wait(context.Background(), done, time.Time{})
	}
}

// closeAll closes n sides of the children at once, and then what is behind them, unless that is nil.
func (m *Multi) closeAll(n int, side func(child int) error, behind func() error) error {
	errs := make([]error, n+1)
	m.together(n, func(i int) { errs[i] = m.children[i].named(side(i)) })
	if behind != nil {
		errs[n] = behind()
	}
	return errors.Join(errs...)
}

// pause waits a while, or until ctx is over.
func (m *Multi) pause(ctx context.Context, d time.Duration) {
	_ = m.run.Wait(ctx, nil, m.run.Now().Add(d))
}
