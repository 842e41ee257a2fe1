package simulate

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
	"github.com/kvport/kvport/multiconnector"
)

// The plugin of an engine may be a MultiConnector: the composition is the real one, over children that die, hang,
// refuse and come back one by one. What is modelled is what package host does between the two: a child's lives, its
// deadlines, and the end of the calls of one that died.

// composite is the plugin of a host that never dies: its children do.
type composite struct {
	h        *host
	crew     *crew
	sched    connector.Scheduler
	workers  []connector.Worker // by rank
	children []*child
}

// child is one plugin through all its lives.
type child struct {
	*composite
	kind    int // which backend: both ends may list them in another order
	medium  Medium
	proc    *proc // nil while none runs
	n       uint64
	startAt time.Time
	since   time.Time
	breaker tracker.Breaker
	holds   *tracker.HoldTable
}

// kindOf is the backend of a child by its place: every second engine lists them the other way round.
func (o *Options) kindOf(engine, place int) int { return (engine + place) % 2 }

// siblings is how many children a composite has.
const siblings = 2

// newComposite opens the children of a host's MultiConnector and what joins them.
func newComposite(h *host) *composite {
	o := &h.w.opt
	f := &composite{h: h, crew: &crew{w: h.w}}
	infos := make([]multiconnector.Child, siblings)
	schedulers, workers := make([]connector.Scheduler, siblings), make([][]connector.Worker, o.Ranks)
	for place := range siblings {
		kind := o.kindOf(h.e.index, place)
		c := &child{composite: f, kind: kind, medium: ThroughStore, breaker: newBreaker(), holds: tracker.NewHoldTable()}
		can := connector.CanReset
		if kind == 0 && o.Medium == ThroughHolds {
			c.medium, can = ThroughHolds, connector.CanHold|connector.CanLease
		}
		if kind == 1 && o.Planner {
			can |= connector.CanPlan
		}
		name := fmt.Sprint("backend ", kind)
		if h.w.is(ChildTicketsMixed) {
			name = fmt.Sprint("child ", place)
		}
		infos[place] = multiconnector.Child{
			Name: name, Role: h.role, Later: 2 * time.Second,
			Info: connector.Info{Groups: true, Capabilities: can, Scope: connector.ScopeShared, MatchFetches: kind == 1 && o.Fetches},
		}
		f.children = append(f.children, c)
		schedulers[place] = childScheduler{c, can}
		for rank := range o.Ranks {
			workers[rank] = append(workers[rank], childWorker{c, rank})
		}
		c.up()
	}
	multi, err := multiconnector.New("composite", infos)
	if err != nil {
		h.w.fail('p', "%v", err)
		return f
	}
	multi.RunOn(f.crew)
	groups := h.trackerConfig().Groups
	f.sched = multi.Scheduler(schedulers, groups, nil)
	for rank := range workers {
		f.workers = append(f.workers, multi.Worker(workers[rank], groups, nil))
	}
	return f
}

// stretch gives a transfer as much time as it may take when one child after the other lets it down.
func (o *Options) stretch(c *tracker.Config) {
	if o.Children {
		c.Transfer, c.TransferPerGiB, c.Grace = siblings*(c.Transfer+2*c.Grace), siblings*c.TransferPerGiB, 2*c.Grace
	}
}

// misfortune is something that happens to what a store keeps, of a composite to that of any child.
func (w *World) misfortune(d *rng) {
	s := w.store
	switch {
	case w.opt.Children && (w.opt.Medium == ThroughHolds || d.n(2) == 0):
		s = w.second
	case w.opt.Medium != ThroughStore:
		return
	}
	w.stats.StoreFaults++
	what := s.misfortune(d)
	w.say("the store %s", what)
}

// begin starts a load or save of the composite.
func (f *composite) begin(m *move) {
	m.begun = true
	if m.Kind == tracker.Save {
		f.h.makeDigests(m)
		f.h.copyOut(m)
	}
	if m.Slots != nil {
		f.h.w.stats.ChildStaged++
	}
	t := m.Seen()
	ctx, cancel := context.WithCancel(context.WithValue(context.Background(), moveKey{}, m))
	m.stop = cancel
	f.crew.Go(func() {
		defer cancel()
		var err error
		if m.Kind == tracker.Load {
			err = f.workers[m.Rank].Load(ctx, t, nil)
		} else {
			err = f.save(ctx, m, t)
		}
		m.answered, m.out = true, tracker.Outcome{Err: m.Back(err)}
	})
}

