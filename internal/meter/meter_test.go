package meter

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

func names(t *testing.T, registry *prometheus.Registry) (out []string) {
	t.Helper()
	families, err := registry.Gather()
	require.NoError(t, err)
	for _, f := range families {
		out = append(out, f.GetName()+" "+f.GetMetric()[0].String())
	}
	return out
}

func TestSet(t *testing.T) {
	registry := prometheus.NewRegistry()
	s := New()
	s.Counters("a_total", "A.", "kind").WithLabelValues("x").Inc()
	own := s.With(prometheus.Labels{"name": "n"})
	own.Gauge("b", "B.").Set(2)
	own.Counter("c_total", "C.")
	require.NoError(t, s.Register(registry))
	got := names(t, registry)
	require.Len(t, got, 3)
	require.Contains(t, got[0], `label:{name:"kind"`)
	require.Contains(t, got[1], `label:{name:"name"`)
	require.NoError(t, s.Show(prometheus.NewGauge(prometheus.GaugeOpts{Name: "d"})))
	require.Len(t, names(t, registry), 4)

	second := New()
	second.Gauges("e", "E.", "kind").WithLabelValues("x")
	second.Counters("a_total", "A.", "kind")
	require.Error(t, second.Register(registry))
	require.Len(t, names(t, registry), 4, "none of a set that cannot be shown is shown")
	s.Unregister()
	require.Empty(t, names(t, registry))
	require.NoError(t, second.Register(registry))

	none := New()
	none.Histogram("f", "F.", prometheus.DefBuckets).Observe(1)
	none.Histograms("g", "G.", prometheus.DefBuckets, "kind").WithLabelValues("x").Observe(1)
	require.NoError(t, none.Register(nil))
	require.NoError(t, none.Show(prometheus.NewGauge(prometheus.GaugeOpts{Name: "h"})))
	none.Unregister()
}
