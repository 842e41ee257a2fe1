package host

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// killChild kills a child and waits for the next of its processes.
func (r *rig) killChild(i int) {
	r.t.Helper()
	pid := r.pids()[i]
	require.NoError(r.t, syscall.Kill(pid, syscall.SIGKILL))
	require.Eventually(r.t, func() bool { now := r.pids()[i]; return now != 0 && now != pid }, 10*time.Second, time.Millisecond)
}

// series are the values of a metric by its label child.
func (r *rig) series(name string) map[string]float64 {
	r.t.Helper()
	families, err := r.metrics.Gather()
	require.NoError(r.t, err)
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() != name {
				continue
			}
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			require.Equal(r.t, MultiName, labels["connector"])
			out[labels["child"]] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return out
}

// Rule MULTI-09: the children's numbers are metrics of the host, and go on over a child's death.
func TestMultiStats(t *testing.T) {
	d := dirs(t, 4)
	counting := func(dir string) map[string]any { return kid(map[string]any{"dir": dir, "fault": "stat"}, nil, nil) }
	inner := map[string]any{
		"kv_connector": MultiName, "kv_role": "kv_both",
		"kv_connector_extra_config": map[string]any{"connectors": []any{kid(map[string]any{"dir": d[3]}, nil, nil), counting(d[2])}},
	}
	r := multiRig(t, 1, nil, counting(d[0]), kid(map[string]any{"dir": d[1]}, nil, nil), inner)
	require.NotZero(t, r.Info().Capabilities&connector.CanStat)
	const name, first, deep = "kvport_connector_calls_total", "0/TestConnector", "2/1/TestConnector"
	was := map[string]float64{}
	grow := func() {
		require.Eventually(t, func() bool {
			now := r.series(name)
			require.GreaterOrEqual(t, now[first], was[first])
			return now[first] > was[first] && now[deep] > was[deep]
		}, 20*time.Second, 5*time.Millisecond)
		was = r.series(name)
	}
	grow()
	grow()
	r.killChild(0)
	grow()
	require.Len(t, was, 2, "%v", was)
	require.Equal(t, map[string]float64{first: 7, deep: 7}, r.series("kvport_connector_level"))
	require.Zero(t, r.metric("kvport_plugin_violations_total"))
}

// Rule STAT-04: what a child may not say is counted.
func TestMultiStatsOutOfBounds(t *testing.T) {
	d := dirs(t, 2)
	r := multiRig(t, 1, nil, kid(map[string]any{"dir": d[0], "fault": "stat_many"}, nil, nil), kid(map[string]any{"dir": d[1]}, nil, nil))
	require.Eventually(t, func() bool { return r.metric("kvport_plugin_violations_total") >= 1 }, 10*time.Second, 5*time.Millisecond)
	require.LessOrEqual(t, r.stats.samples, connector.MaxSamples)
	require.Equal(t, map[string]float64{"0/TestConnector": 7}, r.series("kvport_connector_level"))
}

// Rule MULTI-10: a block is stored when the first child has it, and gone when the last has lost it.
func TestMultiEvents(t *testing.T) {
	events := make(chan BlockReport, 64)
	d := dirs(t, 3)
	telling := func(dir string) map[string]any { return kid(map[string]any{"dir": dir, "fault": "events"}, nil, nil) }
	r := multiRigWith(t, rigOptions{events: events}, telling(d[0]), kid(map[string]any{"dir": d[1]}, nil, nil), telling(d[2]))
	require.NotZero(t, r.Info().Capabilities&connector.CanEvents)
	next := func() (out connector.BlockEvent) {
		t.Helper()
		report := nextReport(t, events)
		require.False(t, report.Gap)
		require.Len(t, report.Events, 1, "%v", report)
		return report.Events[0]
	}
	stored := func(id string, ks []connector.BlockKey, first connector.BlockID) {
		t.Helper()
		require.Empty(t, r.save(id, ks, first).Failed)
		told := map[connector.BlockKey]int{}
		for len(told) < len(ks) {
			for _, e := range nextReport(t, events).Events {
				require.Equal(t, connector.BlocksStored, e.Kind)
				require.Equal(t, "disk", e.Medium)
				for _, k := range e.Keys {
					told[k]++
				}
			}
		}
		for _, k := range ks {
			require.Equal(t, 1, told[k], "both children have it, it is told once")
		}
	}
	stored("a", keys(1, 3), 0)
	r.killChild(0) // the other has all that it had
	stored("b", keys(2, 2), 10)
	r.killChild(2)
	e := next()
	require.Equal(t, connector.BlocksRemoved, e.Kind, "of the first blocks no child knows any more")
	require.ElementsMatch(t, keys(1, 3), e.Keys)
	r.killChild(0)
	require.Equal(t, connector.BlocksCleared, next().Kind)
	stored("c", keys(3, 2), 20)
	require.Zero(t, r.metric("kvport_plugin_violations_total"))
	require.Zero(t, r.metric("kvport_block_events_lost_total"))
}