// moveKey is under which a child's call finds the composite's.
type moveKey struct{}

func (f *composite) save(ctx context.Context, m *move, t *connector.Transfer) error {
	saver, ok := f.workers[m.Rank].(interface {
		SaveTelling(ctx context.Context, t *connector.Transfer, kv *connector.KV, promised func()) error
	})
	if !ok {
		return errBackend
	}
	return saver.SaveTelling(ctx, t, nil, func() {
		f.h.do(f.h.tracker.Stored(f.h.w.now, m.ID))
	})
}

// call starts the first job of the scheduler side.
func (f *composite) call(j *job) {
	j.begun = true
	f.crew.Go(func() {
		ctx := context.Background()
		switch {
		case j.ask != nil:
			var list []connector.Match
			if list, j.err = f.sched.Match(ctx, []connector.Query{j.ask.Query}); j.err == nil {
				j.match = list[0]
			}
		case j.plan != nil:
			planner, _ := connector.As[connector.Planner](f.sched)
			j.planned, j.err = planner.Plan(ctx, j.plan.Step)
		case j.finish != nil:
			holder, _ := connector.As[connector.Holder](f.sched)
			j.given, j.err = holder.Finish(ctx, slices.Clone(j.finish.Ended))
		case j.reset != nil:
			resetter, _ := connector.As[connector.Resetter](f.sched)
			j.emptied, j.err = resetter.Reset(ctx)
		}
		j.answered = true
	})
}

// work has a child do a piece of what it has to do, or the composite begin its next call.
func (f *composite) work(d *rng, fault Fault) {
	if p := f.h.proc; len(p.jobs) > 0 && !p.jobs[0].begun {
		f.call(p.jobs[0])
		f.crew.pump()
	}
	if c := f.children[d.n(siblings)]; c.proc != nil {
		c.proc.work(d, fault)
		f.crew.pump()
	}
}

// reply lets an answer of a child reach the composition.
func (f *composite) reply(d *rng, fault Fault) {
	if c := f.children[d.n(siblings)]; c.proc != nil {
		c.proc.reply(d, fault)
		f.crew.pump()
	}
}

// consume passes on what consumers have fetched, from a child to the composition and from that to the host.
func (f *composite) consume(fault Fault) {
	for _, c := range f.children {
		if c.proc != nil {
			c.proc.consume(fault)
		}
	}
	f.crew.pump()
	holder, can := connector.As[connector.Holder](f.sched)
	if !can {
		return
	}
	ended, _ := multiconnector.WaitHoldsOver(over(), holder)
	for _, id := range ended.Fetched {
		f.h.proc.fetched[id]++
	}
	f.h.w.stats.ChildHolds += len(ended.Died) + len(ended.Lost)
	if f.h.w.is(ChildHoldConsumed) {
		ended = multiconnector.HoldsOver{Fetched: slices.Concat(ended.Fetched, ended.Died, ended.Lost)}
	}
	f.h.do(f.h.tracker.Consumed(f.h.n, ended.Fetched))
	f.h.do(f.h.tracker.HoldsDied(f.h.n, ended.Died, false))
	f.h.do(f.h.tracker.HoldsDied(f.h.n, ended.Lost, !f.h.w.is(AbandonedIsReaped)))
}

// over is the context of a call that must not wait.
func over() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// renewals asks the composition what its children renew.
func (f *composite) renewals(d *rng) []connector.HoldID {
	leaser, can := connector.As[connector.Leaser](f.sched)
	if !can {
		return nil
	}
	for _, c := range f.children {
		if p := c.proc; p != nil && p.hung.IsZero() {
			p.renews = append(p.renews, p.someHolds(d)...)
		}
	}
	f.crew.pump()
	ids, _ := leaser.Renewals(over(), f.h.tracker.Over(f.h.n))
	f.crew.pump()
	return ids
}

