package host

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// labelled is the value of a counter or gauge with a connector's label, and whether it is shown.
func (r *rig) labelled(name, connector string) (value float64, shown bool) {
	r.t.Helper()
	families, err := r.metrics.Gather()
	require.NoError(r.t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if f.GetName() == name && l.GetName() == "connector" && l.GetValue() == connector {
					return m.GetCounter().GetValue() + m.GetGauge().GetValue(), true
				}
			}
		}
	}
	return 0, false
}

func (r *rig) reaches(name, connector string, want func(float64) bool) {
	r.t.Helper()
	require.Eventually(r.t, func() bool {
		value, shown := r.labelled(name, connector)
		return shown && want(value)
	}, time.Minute, time.Millisecond, "%s of %s", name, connector)
}

func equals(n float64) func(float64) bool  { return func(v float64) bool { return v == n } }
func atLeast(n float64) func(float64) bool { return func(v float64) bool { return v >= n } }

// A plugin that cannot be started any more shows in metrics and in /health, and so does its return.
func TestDeadPluginIsSeen(t *testing.T) {
	breaker := map[string]any{"breaker": map[string]any{"deaths": 3, "cooldown": "200ms"}}
	folders := dirs(t, 2)
	for _, c := range []struct {
		name, connector string
		dir             string // that of the plugin that dies
		open            func(t *testing.T) *rig
		health          func(h Health) Health
	}{
		{"single", "TestConnector", folders[0], func(t *testing.T) *rig {
			return newRig(t, rigOptions{dir: folders[0], settings: breaker})
		}, func(h Health) Health { return h }},
		{"child", "1/TestConnector", folders[1], func(t *testing.T) *rig {
			return multiRig(t, 1, nil, kid(map[string]any{"dir": t.TempDir()}, nil, nil), kid(map[string]any{"dir": folders[1]}, breaker, nil))
		}, func(h Health) Health { return h.Children[1] }},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := c.open(t)
			r.reaches("kvport_plugin_up", c.connector, equals(1))
			for _, name := range []string{"kvport_plugin_start_failures_total", "kvport_plugin_breaker_open"} {
				r.reaches(name, c.connector, equals(0))
			}
			replaced := filepath.Join(c.dir, "replaced") // the plugin says then that it is another one
			require.NoError(t, os.WriteFile(replaced, nil, 0o600))
			require.NoError(t, syscall.Kill(c.health(r.Health()).PID, syscall.SIGKILL))
			r.reaches("kvport_plugin_up", c.connector, equals(0))
			r.reaches("kvport_plugin_start_failures_total", c.connector, atLeast(2))
			r.reaches("kvport_plugin_breaker_open", c.connector, equals(1))
			var h Health
			require.Eventually(t, func() bool { // after its pause the plugin is tried again, and is soon left alone once more
				h = c.health(r.Health())
				return h.State == "broken"
			}, time.Minute, time.Millisecond)
			require.GreaterOrEqual(t, h.StartFailures, 2)
			require.Contains(t, h.Error, "has become another plugin")
			require.NoError(t, os.Remove(replaced))
			r.reaches("kvport_plugin_up", c.connector, equals(1))
			r.reaches("kvport_plugin_breaker_open", c.connector, equals(0))
		})
	}
}
