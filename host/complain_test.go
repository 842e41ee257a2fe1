package host

import (
	"context"
	"log/slog"
	"strings"
	"testing"

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
	r.save("again", keys(2, 3), 8)
	require.NoError(t, r.closeNow())
	require.Equal(t, 1, strings.Count(log.String(), "transfer failed"), "one a second")
	leaks()
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