// crash ends a child.
func (f *composite) crash(d *rng) {
	if c := f.children[d.n(siblings)]; c.proc != nil {
		c.proc.crash()
	}
}

// busy reports whether a child can go on with something.
func (f *composite) busy() bool {
	for _, c := range f.children {
		if c.proc.busy() {
			return true
		}
	}
	p := f.h.proc
	return len(p.jobs) > 0 && (p.jobs[0].answered || !p.jobs[0].begun) || slices.ContainsFunc(p.moves, func(m *move) bool { return m.answered })
}

// next is when something happens to a child or the composition by itself.
func (f *composite) next() (first time.Time, found bool) {
	first, found = f.crew.due()
	consider := func(t time.Time, ok bool) {
		if ok && (!found || t.Before(first)) {
			first, found = t, true
		}
	}
	for _, c := range f.children {
		p := c.proc
		if p == nil {
			consider(c.startAt, true)
			continue
		}
		consider(p.downAt, p.dying && !p.isDown)
		consider(p.reapAt, p.dying)
		at, ok := p.patience()
		consider(at, ok && !f.h.w.is(NoDeadline))
	}
	return first, found
}

// fire does everything whose time has come.
func (f *composite) fire() {
	for _, c := range f.children {
		c.due()
	}
	f.crew.pump()
}

// patience is when a process is killed that goes on as it does.
func (p *proc) patience() (first time.Time, found bool) {
	consider := func(t time.Time) {
		if !found || t.Before(first) {
			first, found = t, true
		}
	}
	if p.dying {
		return first, false
	}
	if !p.hung.IsZero() {
		consider(p.hung.Add(heartbeat))
	}
	if len(p.jobs) > 0 {
		consider(p.begin(p.jobs[0]).Add(grace))
	}
	for _, m := range p.moves {
		consider(m.Deadline.Add(grace))
	}
	return first, found
}

// due is what happens to a child by itself.
func (c *child) due() {
	now, p := c.h.w.now, c.proc
	if p == nil {
		if !now.Before(c.startAt) {
			c.up()
		}
		return
	}
	if at, ok := p.patience(); ok && !now.Before(at) && !c.h.w.is(NoDeadline) {
		c.h.w.stats.Kills++
		c.h.w.say("%s kills child %d: it does not answer", c.h.e.name, c.kind)
		p.die()
	}
	if p.dying && !now.Before(p.downAt) {
		c.down(p)
	}
	if p.dying && !now.Before(p.reapAt) {
		c.reap(p)
	}
}

// up starts a life.
func (c *child) up() {
	c.n++
	c.proc = &proc{h: c.h, child: c, n: c.n, fetched: map[connector.HoldID]int{}}
	c.since = c.h.w.now
	c.h.w.say("%s: child %d is up, life %d", c.h.e.name, c.kind, c.n)
}

// down is the moment when the host knows that a life is at its end: its calls of the scheduler side fail.
func (c *child) down(p *proc) {
	if p.isDown {
		return
	}
	p.isDown = true
	c.h.w.stats.ChildDeaths++
	for _, j := range p.jobs {
		j.err, j.over = connector.ErrGone, true
	}
	p.jobs = nil
	c.h.w.say("%s: child %d is gone", c.h.e.name, c.kind)
	if c.h.w.is(ChildGoneEarly) {
		c.giveUp(p)
	}
}

// reap is the moment from which nothing of a life can touch a block: now its loads and saves fail, too.
func (c *child) reap(p *proc) {
	c.h.w.say("%s: child %d is reaped", c.h.e.name, c.kind)
	abandoned := c.h.mayLose(p.moves, c.h.holds) && c.h.rng.n(4) > 0
	if abandoned {
		c.abandon(p)
	}
	c.giveUp(p)
	p.moves, c.proc = nil, nil
	c.holds.Lose(p.n, abandoned)
	if c.h.w.now.Sub(c.since) > c.breaker.Window {
		c.breaker.Proved()
	}
	wait, _ := c.breaker.Died(c.h.w.now)
	c.startAt = c.h.w.now.Add(wait + 5*time.Millisecond)
}

