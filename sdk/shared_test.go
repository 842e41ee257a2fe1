package sdk

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// handle is what one opener can have at a time.
type handle struct {
	open    *atomic.Int32 // how many there are
	failure error         // of Close
	closing func()        // may be nil
}

func (h *handle) Close() error {
	if h.closing != nil {
		h.closing()
	}
	h.open.Add(-1)
	return h.failure
}

// Whoever opens a name, at whatever moment, gets the one open handle, which is closed with its last user.
func TestSharedHandles(t *testing.T) {
	var shared Shared[*handle]
	var open, opens, most atomic.Int32
	get := func(context.Context) (*handle, error) {
		opens.Add(1)
		most.Store(max(most.Load(), open.Add(1)))
		return &handle{open: &open}, nil
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 100 {
				h, release, err := shared.Open(t.Context(), "a", get)
				if err == nil && h.open.Load() != 1 {
					err = errors.New("the handle is closed, or not the only one")
				}
				if err == nil {
					err = errors.Join(release(), release())
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	require.Zero(t, open.Load())
	require.EqualValues(t, 1, most.Load())

	before := opens.Load()
	one, releaseOne, err := shared.Open(t.Context(), "a", get)
	require.NoError(t, err)
	two, releaseTwo, err := shared.Open(t.Context(), "a", get)
	require.NoError(t, err)
	require.Same(t, one, two)
	other, releaseOther, err := shared.Open(t.Context(), "b", get)
	require.NoError(t, err)
	require.NotSame(t, one, other, "another name is another handle")
	require.NoError(t, errors.Join(releaseOne(), releaseOne()))
	require.EqualValues(t, 2, open.Load(), "a second release is not one of another user")
	require.NoError(t, errors.Join(releaseTwo(), releaseOther()))
	require.Zero(t, open.Load())
	require.EqualValues(t, 2, opens.Load()-before)
}

// What cannot be opened or closed says so to those whom it concerns, and is in nobody's way afterwards.
func TestSharedHandleFails(t *testing.T) {
	var shared Shared[*handle]
	var open atomic.Int32
	broken := errors.New("disk")
	_, _, err := shared.Open(t.Context(), "a", func(context.Context) (*handle, error) { return nil, broken })
	require.ErrorIs(t, err, broken)
	require.Panics(t, func() {
		_, _, _ = shared.Open(t.Context(), "a", func(context.Context) (*handle, error) { panic("ouch") })
	})
	get := func(context.Context) (*handle, error) {
		open.Add(1)
		return &handle{open: &open, failure: broken}, nil
	}
	_, first, err := shared.Open(t.Context(), "a", get)
	require.NoError(t, err)
	_, last, err := shared.Open(t.Context(), "a", get)
	require.NoError(t, err)
	require.NoError(t, first())
	err = last()
	require.ErrorIs(t, err, broken)
	require.ErrorContains(t, err, "close a: ")
	require.ErrorIs(t, last(), broken, "asked again it says the same")
	require.Zero(t, open.Load())
}

// While a handle closes nobody opens another: who cannot wait gets the error of its context, and who can gets a new one.
func TestSharedHandleThatCloses(t *testing.T) {
	var shared Shared[*handle]
	var open atomic.Int32
	began, end := make(chan struct{}), make(chan struct{})
	_, release, err := shared.Open(t.Context(), "a", func(context.Context) (*handle, error) {
		open.Add(1)
		return &handle{open: &open, closing: func() { close(began); <-end }}, nil
	})
	require.NoError(t, err)
	closed := make(chan error, 1)
	go func() { closed <- release() }()
	<-began
	get := func(context.Context) (*handle, error) {
		if open.Add(1) != 1 {
			return nil, errors.New("the last handle is still open")
		}
		return &handle{open: &open}, nil
	}
	hurried, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err = shared.Open(hurried, "a", get)
	require.ErrorIs(t, err, context.Canceled)
	opened := make(chan error, 1)
	go func() {
		_, release, err := shared.Open(t.Context(), "a", get)
		if err == nil {
			err = release()
		}
		opened <- err
	}()
	close(end)
	require.NoError(t, <-closed)
	require.NoError(t, <-opened)
	require.Zero(t, open.Load())
}
