package host

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/connector"
)

// childMetrics are those of the children of a MultiConnector.
type childMetrics struct {
	up       *prometheus.GaugeVec // child
	restarts *prometheus.CounterVec
	kills    *prometheus.CounterVec
	blocks   *prometheus.CounterVec // child, direction
	failed   *prometheus.CounterVec
}

func newChildMetrics() *childMetrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, append([]string{"child"}, labels...))
	}
	return &childMetrics{
		up: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "kvport_child_up", Help: "1 while a child of a MultiConnector takes calls.",
		}, []string{"child"}),
		restarts: counter("kvport_child_restarts_total", "Processes of a child started after its first."),
		kills:    counter("kvport_child_deadline_kills_total", "Processes of a child killed for a passed transfer deadline."),
		blocks:   counter("kvport_child_blocks_total", "Blocks that a child was asked to load or save, counted for each rank.", "direction"),
		failed:   counter("kvport_child_failed_blocks_total", "Blocks among them that it did not.", "direction"),
	}
}

func (m *childMetrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.up, m.restarts, m.kills, m.blocks, m.failed}
}

// childCounters are the metrics of one child.
type childCounters struct {
	up              prometheus.Gauge
	restarts, kills prometheus.Counter
	blocks, failed  map[string]prometheus.Counter // by direction
}

func (m *childMetrics) of(label string) childCounters {
	c := childCounters{
		up: m.up.WithLabelValues(label), restarts: m.restarts.WithLabelValues(label), kills: m.kills.WithLabelValues(label),
		blocks: map[string]prometheus.Counter{}, failed: map[string]prometheus.Counter{},
	}
	for _, direction := range []string{"load", "save"} {
		c.blocks[direction] = m.blocks.WithLabelValues(label, direction)
		c.failed[direction] = m.failed.WithLabelValues(label, direction)
	}
	return c
}

// moved counts a call that has returned.
func (c *childCounters) moved(direction string, t *connector.Transfer, err error) {
	c.blocks[direction].Add(float64(len(t.Blocks)))
	if err != nil {
		c.failed[direction].Add(float64(failedCount(t, err)))
	}
}
