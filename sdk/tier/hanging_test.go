package tier

import (
	"context"
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
		require.Equal(t, began, time.Now(), "Reset does not wait for the write")
		synctest.Wait()
		require.Equal(t, 1, lower.ended)
		require.False(t, present(t, s, 1))

		puts(t, s, 2)
		<-lower.began
		require.NoError(t, gets(t, s, 2))
		require.NoError(t, s.Close())
		require.Equal(t, closeWait, time.Since(began))
		require.Equal(t, 2, lower.ended)
		require.ErrorIs(t, s.Flush(t.Context()), errClosed)
	})
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
	i.wait()
	i.wait()
	require.True(t, ended())
	i.resume()
	require.True(t, ended(), "another one still waits")
	i.resume()
	require.False(t, ended())
}
