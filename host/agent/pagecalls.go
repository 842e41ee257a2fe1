package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

const (
	// pagePatience is for how long the host still waits for an answer that nobody waits for any more.
	pagePatience = time.Second
	// A store that needs to be asked again is, after firstPause, doubled each time.
	firstPause, longestPause = 2 * time.Millisecond, 50 * time.Millisecond
	// knownPatience is how long a put waits to hear what need not be stored again.
	knownPatience = 100 * time.Millisecond
)

// The results of pages.
const (
	pageDone       = kvportv1.AgentPageResult_AGENT_PAGE_RESULT_DONE
	pageFailed     = kvportv1.AgentPageResult_AGENT_PAGE_RESULT_FAILED
	pageLate       = kvportv1.AgentPageResult_AGENT_PAGE_RESULT_LATE
	pageMemoryGone = kvportv1.AgentPageResult_AGENT_PAGE_RESULT_MEMORY
)

// pageMetrics count what becomes of pages, since the agent's start.
type pageMetrics struct {
	pages   *prometheus.CounterVec // call, result
	copied  *prometheus.CounterVec // call
	seconds *prometheus.HistogramVec
	lost    prometheus.Gauge
}

func newPageMetrics(r prometheus.Registerer) (*pageMetrics, error) {
	m := &pageMetrics{
		pages: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvport_agent_pages_total",
			Help: "Pages of calls of an engine that stores pages, by what became of them.",
		}, []string{"call", "result"}),
		copied: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvport_agent_pages_copied_bytes_total",
			Help: "Bytes copied between the engine's memory and the agent's.",
		}, []string{"call"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "kvport_agent_pages_seconds",
			Help:    "Time from a call of an engine that stores pages to its answer.",
			Buckets: prometheus.ExponentialBuckets(1e-4, 4, 10),
		}, []string{"call"}),
		lost: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "kvport_agent_pages_lost",
			Help: "Pages of the agent's memory that are not used again, since somebody that a dead plugin left behind may write them.",
		}),
	}
	return m, errors.Join(r.Register(m.pages), r.Register(m.copied), r.Register(m.seconds), r.Register(m.lost))
}

// storesPages says whether an engine is attached that stores pages. The caller holds mu.
func (s *server) storesPages() bool {
	seat := s.seats[0]
	return seat != nil && seat.attach.pages != nil
}

// attachPages takes on an engine that stores pages. It is answered by the keeper, when the connector is open.
func (s *server) attachPages(c *conn, id uint64, m *kvportv1.AgentAttachPages) error {
	a, err := wire.PagesAttachFromProto(m)
	if err != nil {
		return err
	}
	if err := checkHashes(a.Hashes, &s.cfg.Transfer.Settings); err != nil {
		return err
	}
	if err := s.reserve(); err != nil {
		return err
	}
	defer s.unreserve()
	p, layout, err := newPageStore(s, a)
	if err != nil {
		return err
	}
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		return errors.Join(err, p.Close())
	}
	brought := &rankAttach{
		world: 1, shapeText: a.ShapeText, layout: layout, region: p.region, memory: p, engine: a.Engine, hashes: a.Hashes, pages: p,
	}
	brought.model, brought.shape = pageFingerprints(a)
	s.mu.Lock()
	if s.served() {
		err = errServed
	}
	if err == nil && s.pages == nil {
		s.pages, err = newPageMetrics(s.ledger)
	}
	if err == nil {
		err = s.meet(c)
	}
	if err != nil {
		s.mu.Unlock()
		return errors.Join(err, p.Close())
	}
	c.engine, c.pages = a.Engine, p
	s.sit(c, id, brought)
	sent, err := s.greet(c, id, false)
	s.mu.Unlock()
	s.log.Info("attached", "pid", c.pid, "side", "pages", "engine", a.Engine, "page_bytes", a.Bytes(), "pages", a.Pages)
	c.await(sent)
	return err
}

// served says whether a process is attached. The caller holds mu.
func (s *server) served() bool { return s.sched != nil || len(s.seats) > 0 }

// reserve keeps the agent for one engine while its memory for pages is made, so that others cost no memory before they are refused.
func (s *server) reserve() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.served() || s.reserved {
		return errServed
	}
	s.reserved = true
	return nil
}

func (s *server) unreserve() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reserved = false
}

// serves refuses a connector that cannot keep pages. A nil store has no wishes.
func (p *pageStore) serves(info connector.Info) error {
	switch {
	case p == nil:
		return nil
	case info.Capabilities&connector.CanHold != 0:
		return fmt.Errorf("%s keeps blocks with an engine and stores none, so it cannot serve an engine that stores pages: %w", info.Name, connector.ErrIncompatible)
	case info.Lossy:
		return fmt.Errorf("%s may load other bytes than were saved, and an engine that stores pages shares them among requests: %w", info.Name, connector.ErrIncompatible)
	}
	return nil
}

