package acceptance

import (
	"errors"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// TestPluginKilled: the decode engine's plugin dies or stops while it loads; no token is wrong, no
// request is lost, nothing is left behind.
func TestPluginKilled(t *testing.T) {
	r := rig.New(t)
	kills, stops := rig.Count(t, "kills", *rig.Kills, 1, 10), rig.Count(t, "stops", *rig.Stops, 1, 2)
	faults := slices.Concat(slices.Repeat([]syscall.Signal{syscall.SIGKILL}, kills), slices.Repeat([]syscall.Signal{syscall.SIGSTOP}, stops))
	node := r.Serve("single", "")
	p := r.Serve("prefill", r.Config("kv_producer", "", ""))
	d := r.Serve("decode", r.Config("kv_consumer", `,"workers":1`, rig.Patient))
	router := r.Route(p, d)
	r.All(router.URL, rig.Texts(t, *rig.Seed+2000, 1, 400, 400), 1)
	r.Idle(d)
	before := rig.Settled(t, d)

	var got, want []*cluster.Completion
	for i, signal := range faults {
		for try := uint64(0); len(got) == i; try++ {
			require.Less(t, try, uint64(5), "five loads in a row were over before the fault")
			prompt := rig.Texts(t, *rig.Seed+1000*try+uint64(i)+100, 1, 1600, 4400)
			answer, err := signalLoad(r, router, d, prompt[0], signal)
			if errors.Is(err, cluster.ErrTooLate) {
				continue
			}
			require.NoError(t, err)
			got, want = append(got, answer), append(want, r.All(node.URL, prompt, 1)...)
		}
	}
	rig.Same(t, fmt.Sprintf("%d kills and %d stops in mid-load", kills, stops), want, got)

	r.Idle(d)
	r.Idle(p)
	m := r.Metrics(d)
	require.Eventually(t, func() bool { // the last restart waits for its back-off
		m = r.Metrics(d)
		return m.Sum("kvport_plugin_restarts_total") >= float64(len(faults))
	}, time.Minute, 20*time.Millisecond)
	t.Logf("restarts: %.0f, loads that failed: %.0f, started again: %.0f, blocks pinned: %.0f, held: %.0f", m.Sum("kvport_plugin_restarts_total"),
		m.Sum("kvport_failed_loads_total"), m.Sum("kvport_transfer_retries_total"), m.Sum("kvport_blocks", `state="pinned"`), m.Sum("kvport_blocks", `state="held"`))
	require.Eventually(t, func() bool { return cluster.Usage(d.PID()) == before }, time.Minute, 50*time.Millisecond,
		"resources of the engine: before %+v, after %+v", before, cluster.Usage(d.PID()))
	t.Logf("resources of the decode engine before and after: %+v", before)
}

// signalLoad sends a prompt through the router and signals the decode engine's plugin in the middle of
// the load. It returns the answer.
func signalLoad(r *rig.Rig, router, d *cluster.Process, prompt string, signal syscall.Signal) (answer *cluster.Completion, err error) {
	r.Helper()
	plugin := r.Plugin(d)
	answered := make(chan struct{})
	var lost error
	err = r.Client.SignalLoad(r.Context(), d, plugin, signal, func() <-chan struct{} {
		go func() {
			defer close(answered)
			answer, lost = r.Complete(router.URL, prompt)
		}()
		return answered
	})
	<-answered
	require.NoError(r, lost, "the request was lost after %v", signal)
	if err == nil {
		require.Eventually(r, func() bool { return !cluster.Alive(plugin) }, time.Minute, time.Millisecond, "plugin %d lives on after %v", plugin, signal)
	}
	return answer, err
}

// TestEngineKilled: a plugin dies with its engine.
func TestEngineKilled(t *testing.T) {
	r := rig.New(t)
	node := r.ServeModel("sim", "engine", r.Config("kv_both", "", ""))
	r.All(node.URL, rig.Texts(t, *rig.Seed, 2, 100, 200), 2)
	plugins := cluster.Plugins(node.PID())
	require.Len(t, plugins, 1)
	killed := time.Now()
	node.Kill()
	require.Eventually(t, func() bool { return !cluster.Alive(plugins[0]) }, time.Minute, time.Millisecond, "orphan %d", plugins[0])
	t.Logf("plugin %d gone after %v", plugins[0], time.Since(killed))
}

// TestDrain: SIGTERM lets a running request finish, then everything is gone.
func TestDrain(t *testing.T) {
	r := rig.NewLong(t)
	prompt := rig.Texts(t, *rig.Seed+3000, 1, 300, 400)
	want := rig.Single.Answers(r, prompt)
	node := r.Serve("engine", r.Config("kv_both", "", ""))
	plugins := cluster.Plugins(node.PID())
	require.Len(t, plugins, 1)
	got := make(chan *cluster.Completion, 1)
	go func() {
		c, err := r.Complete(node.URL, prompt[0])
		if err != nil {
			t.Errorf("the running request was lost: %v", err)
		}
		got <- c
	}()
	require.Eventually(t, func() bool { return r.Metrics(node).Sum("kvport_requests", `state="running"`) == 1 }, time.Minute, time.Millisecond)
	started := time.Now()
	r.Stop(node)
	t.Logf("drained in %v", time.Since(started))
	require.Less(t, time.Since(started), time.Minute)
	rig.Same(t, "request running at SIGTERM", want, []*cluster.Completion{<-got})
	require.False(t, cluster.Alive(plugins[0]), "plugin %d is left", plugins[0])
}
