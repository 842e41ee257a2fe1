package acceptance

import (
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// reset empties the caches of an engine and gives what it says.
func (r *rig) reset(p *cluster.Process) (status int, body string) {
	r.Helper()
	req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, p.URL+"/reset_prefix_cache", http.NoBody)
	require.NoError(r, err)
	resp, err := r.client.HTTP.Do(req)
	require.NoError(r, err)
	data, err := io.ReadAll(resp.Body)
	require.NoError(r, err)
	require.NoError(r, resp.Body.Close())
	return resp.StatusCode, string(data)
}

// TestResetOfHolder: a reset of NixlConnector ends what it holds for consumers: a ticket from before is worth
// nothing, its prompt is computed, and the next one is worth something again. A connector that has no reset says so.
func TestResetOfHolder(t *testing.T) {
	need(t, "nixl")
	r := newRig(t)
	prompts := texts(t, *flagSeed+129, 2, 600, 900)
	node := r.serveModel("sim", "single", "")
	want := r.all(node.URL, prompts, 1)
	p := r.serveModel("sim", "prefill", nixlConfig("kv_producer", "auto", time.Minute, unhurried))
	d := r.serveModel("sim", "decode", nixlConfig("kv_consumer", "auto", time.Minute, unhurried))
	old := r.ticket(p, prompts[0])
	require.Positive(t, r.metrics(p).Sum("kvport_blocks", `state="held"`))
	status, body := r.reset(p)
	require.Equal(t, http.StatusOK, status, body)
	r.idle(p)
	r.useTicket(d, prompts[0], old, want[0])
	require.Zero(t, r.metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`))
	r.useTicket(d, prompts[1], r.ticket(p, prompts[1]), want[1])
	require.Positive(t, r.metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`))

	other := typical(t, fixture.Peers).Connector
	status, body = r.reset(r.serveModel("sim", "other", fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_producer"}`, other)))
	require.Equal(t, http.StatusNotImplemented, status)
	require.Contains(t, body, "the prefix cache is empty, the connector is not: "+other+" cannot be reset")
}
