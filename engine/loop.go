package engine

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/kvcache"
	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/sample"
	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/meter"
)

// askAgain is how long a request whose match is not known yet waits at most before it is asked about
// again. The host says when asking is worthwhile; this is for answers that got lost.
const askAgain = 100 * time.Millisecond

// askTickets is how often the connector is asked about queued requests that have a ticket (rule LEASE-04).
const askTickets = 500 * time.Millisecond

// loop is the goroutine that runs an engine.
type loop struct {
	e        *Engine
	sched    *sched.Scheduler
	pool     *kvcache.Pool
	ranks    []*connector.KV   // the cache of each rank
	events   <-chan host.Event // nil without a connector
	reports  <-chan host.BlockReport
	news     *news // nil: nobody is told which blocks there are
	metrics  *metrics
	streams  map[connector.RequestID]*stream
	closing  bool
	batch    model.Batch
	kept     time.Time                                  // when the connector was last asked about all queued requests that have a ticket
	saving   uint64                                     // the step whose layers are saved while it is computed
	arriving map[connector.RequestID]connector.Progress // of loads whose layers are verified one by one
	noEarly  atomic.Pointer[time.Time]                  // until then no other load is used before its end
	full     atomic.Bool                                // the batch has no place for a request whose KV arrives
	logits   [][]float32                                // one for each place in the largest batch so far
	sampled  []int32
}

func newLoop(e *Engine, ranks []*connector.KV) *loop {
	groups := ranks[0].Layout().Groups
	cfg := sched.Config{
		BlockTokens: e.cfg.BlockSize, Groups: len(groups),
		MaxBatchedTokens: e.cfg.MaxBatchedTokens, MaxSeqs: e.cfg.MaxSeqs, PrefixCaching: e.cfg.PrefixCaching,
	}
	for _, g := range groups {
		trailing := 0 // all
		if g.Policy == connector.PolicyTrailing {
			trailing = g.Trailing
		}
		cfg.Trailing = append(cfg.Trailing, trailing)
	}
	l := &loop{e: e, pool: kvcache.New(e.cfg.NumBlocks), ranks: ranks, metrics: e.metrics, streams: map[connector.RequestID]*stream{}, arriving: map[connector.RequestID]connector.Progress{}}
	if e.host != nil {
		cfg.Role = e.cfg.Connector.Role
		cfg.FailLoads = e.cfg.Connector.FailurePolicy == host.PolicyFail
		cfg.LayerWise = e.host.LayerWise()
		l.events, l.reports = e.host.Events(), e.reports
	}
	if e.cfg.Events != nil {
		l.news = newNews(e, l.pool)
		cfg.Published, l.pool.Gone = l.news.published, l.news.gone
	}
	l.sched = sched.New(cfg, l.pool)
	return l
}

// run steps until the engine is closed. Without anything to compute it waits: for a request, an
// abort, or an event of the host.
func (l *loop) run() {
	defer close(l.e.done)
	for !l.finished() {
		l.receive()
		l.ask()
		if !l.step() && len(l.sched.Questions()) == 0 && !l.finished() {
			l.wait()
		}
	}
}

// finished reports whether the engine is closing and every request has had its last output.
func (l *loop) finished() bool {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	return l.closing && len(l.e.live) == 0
}

// receive takes in what happened since the last step.
func (l *loop) receive() {
	l.e.mu.Lock()
	inbox := l.e.inbox
	l.e.inbox = nil
	l.e.mu.Unlock()
	for _, f := range inbox {
		f(l)
	}
	reports, room := l.reports, mostAtOnce
	for {
		select {
		case ev, open := <-l.events:
			l.event(ev, open)
		case r := <-reports:
			l.news.report(r)
			if room -= extent(r); room <= 0 {
				reports = nil // the rest waits until after this step: however much a connector reports, steps go on
			}
		default:
			return
		}
	}
}

func (l *loop) wait() {
	var again <-chan time.Time
	later, pause := l.sched.Later(), askTickets
	if len(later) > 0 {
		pause = askAgain
	}
	if len(later) > 0 || len(l.sched.Tickets(true)) > 0 {
		timer := time.NewTimer(pause)
		defer timer.Stop()
		again = timer.C
	}
	select {
	case <-l.e.wake:
	case ev, open := <-l.events:
		l.event(ev, open)
	case r := <-l.reports:
		l.news.report(r)
	case <-again:
		for _, id := range later {
			l.sched.Answered(id)
		}
	}
}

