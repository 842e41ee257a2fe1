package multiconnector

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

// HoldTTL is how long a child's hold lasts that names no time.
const HoldTTL = 30 * time.Second

// maxRounds bounds how often the children are asked for one Match: once for each time that the prefix
// goes on with another child.
const maxRounds = 32

// scheduler is the composite's scheduler side. It has every optional method; Capabilities says which
// the children have.
type scheduler struct {
	*Multi
	lanes   []*lane
	caps    connector.Capability
	unit    int // tokens in which parts from several children may meet
	block   int // tokens of the smallest block, which each key stands for
	groups  []connector.Group
	ledger  ledger
	leases  leases
	events  eventQueue
	pollers []*statsPoller
	life    context.Context //nolint:containedctx // ends with Close
	work    sync.WaitGroup
	close   func() error // acts once
}

// Scheduler joins the scheduler sides of all children, in their order, for a cache of the given
// groups. The result owns them; closed, unless nil, is called after they were closed.
func (m *Multi) Scheduler(sides []connector.Scheduler, groups []connector.Group, closed func() error) connector.Scheduler {
	life, stop := context.WithCancel(context.Background())
	s := &scheduler{Multi: m, unit: 1, block: math.MaxInt32, groups: groups, life: life, ledger: newLedger(), leases: newLeases(sides), events: newEventQueue()}
	for _, g := range groups {
		s.unit = s.unit / gcd(s.unit, g.BlockTokens) * g.BlockTokens
		s.block = min(s.block, g.BlockTokens)
	}
	for i, side := range sides {
		s.lanes = append(s.lanes, newLane(life, m, &m.children[i], side))
		s.caps |= connector.CapabilitiesOf(side)
		if holder, ok := connector.As[connector.Holder](side); ok {
			s.beside(&s.work, func() { s.watchHolds(i, holder) })
		}
		if source, ok := connector.As[connector.StatsSource](side); ok {
			s.pollers = append(s.pollers, &statsPoller{child: &m.children[i], place: i, source: source, busy: make(chan struct{}, 1)})
		}
	}
	if len(m.info.Stats) == 0 {
		s.caps &^= connector.CanStat
	}
	s.close = sync.OnceValue(func() error {
		stop()
		s.work.Wait()
		return m.closeAll(len(s.lanes), func(i int) error { return s.lanes[i].close() }, closed)
	})
	return s
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// Capabilities implements connector.Partial.
func (s *scheduler) Capabilities() connector.Capability { return s.caps }

// search is one query on its way through the children.
type search struct {
	q       connector.Query
	end     int // tokens from 0 that the segments cover
	groups  uint32
	async   bool
	known   []answer // by child
	later   []bool
	silent  []bool // no answer that could be used
	segs    []segment
	tickets []connector.Ticket
	named   []int // by child: leading tokens that the ticket says are in its shared store
}

// answer is what a child has of a prefix: all tokens between from and end.
type answer struct {
	from, end int
	groups    uint32
	async     bool
}

// Match implements connector.Scheduler. All children are asked at once, except those whose Match fetches (see
// inTurn), and those that may go on where the prefix found so far ends are asked again, until nobody can.
func (s *scheduler) Match(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
	list := make([]*search, len(qs))
	for i := range qs {
		list[i] = s.newSearch(&qs[i])
	}
	for range maxRounds {
		if !s.round(ctx, list) {
			break
		}
	}
	out := make([]connector.Match, len(qs))
	for i, f := range list {
		out[i] = connector.Match{Tokens: f.end - f.q.Computed, Groups: f.groups, Async: f.async}
		for _, later := range f.later {
			out[i].Later = out[i].Later || later && f.end < f.q.Tokens-f.q.Tokens%s.unit
		}
		if f.q.Request != "" {
			s.routes.set(f.q.Request, f.segs, f.silent)
		}
	}
	return out, nil
}

func (s *scheduler) newSearch(q *connector.Query) *search {
	f := &search{
		q: *q, end: q.Computed, known: make([]answer, len(s.lanes)), later: make([]bool, len(s.lanes)),
		silent: make([]bool, len(s.lanes)), tickets: make([]connector.Ticket, len(s.lanes)), named: s.namedBy(q.Ticket),
	}
	for i := range s.lanes {
		f.known[i] = answer{from: -1}
		f.named[i] -= f.named[i] % s.unit
		f.tickets[i] = s.ticketOf(i, q.Ticket)
	}
	return f
}

// round asks every child whose turn it is and reports whether there was one.
func (s *scheduler) round(ctx context.Context, list []*search) (asked bool) {
	asks := make([][]*search, len(s.lanes))
	for _, f := range list {
		for _, i := range s.inTurn(f) {
			asks[i] = append(asks[i], f)
			asked = true
		}
	}
	answers := make([][]heard, len(s.lanes))
	queries := make([][]connector.Query, len(s.lanes))
	var lanes []int
	for i, fs := range asks {
		for _, f := range fs {
			q := f.q
			q.Computed, q.Ticket, q.Keys = f.end, f.tickets[i], s.keysFor(i, f)
			queries[i] = append(queries[i], q)
		}
		if len(fs) > 0 {
			lanes = append(lanes, i)
		}
	}
	s.together(len(lanes), func(k int) { answers[lanes[k]] = s.lanes[lanes[k]].match(ctx, queries[lanes[k]]) })
	for i, fs := range asks {
		for k, f := range fs {
			m := answers[i][k]
			f.known[i] = answer{from: f.end, end: f.end + m.Tokens, groups: m.Groups, async: m.Async}
			f.later[i], f.silent[i] = m.Later, m.silent
			s.see(f, i)
		}
	}
	for _, f := range list {
		f.extend()
	}
	return asked
}

// inTurn lists the children that are asked next: all at once those that may have more and have nothing sent
// by being asked. Only when no such child is left, the others come, one at a time: each is asked for what
// nobody before it has.
func (s *scheduler) inTurn(f *search) (children []int) {
	last := -1
	for i := range s.lanes {
		switch {
		case !s.worthAsking(f, i):
		case !s.children[i].fetches():
			children = append(children, i)
		case last < 0:
			last = i
		}
	}
	if len(children) == 0 && last >= 0 {
		return []int{last}
	}
	return children
}

// keysFor are the keys that a child is asked for. An offer for a ticket may end with the prompt, and
// the host leaves out its last token then: a partial block, which a child that keeps no blocks cannot
// load. Such a child is not asked for the block.
func (s *scheduler) keysFor(child int, f *search) []connector.BlockKey {
	keys := f.q.Keys
	if f.q.Ticket != nil && !s.children[child].keeps() && len(keys)*s.block >= f.q.Tokens {
		return keys[:min(len(keys), (f.q.Tokens-1)/s.block)]
	}
	return keys
}

// worthAsking says that a child may have more of a prefix than is known.
func (s *scheduler) worthAsking(f *search, child int) bool {
	switch {
	case !s.children[child].Role.Loads(), f.whole(), f.end%s.unit != 0:
		return false
	case f.q.Reshaped > 0 && (!s.children[child].reshapes() || f.tickets[child] == nil || len(f.segs) > 0):
		return false // one child brings all of it: what is cut comes from one engine
	case len(f.q.Keys) == 0 && f.tickets[child] == nil:
		return false
	}
	return f.known[child].from < 0 || f.known[child].end < f.end && f.known[child].from < f.end
}

// whole reports whether the prefix is all that an engine loads: it computes the last token of a prompt itself.
func (f *search) whole() bool { return f.end >= f.q.Tokens-1 }

// extend lengthens the prefix by what is known.
func (f *search) extend() {
	for child, end := f.best(); end > f.end && (f.q.Reshaped == 0 || len(f.segs) == 0); child, end = f.best() {
		a := &f.known[child]
		f.segs = append(f.segs, segment{child, end})
		f.end, f.groups, f.async = end, a.groups, f.async || a.async
	}
}

// best is the child that the prefix goes on with, and up to where: a shared store as far as the ticket names it, else
// the first child that can. A child is not chosen for what is never loaded: it would not hear that nobody comes for the rest.
func (f *search) best() (child, end int) {
	if f.whole() {
		return 0, f.end
	}
	for i := range f.known {
		if end = min(f.reach(i), f.named[i]); end > f.end {
			return i, end
		}
	}
	for i := range f.known {
		if end = f.reach(i); end > f.end {
			return i, end
		}
	}
	return 0, f.end
}

// reach is where the prefix ends if it goes on with a child; 0 if it cannot.
func (f *search) reach(child int) int {
	a := &f.known[child]
	if a.from < 0 || a.from > f.end || len(f.segs) > 0 && a.groups != f.groups {
		return 0
	}
	return a.end
}

// see remembers what a shared store has answered that it has, for tickets.
func (s *scheduler) see(f *search, child int) {
	a, c := &f.known[child], &s.children[child]
	if f.q.Request == "" || a.from < 0 || !c.isSharedStore() {
		return
	}
	if len(s.groups) != 1 {
		return // keys and blocks of several groups do not go one to one
	}
	first, last := a.from/s.unit, min(max(a.from, a.end)/s.unit, len(f.q.Keys))
	keys := f.q.Keys[min(first, last):last]
	s.stored.add(child, keys)
}

// Reset implements connector.Resetter. It is true only if every child has forgotten everything.
func (s *scheduler) Reset(ctx context.Context) (emptied bool, err error) {
	emptied = true
	var errs []error
	for i, l := range s.lanes {
		resetter, can := connector.As[connector.Resetter](l.side)
		if !can {
			emptied = false
			continue
		}
		one, err := try(ctx, l, untilDeadline(ctx), resetter.Reset)
		emptied = err == nil && one && emptied
		errs = append(errs, s.children[i].named(err))
	}
	s.routes.clear()
	s.stored.clear()
	return emptied, errors.Join(errs...)
}

// untilDeadline is the patience for calls that must not be given up early.
func untilDeadline(ctx context.Context) time.Duration {
	if d, ok := ctx.Deadline(); ok {
		return time.Until(d)
	}
	return time.Hour
}

// Close implements connector.Scheduler.
func (s *scheduler) Close() error { return s.close() }

// maxRoutes bounds what is remembered of requests: beyond it all is forgotten. A route avoids
// asking children that cannot answer; without one, every child is asked in order.
const maxRoutes = 1 << 14

// route says which child has which piece of one request's prefix, by the last Match.
type route []segment

// segment is a piece of a prefix that one child has: up to end, in tokens from 0.
type segment struct {
	child, end int
}

// routes are what the scheduler side tells the workers. Both are in one process.
type routes struct {
	mu      sync.Mutex
	request map[connector.RequestID]matched
}

// matched is what came of a request's last Match: where what is whose, and, by child, who gave no answer.
type matched struct {
	to     route
	silent []bool
}

func (r *routes) set(id connector.RequestID, to route, silent []bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, known := r.request[id]; !known && len(r.request) >= maxRoutes {
		clear(r.request)
	}
	r.request[id] = matched{to, silent}
}

func (r *routes) get(id connector.RequestID) route {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.request[id].to
}

// Piece is a part of a prompt that one child has: up to token End, counted from 0.
type Piece struct {
	Child, End int
}

// Found says which child has which part of a live request's prompt, in order, by the last Match; and, by child, whether
// it was asked and gave no answer that could be used. silent is nil for a request that is not known, and must not be
// changed.
func (m *Multi) Found(request connector.RequestID) (pieces []Piece, silent []bool) {
	m.routes.mu.Lock()
	defer m.routes.mu.Unlock()
	last := m.routes.request[request]
	for _, s := range last.to {
		pieces = append(pieces, Piece{s.child, s.end})
	}
	return pieces, last.silent
}

func (r *routes) forget(id connector.RequestID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.request, id)
}

