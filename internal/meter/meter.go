// Package meter declares the Prometheus metrics of one part of a process and registers them together.
package meter

import "github.com/prometheus/client_golang/prometheus"

// Set is the metrics of one part. What its methods make works before Register, and without it too.
type Set struct {
	labels   prometheus.Labels
	declared *[]prometheus.Collector
	shown    []prometheus.Collector
	registry prometheus.Registerer // nil: nobody sees them
}

// New makes an empty set.
func New() *Set { return &Set{declared: &[]prometheus.Collector{}} }

// With makes metrics of the same set that have these labels.
func (s *Set) With(labels prometheus.Labels) *Set { return &Set{labels: labels, declared: s.declared} }

func declare[C prometheus.Collector](s *Set, c C) C {
	*s.declared = append(*s.declared, c)
	return c
}

// Counter makes a counter without further labels.
func (s *Set) Counter(name, help string) prometheus.Counter {
	return declare(s, prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: s.labels}))
}

// Counters makes a counter with labels.
func (s *Set) Counters(name, help string, labels ...string) *prometheus.CounterVec {
	return declare(s, prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: s.labels}, labels))
}

// Gauge makes a gauge without further labels.
func (s *Set) Gauge(name, help string) prometheus.Gauge {
	return declare(s, prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: s.labels}))
}

// Gauges makes a gauge with labels.
func (s *Set) Gauges(name, help string, labels ...string) *prometheus.GaugeVec {
	return declare(s, prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: s.labels}, labels))
}

// Histogram makes a histogram without further labels.
func (s *Set) Histogram(name, help string, buckets []float64) prometheus.Histogram {
	return declare(s, prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, ConstLabels: s.labels, Buckets: buckets}))
}

// Histograms makes a histogram with labels.
func (s *Set) Histograms(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return declare(s, prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, ConstLabels: s.labels, Buckets: buckets}, labels))
}

// Register shows all metrics of the set; a nil registry shows none. If one of them cannot be shown, none is.
func (s *Set) Register(registry prometheus.Registerer) error {
	s.registry = registry
	for _, c := range *s.declared {
		if err := s.Show(c); err != nil {
			s.Unregister()
			return err
		}
	}
	return nil
}

// Show shows another metric, until Unregister.
func (s *Set) Show(c prometheus.Collector) error {
	if s.registry == nil {
		return nil
	}
	if err := s.registry.Register(c); err != nil {
		return err
	}
	s.shown = append(s.shown, c)
	return nil
}

// Unregister takes away what is shown.
func (s *Set) Unregister() {
	for _, c := range s.shown {
		s.registry.Unregister(c)
	}
	s.shown = nil
}

// Mark sets a gauge to 1 or 0.
func Mark(g prometheus.Gauge, yes bool) {
	value := 0.0
	if yes {
		value = 1
	}
	g.Set(value)
}
