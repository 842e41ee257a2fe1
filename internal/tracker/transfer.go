package tracker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// Why blocks fail on this side of the wire.
var (
	errPlanLate   = fmt.Errorf("the connector's plan came too late: %w", context.DeadlineExceeded)
	errNotPlanned = errors.New("the connector chose not to load them")
	errLate       = fmt.Errorf("transfer deadline: %w", context.DeadlineExceeded)
	errViolation  = fmt.Errorf("the connector's answer breaks the contract: %w", connector.ErrIncompatible)
	errAbandoned  = fmt.Errorf("somebody that the plugin left behind may still use the blocks: %w", connector.ErrGone)
	errRole       = errors.New("the role does not load")
	errLoading    = errors.New("a load still writes one of the blocks")
	errReused     = fmt.Errorf("an earlier turn's blocks have been reused: %w", connector.ErrGone)
	errEarly      = fmt.Errorf("the connector answered before all layers were computed: %w", connector.ErrIncompatible)
	errWindows    = fmt.Errorf("somebody that a plugin left behind may still write all memory for blocks of other shapes: %w", connector.ErrGone)
	errLanding    = errors.New("more blocks than landing memory holds: raise kvport.landing_bytes")
)

// ErrForeignKey is why blocks failed whose digests were made with a key that is not in the ring. The host says more in its log.
var ErrForeignKey = fmt.Errorf("their digests were made with a key that is not in the ring: %w", connector.ErrGone)

type callState uint8

const (
	ready   callState = iota // to be started as soon as a plugin is up
	running                  // the plugin may touch the blocks
	lost                     // no answer will come, but the plugin may still touch the blocks
	backoff                  // ErrBusy; becomes ready at retryAt
	over
)

// op is one Transfer on its way: it pins its blocks until all its calls are over.
type op struct {
	id       uint64
	kind     Kind
	req      *request
	step     uint64
	began    time.Time
	deadline time.Time
	t        connector.Transfer
	calls    []*call
	planning bool               // its parts are not known yet
	stored   bool               // see Stored
	refused  bool               // its blocks are tainted
	layered  bool               // its blocks were handed over before they were computed
	layers   int                // of those blocks that are final
	givenUp  bool               // no more will be
	computed bool               // its step is over
	arrived  int                // layers of a load that the engine may use before its end
	placed   int                // blocks of it that the host brought, on every rank
	tail     connector.BlockKey // loads: of the partial last block, at its producer
	source   *Source            // the engine of another shape from which the ticket comes; nil: it is of ours
	damaged  int                // loads: blocks that arrived and are not what was saved, by all calls
	damage   error              // what was said of the first of them
	retried  bool               // it has lost one generation already
	canceled bool
	noPlan   error // why the connector makes none for it, so that the host alone may load it; nil: it made one, or makes none at all
	replace  bool  // loads: some of what failed is stored and cannot be used
	lost     bool  // its blocks never come back
	guilty   bool  // it made its generation miss the deadline
	failed   map[connector.BlockID]struct{}
	skipped  map[connector.BlockID]struct{} // saves: the connector chose not to
	err      error                          // the first, and damage
}

// call is one part of a transfer on one rank.
type call struct {
	op      *op
	id      CallID // of the running attempt
	gen     uint64
	part    *connector.Transfer
	rank    int
	state   callState
	wait    time.Duration // last back-off
	retryAt time.Time
	slots   []connector.BlockID // of landing memory, while it may touch them
	waiting bool                // in line for slots
	stored  bool                // all that a ticket promises of it is
	looked  bool                // the host has tried by itself since it last was a generation's
	overlap bool                // loads: the engine may use its layers before all have come
	layers  int                 // of them: how many are verified
}