// registerPages takes a piece of the engine's memory.
func (c *conn) registerPages(id uint64, m *kvportv1.AgentPagesRegion, file *os.File) error {
	if file == nil {
		return fmt.Errorf("pages_region: the descriptor did not come beside the frame: %w", wire.ErrMalformed)
	}
	sealed, err := c.pages.register(int(m.GetRegion()), m.GetSize(), file)
	if err != nil {
		return err
	}
	c.pages.s.log.Info("memory of an engine that stores pages", "region", m.GetRegion(), "bytes", m.GetSize(), "sealed", sealed,
		"how", "read and written by calls, each page is copied once")
	c.send(&kvportv1.AgentAnswer{Id: id, Result: &kvportv1.AgentAnswer_PagesMemory{PagesMemory: &kvportv1.AgentPagesMemory{Sealed: sealed}}})
	return nil
}

// pagesCall begins a call of an engine that stores pages. An error ends the connection.
func (c *conn) pagesCall(call *kvportv1.AgentCall) error {
	p, id := c.pages, call.GetId()
	switch m := call.GetCall().(type) {
	case *kvportv1.AgentCall_PagesExists:
		keys, err := wire.PageKeysFromProto("pages_exists", m.PagesExists.GetKeys())
		if err != nil {
			return err
		}
		answer := func(n int, late bool) {
			c.send(&kvportv1.AgentAnswer{Id: id, Result: &kvportv1.AgentAnswer_PagesFound{PagesFound: &kvportv1.AgentPagesFound{Pages: uint32(n), Late: late}}})
		}
		if !p.begin(id, wire.PagesDeadline(m.PagesExists), func(ctx context.Context) { answer(p.exists(ctx, keys)) }) {
			answer(0, true)
		}
		return nil
	case *kvportv1.AgentCall_PagesPut:
		return c.pagesMove(id, "put", m.PagesPut, p.put)
	case *kvportv1.AgentCall_PagesGet:
		return c.pagesMove(id, "get", m.PagesGet, p.get)
	case *kvportv1.AgentCall_PagesAbort:
		found := p.abort(m.PagesAbort.GetCall())
		c.send(&kvportv1.AgentAnswer{Id: id, Result: &kvportv1.AgentAnswer_PagesAborted{PagesAborted: &kvportv1.AgentPagesAborted{Found: found}}})
		return nil
	}
	return fmt.Errorf("an engine that stores pages does not call %T: %w", call.GetCall(), wire.ErrMalformed)
}

// wirePages is a put or a get as it came.
type wirePages interface {
	GetKeys() []byte
	GetRegion() uint32
	GetOffsets() []uint64
	GetDeadlineMs() uint32
}

// pagesMove begins a put or a get.
func (c *conn) pagesMove(id uint64, name string, m wirePages, run func(context.Context, *pageTask)) error {
	p := c.pages
	move, err := wire.PagesMoveFromProto("pages_"+name, m, len(p.Lengths))
	if err != nil {
		return err
	}
	p.mu.Lock()
	memory := p.memory[move.Region]
	p.mu.Unlock()
	if memory == nil {
		return fmt.Errorf("pages_%s.region %d is not there: %w", name, move.Region, wire.ErrMalformed)
	}
	for i, o := range move.Offsets {
		if length := p.Lengths[i%len(p.Lengths)]; o > memory.size-length {
			return fmt.Errorf("pages_%s.offsets[%d]: %d bytes from %d on, region %d has %d: %w", name, i, length, o, move.Region, memory.size, wire.ErrMalformed)
		}
	}
	t := &pageTask{PagesMove: move, memory: memory, results: slices.Repeat([]kvportv1.AgentPageResult{pageLate}, len(move.Keys))}
	began := time.Now()
	answer := func() {
		p.s.pages.seconds.WithLabelValues(name).Observe(time.Since(began).Seconds())
		for _, r := range t.results {
			p.s.pages.pages.WithLabelValues(name, resultName(r)).Inc()
		}
		c.send(&kvportv1.AgentAnswer{Id: id, Result: &kvportv1.AgentAnswer_PagesDone{PagesDone: &kvportv1.AgentPagesDone{Results: t.results}}})
	}
	begun := p.begin(id, move.Deadline, func(ctx context.Context) {
		run(ctx, t)
		answer()
	})
	if !begun {
		answer()
	}
	return nil
}

func resultName(r kvportv1.AgentPageResult) string {
	if r == pageDone {
		return "done"
	}
	if r == pageLate {
		return "late"
	}
	if r == pageMemoryGone {
		return "memory"
	}
	return "failed"
}

// pageTask is a put or a get at work.
type pageTask struct {
	*wire.PagesMove
	memory  *pageMemory
	results []kvportv1.AgentPageResult
}

// offsets are those of one page.
func (t *pageTask) offsets(page, segments int) []int64 {
	return t.Offsets[page*segments : (page+1)*segments]
}

// exists counts the leading pages that the connector has, up to the first that is hidden (rule PAGES-07).
func (p *pageStore) exists(ctx context.Context, keys []connector.BlockKey) (n int, late bool) {
	began := time.Now()
	n, late = p.ask(ctx, keys)
	n = min(n, p.doubt.before(keys))
	p.s.pages.seconds.WithLabelValues("exists").Observe(time.Since(began).Seconds())
	p.s.pages.pages.WithLabelValues("exists", "done").Add(float64(n))
	rest := "failed"
	if late {
		rest = "late"
	}
	p.s.pages.pages.WithLabelValues("exists", rest).Add(float64(len(keys) - n))
	return n, late
}