// abandon ends a life that has left somebody behind: the blocks of its calls are lost, and the composition goes on.
func (c *child) abandon(p *proc) {
	c.h.w.say("%s: somebody may write the blocks of child %d, life %d, for ever", c.h.e.name, c.kind, p.n)
	for _, m := range p.moves {
		if len(m.Transfer.Blocks) > 0 {
			c.h.orphans = append(c.h.orphans, m)
		}
		if !c.h.w.is(AbandonedIsReaped) {
			c.h.do(c.h.tracker.Lose(c.h.w.now, m.of.ID))
		}
	}
}

func (c *child) giveUp(p *proc) {
	for _, m := range p.moves {
		m.out, m.over = tracker.Outcome{Err: connector.ErrGone}, true
	}
}

// childScheduler is the scheduler side of a child.
type childScheduler struct {
	*child
	can connector.Capability
}

// Capabilities implements connector.Partial.
func (s childScheduler) Capabilities() connector.Capability { return s.can }

// Close implements connector.Scheduler.
func (s childScheduler) Close() error { return nil }

// call has the life that runs do a job, and waits for it.
func (s childScheduler) call(j *job) error {
	p := s.proc
	if p == nil || p.isDown {
		return connector.ErrGone
	}
	p.jobs = append(p.jobs, j)
	s.crew.wait(func() bool { return j.over }, time.Time{})
	return j.err
}

// Match implements connector.Scheduler.
func (s childScheduler) Match(_ context.Context, qs []connector.Query) ([]connector.Match, error) {
	out := make([]connector.Match, len(qs))
	for i := range qs {
		s.checkTicket(qs[i].Request, qs[i].Ticket)
		if s.kind == 1 && s.h.w.opt.Fetches {
			s.h.w.stats.ChildFetches++
		}
		j := &job{ask: &tracker.Ask{Query: qs[i]}}
		if err := s.call(j); err != nil {
			return nil, err
		}
		out[i] = j.match
	}
	return out, nil
}

// checkTicket verifies that a child is given its own part of a ticket.
func (c *child) checkTicket(id connector.RequestID, ticket connector.Ticket) {
	if t, ok := parseTicket(ticket); ok && (t.child != c.kind || c.medium != ThroughHolds) {
		c.h.w.fail('t', "%s: child %d is given the ticket of child %d for %s", c.h.e.name, c.kind, t.child, id)
	}
}

// Finish implements connector.Holder.
func (s childScheduler) Finish(_ context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	j, life := &job{finish: &tracker.Finish{Ended: ended}}, s.n
	s.holds.Ask(true)
	defer s.holds.Ask(false)
	if err := s.call(j); err != nil {
		return nil, err
	}
	for i := range j.given {
		j.given[i].Weak = j.given[i].Weak || i < len(ended) && ended[i].Weak
		j.given[i].ID = s.holds.Add(s.h.w.now, life, &j.given[i], holdMax)
	}
	return j.given, nil
}

// Consumed implements connector.Holder.
func (s childScheduler) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	o, err := s.HoldsOver(ctx)
	return o.Consumed(), err
}

// HoldsOver implements multiconnector.HoldWatcher.
func (s childScheduler) HoldsOver(context.Context) (multiconnector.HoldsOver, error) {
	s.crew.wait(s.holds.Pending, time.Time{})
	return multiconnector.HoldsOver(s.holds.Take()), nil
}

// Renewals implements connector.Leaser.
func (s childScheduler) Renewals(_ context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
	p := s.proc
	if p == nil || p.isDown {
		return nil, connector.ErrGone
	}
	over := s.holds.Ended(p.n, ended)
	p.renews = slices.DeleteFunc(p.renews, func(id connector.HoldID) bool { return slices.Contains(over, id) })
	s.crew.wait(func() bool { return p.isDown || len(p.renews) > 0 }, s.h.w.now.Add(time.Second))
	if p.isDown {
		return nil, connector.ErrGone
	}
	list := p.renews
	p.renews = nil
	return s.holds.Renewed(p.n, list), nil
}

