package engine

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/engine/sched"
)

// metrics are the engine's own figures; the host has those of the connector.
type metrics struct {
	prompt, requests              *prometheus.CounterVec
	generated, preempted, badLoad prometheus.Counter
	blocks, load                  *prometheus.GaugeVec
	first, next, step             prometheus.Histogram
	seen                          sched.Stats
	registry                      prometheus.Registerer
	registered                    []prometheus.Collector
}

// newMetrics registers the figures; it fails if another engine has registered the same ones.
func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	seconds := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(0.0005, 2, 18)})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	counters := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	}
	gauges := func(name, help, label string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, []string{label})
	}
	m := &metrics{
		registry:  reg,
		prompt:    counters("kvport_prompt_tokens_total", "Prompt tokens of requests that got a first token, by where their KV came from.", "source"),
		requests:  counters("kvport_requests_total", "Requests that ended, by reason.", "reason"),
		generated: counter("kvport_generated_tokens_total", "Tokens generated."),
		preempted: counter("kvport_preemptions_total", "Requests that lost their blocks and were recomputed."),
		badLoad:   counter("kvport_failed_loads_total", "Loads of which at least one block had to be recomputed."),
		blocks:    gauges("kvport_blocks", "Blocks of the cache, by state.", "state"),
		load:      gauges("kvport_requests", "Requests in the engine, by state.", "state"),
		first:     seconds("kvport_time_to_first_token_seconds", "From Submit to the first token."),
		next:      seconds("kvport_time_per_token_seconds", "Between two tokens of a request."),
		step:      seconds("kvport_step_seconds", "Computing and sampling of one step."),
	}
	for _, source := range []string{"local_compute", "local_cache", "external"} {
		m.prompt.WithLabelValues(source) // shown as 0 from the start
	}
	for _, c := range []prometheus.Collector{
		m.prompt, m.requests, m.generated, m.preempted, m.badLoad, m.blocks, m.load, m.first, m.next, m.step,
	} {
		if err := reg.Register(c); err != nil {
			m.close()
			return nil, fmt.Errorf("metrics: %w", err)
		}
		m.registered = append(m.registered, c)
	}
	return m, nil
}

func (m *metrics) close() {
	for _, c := range m.registered {
		m.registry.Unregister(c)
	}
}

// output counts a request's news.
func (m *metrics) output(st *stream, o sched.Output) {
	if len(o.Tokens) > 0 {
		now := time.Now()
		m.generated.Add(float64(len(o.Tokens)))
		if st.last.IsZero() {
			m.first.Observe(now.Sub(st.since).Seconds())
			m.prompt.WithLabelValues("local_cache").Add(float64(o.Local))
			m.prompt.WithLabelValues("external").Add(float64(o.External))
			m.prompt.WithLabelValues("local_compute").Add(float64(st.prompt - o.Local - o.External))
		} else {
			m.next.Observe(now.Sub(st.last).Seconds())
		}
		st.last = now
	}
	if o.Reason != 0 {
		m.requests.WithLabelValues([]string{"", "stop", "length", "abort", "error"}[o.Reason]).Inc()
	}
}

// state shows the state after a step.
func (m *metrics) state(h Health, s sched.Stats) {
	m.blocks.WithLabelValues("free").Set(float64(h.Blocks.Free))
	m.blocks.WithLabelValues("used").Set(float64(h.Blocks.Used))
	m.blocks.WithLabelValues("pinned").Set(float64(h.Blocks.Pinned))
	m.blocks.WithLabelValues("held").Set(float64(h.Blocks.Held))
	m.load.WithLabelValues("running").Set(float64(h.Running))
	m.load.WithLabelValues("waiting").Set(float64(h.Waiting))
	m.preempted.Add(float64(s.Preemptions - m.seen.Preemptions))
	m.badLoad.Add(float64(s.FailedLoads - m.seen.FailedLoads))
	m.seen = s
}
