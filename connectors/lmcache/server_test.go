package lmcache_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/lmtest"
	"github.com/kvport/kvport/verify/testkit"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// TestRealServer runs LMCache's own cache server and the profile store on it: what it speaks is what the
// client speaks. Without LMCache the test says that it has not run; connectors/internal/remote then has only the
// headers that were recorded from it.
func TestRealServer(t *testing.T) {
	if testing.Short() {
		t.Skip("half a minute of processes: left out with -short")
	}
	clean(t)
	server, err := lmtest.StartReal(t.Context(), testkit.Root(t))
	if errors.Is(err, lmtest.ErrNoLMCache) {
		t.Skipf("NOT RUN: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() {
		if output := server.Close(); t.Failed() {
			t.Logf("LMCache's server:\n%s", output)
		}
	})
	config := fmt.Sprintf(`{"lmcache.chunk_size": 4, "lmcache.local_cpu": false, "lmcache.remote_url": "lm://%s"}`, server.Address)
	conformance.Run(t, conformance.InProcess(plugin(), json.RawMessage(config)))
	conformance.Run(t, conformance.Wire(plugin(), json.RawMessage(config)), conformance.Store, conformance.MultiRank, conformance.Groups)
}
