package main

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/internal/machine"
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
			newQueuedNixl(t, plugin).run()
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

func newQueuedNixl(t *testing.T, plugin string) *queuedNixl {
	t.Helper()
	const slow = "sim:layers=64" // its longest answer takes minutes
	q := &queuedNixl{Rig: rig.New(t), prompts: rig.Texts(t, *rig.Seed+61001, 4, 100, 400)}
	q.Tokens = 4
	node := q.ServeModel(slow, "single", "")
	q.want = q.All(node.URL, q.prompts, 4)
	q.Stop(node)
	multi := composed{
		children: children(t, "queued"), values: fixture.Values{"LEASE": queuedLease.Milliseconds()},
		settings: fmt.Sprintf(`,"kv_connector_module_path":%q,"kvport":{"deadlines":{"handshake":"30s"}}`, plugin), // it starts two children
	}
	q.p = q.ServeModel(slow, "prefill", multi.config(t, "kv_both", "kv_producer"))
	q.d = q.ServeModel(slow, "decode", multi.config(t, "kv_both", "kv_consumer"), "--max-num-seqs", "1", "--enable-prefix-caching=false")
	return q
}

// run checks that all was loaded. A machine that lets a process wait for a large part of a lease may lose the hold,
// which says nothing; tokens must be right in any case.
func (q *queuedNixl) run() {
	q.Helper()
	stalled := q.watchStalls()
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
	worst := stalled()
	loaded := external >= float64(full) && m.Sum("kvport_failed_loads_total") == 0
	if !loaded && worst >= queuedLease/3 {
		q.Skipf("inconclusive: within a lease of %v threads waited for a processor for %v", queuedLease, worst)
	}
	require.True(q, loaded, "what was queued is computed; within a lease of %v threads waited for a processor for %v", queuedLease, worst)
}

// watchStalls watches how long the threads of the engines and their plugins, and this process, wait for a processor.
// The function that it returns ends that and says how much was lost within a lease at most.
func (q *queuedNixl) watchStalls() (worst func() time.Duration) {
	const tick = 100 * time.Millisecond
	folders := []string{"/proc/self/task"}
	for pids := []int{q.p.PID(), q.d.PID()}; len(pids) > 0; pids = pids[1:] {
		folders = append(folders, fmt.Sprintf("/proc/%d/task", pids[0]))
		pids = append(pids, cluster.Children(pids[0])...)
	}
	ctx, stop := context.WithCancel(q.Context())
	result := make(chan time.Duration, 1)
	go func() {
		var most time.Duration
		lost := map[string][]time.Duration{} // of each thread in each of the last ticks, and of this goroutine under ""
		was, last := map[string]machine.SchedStat{}, time.Now()
		note := func(thread string, waited time.Duration) {
			lost[thread] = append(lost[thread], max(waited, 0))
			lost[thread] = lost[thread][max(0, len(lost[thread])-int(queuedLease/tick)):]
			sum := time.Duration(0)
			for _, d := range lost[thread] {
				sum += d
			}
			most = max(most, sum)
		}
		for ticker := time.NewTicker(tick); ; {
			select {
			case <-ctx.Done():
				ticker.Stop()
				result <- most
				return
			case now := <-ticker.C:
				note("", now.Sub(last)-tick)
				threads := maps.Collect(machine.SchedStats(folders...))
				for path, is := range threads {
					if before, known := was[path]; known {
						note(path, time.Duration(is.Waited-before.Waited)) //nolint:gosec // less than a life
					}
				}
				was, last = threads, now
			}
		}
	}()
	return func() time.Duration { stop(); return <-result }
}