func (l *loop) event(ev host.Event, open bool) {
	if !open {
		l.events = nil
		return
	}
	if ev.Kind == host.Loaded {
		delete(l.arriving, ev.Request)
	}
	switch {
	case ev.Lost && ev.Kind == host.Released:
		l.sched.LostHold(ev.Step, ev.Request)
		return
	case ev.Lost:
		l.noteLoaded(ev.Request, ev.Kind == host.Loaded)
		l.sched.Lost(ev.Step, ev.Request, ev.Kind == host.Loaded)
		return
	}
	switch ev.Kind {
	case host.Loaded:
		l.noteLoaded(ev.Request, len(ev.Failed) > 0)
		l.sched.Loaded(ev.Step, ev.Request, ev.Failed, ev.Replace, ev.Unverified)
	case host.Arriving:
		l.arrives(&ev)
	case host.Saved:
		l.sched.Saved(ev.Step, ev.Request)
	case host.Stored:
		l.sched.Stored(ev.Step, ev.Request)
	case host.Finished:
		l.sched.Finished(ev.Step, ev.Request, ev.Held, ev.Ticket)
	case host.Released:
		l.sched.Released(ev.Step, ev.Request)
	case host.Answered:
		l.sched.Answered(ev.Request)
	}
}

// ask puts the scheduler's questions to the connector. Each takes 200 microseconds at most.
func (l *loop) ask() {
	for _, q := range append(l.sched.Questions(), l.tickets()...) {
		m := l.e.host.Match(q.Query, q.Ticket)
		l.sched.Answer(q.Query.Request, q.Query.Computed, m)
		l.noteTicket(q.Query.Request)
		l.noteOrigin(q.Query.Request, m)
	}
}

// tickets are questions about queued requests that have a ticket: new ones at once, all of them again
// and again.
func (l *loop) tickets() []sched.Question {
	again := time.Since(l.kept) >= askTickets
	if again {
		l.kept = time.Now()
	}
	return l.sched.Tickets(again)
}

// step carries out one step of the schedule. It reports whether anything was computed.
func (l *loop) step() bool {
	chunks, st := l.sched.Schedule()
	l.full.Store(len(chunks) >= l.e.cfg.MaxSeqs)
	l.watchLayers(st)
	l.tell(st) // loads start while the model computes
	if len(chunks) > 0 {
		// Saves start only afterwards, when the blocks are complete, except those that go layer by layer.
		l.tell(l.compute(chunks))
	}
	l.observe() // first, so that a client that has its last output finds the state that it left
	for _, out := range l.sched.Outputs() {
		l.deliver(out)
	}
	l.news.send()
	return len(chunks) > 0
}

// watchLayers arranges that the host is told about each layer of the coming step once it is computed, if
// any of the step's blocks are saved meanwhile.
func (l *loop) watchLayers(st *connector.Step) {
	l.batch.AfterLayer = nil
	if st == nil || len(st.Computing) == 0 {
		return
	}
	l.saving = st.ID
	l.batch.AfterLayer = func(layer int) error {
		l.e.host.Layers(l.saving, layer+1)
		return nil
	}
}

func (l *loop) tell(st *connector.Step) {
	if st != nil {
		l.e.host.Step(st)
	}
}

// compute runs the model over the chunks and samples. If the model fails, the requests of this step
// end with its error and the engine lives on.
func (l *loop) compute(chunks []sched.Chunk) *connector.Step {
	start := time.Now()
	l.sampled = l.sampled[:0]
	chunks, err := l.overlapped(chunks)
	if err != nil {
		if l.batch.AfterLayer != nil {
			l.e.host.GiveUp(l.saving)
		}
		l.e.cfg.Log.Error("the model failed", "error", err, "requests", len(chunks))
		return l.sched.Fail(err)
	}
	for i, c := range chunks {
		var token int32
		if c.Sample {
			token = sample.Sample(l.logits[i], l.streams[c.Request].params, c.Start+len(c.Tokens))
		}
		l.sampled = append(l.sampled, token)
	}
	l.metrics.step.Observe(time.Since(start).Seconds())
	return l.sched.Commit(l.sampled)
}

// fill makes chunks the model's batch.
func (l *loop) fill(chunks []sched.Chunk) {
	l.batch.Chunks = l.batch.Chunks[:0]
	for len(l.logits) < len(chunks) {
		l.logits = append(l.logits, make([]float32, l.e.info.Vocab))
	}
	for i, c := range chunks {
		chunk := model.Chunk{Tokens: c.Tokens, Start: c.Start, Blocks: c.Blocks}
		if c.Sample {
			chunk.Logits = l.logits[i : i+1]
		}
		l.batch.Chunks = append(l.batch.Chunks, chunk)
	}
}

