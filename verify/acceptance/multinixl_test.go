package acceptance

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/verify/cluster"
)

const queuedLease = 2 * time.Second

// TestMultiNixlQueued: NixlConnector first and OffloadingConnector second, the documented use, and consumers that
// are queued for three times the lease of what they wait for. The producer's hold is renewed through the
// MultiConnector, composed by the host and as a plugin: they load, and compute nothing.
func TestMultiNixlQueued(t *testing.T) {
	needNixl(t)
	for name, plugin := range map[string]string{"composed by the host": "", "kvport-multi": filepath.Join(root(t), "bin", "kvport-multi")} {
		t.Run(name, func(t *testing.T) {
			const tries = 3 // a machine that stalls for longer than a lease loses the hold
			for try := 1; !newQueuedNixl(t, plugin, uint64(try)).run(); try++ {
				require.Less(t, try, tries, "what was queued is computed")
			}
		})
	}
}

// queuedNixl is a prefill engine, and a decode engine that runs one request at a time.
type queuedNixl struct {
	*rig
	prompts []string
	want    []*cluster.Completion
	p, d    *cluster.Process
}

func newQueuedNixl(t *testing.T, plugin string, n uint64) *queuedNixl {
	t.Helper()
	const slow = "sim:layers=64" // its longest answer takes minutes
	q := &queuedNixl{rig: newRig(t), prompts: texts(t, *flagSeed+61000+n, 4, 100, 400)}
	q.tokens = 4
	node := q.serveModel(slow, "single", "")
	q.want = q.all(node.URL, q.prompts, 4)
	q.stop(node)
	config := func(role string) string {
		nixl := newKid("NixlConnector", map[string]any{"lease_ms": queuedLease.Milliseconds()})
		memory := newKid("OffloadingConnector", map[string]any{"cpu_bytes_to_use": 64 << 20})
		data, err := json.Marshal(map[string]any{
			"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_module_path": plugin,
			"kv_connector_extra_config": map[string]any{"connectors": []kid{nixl.in(role), memory.in("kv_both")}},
		})
		require.NoError(t, err)
		return string(data)
	}
	q.p = q.serveModel(slow, "prefill", config("kv_producer"))
	q.d = q.serveModel(slow, "decode", config("kv_consumer"), "--max-num-seqs", "1", "--enable-prefix-caching=false")
	return q
}

// run reports whether all was loaded. Tokens must be right in any case.
func (q *queuedNixl) run() bool {
	q.Helper()
	busy, leave := context.WithCancel(q.Context())
	defer leave()
	var others errgroup.Group
	others.Go(func() error {
		_, _ = q.client.Complete(busy, q.d.URL, cluster.Request{Prompt: "others", MaxTokens: 8000, IgnoreEOS: true}) // until it is cut off
		return nil
	})
	requests := func(state string) float64 {
		return q.metrics(q.d).Sum("kvport_requests", fmt.Sprintf("state=%q", state))
	}
	require.Eventually(q, func() bool { return requests("running") == 1 }, time.Minute, 10*time.Millisecond)
	got := make([]*cluster.Completion, len(q.prompts))
	var queued errgroup.Group
	router := q.route(q.p, q.d)
	for i, prompt := range q.prompts {
		queued.Go(func() (err error) {
			got[i], err = q.complete(router.URL, prompt)
			return err
		})
	}
	all := float64(len(q.prompts))
	require.Eventually(q, func() bool { return requests("waiting") == all }, time.Minute, 10*time.Millisecond)
	<-time.After(3 * queuedLease)
	require.InDelta(q, all, requests("waiting"), 0, "they are still queued")
	leave()
	require.NoError(q, others.Wait())
	require.NoError(q, queued.Wait())
	tokens := compare(q.T, "queued", q.want, got)

	full := 0
	for _, a := range got {
		full += (a.Prompt - 1) / 16 * 16
	}
	m := q.metrics(q.d)
	external := m.Sum("kvport_prompt_tokens_total", `source="external"`)
	q.Logf("%.0f requests queued for %v, leases of %v: %d tokens compared, 0 differ; %.0f prompt tokens loaded, %d are in full blocks",
		all, 3*queuedLease, queuedLease, tokens, external, full)
	return external >= float64(full) && m.Sum("kvport_failed_loads_total") == 0
}
