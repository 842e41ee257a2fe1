package host

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/leaktest"
	"github.com/kvport/kvport/internal/tracker"
	"github.com/kvport/kvport/verify/testkit"
)

// A store without room appears in the engine's log, with what it could not keep and why.
func TestFailedTransfersAreLogged(t *testing.T) {
	leaks := leaktest.Watch(t)
	o := rigOptions{extra: map[string]any{"fault": "full_save"}}
	cfg, eng, opts := o.build(t)
	var log testkit.Log
	opts.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	h, err := Open(t.Context(), cfg, eng, opts)
	require.NoError(t, err)
	r := &rig{Host: h, t: t}
	e := r.save("full", keys(1, 3), 0)
	require.Len(t, e.Failed, 3)
	for _, want := range []string{"transfer failed", "connector=TestConnector", "direction=save", "request=full", "blocks=3", "no space left on device"} {
		require.Contains(t, log.String(), want)
	}
	require.NoError(t, r.closeNow())
	leaks()
}

// What fails for every request is logged once a second, and how often it was not.
func TestFailedTransfersAreLoggedOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Log
		h := &Host{log: slog.New(slog.NewTextHandler(&log, nil))}
		for _, lines := range []int{1, 2} {
			for range 3 {
				h.complain("save", &h.badSaves, &tracker.Event{Failed: []connector.BlockID{1}, Err: connector.ErrGone})
			}
			require.Equal(t, lines, strings.Count(log.String(), "transfer failed"))
			<-time.After(time.Second)
		}
		require.Equal(t, 1, strings.Count(log.String(), "not_logged=2"))
	})
}

func TestOrdinaryEndsAreNotLogged(t *testing.T) {
	var log testkit.Log
	h := &Host{log: slog.New(slog.NewTextHandler(&log, nil))}
	for _, b := range []tracker.Event{
		{}, {Err: connector.ErrGone}, {Failed: []connector.BlockID{1}}, {Failed: []connector.BlockID{1}, Err: context.Canceled},
	} {
		h.complain("load", &h.badLoads, &b)
	}
	require.Empty(t, log.String())
	h.complain("load", &h.badLoads, &tracker.Event{Failed: []connector.BlockID{1}, Err: connector.ErrGone})
	require.Contains(t, log.String(), "error=gone")
}