func (p *pageStore) ask(ctx context.Context, keys []connector.BlockKey) (n int, late bool) {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		m, ok := p.probe(ctx, keys)
		switch {
		case !ok:
			return 0, true
		case !m.Later:
			return min(m.Tokens/p.Tokens, len(keys)), false // the question has one token more than its pages
		}
		select {
		case <-ctx.Done():
			return 0, true
		case <-time.After(pause):
		}
	}
}

// probe asks the connector once. false: there is no answer in time. An answer that nobody waits for any more
// is not awaited longer than pagePatience; there are never more such questions than pageCalls.
func (p *pageStore) probe(ctx context.Context, keys []connector.BlockKey) (connector.Match, bool) {
	p.s.mu.Lock()
	o := p.s.session
	p.s.mu.Unlock()
	if o == nil || o.pages != p {
		return connector.Match{}, true
	}
	select {
	case p.asking <- struct{}{}:
	case <-ctx.Done():
		return connector.Match{}, false
	}
	q := connector.Query{Tokens: len(keys)*p.Tokens + 1, Keys: slices.Clone(keys)}
	o.keys.query(&q)
	answer := make(chan connector.Match, 1)
	asking, stop := context.WithCancel(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() { time.AfterFunc(pagePatience, stop) })
	p.s.work.Go(func() {
		defer func() { <-p.asking }()
		defer stop()
		answer <- o.host.Probe(asking, q)
	})
	select {
	case m := <-answer:
		return m, true
	case <-ctx.Done():
		return connector.Match{}, false
	}
}

// put stores pages. Leading ones that the connector has are not stored again (rule PAGES-06).
func (p *pageStore) put(ctx context.Context, t *pageTask) {
	at := p.known(ctx, t.Keys)
	for i := range at {
		t.results[i] = pageDone
	}
	for at < len(t.Keys) && ctx.Err() == nil {
		blocks := p.puts.take(ctx, len(t.Keys)-at)
		n := 0
		for n < len(blocks) && ctx.Err() == nil {
			if t.memory.read(p.slot(blocks[n]), t.offsets(at+n, len(p.Lengths)), p.Lengths) != nil {
				break
			}
			n++
		}
		p.puts.give(blocks[n:])
		if n == 0 {
			break
		}
		p.s.pages.copied.WithLabelValues("put").Add(float64(int64(n) * p.Bytes()))
		keys := t.Keys[at : at+n]
		m := p.start(false, keys, blocks[:n])
		if !p.wait(ctx, m) {
			break
		}
		p.judge(m, t.results[at:])
		m.release()
		at += n
	}
	t.gone()
}

// known is how many leading pages need not be stored again.
func (p *pageStore) known(ctx context.Context, keys []connector.BlockKey) int {
	if !p.doubt.certain(keys) {
		return 0
	}
	ctx, cancel := context.WithTimeout(ctx, knownPatience)
	defer cancel()
	n, _ := p.ask(ctx, keys)
	return n
}

// gone gives the reason of what is not done, if the engine's memory is the reason.
func (t *pageTask) gone() {
	if t.memory.whole() {
		return
	}
	for i, r := range t.results {
		if r == pageLate {
			t.results[i] = pageMemoryGone
		}
	}
}

// judge gives the results of a move that is over.
func (p *pageStore) judge(m *pageMove, results []kvportv1.AgentPageResult) {
	for i, ok := range m.right {
		results[i] = pageFailed
		if ok {
			results[i] = pageDone
		}
	}
	p.learn(m)
}

// get loads pages. What was verified is copied to the engine's memory, unless the call is over by then (rules
// PAGES-01 and PAGES-02).
func (p *pageStore) get(ctx context.Context, t *pageTask) {
	for at := 0; at < len(t.Keys) && ctx.Err() == nil; {
		blocks := p.gets.take(ctx, len(t.Keys)-at)
		if len(blocks) == 0 {
			break
		}
		keys := t.Keys[at : at+len(blocks)]
		m := p.start(true, keys, blocks)
		if !p.wait(ctx, m) {
			break
		}
		results := t.results[at : at+len(keys)]
		p.judge(m, results)
		for i, ok := range m.right {
			if ok {
				results[i] = p.deliver(ctx, t, at+i, m.blocks[i])
			}
		}
		m.release()
		at += len(keys)
	}
	t.gone()
}

// deliver copies a page that was verified to the engine's memory.
func (p *pageStore) deliver(ctx context.Context, t *pageTask, page int, b connector.BlockID) kvportv1.AgentPageResult {
	if ctx.Err() != nil {
		return pageLate
	}
	if t.memory.write(p.slot(b), t.offsets(page, len(p.Lengths)), p.Lengths) != nil {
		return pageMemoryGone
	}
	p.s.pages.copied.WithLabelValues("get").Add(float64(p.Bytes()))
	return pageDone
}
