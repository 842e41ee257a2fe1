// Package pipetest checks that a pipe keeps the promises of package pipe. Authors of pipes run it:
//
//	func TestPipe(t *testing.T) {
//		pipetest.Run(t, pipetest.Harness{Open: func(t pipetest.T) pipetest.Ends { ... }})
//	}
//
// The suite uses host memory from Harness.Alloc, so that transports that need registered memory can provide
// it, and requires nothing beyond Pipe. The functions of Ends say what else a transport can do (cut its
// connection, kill a peer); cases that need something it cannot do are skipped.
package pipetest

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/pipe"
)

// T is the part of testing.TB that a case needs.
type T interface {
	require.TestingT // Errorf reports a failure, FailNow ends the case
	// Context ends with the case's deadline.
	Context() context.Context
	// Skipf ends a case that does not apply and says why.
	Skipf(format string, args ...any)
	// Cleanup runs a function at the end of the case.
	Cleanup(func())
}

// Ends are the two ends of one new pipe, and what a case can do to it.
type Ends struct {
	Out, In pipe.Pipe // the sending and the receiving end; may be one value
	// Cut breaks the connection under the pipe once, as a network does; the pipe must restore it by itself.
	// It is nil if there is no connection to break, or if the pipe does not promise to restore it.
	Cut func()
	// Kill ends the sending end's process, or simulates that. It is nil if that is not possible.
	Kill func()
}

// Harness makes pipes for the suite.
type Harness struct {
	// Open makes a new pipe. The suite closes both ends.
	Open func(t T) Ends
	// Alloc returns n bytes of memory that the pipe can send from and receive into. If it is nil, the suite
	// uses make.
	Alloc func(t T, n int) []byte
	// Bound is the largest number of bytes that the pipe may hold between its ends. 0 means 64 MiB.
	Bound int
	// Large is the size of the largest payload that the suite tries. 0 means 8 MiB.
	Large int
}

// The defaults of Harness, and the time limits.
const (
	defaultBound = 64 << 20
	defaultLarge = 8 << 20
	soon         = 5 * time.Second
	moment       = 50 * time.Millisecond
)

// A Case checks one promise.
type Case struct {
	Name string
	Text string // what the case checks, in one sentence
	Run  func(t T, h Harness)
}

// Pair makes a link between two networks, which may be the same one, and returns both of its ends. The ends
// and the listener are closed with the test.
func Pair(t T, listens, dials pipe.Network) (dialed, accepted pipe.Link) {
	l, err := listens.Listen(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	dialed, err = dials.Dial(t.Context(), l.Address())
	require.NoError(t, err)
	accepted, err = l.Accept(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = errors.Join(accepted.Close(), dialed.Close()) })
	return dialed, accepted
}

// Run runs every case as a subtest.
func Run(t *testing.T, h Harness) {
	t.Helper()
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) { c.Run(t, h) })
	}
}

// Cases lists the suite.
func Cases() []Case {
	return []Case{
		{"bytes", "Frames of many sizes and shapes arrive as they were sent.", bytesArrive},
		{"order", "Frames arrive in the order in which they were sent.", inOrder},
		{"large", "A frame larger than all buffers goes through.", large},
		{"spans-returned", "What a caller does to its memory after Send does not change a frame.", spansReturned},
		{"in-place", "Nothing is written outside the spans that place returned.", inPlace},
		{"refused-frame", "A frame that is refused is dropped, and the next one arrives.", refused},
		{"wrong-room", "Spans of another length than the frame's are refused.", wrongRoom},
		{"too-large", "A header or payload beyond the limits is refused, and the pipe still works.", tooLarge},
		{"back-pressure", "A pipe that nobody reads takes a bounded number of bytes.", backPressure},
		{"cancelled-send", "A Send whose context ends does not affect any other frame.", cancelledSend},
		{"cancelled-recv", "A Recv whose context ends before a frame begins does not lose a frame.", cancelledRecv},
		{"many-senders", "Frames of concurrent senders arrive whole, each sender's in order.", manySenders},
		{"close-sender", "After the sender has closed, what was sent arrives, then ErrClosed.", closeSender},
		{"close-receiver", "After the receiver has closed a Send ends with an error.", closeReceiver},
		{"close-waiting", "Close ends calls that wait, at both ends.", closeWaiting},
		{"close-twice", "Close may be called again.", closeTwice},
		{"cut", "A connection that breaks at any moment loses no frame and delivers none twice.", cut},
		{"killed-sender", "The death of the sender ends a waiting Recv, and no part of a frame arrives.", killed},
	}
}

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
