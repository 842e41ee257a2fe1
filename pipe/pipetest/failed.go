package pipetest

import (
	"context"
	"runtime"
	"slices"
	"sync"
)

// Failed runs a case, of this suite or of lookupbuffertest, outside of a test and reports whether it failed: for
// those who show with a wrong implementation that a case finds what it is for. The case's clean-up runs
// before it returns, after ctx of the case has ended.
func Failed(ctx context.Context, run func(t T)) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &recorder{ctx: ctx}
	done := make(chan struct{})
	go func() { // a case may end its goroutine
		defer close(done)
		run(r)
	}()
	<-done
	cancel()
	for _, f := range slices.Backward(r.cleanups) {
		f()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed
}

// recorder is the T of such a case.
type recorder struct {
	ctx context.Context //nolint:containedctx // what Context gives

	mu       sync.Mutex
	failed   bool
	cleanups []func()
}

// Context implements T.
func (r *recorder) Context() context.Context { return r.ctx }

// Skipf implements T.
func (r *recorder) Skipf(string, ...any) { runtime.Goexit() }

// FailNow implements require.TestingT.
func (r *recorder) FailNow() { runtime.Goexit() }

// Cleanup implements T.
func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }

// Errorf implements require.TestingT.
func (r *recorder) Errorf(string, ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = true
}
