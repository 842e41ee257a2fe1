package server

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	requests      *prometheus.CounterVec
	seconds       *prometheus.HistogramVec
	unknownFields prometheus.Counter
	inFlight      prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvport_http_requests_total", Help: "Generation requests by path and status; 499: the client went away.",
		}, []string{"path", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kvport_http_request_seconds", Help: "From a generation request's arrival to the end of its answer.",
			Buckets: prometheus.ExponentialBuckets(0.002, 2, 18),
		}, []string{"path"}),
		unknownFields: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvport_http_unknown_fields_total", Help: "Fields of request bodies that were ignored because nothing here knows them.",
		}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvport_http_requests_in_flight", Help: "Generation requests being served.",
		}),
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.requests, m.seconds, m.unknownFields, m.inFlight} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}