// Step takes what the engine decided, with the tails of the step's Admitted and Ended. The Tracker owns s from
// now on.
func (b *Tracker) Step(now time.Time, s *connector.Step, tails Tails) []Action {
	for i := range s.Arrived {
		b.request(s.Arrived[i].Request).arrived = true
	}
	for _, id := range s.Preempted {
		if r := b.requests[id]; r != nil {
			b.cancelLoads(now, r)
			b.forgetMatch(r)
		}
	}
	var ops []*op // after the preempted ones: a request may have got new blocks in the same step
	for _, t := range s.Admitted {
		if o := b.addOp(now, Load, s.ID, t); o != nil {
			o.tail = tails[t.Request]
			ops = append(ops, o)
		}
	}
	for _, t := range s.Computed {
		if o := b.addOp(now, Save, s.ID, t); o != nil {
			ops = append(ops, o)
		}
	}
	b.shed(s)
	b.planOrStart(now, s, ops)
	b.computing(now, s)
	var ended []*ending
	for i := range s.Ended {
		ended = append(ended, b.addEnding(now, s.ID, &s.Ended[i], tails[s.Ended[i].Request]))
	}
	b.finishReady(now, ended)
	return b.take()
}

// addOp takes on a transfer, or answers it at once and returns nil.
func (b *Tracker) addOp(now time.Time, kind Kind, step uint64, t connector.Transfer) *op {
	o := &op{
		id: b.id(), kind: kind, req: b.request(t.Request), step: step, began: now, t: t,
		failed: map[connector.BlockID]struct{}{},
	}
	if kind == Save {
		o.req.saves++
		o.deadline = now.Add(b.cfg.Save)
	} else {
		if !o.req.bare {
			o.t.Ticket, o.source = o.req.plugin, o.req.source
		}
		gib := float64(b.bytes(t.Blocks)) / (1 << 30)
		o.deadline = now.Add(b.cfg.Transfer + time.Duration(gib*float64(b.cfg.TransferPerGiB)))
	}
	b.ops[o.id] = o
	if len(t.Blocks) == 0 || kind == Save && !b.cfg.Role.Saves() { // nothing failed: such a role has nothing to store
		b.endOp(now, o)
		return nil
	}
	if err := b.refusal(o); err != nil {
		o.refused = errors.Is(err, errTainted)
		o.fail(t.Blocks, err)
		b.endOp(now, o)
		return nil
	}
	b.wakes.at(o.deadline)
	b.wakes.at(o.deadline.Add(b.cfg.Grace))
	return o
}

// refusal is why no call is made for a transfer; nil: calls are made.
func (b *Tracker) refusal(o *op) error {
	switch {
	case o.kind == Load && !b.cfg.Role.Loads():
		return errRole
	case b.closed || b.state == broken && !b.mayLoadAlone(o):
		return connector.ErrGone
	case o.source != nil && b.Windowless():
		return errWindows
	case o.kind == Save && b.loadingAny(o.t.Blocks):
		return errLoading
	case o.kind == Save && b.tainted(&o.t):
		return errTainted
	}
	return nil
}

// loadingAny reports whether a load may still write one of some blocks: what lies in such a block is
// nobody's yet, and a store that took it would serve it (rule MULTI-08).
func (b *Tracker) loadingAny(blocks []connector.Block) bool {
	var wanted map[connector.Block]bool
	for _, o := range b.ops {
		if o.kind != Load {
			continue
		}
		if wanted == nil {
			wanted = make(map[connector.Block]bool, len(blocks))
			for _, k := range blocks {
				wanted[connector.Block{ID: k.ID, Group: k.Group}] = true
			}
		}
		for _, k := range o.t.Blocks {
			if wanted[connector.Block{ID: k.ID, Group: k.Group}] {
				return true
			}
		}
	}
	return false
}

// split makes the calls of an op: every part on every rank. One from an engine of another shape is a single call.
func (b *Tracker) split(o *op, parts []*connector.Transfer) {
	if o.source != nil {
		for _, p := range parts {
			o.calls = append(o.calls, &call{op: o, part: p})
		}
		return
	}
	if b.landing != nil {
		parts = b.divide(o, parts)
	}
	for _, p := range parts {
		for rank := range b.cfg.Ranks {
			o.calls = append(o.calls, &call{op: o, part: p, rank: rank})
		}
	}
}