// Plan implements connector.Planner.
func (s childScheduler) Plan(_ context.Context, step *connector.Step) (*connector.Plan, error) {
	s.h.w.stats.ChildPlans++
	j := &job{plan: &tracker.Plan{Step: step}}
	err := s.call(j)
	return j.planned, err
}

// Reset implements connector.Resetter.
func (s childScheduler) Reset(context.Context) (bool, error) {
	j := &job{reset: &tracker.Reset{}}
	err := s.call(j)
	return j.emptied, err
}

// childWorker is the worker side of one rank of a child.
type childWorker struct {
	*child
	rank int
}

// Close implements connector.Worker.
func (w childWorker) Close() error { return nil }

// Load implements connector.Worker.
func (w childWorker) Load(ctx context.Context, t *connector.Transfer, _ *connector.KV) error {
	w.checkTicket(t.Request, t.Ticket)
	limit := 5*time.Second + time.Duration(len(t.Blocks))*time.Second/1024
	err := w.move(ctx, tracker.Load, t, limit)
	if err != nil {
		w.h.w.stats.ChildFailed++
	}
	return err
}

// Save implements connector.Worker.
func (w childWorker) Save(ctx context.Context, t *connector.Transfer, _ *connector.KV) error {
	return w.move(ctx, tracker.Save, t, 30*time.Second)
}

// move has the life that runs make a call, and waits until nothing of it can touch the blocks any more.
func (w childWorker) move(ctx context.Context, kind tracker.Kind, t *connector.Transfer, limit time.Duration) error {
	p := w.proc
	up, ok := ctx.Value(moveKey{}).(*move)
	if !ok || p == nil || p.isDown {
		return connector.ErrGone
	}
	w.h.w.stats.ChildCalls++
	m := &move{
		Move:  tracker.Move{Kind: kind, Rank: w.rank, Transfer: t, Deadline: w.h.w.now.Add(limit)},
		grant: up.grant, of: up,
	}
	if up.Slots != nil { // its blocks are landing slots
		for _, b := range t.Blocks {
			m.Slots = append(m.Slots, b.ID)
		}
	}
	p.moves = append(p.moves, m)
	w.crew.wait(func() bool { return m.over || up.canceled && w.h.w.is(ChildFreedOnCancel) }, time.Time{})
	if !m.over {
		return errCanceled
	}
	return m.out.Err
}

// answerPart lets the answer of a child's call reach the composition. Of a call whose process is at its end the
// composition hears when that is reaped.
func (p *proc) answerPart(m *move, f Fault) {
	switch {
	case !m.answered:
	case f == faultLost:
		m.answered, m.stuck = false, true
	default:
		m.over = true
		p.moves = slices.DeleteFunc(p.moves, func(o *move) bool { return o == m })
	}
}

// releasePart is a load without blocks: its producer need not keep them for this consumer.
func (p *proc) releasePart(m *move) {
	if len(m.Transfer.Blocks) > 0 {
		return
	}
	if t, ok := parseTicket(m.Transfer.Ticket); ok {
		if from := p.h.w.pluginOf(t); from != nil {
			from.taken = append(from.taken, t.hold)
		}
	}
}

// backend is the life of the child of a kind, nil while none runs.
func (f *composite) backend(kind int) *proc {
	for _, c := range f.children {
		if c.kind == kind {
			return c.proc
		}
	}
	return nil
}

// kind says which backend a plugin has.
func (p *proc) kind() int {
	if p.child == nil {
		return 0
	}
	return p.child.kind
}

func (p *proc) medium() Medium {
	if p.child == nil {
		return p.h.w.opt.Medium
	}
	return p.child.medium
}

func (p *proc) store() *store {
	if p.kind() == 0 {
		return p.h.w.store
	}
	return p.h.w.second
}

// impatient is a client who leaves while children load for it, which is when that does harm.
func (r *routing) impatient(c *client, d *rng) *client {
	if !r.w.opt.Children || d.n(4) == 0 {
		return c
	}
	for _, other := range r.live {
		if e := other.engine; e != nil && e.host.proc != nil && slices.ContainsFunc(e.host.proc.moves, func(m *move) bool {
			return m.Kind == tracker.Load && m.Transfer.Request == other.id && !m.answered
		}) {
			return other
		}
	}
	return c
}