func (l *loop) forward() error {
	if m, sharded := l.e.cfg.Model.(model.Sharded); sharded {
		return m.ForwardRanks(&l.batch, l.ranks)
	}
	return l.e.cfg.Model.Forward(&l.batch, l.ranks[0])
}

// add takes in a submitted request.
func (l *loop) add(st *stream, seq sched.Request) {
	l.streams[st.id], st.asked = st, &seq
	if err := l.sched.Add(seq); err != nil {
		l.deliver(sched.Output{Request: st.id, Reason: connector.ReasonError, Err: err})
		return
	}
	if st.cause() != nil {
		l.abort(st)
	}
}

// abort ends a request whose context is done.
func (l *loop) abort(st *stream) {
	switch {
	case l.streams[st.id] != st: // over, or not taken in yet
	case errors.Is(st.cause(), ErrStop):
		l.sched.Abort(st.id, connector.ReasonStop, nil)
	default:
		l.sched.Abort(st.id, connector.ReasonAbort, nil)
	}
}

// abortAll ends what is left when the time to drain is over.
func (l *loop) abortAll() {
	for id := range l.streams {
		l.sched.Abort(id, connector.ReasonError, ErrClosed)
	}
}

// deliver passes a request's news on to its client.
func (l *loop) deliver(o sched.Output) {
	st := l.streams[o.Request]
	usage := Usage{Prompt: st.prompt, Generated: o.Generated, Local: o.Local, External: o.External, Handoff: l.handoff(st, o)}
	l.metrics.output(st, o)
	if o.Generated == len(o.Tokens) && o.Generated > 0 {
		l.news.reused(st.asked, o.Local)
	}
	if o.Reason != 0 { // first, so that a client that has the last output can use the id again
		st.unwatch()
		delete(l.streams, o.Request)
		l.e.mu.Lock()
		delete(l.e.live, o.Request)
		l.e.mu.Unlock()
	}
	st.send(Output{Tokens: o.Tokens, Reason: o.Reason, Err: o.Err, Ticket: o.Ticket, Usage: usage, Cached: l.cached(st, o)})
	if o.Reason != 0 {
		close(st.out)
	}
}

// observe makes the state of the step visible.
func (l *loop) observe() {
	h := Health{Running: l.sched.Running(), Waiting: l.sched.Waiting(), Blocks: blocks(l.pool)}
	l.metrics.state(h, l.sched.Stats())
	l.e.mu.Lock()
	l.e.health = h
	l.e.mu.Unlock()
}

// stream is a request's way back to its client.
type stream struct {
	id      connector.RequestID
	params  sample.Params
	prompt  int       // length
	since   time.Time // of Submit
	last    time.Time // of the last token, zero before the first
	out     chan Output
	cause   func() error // why its context is done, nil while it is not
	unwatch func() bool
	asked   *sched.Request // to be used by the loop, as what follows
	brought brought
	query   *query // of a cache query
	awaited bool   // its prompt counts as waiting
}

// send never blocks: what the client has not read yet is taken back and sent again with the news.
// The loop is the only sender, so the channel's one place is free then.
func (st *stream) send(o Output) {
	select {
	case unread := <-st.out:
		o.Tokens = append(unread.Tokens, o.Tokens...)
	default:
	}
	st.out <- o
}

// Handoff says what became of the ticket that a request brought. The zero value: it brought none.
type Handoff struct {
	Result string // one of the Handoff constants
	Reason string // why it is not HandoffLoaded, in one word; empty where there is nothing to explain
}

// The results of a hand-off.
const (
	HandoffLoaded  = "loaded"  // all that the ticket promised and that was not here already
	HandoffPartial = "partial" // some of it, the rest was computed; reason load_failed or gone
	HandoffLocal   = "local"   // nothing was loaded since all of it was here already
	HandoffRefused = "refused" // the ticket was not accepted; reason key, foreign_key, model, block_size, shape, role, replayed, gone, peer, prompt, unsupported, other
	HandoffNone    = "none"    // the ticket was accepted and nothing could be loaded by it; reason load_failed or gone
)

// brought is what is known of a request's ticket.
type brought struct {
	any      bool   // there is one
	promised int    // tokens that it speaks of; 0 until the host has looked at it
	refused  string // why the host does not use it
	failed   bool   // a load failed, or a part of one
	forgot   bool   // the host has forgotten it since, because a load by it brought nothing
}