// startReady starts the calls that wait for nothing but a plugin. While none is up, the host tries by itself.
func (b *Tracker) startReady(o *op) {
	if b.state != up && b.mayLoadAlone(o) {
		b.startAlone(o)
	}
	if b.landing != nil || o.source != nil {
		b.queue(o)
		b.startQueued()
		return
	}
	if b.state != up {
		return
	}
	for _, c := range o.calls {
		if c.state == ready {
			b.start(c, b.gen)
		}
	}
}

// start makes a call of a generation; 0: the host's own.
func (b *Tracker) start(c *call, gen uint64) {
	c.state, c.id, c.gen, c.layers = running, CallID(b.id()), gen, 0
	c.looked = gen == 0
	b.calls[c.id] = c
	if c.op.kind == Load && c.op.req.turn {
		c.op.req.denied = true // it serves one load: if the request is preempted, it computes
	}
	if c.op.kind == Save && !c.part.Replace && b.corrupt.any(c.part.Blocks) {
		p := *c.part
		p.Replace = true
		c.part = &p
	}
	if c.op.kind == Save {
		for _, r := range b.resets {
			r.saved = true
		}
	}
	m := Move{
		ID: c.id, Gen: c.gen, Kind: c.op.kind, Rank: c.rank, Transfer: c.part, Slots: c.slots, Deadline: c.op.deadline,
		Check: b.check(c), Source: c.op.source, Computing: c.op.layered, Layers: c.op.layers, GivenUp: c.op.givenUp,
	}
	c.overlap = b.overlaps(c, m.Check)
	m.Overlap, m.Step = c.overlap, c.op.step
	if c.op.source != nil {
		m.Window, m.Slots = int(c.slots[0]), nil
	}
	b.emit(m)
}

// Moved says that a call of the worker side has returned.
func (b *Tracker) Moved(now time.Time, id CallID, out Outcome) []Action {
	c := b.calls[id]
	if c == nil {
		b.counters.Unknown++
		return nil
	}
	delete(b.calls, id)
	if out.Lost {
		c.state = lost
		return b.take()
	}
	if out.Absent {
		b.absent(now, c)
		return b.take()
	}
	o := c.op
	b.vacate(c)
	retryAt := now.Add(min(max(2*c.wait, b.cfg.BackoffMin), b.cfg.BackoffMax))
	if errors.Is(out.Err, connector.ErrBusy) && o.arrived == 0 && !o.canceled && !b.closed && b.state != broken && retryAt.Before(o.deadline) {
		c.state, c.wait, c.retryAt = backoff, retryAt.Sub(now), retryAt
		b.wakes.at(retryAt)
		b.startQueued()
		return b.take()
	}
	c.state = over
	if o.layered && out.Err == nil && out.Layers < b.cfg.Layers {
		out.Err = errEarly
	}
	b.judge(c, out)
	o.placed += out.Placed
	if len(o.failed) == 0 {
		b.whole(c)
	}
	b.endIfOver(now, o)
	b.startQueued()
	return b.take()
}

func (o *op) fail(blocks []connector.Block, err error) {
	for _, k := range blocks {
		o.failed[k.ID] = struct{}{}
	}
	switch {
	case o.err == nil:
		o.err = err
	case errors.Is(err, connector.ErrCorrupt) && !errors.Is(o.err, connector.ErrCorrupt):
		o.err = errors.Join(o.err, err)
	}
}

// failReady ends the calls of an op that no plugin works on.
func (b *Tracker) failReady(now time.Time, o *op, err error) {
	for _, c := range o.calls {
		if c.state == ready || c.state == backoff {
			c.state = over
			o.fail(c.part.Blocks, err)
		}
	}
	b.endIfOver(now, o)
}

// cancelLoads asks the loads of a request to stop. Their blocks stay pinned until they have.
func (b *Tracker) cancelLoads(now time.Time, r *request) {
	for _, o := range sorted(b.ops) {
		if o.req != r || o.kind != Load || o.canceled {
			continue
		}
		o.canceled = true
		for _, c := range o.calls {
			if c.state == running {
				b.emit(CancelCall{ID: c.id})
			}
		}
		b.failReady(now, o, context.Canceled)
	}
}