func (r *routes) clear() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.request)
}

// first is the child that a block ending at token end is routed to; ok is false without a route.
func (r route) first(end int) (child int, ok bool) {
	for _, s := range r {
		if end <= s.end {
			return s.child, true
		}
	}
	return 0, false
}

// maxSeen is how many keys at least are remembered of what children have, those that were added last, and half of how
// many at most.
const maxSeen = 1 << 16

// seen is what shared stores were seen to have, or were sent.
type seen struct {
	mu        sync.Mutex
	keys, old map[connector.BlockKey]uint32 // the children, as bits: what was added last, and before that
}

func (s *seen) add(child int, keys []connector.BlockKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range keys {
		if s.keys == nil || len(s.keys) >= maxSeen {
			s.keys, s.old = map[connector.BlockKey]uint32{}, s.keys
		}
		s.keys[k] |= s.old[k] | 1<<child
		delete(s.old, k)
	}
}

// of is the children that have a block, as bits. The caller holds mu.
func (s *seen) of(k connector.BlockKey) uint32 { return s.keys[k] | s.old[k] }

// lost forgets that a child has some blocks: it failed to load them.
func (s *seen) lost(child int, blocks []connector.Block) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range blocks {
		s.forget(child, b.Key)
	}
}

// forget forgets one block. The caller holds mu.
func (s *seen) forget(child int, k connector.BlockKey) {
	for _, keys := range []map[connector.BlockKey]uint32{s.keys, s.old} {
		if keys[k] != 0 {
			keys[k] &^= 1 << child
		}
	}
}

