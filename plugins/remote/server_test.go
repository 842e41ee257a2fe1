package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/conformance/relay"
	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// remoteConfig is the --kv-transfer-config of an engine that does both.
func remoteConfig(t *testing.T, extra map[string]string) string {
	t.Helper()
	config := struct {
		Connector string            `json:"kv_connector"`
		Role      string            `json:"kv_role"`
		Extra     map[string]string `json:"kv_connector_extra_config"`
	}{"RemoteStoreConnector", "kv_both", extra}
	data, err := json.Marshal(config)
	require.NoError(t, err)
	return string(data)
}

// remoteFault is something that happens to the server.
type remoteFault struct {
	name         string
	inject, heal func() error
	met          func() bool // proof that it happened; nil: inject returned no error
}

func remoteFaults(t *testing.T, srv *redistest.Server, between *relay.Relay) []remoteFault {
	nothing := func() error { return nil }
	do := func(args ...any) error { return srv.Do(t.Context(), args...) }
	return []remoteFault{
		{name: "200 ms slow", inject: func() error { between.Delay(200 * time.Millisecond); return nil }, heal: func() error { between.Delay(0); return nil }},
		{name: "paused", inject: srv.Pause, heal: srv.Resume},
		{name: "out of memory", inject: func() error { return do("config", "set", "maxmemory", "1") }, heal: func() error { return do("config", "set", "maxmemory", "0") }},
		{
			name: "connections cut", inject: func() error { between.CutAfter(100 << 10); return nil }, heal: func() error { between.CutAfter(0); return nil },
			met: func() bool { return between.Cuts() > 0 },
		},
		{name: "restarted", inject: func() error { srv.Kill(); return srv.Restart() }, heal: nothing},
		{name: "killed", inject: func() error { srv.Kill(); return nil }, heal: srv.Restart},
	}
}

// TestRemoteServerFaults: what happens to a Redis server costs time that deadlines bound, and no token. While it happens
// other requests of the same engine go on.
func TestRemoteServerFaults(t *testing.T) {
	const limit = 10 * time.Second // 2 s for the answer to a match, 5 s for a load, and a busy machine
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+8600, 12, 300, 900)
	node := r.ServeModel("sim", "single", "")
	want := r.All(node.URL, prompts, 1)
	r.Stop(node)

	srv, between := rig.RemoteServer(t)
	config := remoteConfig(t, map[string]string{"url": "redis://" + between.Address()})
	engine := r.ServeModel("sim", "engine", config, "--enable-prefix-caching=false")
	external := func() float64 { return r.Metrics(engine).Sum("kvport_prompt_tokens_total", `source="external"`) }
	loads := func() { // until blocks come from the server again
		before := external()
		require.Eventually(t, func() bool {
			rig.Same(t, "healthy", want, r.All(engine.URL, prompts, 4))
			return external() > before
		}, time.Minute, 100*time.Millisecond)
	}
	loads()
	had := external()
	rig.Same(t, "all of it from the server", want, r.All(engine.URL, prompts, 4))
	healthy := 2 * (external() - had) // what two rounds of the prompts have of the server
	failed := func() float64 { return r.Metrics(engine).Sum("kvport_transfer_failed_blocks_total") }
	for n, fault := range remoteFaults(t, srv, between) {
		t.Run(fault.name, func(t *testing.T) {
			stop, canaries := make(chan struct{}), make(chan time.Duration, 1)
			go func() { canaries <- canary(r, engine.URL, stop) }()
			before, broken := external(), failed()
			require.NoError(t, fault.inject())
			slowest, tokens := time.Duration(0), 0
			fresh := rig.Texts(t, *rig.Seed+8700+uint64(n), 4, 200, 400) // with saves, too
			for range 2 {
				got := r.All(engine.URL, prompts, 4)
				tokens += rig.Compare(t, fault.name, want, got)
				got = append(got, r.All(engine.URL, fresh, 4)...)
				for _, c := range got {
					slowest = max(slowest, c.Total)
				}
			}
			if fault.met != nil {
				require.True(t, fault.met(), "it did not happen")
			}
			missed, broken := healthy-(external()-before), failed()-broken
			require.True(t, missed > 0 || broken > 0 || slowest >= 200*time.Millisecond, "no transfer met it")
			require.NoError(t, fault.heal())
			close(stop)
			waited := <-canaries
			loads()
			h, err := r.Client.Health(t.Context(), engine.URL)
			require.NoError(t, err)
			require.Zero(t, h.Connector.Restarts, "a call went past its deadline and the plugin was killed for it")
			require.Less(t, slowest, limit)
			require.Positive(t, waited)
			require.Less(t, waited, 2*time.Second, "a request that needs nothing of the server")
			m := r.Metrics(engine)
			t.Logf("%s: %d tokens compared, 0 differ; slowest request %v; slowest of those beside it %v; a match held the loop for %.2f ms on average; 0 plugin restarts; met by transfers: %.0f blocks failed, %.0f of %.0f prompt tokens not found",
				fault.name, tokens, slowest.Round(time.Millisecond), waited.Round(time.Millisecond),
				1e3*m.Sum("kvport_match_seconds_sum")/m.Sum("kvport_match_seconds_count"), broken, max(0, missed), healthy)
		})
	}
	r.Idle(engine)
	r.Stop(engine)
}

