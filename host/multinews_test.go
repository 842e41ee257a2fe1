package host

import (
	"maps"
	"slices"
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
	require.Eventually(r.t, func() bool { now := r.pids()[i]; return now != 0 && now != pid }, time.Minute, time.Millisecond)
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
		}, time.Minute, 5*time.Millisecond)
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
	require.Eventually(t, func() bool { return r.metric("kvport_plugin_violations_total") >= 1 }, time.Minute, 5*time.Millisecond)
	require.Eventually(t, func() bool { return len(r.series("kvport_connector_level")) == 1 }, time.Minute, 5*time.Millisecond)
	require.LessOrEqual(t, int(r.metric("kvport_connector_level")), 7)
}

// Rule MULTI-10: a block is stored when the first child has it, and gone when the last has lost it.
func TestMultiEvents(t *testing.T) {
	events := make(chan BlockReport, 64)
	d := dirs(t, 3)
	telling := func(dir string) map[string]any { return kid(map[string]any{"dir": dir, "fault": "events"}, nil, nil) }
	r := multiRigWith(t, rigOptions{events: events}, telling(d[0]), kid(map[string]any{"dir": d[1]}, nil, nil), telling(d[2]))
	require.NotZero(t, r.Info().Capabilities&connector.CanEvents)
	has := map[connector.BlockKey]bool{}
	until := func(want ...connector.BlockKey) { // what an index of the events knows
		t.Helper()
		for !maps.Equal(has, setOf(want)) {
			report := nextReport(t, events)
			require.False(t, report.Gap)
			for _, e := range report.Events {
				for _, k := range e.Keys {
					require.Equal(t, e.Kind == connector.BlocksRemoved, has[k], "%v of %v is no news", e.Kind, k)
					has[k] = true
					if e.Kind == connector.BlocksRemoved {
						delete(has, k)
					}
				}
				if e.Kind == connector.BlocksCleared {
					clear(has)
				}
			}
		}
	}
	save := func(id string, ks []connector.BlockKey, first connector.BlockID) {
		t.Helper()
		r.waitFor("ready", "ready", "ready")
		require.Empty(t, r.save(id, ks, first).Failed)
	}
	first, second, third := keys(1, 3), keys(2, 2), keys(3, 2)
	save("a", first, 0)
	until(first...)
	r.killChild(0) // the other has all that it had
	save("b", second, 10)
	until(slices.Concat(first, second)...)
	r.killChild(2) // of the first blocks no child knows any more
	until(second...)
	r.killChild(0)
	until()
	save("c", third, 20)
	until(third...)
	require.Zero(t, r.metric("kvport_plugin_violations_total"))
	require.Zero(t, r.metric("kvport_block_events_lost_total"))
}

func setOf(keys []connector.BlockKey) map[connector.BlockKey]bool {
	out := map[connector.BlockKey]bool{}
	for _, k := range keys {
		out[k] = true
	}
	return out
}