// prefix counts the leading blocks that a child has.
func (s *seen) prefix(child int, blocks []connector.Block) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n < len(blocks) && s.of(blocks[n].Key)&(1<<child) != 0 {
		n++
	}
	return n
}

func (s *seen) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.keys)
	clear(s.old)
}

// errSlow says that a child has not answered in time. Its answer is not waited for any more.
var errSlow = errors.New("no answer in time")

// patiencePerKey is what a query's keys add to a child's patience.
const patiencePerKey = 20 * time.Microsecond

// maxLaters bounds the requests for which a lane remembers when Later began.
const maxLaters = 1 << 12

// lane makes the calls of one child's scheduler side, one at a time. A call that takes longer than
// the child's patience goes on alone; until it has returned the child counts as slow, and nobody
// waits for it.
type lane struct {
	*Multi
	child *Child
	side  connector.Scheduler
	life  context.Context //nolint:containedctx // of calls that nobody waits for any more
	turn  chan struct{}   // has a token unless a call runs
	late  atomic.Int64    // when the call that runs becomes slow, in Unix nanoseconds; 0: none runs
	work  sync.WaitGroup

	mu     sync.Mutex
	laters map[connector.RequestID]time.Time // when a child began to say Later
}

func newLane(life context.Context, m *Multi, child *Child, side connector.Scheduler) *lane {
	l := &lane{Multi: m, child: child, side: side, life: life, turn: make(chan struct{}, 1), laters: map[connector.RequestID]time.Time{}}
	l.turn <- struct{}{}
	return l
}

