package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/meter"
	"github.com/kvport/kvport/internal/tracker"
)

// metrics are the host's. They work without a registry too.
type metrics struct {
	bytes         *prometheus.CounterVec // connector, direction
	seconds       *prometheus.HistogramVec
	failed        *prometheus.CounterVec
	refused       *prometheus.CounterVec // reason
	released      *prometheus.CounterVec // reason
	turns         *prometheus.CounterVec // connector, result
	integrity     prometheus.Counter
	foreign       prometheus.Counter // blocks
	outdated      prometheus.Counter // blocks
	violations    prometheus.Counter
	late          prometheus.Counter // answers
	retries       prometheus.Counter
	undecided     prometheus.Counter // matches
	kills         prometheus.Counter
	match         prometheus.Histogram
	answer        prometheus.Histogram   // of the plugin, to Match
	copied        *prometheus.CounterVec // connector, direction
	unchecked     *prometheus.CounterVec
	landing       prometheus.Gauge
	info          prometheus.Gauge
	lostBlocks    prometheus.Gauge
	arena         prometheus.Gauge
	allocated     prometheus.Gauge   // of arena
	placed        prometheus.Counter // blocks
	placedMatches prometheus.Counter
	placedFailed  prometheus.Counter // blocks
	alone         prometheus.Counter // blocks of placed
	byLayer       prometheus.Counter // blocks of placed
	aloneMatches  prometheus.Counter // of placedMatches
	placedSaved   prometheus.Counter // blocks
	staleKeys     prometheus.Gauge
	children      *childMetrics
	vitals        *vitals
	events        prometheus.Counter // of blocks
	lost          prometheus.Counter

	name string
	seen tracker.Counters
	set  *meter.Set
}

