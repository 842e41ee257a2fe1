package main

import (
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// reset empties the caches of an engine and gives what it says.
func reset(r *rig.Rig, p *cluster.Process) (status int, body string) {
	r.Helper()
	req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, p.URL+"/reset_prefix_cache", http.NoBody)
	require.NoError(r, err)
	resp, err := r.Client.HTTP.Do(req)
	require.NoError(r, err)
	data, err := io.ReadAll(resp.Body)
	require.NoError(r, err)
	require.NoError(r, resp.Body.Close())
	return resp.StatusCode, string(data)
}

// TestResetOfHolder: a reset of NixlConnector ends what it holds for consumers: a ticket from before is worth
// nothing, its prompt is computed, and the next one is worth something again. A connector that has no reset says so.
func TestResetOfHolder(t *testing.T) {
	rig.Need(t, "nixl")
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+129, 2, 600, 900)
	node := r.ServeModel("sim", "single", "")
	want := r.All(node.URL, prompts, 1)
	p := r.ServeModel("sim", "prefill", nixlConfig("kv_producer", "auto", time.Minute, rig.Unhurried))
	d := r.ServeModel("sim", "decode", nixlConfig("kv_consumer", "auto", time.Minute, rig.Unhurried))
	old := r.Ticket(p, prompts[0])
	require.Positive(t, r.Metrics(p).Sum("kvport_blocks", `state="held"`))
	status, body := reset(r, p)
	require.Equal(t, http.StatusOK, status, body)
	r.Idle(p)
	r.UseTicket(d, prompts[0], old, want[0])
	require.Zero(t, r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`))
	r.UseTicket(d, prompts[1], r.Ticket(p, prompts[1]), want[1])
	require.Positive(t, r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`))

	other := testkit.Typical(t, fixture.Peers).Connector
	status, body = reset(r, r.ServeModel("sim", "other", fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_producer"}`, other)))
	require.Equal(t, http.StatusNotImplemented, status)
	require.Contains(t, body, "the prefix cache is empty, the connector is not: "+other+" cannot be reset")
}