// try makes a call of the lane's side in its turn and waits for patience at most. When it gives errSlow, the
// call may still run.
func try[T any](ctx context.Context, l *lane, patience time.Duration, f func(context.Context) (T, error)) (none T, err error) {
	if l.slow() {
		return none, errSlow
	}
	until := l.run.Now().Add(patience)
	if err := l.wait(ctx, l.turn, until); err != nil {
		return none, err
	}
	// The call keeps the caller's deadline, but not its end: nobody may stop waiting for all children
	// because one is slow.
	call, cancel := l.life, context.CancelFunc(func() {})
	if d, ok := ctx.Deadline(); ok {
		call, cancel = context.WithDeadline(l.life, d)
	}
	done := make(chan struct{})
	var answer T
	var failed error
	l.beside(&l.work, func() {
		defer cancel()
		l.late.Store(l.run.Now().Add(patience).UnixNano())
		answer, failed = f(call)
		l.late.Store(0)
		l.turn <- struct{}{}
		close(done)
	})
	if err := l.wait(ctx, done, until); err != nil {
		return none, err
	}
	return answer, failed
}

// wait is Wait, after which the child counts as slow when until has come.
func (l *lane) wait(ctx context.Context, ready <-chan struct{}, until time.Time) error {
	err := l.run.Wait(ctx, ready, until)
	if err != nil && ctx.Err() == nil {
		return errSlow
	}
	return err
}

