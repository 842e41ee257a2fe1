package mem

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/pipetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestPipe(t *testing.T) {
	for _, limit := range []int{0, 1000, 1 << 20} {
		pipetest.Run(t, pipetest.Harness{Bound: 2 << 20, Open: func(pipetest.T) pipetest.Ends {
			p := New(limit)
			return pipetest.Ends{Out: p, In: p, Kill: p.Kill}
		}})
	}
}

// Nothing waits longer than its context, to the nanosecond of a fake clock.
func TestWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := New(10)
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, _, err := pipe.Receive(ctx, p)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Hour, time.Since(began))

		require.NoError(t, p.Send(t.Context(), nil, [][]byte{make([]byte, 10)}))
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.ErrorIs(t, p.Send(ctx, []byte("h"), nil), context.DeadlineExceeded)
		require.Equal(t, time.Hour+time.Minute, time.Since(began))
	})
}

func TestNetwork(t *testing.T) {
	n := &Network{}
	l, err := n.Listen(t.Context())
	require.NoError(t, err)
	accepted := make(chan pipe.Link, 1)
	go func() {
		link, err := l.Accept(t.Context())
		if err == nil {
			accepted <- link
		}
	}()
	a, err := n.Dial(t.Context(), l.Address())
	require.NoError(t, err)
	b := <-accepted
	require.NoError(t, a.Out.Send(t.Context(), []byte("there"), nil))
	require.NoError(t, b.Out.Send(t.Context(), []byte("back"), nil))
	header, _, err := pipe.Receive(t.Context(), b.In)
	require.NoError(t, err)
	require.Equal(t, "there", string(header))
	header, _, err = pipe.Receive(t.Context(), a.In)
	require.NoError(t, err)
	require.Equal(t, "back", string(header))
	require.NoError(t, a.Close())
	_, _, err = pipe.Receive(t.Context(), b.In)
	require.ErrorIs(t, err, pipe.ErrClosed)

	require.NoError(t, l.Close())
	require.NoError(t, l.Close())
	_, err = l.Accept(t.Context())
	require.ErrorIs(t, err, pipe.ErrClosed)
	_, err = n.Dial(t.Context(), l.Address())
	require.ErrorIs(t, err, connector.ErrGone)
}
