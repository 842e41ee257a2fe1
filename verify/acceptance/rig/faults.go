package rig

import (
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// Patient raises the breaker so that many deaths in a row are survived, and shortens the deadline
// after which a hanging transfer costs the plugin its life.
const Patient = `,"kvport":{"breaker":{"deaths":1000},"deadlines":{"transfer":"1s"}}`

// Unhurried is a limit of transfers that no test waits for.
const Unhurried = time.Minute

// Settled waits until the process's resources stay the same for a while.
func Settled(t *testing.T, p *cluster.Process) cluster.Resources {
	t.Helper()
	last, since := cluster.Usage(p.PID()), time.Now()
	require.Eventually(t, func() bool {
		if now := cluster.Usage(p.PID()); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > 500*time.Millisecond
	}, time.Minute, 20*time.Millisecond)
	return last
}

// SignalAmid runs the prompts and signals an engine's plugin in the midst of them. It returns when the
// plugin is gone and all answers are there; hit says whether a transfer was running.
func (r *Rig) SignalAmid(rng *rand.Rand, router, engine *cluster.Process, signal syscall.Signal, prompts []string) (hit bool, got []*cluster.Completion) {
	r.Helper()
	plugin := r.Plugin(engine)
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		got = r.All(router.URL, prompts, 4)
	}()
	// Wait for a transfer, but not for long: some faults are to meet an idle plugin.
	deadline := time.Now().Add(time.Duration(5+rng.IntN(60)) * time.Millisecond)
	for !hit && time.Now().Before(deadline) {
		h, err := r.Client.Health(r.Context(), engine.URL)
		hit = err == nil && h.Connector.Pending > 0
	}
	if err := syscall.Kill(plugin, signal); err != nil {
		require.ErrorIs(r, err, syscall.ESRCH)
		require.Fail(r, "the plugin died by itself")
	}
	<-answered
	require.Eventually(r, func() bool { return !cluster.Alive(plugin) }, time.Minute, time.Millisecond, "plugin %d lives on after %v", plugin, signal)
	return hit, got
}

// Plugin waits until an engine's plugin is ready.
func (r *Rig) Plugin(p *cluster.Process) (pid int) {
	r.Helper()
	require.Eventually(r, func() bool {
		h, err := r.Client.Health(r.Context(), p.URL)
		if err == nil && h.Connector.State == "ready" && cluster.Alive(h.Connector.PID) { // not one whose end was not seen yet
			pid = h.Connector.PID
		}
		return pid != 0
	}, time.Minute, 5*time.Millisecond, "no plugin runs")
	return pid
}

// KillAmidLayers kills a plugin while the prefill engine saves what it computes.
func (r *Rig) KillAmidLayers(p, victim *cluster.Process) {
	r.Helper()
	require.Eventually(r, func() bool {
		h, err := r.Client.Health(r.Context(), p.URL)
		return err == nil && h.Connector.Pending > 0
	}, time.Minute, time.Millisecond)
	plugins := cluster.Plugins(victim.PID())
	require.Len(r, plugins, 1)
	require.NoError(r, syscall.Kill(plugins[0], syscall.SIGKILL))
}