// slow reports whether a call has outlived the child's patience.
func (l *lane) slow() bool {
	late := l.late.Load()
	return late != 0 && l.run.Now().UnixNano() > late
}

// heard is a child's answer, or what stands for it where the child is silent.
type heard struct {
	connector.Match
	silent bool // slow, failed, wrong, or later for too long
}

// match asks the child. A child that is slow or fails has nothing; ErrBusy is Later.
func (l *lane) match(ctx context.Context, qs []connector.Query) []heard {
	patience := l.child.Patience
	for i := range qs {
		patience += time.Duration(len(qs[i].Keys)) * patiencePerKey
	}
	answers, err := try(ctx, l, patience, func(ctx context.Context) ([]connector.Match, error) { return l.side.Match(ctx, qs) })
	out := make([]heard, len(qs))
	whole := err == nil && len(answers) == len(qs)
	for i := range out {
		q, m := &qs[i], &out[i]
		if m.silent = !whole; whole {
			m.Match = answers[i]
		}
		if m.Tokens < 0 || m.Tokens > q.Tokens-q.Computed {
			*m = heard{silent: true} // an answer that no engine could use
		}
		later := m.Later || errors.Is(err, connector.ErrBusy)
		m.Later = l.believed(q.Request, later)
		m.silent = m.silent || later
	}
	return out
}

// believed bounds how long a child may say Later of one request.
func (l *lane) believed(id connector.RequestID, later bool) bool {
	if l.child.Later <= 0 || id == "" {
		return later
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	since, known := l.laters[id]
	switch {
	case !later:
		delete(l.laters, id)
		return false
	case known:
		return l.run.Now().Sub(since) < l.child.Later
	case len(l.laters) >= maxLaters:
		clear(l.laters)
	}
	l.laters[id] = l.run.Now()
	return true
}

// close waits for the last call and closes the side.
func (l *lane) close() error {
	l.work.Wait()
	return l.side.Close()
}

// ordinals numbers the blocks of a transfer within their groups, from the begin of the prompt: the
// blocks of each group end with the transfer's last token (rule GROUP-01).
func ordinals(t *connector.Transfer, groups []connector.Group) []int {
	count := make([]int, len(groups))
	for _, b := range t.Blocks {
		if int(b.Group) < len(count) {
			count[b.Group]++
		}
	}
	out := make([]int, len(t.Blocks))
	for i, b := range t.Blocks {
		if int(b.Group) >= len(count) {
			continue
		}
		n := groups[b.Group].BlockTokens
		out[i] = (t.From+t.Tokens+n-1)/n - count[b.Group]
		count[b.Group]--
	}
	return out
}

// ends gives the token after each block of a transfer, counted from the begin of the prompt.
func ends(t *connector.Transfer, groups []connector.Group) []int {
	out := ordinals(t, groups)
	for i, b := range t.Blocks {
		if int(b.Group) < len(groups) {
			out[i] = min((out[i]+1)*groups[b.Group].BlockTokens, t.From+t.Tokens)
		}
	}
	return out
}

// pick makes transfers of some blocks of t, given by index in order: t itself if it is all of them,
// else one for each run of adjacent blocks of a group.
func pick(t *connector.Transfer, indexes []int, groups []connector.Group) []connector.Transfer {
	if len(indexes) == len(t.Blocks) {
		return []connector.Transfer{*t}
	}
	ordinal, end := ordinals(t, groups), ends(t, groups)
	var out []connector.Transfer
	last := -1
	for _, i := range indexes {
		b := t.Blocks[i]
		if int(b.Group) >= len(groups) {
			continue
		}
		n := groups[b.Group].BlockTokens
		if last >= 0 && t.Blocks[last].Group == b.Group && ordinal[last]+1 == ordinal[i] {
			p := &out[len(out)-1]
			p.Blocks, p.Tokens = append(p.Blocks, b), end[i]-p.From
		} else {
			p := *t
			p.From = ordinal[i] * n
			p.Tokens, p.Blocks = end[i]-p.From, []connector.Block{b}
			out = append(out, p)
		}
		last = i
	}
	return out
}
