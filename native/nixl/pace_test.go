package nixl_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/native/nixl"
)

// TestPace: nobody pauses while bytes come, and who waits for nothing pauses longer and longer.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p nixl.Pace
		call := func(took time.Duration) time.Duration {
			p.Begin()
			<-time.After(took)
			return p.End()
		}
		for range 1000 { // ms, of which the first half a call does something
			require.Zero(t, call(time.Microsecond))
			require.Zero(t, call(10*time.Microsecond))
		}
		var pauses []time.Duration
		for began := time.Now(); time.Since(began) < 20*time.Millisecond; {
			pause := call(time.Microsecond)
			<-time.After(pause)
			if pause > 0 {
				pauses = append(pauses, pause)
			}
		}
		require.NotEmpty(t, pauses)
		require.IsNonDecreasing(t, pauses)
		require.Greater(t, pauses[0], 30*time.Microsecond)
		require.Equal(t, 200*time.Microsecond, pauses[len(pauses)-1])
		require.Zero(t, call(10*time.Microsecond), "something came")
	})
}
