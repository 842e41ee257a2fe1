package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
)

// connectorStats shows the numbers of a StatsSource as metrics. Counters do not go back when the
// plugin starts again: what its former lives counted is added (rule STAT-04).
type connectorStats struct {
	mu       sync.Mutex
	families map[string]*statFamily
	samples  int // of all families
}

type statFamily struct {
	info   connector.StatInfo
	desc   *prometheus.Desc
	series map[string]*statSeries
}

// statSeries is one number with its labels.
type statSeries struct {
	labels []string
	before float64 // what former lives of the plugin have counted
	last   float64
	gen    uint64 // that gave last
}

func newConnectorStats(name string, infos []connector.StatInfo) *connectorStats {
	s := &connectorStats{families: map[string]*statFamily{}}
	for _, i := range infos {
		s.families[i.Name] = &statFamily{info: i, series: map[string]*statSeries{}, desc: prometheus.NewDesc(
			"kvport_connector_"+i.Name, i.Help, i.Labels, prometheus.Labels{"connector": name})}
	}
	return s
}

// take notes what the plugin of a generation has answered. What was not declared, or cannot be, is
// left out; the first such error is returned.
func (s *connectorStats) take(gen uint64, stats []connector.Stat) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range stats {
		v := &stats[i]
		f := s.families[v.Name]
		var e error
		if f == nil {
			e = fmt.Errorf("stat %q was not declared", v.Name)
		} else if e = f.info.Check(v); e == nil {
			e = s.note(f, gen, v)
		}
		if err == nil {
			err = e
		}
	}
	return err
}

func (s *connectorStats) note(f *statFamily, gen uint64, v *connector.Stat) error {
	key := strings.Join(v.Labels, "\x00")
	n := f.series[key]
	if n == nil {
		if s.samples == connector.MaxSamples {
			return fmt.Errorf("stat %q: more than %d series", v.Name, connector.MaxSamples)
		}
		s.samples++
		n = &statSeries{labels: v.Labels, gen: gen}
		f.series[key] = n
	}
	if f.info.Kind == connector.Counter {
		if n.gen != gen {
			n.before, n.last = n.before+n.last, 0
		} else if v.Value < n.last {
			return fmt.Errorf("stat %q went back from %v to %v", v.Name, n.last, v.Value)
		}
	}
	n.gen, n.last = gen, v.Value
	return nil
}

// Describe implements prometheus.Collector.
func (s *connectorStats) Describe(out chan<- *prometheus.Desc) {
	for _, f := range s.families {
		out <- f.desc
	}
}

// Collect implements prometheus.Collector.
func (s *connectorStats) Collect(out chan<- prometheus.Metric) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.families {
		kind := prometheus.GaugeValue
		if f.info.Kind == connector.Counter {
			kind = prometheus.CounterValue
		}
		for _, n := range f.series {
			if m, err := prometheus.NewConstMetric(f.desc, kind, n.before+n.last, n.labels...); err == nil {
				out <- m
			}
		}
	}
}

// values are the present ones of all series.
func (s *connectorStats) values() []connector.Stat {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []connector.Stat
	for name, f := range s.families {
		for _, n := range f.series {
			out = append(out, connector.Stat{Name: name, Labels: n.labels, Value: n.before + n.last})
		}
	}
	return out
}

// watchStats asks the connector for its numbers again and again.
func (g *generation) watchStats(life context.Context) {
	defer g.work.Done()
	source, ok := connector.As[connector.StatsSource](g.sched)
	for ok && life.Err() == nil {
		ctx, cancel := context.WithTimeout(life, statsWait)
		stats, err := source.Stats(ctx)
		cancel()
		switch {
		case err == nil:
			if err := g.h.stats.take(g.n, stats); err != nil {
				g.h.violation("stats: " + err.Error())
			}
		case errors.Is(err, plugin.ErrUnanswered) && life.Err() == nil:
			g.h.violation("stats: no answer, it is not asked again (rule STAT-03)")
			return
		case errors.Is(err, plugin.ErrLost):
			return
		}
		pause(life, statsEvery)
	}
}

// sameStat reports whether two declarations make the same metric.
func sameStat(a, b connector.StatInfo) bool {
	return a.Name == b.Name && a.Kind == b.Kind && slices.Equal(a.Labels, b.Labels)
}
