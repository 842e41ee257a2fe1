package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
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

// A conform without a verdict has a code of its own, whether the trial of --profile auto had none or a case.
func TestExitCodes(t *testing.T) {
	for _, err := range []error{errInconclusive, fail(fmt.Errorf("the trial: %w", conformance.ErrInconclusive))} {
		require.Equal(t, exitInconclusive, codeOf(err))
	}
	require.Equal(t, exitFailure, codeOf(fail(errors.New("it failed"))))
	require.Equal(t, exitUsage, codeOf(errors.New("a wrong flag")))
}
