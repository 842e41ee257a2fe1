package main

import (
	"fmt"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// TestPeers: prefill sends to decode, over TCP and through shared memory; an engine or plugin that dies
// costs computing, never a token, and the next requests are served from peers again.
func TestPeers(t *testing.T) {
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) { testPeers(t, transport) })
	}
}

func testPeers(t *testing.T, transport string) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed, *rig.Prompts, 400, 1200)
	single := r.ServeModel(rig.Simulated(), "single", "")
	want := r.All(single.URL, prompts, 4)
	p, d, router := r.Pair(fmt.Sprintf(`"kv_connector":"PipeConnector","kv_connector_extra_config":{"transport":%q}`, transport))
	rig.Same(t, "P/D over "+transport, want, r.All(router.URL, prompts, 4))
	external := r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`)
	t.Logf("tokens from the peer: %.0f", external)
	require.Positive(t, external)

	for _, engine := range []*cluster.Process{p, d} {
		for _, plugin := range cluster.Plugins(engine.PID()) {
			require.NoError(t, exec.Command("kill", "-9", fmt.Sprint(plugin)).Run())
		}
		more := rig.Texts(t, *rig.Seed+uint64(engine.PID()), 8, 400, 1200)
		rig.Same(t, "after the plugin of "+engine.Name+" was killed", r.All(single.URL, more, 4), r.All(router.URL, more, 4))
	}
	before := r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`)
	more := rig.Texts(t, *rig.Seed+1000, 8, 400, 1200)
	rig.Same(t, "at the end", r.All(single.URL, more, 4), r.All(router.URL, more, 4))
	require.Greater(t, r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`), before)
	r.Idle(p)
	r.Idle(d)
}

// TestManyPeers: two prefill and two decode engines, any to any.
func TestManyPeers(t *testing.T) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed, *rig.Prompts, 400, 1200)
	single := r.ServeModel(rig.Simulated(), "single", "")
	want := r.All(single.URL, prompts, 4)
	const config = `{"kv_connector":"PipeConnector","kv_role":%q}`
	var urls [4]string
	var consumers []*cluster.Process
	for i, role := range []string{"kv_producer", "kv_producer", "kv_consumer", "kv_consumer"} {
		e := r.ServeModel(rig.Simulated(), fmt.Sprintf("%s %d", role, i), fmt.Sprintf(config, role))
		urls[i] = e.URL
		if i >= 2 {
			consumers = append(consumers, e)
		}
	}
	router := r.Start("router", "route", "--port", "0", "--prefill", urls[0]+","+urls[1], "--decode", urls[2]+","+urls[3])
	rig.Same(t, "2P2D", want, r.All(router.URL, prompts, 4))
	for _, d := range consumers {
		external := r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`)
		t.Logf("%s: %.0f tokens from peers", d.Name, external)
		require.Positive(t, external)
	}
}
