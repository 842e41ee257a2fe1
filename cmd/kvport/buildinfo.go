package main

import (
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
)

// newBuildInfo is the metric that says which program runs.
func newBuildInfo() prometheus.Gauge {
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kvport_build_info", Help: "1 for the version of kvport that runs and the Go that built it.",
		ConstLabels: prometheus.Labels{"version": buildVersion(), "goversion": runtime.Version()},
	})
	g.Set(1)
	return g
}