// opReaped goes on with an op whose calls of a generation will never answer: with the next
// generation, once, unless the op itself was at fault, or not at all.
func (b *Tracker) opReaped(now time.Time, o *op, gen uint64) {
	if !slices.ContainsFunc(o.calls, func(c *call) bool { return c.stuck(gen) }) {
		return
	}
	given := o.guilty || o.retried || o.arrived > 0 || o.canceled || b.closed || b.state == broken || !now.Before(o.deadline)
	o.retried = true
	for _, c := range o.calls {
		if !c.stuck(gen) {
			continue
		}
		delete(b.calls, c.id)
		b.vacate(c)
		if given {
			c.state = over
			o.fail(c.part.Blocks, connector.ErrGone)
			continue
		}
		c.state = ready
		b.counters.Retries++
	}
	b.startReady(o)
	b.endIfOver(now, o)
}

// stuck says that the call waits for an answer of generation gen.
func (c *call) stuck(gen uint64) bool {
	return c.gen == gen && (c.state == running || c.state == lost)
}

func (b *Tracker) tickOp(now time.Time, o *op) {
	if !now.Before(o.deadline) {
		b.cancelLate(o)
		b.failReady(now, o, errLate)
		if !now.Before(o.deadline.Add(b.cfg.Grace)) {
			b.killLate(o)
		}
		return
	}
	for _, c := range o.calls {
		if c.state == backoff && !now.Before(c.retryAt) {
			c.state = ready
			b.counters.Retries++
		}
	}
	b.startReady(o)
}

// killLate ends the generations that let a transfer miss its deadline: its blocks come back only
// when nothing can write them any more.
func (b *Tracker) killLate(o *op) {
	for _, c := range o.calls {
		if c.state != running && c.state != lost || c.gen == 0 {
			continue
		}
		o.guilty = true
		if !b.killed[c.gen] {
			b.killed[c.gen] = true
			b.counters.Kills++
			b.emit(Kill{Gen: c.gen, Reason: fmt.Sprintf("%s of request %q past its deadline", o.kind, o.req.id)})
		}
	}
}

func (b *Tracker) endIfOver(now time.Time, o *op) {
	if o.planning || b.ops[o.id] == nil {
		return
	}
	for _, c := range o.calls {
		if c.state != over {
			return
		}
	}
	b.endOp(now, o)
}

// endOp reports an op, once, and unpins its blocks.
func (b *Tracker) endOp(now time.Time, o *op) {
	delete(b.ops, o.id)
	ev := Event{
		Kind: Loaded, Request: o.t.Request, Step: o.step, Tokens: o.t.Tokens, Took: now.Sub(o.began),
		Blocks: ids(o.t.Blocks), Lost: o.lost, Damaged: o.damaged, Damage: o.damage, Replace: o.replace, Refused: o.refused,
	}
	for _, k := range o.t.Blocks {
		_, bad := o.failed[k.ID]
		if bad {
			ev.Failed = append(ev.Failed, k.ID)
		}
		if _, skipped := o.skipped[k.ID]; !bad && !skipped && len(o.calls) > 0 {
			ev.Bytes += b.bytes([]connector.Block{k})
		}
	}
	if len(ev.Failed) > 0 {
		ev.Err = o.err
	}
	if o.kind == Load {
		if o.arrived > 0 {
			ev.ByLayer = o.placed
		}
		ev.Unverified = b.taint(o)
		b.settleLoad(o)
		b.emit(Tell{ev})
		return
	}
	ev.Kind = Saved
	b.settleSave(o)
	b.emit(Tell{ev})
	switch r := o.req; {
	case r.saves > 0:
	case r.ending != nil:
		b.finishReady(now, []*ending{r.ending})
	case !r.arrived && !r.queried && b.requests[r.id] == r && !r.match.open:
		delete(b.requests, r.id) // nothing will end it
	}
}

func (b *Tracker) bytes(blocks []connector.Block) int64 {
	var n int64
	for _, k := range blocks {
		if int(k.Group) < len(b.cfg.BlockBytes) {
			n += b.cfg.BlockBytes[k.Group]
		}
	}
	return n
}
