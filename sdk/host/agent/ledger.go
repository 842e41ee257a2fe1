package agent

import (
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// ledger is the registry of the agent's hosts. What a closed one has counted stays: to the engine the
// counters are the agent's.
type ledger struct {
	*prometheus.Registry

	mu   sync.Mutex
	past map[string]float64 // of closed hosts, by name and labels
}

func newLedger() *ledger {
	return &ledger{Registry: prometheus.NewRegistry(), past: map[string]float64{}}
}

// Unregister implements prometheus.Registerer.
func (l *ledger) Unregister(c prometheus.Collector) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.Registry.Unregister(c) {
		return false
	}
	last := prometheus.NewRegistry()
	if err := last.Register(c); err != nil {
		return true
	}
	families, _ := last.Gather() // as far as it goes
	for _, k := range flatten(families) {
		if !k.GetGauge() {
			l.past[name(k)] += k.GetValue()
		}
	}
	return true
}

// counters are all metrics; a histogram is its sum and its count.
func (l *ledger) counters() ([]*kvportv1.AgentCounter, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	families, err := l.Gather()
	out := flatten(families)
	for _, k := range out {
		k.Value += l.past[name(k)]
	}
	return out, err
}

func name(k *kvportv1.AgentCounter) string {
	return k.GetName() + "\x00" + strings.Join(k.GetLabels(), "\x00")
}

// flatten makes counters of metrics.
func flatten(families []*dto.MetricFamily) []*kvportv1.AgentCounter {
	var out []*kvportv1.AgentCounter
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName(), l.GetValue())
			}
			add := func(suffix string, value float64, gauge bool) {
				out = append(out, &kvportv1.AgentCounter{Name: f.GetName() + suffix, Labels: slices.Clone(labels), Value: value, Gauge: gauge})
			}
			switch { // a host has no other types
			case m.GetCounter() != nil:
				add("", m.GetCounter().GetValue(), false)
			case m.GetGauge() != nil:
				add("", m.GetGauge().GetValue(), true)
			case m.GetHistogram() != nil:
				add("_sum", m.GetHistogram().GetSampleSum(), false)
				add("_count", float64(m.GetHistogram().GetSampleCount()), false)
			}
		}
	}
	return out
}