func newMetrics(registry prometheus.Registerer, name string, trust Trust) (*metrics, error) {
	s := meter.New()
	own := s.With(prometheus.Labels{"connector": name})
	m := &metrics{
		name: name, set: s,
		bytes:         s.Counters("kvport_transfer_bytes_total", "KV bytes moved, of blocks that did not fail.", "connector", "direction"),
		seconds:       s.Histograms("kvport_transfer_seconds", "Time from a step to the end of its transfer.", prometheus.ExponentialBuckets(1e-4, 4, 10), "connector", "direction"),
		failed:        s.Counters("kvport_transfer_failed_blocks_total", "Blocks that could not be loaded or saved, without those that are not saved because nobody has verified what they depend on.", "connector", "direction"),
		refused:       s.Counters("kvport_tickets_refused_total", "Tickets that were not accepted.", "reason"),
		released:      s.Counters("kvport_holds_released_total", "Holds that are over.", "reason"),
		turns:         s.Counters("kvport_turn_blocks_total", "Blocks of earlier turns that were fetched from where the answer was made: loaded, or lost to other requests meanwhile.", "connector", "result"),
		copied:        s.Counters("kvport_landing_copied_bytes_total", "KV bytes copied between cache and landing memory (trust level staged), and those of blocks that were cut out of blocks of another size or other ranks.", "connector", "direction"),
		integrity:     own.Counter("kvport_integrity_failures_total", "Loaded blocks that were not what was saved."),
		violations:    own.Counter("kvport_plugin_violations_total", "Answers of the plugin that broke the contract."),
		late:          own.Counter("kvport_plugin_late_answers_total", "Answers and reports of the plugin that nobody waited for any more: no fault of the plugin's."),
		undecided:     own.Counter("kvport_match_undecided_total", "Matches that the connector left undecided until kvport.deadlines.later: what it had not found by then counted as a miss."),
		retries:       own.Counter("kvport_transfer_retries_total", "Transfer calls that were started again."),
		kills:         own.Counter("kvport_plugin_deadline_kills_total", "Plugins killed for a passed transfer deadline."),
		events:        own.Counter("kvport_block_events_total", "Events of blocks that the connector has reported."),
		lost:          own.Counter("kvport_block_events_lost_total", "Events of blocks that were lost before anybody read them."),
		landing:       own.Gauge("kvport_landing_slots_used", "Slots of landing memory that transfers have."),
		placed:        own.Counter("kvport_placed_blocks_total", "Blocks, by rank, that the host found in the connector's memory and loaded from there without a call of the plugin."),
		placedMatches: own.Counter("kvport_placed_matches_total", "Matches that the host answered from its index of the connector's memory without a call of the plugin."),
		placedFailed:  own.Counter("kvport_placed_failed_blocks_total", "Blocks, by rank, that the host found in the connector's memory and could not use: their slots were given up meanwhile, or held something else. The plugin is asked for them, if one is up, unless the engine has learned of a layer of their load."),
		alone:         own.Counter("kvport_placed_alone_blocks_total", "Blocks of kvport_placed_blocks_total that were loaded while no plugin was up."),
		byLayer:       own.Counter("kvport_placed_by_layer_blocks_total", "Blocks of kvport_placed_blocks_total whose load ended after the engine had learned that layers of it had come."),
		aloneMatches:  own.Counter("kvport_placed_alone_matches_total", "Matches of kvport_placed_matches_total that were answered while no plugin was up."),
		placedSaved:   own.Counter("kvport_placed_saved_blocks_total", "Blocks, by rank, that the host saved in slots of the connector's memory that were lent to it, without a call of the plugin."),
		arena:         own.Gauge("kvport_arena_bytes", "Memory that the connector asked the host to keep for it."),
		allocated:     own.Gauge("kvport_arena_allocated_bytes", "Bytes of kvport_arena_bytes that are allocated: the host does that in the background, from its start on."),
		lostBlocks:    own.Gauge("kvport_blocks_lost", "Blocks of the cache that are not used again, since somebody that a dead plugin left behind may write them."),
		staleKeys:     own.Gauge("kvport_key_file_stale", "1 if the file of keys has changed and cannot be read: the keys that it had stay in use."),
		answer:        own.Histogram("kvport_plugin_match_seconds", "Time the connector took to answer Match, of one call with one or more queries, also where nobody waited any more.", prometheus.ExponentialBuckets(1e-5, 4, 11)),
		match:         own.Histogram("kvport_match_seconds", "Time the engine's loop spent in Match.", prometheus.ExponentialBuckets(1e-6, 4, 8)),
		info:          s.With(prometheus.Labels{"connector": name, "trust": string(trust)}).Gauge("kvport_connector_info", "1 for the trust level at which the connector runs."),
		unchecked: s.Counters("kvport_unverified_blocks_total",
			"Loaded blocks for whose bytes there was no digest; reason: `lossy` (the connector may change bytes). They stay with their request.", "connector", "reason"),
		children: newChildMetrics(s), vitals: newVitals(s),
	}
	misses := s.Counters("kvport_digest_misses_total",
		"Loaded blocks whose digests cannot be checked here, so that they count as misses; reason: `foreign_key` (made with a key that is not in the ring) or `edition` (stored by another version, or with another kvport.digest).", "connector", "reason")
	m.foreign, m.outdated = misses.WithLabelValues(name, "foreign_key"), misses.WithLabelValues(name, "edition")
	m.info.Set(1)
	if err := s.Register(registry); err != nil {
		return nil, errors.Join(errors.New("two hosts on one registry"), err)
	}
	m.zeros()
	return m, nil
}

// zeros shows the series that will be there, so that their first increase is one.
func (m *metrics) zeros() {
	for _, direction := range []string{"load", "save"} {
		m.bytes.WithLabelValues(m.name, direction)
		m.failed.WithLabelValues(m.name, direction)
		m.seconds.WithLabelValues(m.name, direction)
	}
	m.unchecked.WithLabelValues(m.name, "lossy")
	for _, reason := range []string{tracker.ReleasedConsumed, tracker.ReleasedExpired, tracker.ReleasedPluginDied, tracker.ReleasedShutdown} {
		m.released.WithLabelValues(reason)
	}
	for _, reason := range []string{"foreign_key", "forged", "incompatible", "other", "peer", "prompt", "replayed", "stale"} {
		m.refused.WithLabelValues(reason)
	}
}

