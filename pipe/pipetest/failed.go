package pipetest

import (
	"context"
	"runtime"
	"slices"
	"sync"
)

// Failed runs a case of this suite or of lookupbuffertest outside of a test and reports whether the case
// failed. It is for tests that show, with a wrong implementation, that a case finds what it is for. The
// case's clean-up runs before Failed returns, after the case's context has ended.
func Failed(ctx context.Context, run func(t T)) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &recorder{ctx: ctx}
	done := make(chan struct{})
	go func() { // a case may end the goroutine it runs in
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
