package host

import "github.com/prometheus/client_golang/prometheus"

// vitals are the metrics of plugin processes, by connector: of the one plugin, or of each child of a
// MultiConnector by its label.
type vitals struct {
	up       *prometheus.GaugeVec
	breaker  *prometheus.GaugeVec
	failures *prometheus.CounterVec
}

func newVitals() *vitals {
	labels := []string{"connector"}
	return &vitals{
		up: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "kvport_plugin_up", Help: "1 while a plugin takes calls, 0 while it is down. A MultiConnector has one for each child.",
		}, labels),
		breaker: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "kvport_plugin_breaker_open", Help: "1 while a plugin that keeps dying, or does not start, is left alone (kvport.breaker).",
		}, labels),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvport_plugin_start_failures_total", Help: "Failed starts of a plugin, after its first successful one.",
		}, labels),
	}
}

func (v *vitals) all() []prometheus.Collector {
	return []prometheus.Collector{v.up, v.breaker, v.failures}
}

// vital are the metrics of one plugin.
type vital struct {
	up, breaker prometheus.Gauge
	failures    prometheus.Counter
}

// of makes the metrics of one plugin, which show zeros from then on.
func (v *vitals) of(connector string) *vital {
	return &vital{v.up.WithLabelValues(connector), v.breaker.WithLabelValues(connector), v.failures.WithLabelValues(connector)}
}

// isUp says whether the plugin takes calls. v may be nil, here and below.
func (v *vital) isUp(yes bool) {
	if v != nil {
		set(v.up, yes)
	}
}

// isOpen says whether the breaker is.
func (v *vital) isOpen(yes bool) {
	if v != nil {
		set(v.breaker, yes)
	}
}

// failed counts a start that failed.
func (v *vital) failed() {
	if v != nil {
		v.failures.Inc()
	}
}

// set sets a gauge to 1 or 0.
func set(g prometheus.Gauge, yes bool) {
	value := 0.0
	if yes {
		value = 1
	}
	g.Set(value)
}
