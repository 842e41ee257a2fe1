package main

import (
	"context"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A signal that comes twice at once, as timeout(1) sends it, is one signal.
func TestSignalTwiceAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		signals := make(chan os.Signal, 2)
		got := make(chan os.Signal, 1)
		go func() { got <- secondSignal(ctx, cancel, signals) }()
		synctest.Wait()
		require.NoError(t, ctx.Err())
		signals <- syscall.SIGTERM
		signals <- syscall.SIGTERM
		synctest.Wait()
		require.Error(t, ctx.Err())
		require.Empty(t, got, "the repeat counts")
		<-time.After(sameSignal)
		signals <- syscall.SIGINT
		require.Equal(t, syscall.SIGINT, <-got)
	})
}

func TestNoSignal(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.Nil(t, secondSignal(ctx, cancel, nil))
}
