package plugin

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A start has its deadline alone, except on a machine where the plugin waits for a processor.
func TestPatience(t *testing.T) {
	const tick = limit / heartbeatTicks
	for _, c := range []struct {
		name  string
		waits func() time.Duration
		takes time.Duration // the start
		want  time.Duration // until it is given up; 0: it is not
	}{
		{"in time", nil, limit - tick, 0},
		{"late without a reason", nil, time.Hour, limit},
		{"late, had half a processor", func() time.Duration { return tick / 2 }, 2*limit - tick, 0},
		{"never, had half a processor", func() time.Duration { return tick / 2 }, time.Hour, 2 * limit},
		{"never, had no processor", func() time.Duration { return time.Hour }, time.Hour, heartbeatStretch * limit},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				ctx, cancel := Patient(t.Context(), limit, c.waits)
				defer cancel()
				require.Equal(t, c.want == 0, after(c.takes)(ctx) == nil)
				require.Equal(t, c.want != 0, RanOut(ctx))
				if c.want != 0 {
					require.Equal(t, c.want, time.Since(began))
				}
			})
		})
	}
	ctx, stop := context.WithCancel(t.Context())
	ctx, cancel := Patient(ctx, time.Hour, nil)
	defer cancel()
	stop()
	<-ctx.Done()
	require.False(t, RanOut(ctx), "the caller has given up, not the plugin")
}
