package host

import (
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// killed kills the plugin and waits for the next one.
func (r *rig) killed() {
	r.t.Helper()
	pid := r.Health().PID
	require.NoError(r.t, syscall.Kill(pid, syscall.SIGKILL))
	require.Eventually(r.t, func() bool {
		now := r.Health()
		return now.State == "ready" && now.PID != pid
	}, time.Minute, time.Millisecond)
}

// Rule STAT-04: the connector's numbers are metrics, and counters go on over the plugin's death.
func TestStats(t *testing.T) {
	r := newRig(t, rigOptions{extra: map[string]any{"fault": "stat"}})
	const name = "kvport_connector_calls_total"
	for life := range 2 {
		was := r.metric(name)
		for n := range 2 {
			require.Eventually(t, func() bool {
				now := r.metric(name)
				require.GreaterOrEqual(t, now, was, "back in life %d", life)
				return now >= was+float64(n)+1
			}, time.Minute, 5*time.Millisecond)
		}
		if life == 0 {
			r.killed()
		}
	}
	require.InDelta(t, 7, r.metric("kvport_connector_level"), 0)
	require.Zero(t, r.metric("kvport_plugin_violations_total"))
	families, err := r.metrics.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() == name {
			require.Equal(t, "Calls.", f.GetHelp())
			labels := map[string]string{}
			for _, l := range f.GetMetric()[0].GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			require.Equal(t, map[string]string{"connector": "TestConnector", "of": "stats"}, labels)
		}
	}
}

// Rule STAT-04: what was not declared or is too much is dropped and counted.
func TestStatsOutOfBounds(t *testing.T) {
	r := newRig(t, rigOptions{extra: map[string]any{"fault": "stat_many"}})
	require.Eventually(t, func() bool { return r.metric("kvport_plugin_violations_total") >= 2 }, time.Minute, 5*time.Millisecond)
	r.stats.mu.Lock() // the plugin goes on being asked
	samples := r.stats.samples
	r.stats.mu.Unlock()
	require.Equal(t, connector.MaxSamples, samples)
	require.InDelta(t, 7, r.metric("kvport_connector_level"), 0)

	o := rigOptions{extra: map[string]any{"fault": "stat_bad_name"}}
	cfg, eng, opts := o.build(t)
	_, err := Open(t.Context(), cfg, eng, opts)
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, `stat "Calls" must consist of a-z`)
}

func TestStatsSeries(t *testing.T) {
	s := newConnectorStats("c", []connector.StatInfo{
		{Name: "n_total", Kind: connector.Counter}, {Name: "g", Kind: connector.Gauge, Labels: []string{"l"}},
	})
	take := func(gen uint64, v float64) error { return s.take(gen, []connector.Stat{{Name: "n_total", Value: v}}) }
	shown := func() float64 {
		n := s.families["n_total"].series[""]
		return n.before + n.last
	}
	require.NoError(t, take(1, 3))
	require.NoError(t, take(1, 5))
	require.ErrorContains(t, take(1, 4), "went back from 5 to 4")
	require.InDelta(t, 5, shown(), 0)
	require.NoError(t, take(2, 0), "a new life begins at 0")
	require.InDelta(t, 5, shown(), 0)
	require.NoError(t, take(2, 2))
	require.NoError(t, take(4, 1), "one did not answer")
	require.InDelta(t, 8, shown(), 0)
	require.ErrorContains(t, s.take(4, []connector.Stat{{Name: "g"}, {Name: "what"}}), `"g" with 0 labels`)
	registry := prometheus.NewRegistry()
	require.NoError(t, registry.Register(s))
	families, err := registry.Gather()
	require.NoError(t, err)
	require.Len(t, families, 1)
	require.True(t, registry.Unregister(s))
}

// nextReport is the next report of blocks.
func nextReport(t *testing.T, events <-chan BlockReport) BlockReport {
	t.Helper()
	select {
	case r := <-events:
		return r
	case <-time.After(time.Minute):
		require.Fail(t, "no report")
		return BlockReport{}
	}
}

// Rule EVENT-05: events come in order, under the engine's keys; a new life of the plugin is a gap.
func TestBlockEvents(t *testing.T) {
	events := make(chan BlockReport, 64)
	r := newRig(t, rigOptions{extra: map[string]any{"fault": "events"}, events: events})
	first, second := keys(1, 3), keys(2, 2)
	r.save("a", first, 0)
	for i, k := range first {
		report := nextReport(t, events)
		require.False(t, report.Gap)
		require.Equal(t, []connector.BlockEvent{{
			Seq: uint64(i + 1), Kind: connector.BlocksStored, Keys: []connector.BlockKey{k}, Medium: "disk", Scope: connector.ScopeNode,
		}}, report.Events)
	}
	r.killed()
	require.Equal(t, BlockReport{Gap: true}, nextReport(t, events))
	r.save("b", second, 0)
	report := nextReport(t, events)
	require.False(t, report.Gap)
	require.EqualValues(t, 1, report.Events[0].Seq, "of the new plugin")
	nextReport(t, events)
	require.Eventually(t, func() bool { return r.metric("kvport_block_events_total") == 5 }, time.Minute, time.Millisecond,
		"a report is counted after its reader has it")
	require.Zero(t, r.metric("kvport_plugin_violations_total"))
}

// Rule EVENT-05: a reader that does not read costs events, not time.
func TestSlowReaderOfBlockEvents(t *testing.T) {
	events := make(chan BlockReport, 1)
	r := newRig(t, rigOptions{extra: map[string]any{"fault": "events"}, events: events})
	r.save("a", keys(1, 5), 0)
	require.Eventually(t, func() bool { return r.metric("kvport_block_events_lost_total") == 4 }, time.Minute, time.Millisecond)
	require.False(t, nextReport(t, events).Gap)
	last := keys(2, 1)
	r.save("b", last, 0)
	report := nextReport(t, events)
	require.True(t, report.Gap)
	require.Equal(t, last, report.Events[0].Keys)
}

// Rule EVENT-05.
func TestEventOrder(t *testing.T) {
	of := func(seqs ...uint64) []connector.BlockEvent {
		var out []connector.BlockEvent
		for _, s := range seqs {
			out = append(out, connector.BlockEvent{Seq: s})
		}
		return out
	}
	o := &eventOrder{}
	for _, c := range []struct {
		in, out []uint64
		lost    uint64
		bad     bool
	}{
		{in: []uint64{7, 8}, out: []uint64{7, 8}}, // the first may be any
		{in: []uint64{9}, out: []uint64{9}},
		{in: []uint64{9, 10}, out: []uint64{10}, bad: true},        // again
		{in: []uint64{13}, out: []uint64{13}, lost: 2},             // 11 and 12
		{in: []uint64{14, 16, 17}, out: []uint64{16, 17}, lost: 2}, // 15, and 14 does not hold any more
		{in: []uint64{3, 2, 18}, out: []uint64{18}, bad: true},
		{in: nil, out: nil},
	} {
		fresh, lost, err := o.check(of(c.in...))
		require.Equal(t, of(c.out...), append([]connector.BlockEvent(nil), fresh...), "%v", c.in)
		require.Equal(t, c.lost, lost, "%v", c.in)
		require.Equal(t, c.bad, err != nil, "%v: %v", c.in, err)
	}
}
