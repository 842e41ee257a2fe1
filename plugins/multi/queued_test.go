package main

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

const queuedLease = 2 * time.Second

// TestMultiNixlQueued: a child that holds blocks first and one that keeps them in memory second, the documented use, and consumers that
// are queued for three times the lease of what they wait for. The producer's hold is renewed through the
// MultiConnector, composed by the host and as a plugin: they load, and compute nothing.
func TestMultiNixlQueued(t *testing.T) {
	needAll(t, "queued")
	for name, plugin := range map[string]string{"composed by the host": "", "kvport-multi": filepath.Join(testkit.Root(t), "bin", "kvport-multi")} {
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
	*rig.Rig
	prompts []string
	want    []*cluster.Completion
	p, d    *cluster.Process
}

func newQueuedNixl(t *testing.T, plugin string, n uint64) *queuedNixl {
	t.Helper()
	const slow = "sim:layers=64" // its longest answer takes minutes
	q := &queuedNixl{Rig: rig.New(t), prompts: rig.Texts(t, *rig.Seed+61000+n, 4, 100, 400)}
	q.Tokens = 4
	node := q.ServeModel(slow, "single", "")
	q.want = q.All(node.URL, q.prompts, 4)
	q.Stop(node)
	multi := composed{
		children: children(t, "queued"), values: fixture.Values{"LEASE": queuedLease.Milliseconds()},
		settings: fmt.Sprintf(`,"kv_connector_module_path":%q`, plugin),
	}
	q.p = q.ServeModel(slow, "prefill", multi.config(t, "kv_both", "kv_producer"))
	q.d = q.ServeModel(slow, "decode", multi.config(t, "kv_both", "kv_consumer"), "--max-num-seqs", "1", "--enable-prefix-caching=false")
	return q
}

// run reports whether all was loaded. Tokens must be right in any case.
func (q *queuedNixl) run() bool {
	q.Helper()
	busy, leave := context.WithCancel(q.Context())
	defer leave()
	var others errgroup.Group
	others.Go(func() error {
		_, _ = q.Client.Complete(busy, q.d.URL, cluster.Request{Prompt: "others", MaxTokens: 8000, IgnoreEOS: true}) // until it is cut off
		return nil
	})
	requests := func(state string) float64 {
		return q.Metrics(q.d).Sum("kvport_requests", fmt.Sprintf("state=%q", state))
	}
	require.Eventually(q, func() bool { return requests("running") == 1 }, time.Minute, 10*time.Millisecond)
	got := make([]*cluster.Completion, len(q.prompts))
	var queued errgroup.Group
	router := q.Route(q.p, q.d)
	for i, prompt := range q.prompts {
		queued.Go(func() (err error) {
			got[i], err = q.Complete(router.URL, prompt)
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
	tokens := rig.Compare(q.T, "queued", q.want, got)

	full := 0
	for _, a := range got {
		full += (a.Prompt - 1) / 16 * 16
	}
	m := q.Metrics(q.d)
	external := m.Sum("kvport_prompt_tokens_total", `source="external"`)
	q.Logf("%.0f requests queued for %v, leases of %v: %d tokens compared, 0 differ; %.0f prompt tokens loaded, %d are in full blocks",
		all, 3*queuedLease, queuedLease, tokens, external, full)
	return external >= float64(full) && m.Sum("kvport_failed_loads_total") == 0
}
