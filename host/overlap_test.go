package host

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// The engine is given one layer at a time, none while what has arrived is checked, and what it was given before goes on.
func TestArrivingGivesNothingWhileItIsChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &arriving{}
		a.Advance(3)
		n, err := a.Wait(t.Context(), 0)
		require.NoError(t, err)
		require.Equal(t, 1, n, "what the engine was not given is checked again")
		require.Equal(t, 1, a.beginCheck())
		require.Equal(t, 1, a.beginCheck(), "another rank")
		n, err = a.Wait(t.Context(), 0)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		got := make(chan int)
		go func() {
			n, _ := a.Wait(t.Context(), 1)
			got <- n
		}()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = a.Wait(ctx, 1)
		require.ErrorIs(t, err, context.Canceled)
		require.False(t, a.endCheck())
		synctest.Wait()
		require.Empty(t, got)
		require.True(t, a.endCheck())
		require.Equal(t, 2, <-got)
		require.Equal(t, 2, a.beginCheck())
		a.endCheck()
		a.GiveUp()
		_, err = a.Wait(t.Context(), 3)
		require.ErrorIs(t, err, connector.ErrGone)
	})
}
