package router

import "github.com/prometheus/client_golang/prometheus"

// outcome says how a request ended, as a label of kvport_router_requests_total.
type outcome string

const (
	disaggregated outcome = "disaggregated" // served by D, which loaded what P's ticket promised, or does not say
	local         outcome = "local"         // served by D, which had all that the ticket promised already
	recomputed    outcome = "recomputed"    // served by D, which loaded nothing by its ticket: P's work was wasted
	plain         outcome = "plain"         // served by D alone
	clientError   outcome = "client_error"  // refused by the router or an instance: 4xx
	aborted       outcome = "aborted"       // the client went away
	overloaded    outcome = "overloaded"    // too many requests
	unavailable   outcome = "unavailable"   // no decode instance
	upstreamError outcome = "upstream_error"
	broken        outcome = "broken" // the answer ended in the middle of a stream
)

type metrics struct {
	requests *prometheus.CounterVec
	handoffs *prometheus.CounterVec
	broken   *prometheus.GaugeVec
	retries  *prometheus.CounterVec
	turns    *prometheus.CounterVec
	up       *prometheus.GaugeVec
	ttft     prometheus.Histogram
	inFlight prometheus.Gauge

	registrations *prometheus.CounterVec
	introduced    prometheus.Counter
	known         prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvport_router_requests_total", Help: "Requests by how they ended.",
		}, []string{"outcome"}),
		handoffs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvport_router_handoffs_total", Help: "What became of tickets, as decode instances say, and of requests that went without one.",
		}, []string{"result", "reason"}),
		broken: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "kvport_router_breaker_open", Help: "1 if the instance is left out since it fails every request, whatever its health checks say.",
		}, []string{"instance", "role"}),
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvport_router_retries_total", Help: "Attempts that failed before the first byte and were made again elsewhere, or given up.",
		}, []string{"role"}),
		turns: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvport_router_turns_total", Help: "Answers that decode instances hold for the next turn (kept), and those that a prefill instance learned about (handed).",
		}, []string{"what"}),
		up: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "kvport_router_instance_up", Help: "1 if the instance answers health checks and takes requests.",
		}, []string{"instance", "role"}),
		ttft: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvport_router_ttft_seconds", Help: "From a request's arrival to the first byte of its answer.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 18),
		}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvport_router_requests_in_flight", Help: "Requests being served.",
		}),
		registrations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvport_router_registrations_total", Help: "Registrations of instances by HTTP status.",
		}, []string{"code"}),
		introduced: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvport_router_introductions_total", Help: "Requests whose id named both engines, signed.",
		}),
		known: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvport_router_registered_instances", Help: "Instances that have said where they take blocks.",
		}),
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{
		m.requests, m.handoffs, m.retries, m.turns, m.up, m.broken, m.ttft, m.inFlight, m.registrations, m.introduced, m.known,
	} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) setUp(instance string, r role, isUp bool) {
	v := 0.0
	if isUp {
		v = 1
	}
	m.up.WithLabelValues(instance, r.String()).Set(v)
}

func (m *metrics) setBroken(instance string, r role, open bool) {
	v := 0.0
	if open {
		v = 1
	}
	m.broken.WithLabelValues(instance, r.String()).Set(v)
}
