package router

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/internal/meter"
)

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
	prefix   *prometheus.CounterVec
	queries  *prometheus.CounterVec
	up       *prometheus.GaugeVec
	ttft     prometheus.Histogram
	inFlight prometheus.Gauge

	events       *prometheus.CounterVec
	blocks       *prometheus.CounterVec
	indexed      prometheus.Gauge
	tokenize     *prometheus.CounterVec
	queued       prometheus.Gauge
	queueSeconds prometheus.Histogram
	refusals     *prometheus.CounterVec
	exhausted    prometheus.Counter
	lookups      *prometheus.CounterVec
	fileReads    *prometheus.CounterVec
	fileBad      prometheus.Gauge

	registrations *prometheus.CounterVec
	introduced    prometheus.Counter
	unnamed       prometheus.Counter
	foreignIDs    prometheus.Counter
	known         prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	s := meter.New()
	m := &metrics{
		requests:      s.Counters("kvport_router_requests_total", "Requests by how they ended.", "outcome"),
		handoffs:      s.Counters("kvport_router_handoffs_total", "What became of tickets, as decode instances say, and of requests that went without one.", "result", "reason"),
		broken:        s.Gauges("kvport_router_breaker_open", "1 if the instance is left out since it fails every request, whatever its health checks say.", "instance", "role"),
		retries:       s.Counters("kvport_router_retries_total", "Attempts that failed before the first byte and were made again elsewhere, or given up.", "role"),
		turns:         s.Counters("kvport_router_turns_total", "Answers that decode instances hold for the next turn (kept), and those that a prefill instance learned about (handed).", "what"),
		prefix:        s.Counters("kvport_router_prefix_tokens_total", "Tokens of prompts that instances computed and said so: of the whole prompts, and of these those that the router expected to be there already (expected) and those that were (cached).", "kind"),
		queries:       s.Counters("kvport_router_cache_queries_total", "Cache queries for requests of whose prompt too little was known: answered, remembered (a moment ago), unanswered, limited (too many run, or were made lately).", "result"),
		up:            s.Gauges("kvport_router_instance_up", "1 if the instance answers health checks and takes requests.", "instance", "role"),
		ttft:          s.Histogram("kvport_router_ttft_seconds", "From a request's arrival to the first byte of its answer.", prometheus.ExponentialBuckets(0.001, 2, 18)),
		inFlight:      s.Gauge("kvport_router_requests_in_flight", "Requests being served."),
		events:        s.Counters("kvport_router_kv_events_total", "What came of the KV events of instances: events applied, gaps in their numbers, replays asked for, batches replayed, times when what was known of an instance was lost, and invalid messages.", "what"),
		blocks:        s.Counters("kvport_router_kv_blocks_total", "Blocks in the KV events of instances: stored, removed, and left out since their place is not known (unplaced) or there are too many (full); and those of an instance that were forgotten so that others have room (evicted).", "what"),
		indexed:       s.Gauge("kvport_router_kv_index_blocks", "Blocks that the router knows of by KV events, each counted for each instance that has it."),
		tokenize:      s.Counters("kvport_router_tokenize_total", "Prompts whose tokens were needed: those that had them (given), whose tokens were remembered, asked of an instance, or not to be had in time (failed).", "result"),
		queued:        s.Gauge("kvport_router_queue_requests", "Requests that wait until they may run."),
		queueSeconds:  s.Histogram("kvport_router_queue_seconds", "How long requests waited until they could run or were refused.", prometheus.ExponentialBuckets(0.001, 2, 18)),
		refusals:      s.Counters("kvport_router_refusals_total", "Requests that were not admitted: the queue was full, they waited too long, or their client's rate or its room for bodies is used up.", "reason"),
		exhausted:     s.Counter("kvport_router_retries_exhausted_total", "Attempts that failed and were not made again, since the budget of retries was used up."),
		lookups:       s.Counters("kvport_router_dns_lookups_total", "Lookups of DNS names that stand for instances: ok, failed, and those of names with more instances than are used (cut).", "result"),
		fileReads:     s.Counters("kvport_router_config_reloads_total", "Contents of the config file that were new: used (ok) or not (bad).", "result"),
		fileBad:       s.Gauge("kvport_router_config_bad", "1 if the config file cannot be used as it is now, and what it said before counts."),
		registrations: s.Counters("kvport_router_registrations_total", "Registrations of instances by HTTP status.", "code"),
		introduced:    s.Counter("kvport_router_introductions_total", "Requests whose id named both engines, signed."),
		unnamed:       s.Counter("kvport_router_introductions_failed_total", "Requests whose id could not name both engines, since no id can name where one of them takes blocks."),
		foreignIDs:    s.Counter("kvport_router_foreign_ids_total", "Requests whose client's id names two engines, as other routers make them; it was replaced."),
		known:         s.Gauge("kvport_router_registered_instances", "Instances that have said where they take blocks."),
	}
	return m, s.Register(reg)
}

func (m *metrics) setUp(instance string, r role, isUp bool) {
	meter.Mark(m.up.WithLabelValues(instance, r.String()), isUp)
}

func (m *metrics) setBroken(instance string, r role, open bool) {
	meter.Mark(m.broken.WithLabelValues(instance, r.String()), open)
}

// forget drops the series of an instance that is gone.
func (m *metrics) forget(instance string, r role) {
	m.up.DeleteLabelValues(instance, r.String())
	m.broken.DeleteLabelValues(instance, r.String())
}
