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
	past map[string]*kvportv1.AgentCounter // of closed hosts, by name and labels
}

func newLedger() *ledger {
	return &ledger{Registry: prometheus.NewRegistry(), past: map[string]*kvportv1.AgentCounter{}}
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
			add(k, l.past[name(k)])
			l.past[name(k)] = k
		}
	}
	return true
}

// counters are all metrics.
func (l *ledger) counters() ([]*kvportv1.AgentCounter, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	families, err := l.Gather()
	out := flatten(families)
	for _, k := range out {
		add(k, l.past[name(k)])
	}
	return out, err
}

func name(k *kvportv1.AgentCounter) string {
	return k.GetName() + "\x00" + strings.Join(k.GetLabels(), "\x00")
}

// add adds what an earlier host has counted; nil is nothing.
func add(to, past *kvportv1.AgentCounter) {
	to.Value += past.GetValue()
	h, before := to.GetHistogram(), past.GetHistogram()
	if h == nil || !slices.Equal(h.GetBounds(), before.GetBounds()) {
		return
	}
	h.Sum += before.GetSum()
	for i, n := range before.GetCounts() {
		h.Counts[i] += n
	}
}

// flatten lists the series of metrics.
func flatten(families []*dto.MetricFamily) []*kvportv1.AgentCounter {
	var out []*kvportv1.AgentCounter
	for _, f := range families {
		for _, m := range f.GetMetric() {
			k := &kvportv1.AgentCounter{Name: f.GetName(), Help: f.GetHelp()}
			for _, l := range m.GetLabel() {
				k.Labels = append(k.Labels, l.GetName(), l.GetValue())
			}
			switch { // a host has no other types
			case m.GetCounter() != nil:
				k.Value = m.GetCounter().GetValue()
			case m.GetGauge() != nil:
				k.Value, k.Gauge = m.GetGauge().GetValue(), true
			case m.GetHistogram() != nil:
				k.Histogram = buckets(m.GetHistogram())
			}
			out = append(out, k)
		}
	}
	return out
}

// buckets takes a histogram's buckets apart, which Prometheus adds up.
func buckets(h *dto.Histogram) *kvportv1.AgentHistogram {
	out := &kvportv1.AgentHistogram{Sum: h.GetSampleSum()}
	below := uint64(0)
	for _, b := range h.GetBucket() {
		out.Bounds = append(out.Bounds, b.GetUpperBound())
		out.Counts = append(out.Counts, b.GetCumulativeCount()-below)
		below = b.GetCumulativeCount()
	}
	out.Counts = append(out.Counts, h.GetSampleCount()-below)
	return out
}