// canary sends one short request after another, which has no full block and so asks the server nothing, until stop is
// closed. It gives the time of the slowest.
func canary(r *rig.Rig, url string, stop <-chan struct{}) (slowest time.Duration) {
	for {
		select {
		case <-stop:
			return slowest
		default:
		}
		c, err := r.Client.Complete(context.WithoutCancel(r.Context()), url, cluster.Request{Prompt: "hello", MaxTokens: 2, IgnoreEOS: true})
		if err != nil {
			return time.Hour
		}
		slowest = max(slowest, c.Total)
	}
}

// TestRemoteWrongPassword: it ends the start, named by its field, and is shown nowhere.
func TestRemoteWrongPassword(t *testing.T) {
	r := rig.New(t)
	srv, _ := rig.RemoteServer(t, "--requirepass", "right-password")
	file := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(file, []byte("wrong-password"), 0o600))
	config := remoteConfig(t, map[string]string{"url": "redis://" + srv.Address, "password_file": file})
	_, err := cluster.Start(t.Context(), nil, "engine", rig.Binary(t), "serve", "--model", "sim", "--port", "0", "--kv-transfer-config", config)
	require.Error(t, err)
	require.ErrorContains(t, err, "password_file")
	require.ErrorContains(t, err, "exit status 2")
	require.NotContains(t, err.Error(), "wrong-password")

	require.NoError(t, os.WriteFile(file, []byte("right-password\n"), 0o600))
	engine := r.ServeModel("sim", "engine", config)
	r.Stop(engine)
}

// TestRemoteWrongTLS: a server that speaks no TLS although the config requires it cannot be used: the log says so,
// and the engine computes.
func TestRemoteWrongTLS(t *testing.T) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+8900, 4, 200, 400)
	node := r.ServeModel("sim", "single", "")
	want := r.All(node.URL, prompts, 1)
	srv, _ := rig.RemoteServer(t)
	config := remoteConfig(t, map[string]string{"url": "rediss://" + srv.Address})
	engine := r.ServeModel("sim", "engine", config, "--enable-prefix-caching=false")
	for range 2 {
		rig.Same(t, "no TLS", want, r.All(engine.URL, prompts, 2))
	}
	require.Zero(t, r.Metrics(engine).Sum("kvport_prompt_tokens_total", `source="external"`))
	require.NoError(t, engine.Logged(t.Context(), "server cannot be used, computing instead"))
	r.Idle(engine)
	r.Stop(engine)
	r.Stop(node)
	keys, err := srv.Keys(t.Context())
	require.NoError(t, err)
	require.Empty(t, keys, "nothing went over the wire in clear text")
}