// noteTicket remembers what the host made of a request's ticket.
func (l *loop) noteTicket(id connector.RequestID) {
	if st := l.streams[id]; st != nil && st.brought.any && st.brought.promised == 0 {
		st.brought.promised, st.brought.refused = l.e.host.Brought(id)
	}
}

// noteLoaded remembers that a load failed, or a part of one. A lost load, whose blocks nobody can use again, has failed.
func (l *loop) noteLoaded(id connector.RequestID, failed bool) {
	if st := l.streams[id]; st != nil && failed {
		st.brought.failed = true
		if st.brought.promised > 0 {
			_, refused := l.e.host.Brought(id)
			st.brought.forgot = refused != ""
		}
	}
}

// handoff says what became of a request's ticket so far. From the first token on it does not change.
func (l *loop) handoff(st *stream, o sched.Output) Handoff {
	b := &st.brought
	lost := "gone"
	if b.failed {
		lost = "load_failed"
	}
	size := l.e.cfg.BlockSize
	want := max(0, min(b.promised, st.prompt-1)) / size * size
	here := o.Local+o.External >= want
	switch {
	case !b.any:
		return Handoff{}
	case l.e.host == nil:
		return Handoff{HandoffRefused, "unsupported"}
	case !l.e.cfg.Connector.Role.Loads():
		return Handoff{HandoffRefused, "role"}
	case b.refused != "":
		return Handoff{HandoffRefused, b.refused}
	case b.forgot: // what was loaded is somebody else's
		return Handoff{HandoffNone, lost}
	case o.External > 0 && here:
		return Handoff{Result: HandoffLoaded}
	case o.External > 0:
		return Handoff{HandoffPartial, lost}
	case here && o.Local > 0:
		return Handoff{Result: HandoffLocal}
	}
	return Handoff{HandoffNone, lost}
}

// metrics are the engine's own figures; the host has those of the connector.
type metrics struct {
	prompt, requests              *prometheus.CounterVec
	generated, preempted, badLoad prometheus.Counter
	overlapped                    prometheus.Counter
	blocks, load                  *prometheus.GaugeVec
	awaited                       prometheus.Gauge
	first, next, step             prometheus.Histogram
	seen                          sched.Stats
	set                           *meter.Set
}

// newMetrics registers the figures; it fails if another engine has registered the same ones.
func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	s, seconds := meter.New(), prometheus.ExponentialBuckets(0.0005, 2, 18)
	m := &metrics{
		set:        s,
		prompt:     s.Counters("kvport_prompt_tokens_total", "Prompt tokens of requests that got a first token, by where their KV came from.", "source"),
		requests:   s.Counters("kvport_requests_total", "Requests that ended, by reason.", "reason"),
		generated:  s.Counter("kvport_generated_tokens_total", "Tokens generated."),
		preempted:  s.Counter("kvport_preemptions_total", "Requests that lost their blocks and were recomputed."),
		badLoad:    s.Counter("kvport_failed_loads_total", "Loads of which at least one block had to be recomputed."),
		overlapped: s.Counter("kvport_overlapped_chunks_total", "Chunks of prompts that were computed while earlier KV of their request was loaded layer by layer, and that count."),
		blocks:     s.Gauges("kvport_blocks", "Blocks of the cache, by state.", "state"),
		load:       s.Gauges("kvport_requests", "Requests in the engine, by state.", "state"),
		awaited:    s.Gauge("kvport_prompt_tokens_waiting", "Tokens of prompts whose first token has not come yet, wherever their KV will come from."),
		first:      s.Histogram("kvport_time_to_first_token_seconds", "From Submit to the first token.", seconds),
		next:       s.Histogram("kvport_time_per_token_seconds", "Between two tokens of a request.", seconds),
		step:       s.Histogram("kvport_step_seconds", "Computing and sampling of one step.", seconds),
	}
	for _, source := range []string{"local_compute", "local_cache", "external"} {
		m.prompt.WithLabelValues(source) // shown as 0 from the start
	}
	if err := s.Register(reg); err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return m, nil
}

// await counts a request until its first output, of whatever kind.
func (m *metrics) await(st *stream) {
	if st.query == nil {
		st.awaited = true
		m.awaited.Add(float64(st.prompt))
	}
}

// output counts a request's news.
func (m *metrics) output(st *stream, o sched.Output) {
	if st.awaited {
		st.awaited = false
		m.awaited.Sub(float64(st.prompt))
	}
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
	if o.Reason != 0 && st.query == nil {
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
	m.overlapped.Add(float64(s.Overlapped - m.seen.Overlapped))
	m.seen = s
}