// turned counts blocks of earlier turns. Both series begin with the first of them.
func (m *metrics) turned(loaded, lost int) {
	if loaded+lost > 0 {
		m.turns.WithLabelValues(m.name, "loaded").Add(float64(loaded))
		m.turns.WithLabelValues(m.name, "lost").Add(float64(lost))
	}
}

// moved counts the end of a transfer.
func (m *metrics) moved(direction string, e *tracker.Event) {
	m.bytes.WithLabelValues(m.name, direction).Add(float64(e.Bytes))
	m.failed.WithLabelValues(m.name, direction).Add(float64(len(e.Failed)))
	if len(e.Blocks) > 0 {
		m.seconds.WithLabelValues(m.name, direction).Observe(e.Took.Seconds())
	}
}

// observe adds what the tracker has counted since the last time. It returns the new matches that stayed undecided.
func (m *metrics) observe(c tracker.Counters) (undecided int) {
	undecided = c.Undecided - m.seen.Undecided
	m.undecided.Add(float64(undecided))
	m.lostBlocks.Set(float64(c.Lost))
	m.violations.Add(float64(c.Violations - m.seen.Violations))
	m.late.Add(float64(c.Unknown - m.seen.Unknown))
	m.retries.Add(float64(c.Retries - m.seen.Retries))
	m.kills.Add(float64(c.Kills - m.seen.Kills))
	m.integrity.Add(float64(c.Damaged - m.seen.Damaged))
	m.foreign.Add(float64(c.Foreign - m.seen.Foreign))
	m.outdated.Add(float64(c.Outdated - m.seen.Outdated))
	m.turned(c.TurnLoaded-m.seen.TurnLoaded, c.TurnLost-m.seen.TurnLost)
	m.seen = c
	return undecided
}

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
		err = cmp.Or(err, e)
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

// vitals are the metrics of plugin processes, by connector: of the one plugin, or of each child of a
// MultiConnector by its label.
type vitals struct {
	up       *prometheus.GaugeVec
	breaker  *prometheus.GaugeVec
	restarts *prometheus.CounterVec
	failures *prometheus.CounterVec
}

func newVitals(s *meter.Set) *vitals {
	return &vitals{
		up:       s.Gauges("kvport_plugin_up", "1 while a plugin takes calls, 0 while it is down. A MultiConnector has one for each child.", "connector"),
		breaker:  s.Gauges("kvport_plugin_breaker_open", "1 while a plugin that keeps dying, or does not start, is left alone (kvport.breaker).", "connector"),
		restarts: s.Counters("kvport_plugin_restarts_total", "Plugin processes started after the first. A MultiConnector has a number for each child.", "connector"),
		failures: s.Counters("kvport_plugin_start_failures_total", "Failed starts of a plugin, after its first successful one.", "connector"),
	}
}

// vital are the metrics of one plugin.
type vital struct {
	up, breaker        prometheus.Gauge
	restarts, failures prometheus.Counter
}

// of makes the metrics of one plugin, which show zeros from then on.
func (v *vitals) of(connector string) *vital {
	return &vital{v.up.WithLabelValues(connector), v.breaker.WithLabelValues(connector), v.restarts.WithLabelValues(connector), v.failures.WithLabelValues(connector)}
}

// isUp says whether the plugin takes calls. v may be nil, here and below.
func (v *vital) isUp(yes bool) {
	if v != nil {
		meter.Mark(v.up, yes)
	}
}

// isOpen says whether the breaker is.
func (v *vital) isOpen(yes bool) {
	if v != nil {
		meter.Mark(v.breaker, yes)
	}
}

// restarted counts a process after the first.
func (v *vital) restarted() {
	if v != nil {
		v.restarts.Inc()
	}
}

// failed counts a start that failed.
func (v *vital) failed() {
	if v != nil {
		v.failures.Inc()
	}
}
