package agent

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// A histogram reaches the engine with its buckets, everything with its help, and what a host has counted
// that is closed stays in the numbers of the next one.
func TestLedger(t *testing.T) {
	l := newLedger()
	open := func() (prometheus.Counter, prometheus.Histogram, prometheus.Gauge) {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: "c_total", Help: "Counted."})
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "h_seconds", Help: "Times.", Buckets: []float64{1, 10}})
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "g", Help: "A level.", ConstLabels: prometheus.Labels{"of": "x"}})
		l.MustRegister(c, h, g)
		return c, h, g
	}
	c, h, g := open()
	c.Add(2)
	g.Set(7)
	for _, v := range []float64{0.5, 5, 6, 50} {
		h.Observe(v)
	}
	for _, one := range []prometheus.Collector{c, h, g} {
		require.True(t, l.Unregister(one))
	}
	c, h, _ = open()
	c.Add(1)
	h.Observe(20)
	got, err := l.counters()
	require.NoError(t, err)
	by := map[string]*kvportv1.AgentCounter{}
	for _, k := range got {
		by[k.GetName()] = k
	}
	require.Len(t, by, 3)
	require.InDelta(t, 3, by["c_total"].GetValue(), 0)
	require.Equal(t, "Counted.", by["c_total"].GetHelp())
	times := by["h_seconds"].GetHistogram()
	require.Equal(t, []float64{1, 10}, times.GetBounds())
	require.Equal(t, []uint64{1, 2, 2}, times.GetCounts())
	require.InDelta(t, 81.5, times.GetSum(), 1e-9)
	require.Equal(t, "Times.", by["h_seconds"].GetHelp())
	require.Zero(t, by["g"].GetValue(), "a level of a host that is closed is none")
	require.True(t, by["g"].GetGauge())
	require.Equal(t, []string{"of", "x"}, by["g"].GetLabels())
}
