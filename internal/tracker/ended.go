package tracker

import (
	"maps"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

type finishState uint8

const (
	notAsked finishState = iota
	asked
	answered
)

// ending is a request that has ended and whose Finished is due.
type ending struct {
	id       uint64
	gen      uint64
	req      *request
	step     uint64
	ended    connector.Ended
	tail     connector.BlockKey // of its partial last block
	deadline time.Time
	finish   finishState
	call     CallID
	hold     connector.Hold
}

// hold is blocks of an ended request that stay for consumers.
type hold struct {
	id        connector.HoldID
	gen       uint64
	req       connector.RequestID
	step      uint64
	blocks    []connector.BlockID
	consumers int
	began     time.Time
	ttl       time.Duration
	deadline  time.Time
	lost      bool // its blocks never come back
}

// maxEarly bounds the reports about holds that are not announced yet.
const maxEarly = 1 << 10

// earlyEnd is what was reported of a hold before the answer that announces it.
type earlyEnd struct {
	consumers  int
	died, lost bool
}

func (b *Tracker) addEnding(now time.Time, step uint64, ended *connector.Ended, tail connector.BlockKey) *ending {
	r := b.request(ended.Request)
	r.match.told = false // nobody waits for an answer any more
	b.cancelLoads(now, r)
	b.forgetMatch(r)
	delete(b.requests, ended.Request) // the id may be used again from now on
	e := &ending{id: b.id(), req: r, step: step, ended: *ended, tail: tail, deadline: now.Add(b.cfg.Finish)}
	if b.isHolder() && r.beyond(ended.Tokens) {
		e.ended.Remote, e.ended.Weak = false, false // nothing of it is held
	}
	r.ending = e
	b.endings[e.id] = e
	b.wakes.at(e.deadline)
	return e
}

// finishReady goes on with ended requests: a Holder is asked once the saves of a request with a
// consumer are over, everything else is finished.
func (b *Tracker) finishReady(now time.Time, list []*ending) {
	call := Finish{Gen: b.gen}
	var batch []*ending
	for _, e := range list {
		if b.endings[e.id] == nil || e.finish != notAsked || e.ended.Remote && e.req.saves > 0 {
			continue
		}
		if !b.isHolder() || b.state != up || b.closed {
			b.finishEnding(now, e)
			continue
		}
		batch = append(batch, e)
		call.Ended, call.Partial = append(call.Ended, e.ended), append(call.Partial, e.partial()...)
	}
	if len(batch) == 0 {
		return
	}
	call.ID, call.Deadline = CallID(b.id()), now.Add(b.cfg.Finish)
	for _, e := range batch {
		e.finish, e.call, e.gen = asked, call.ID, b.gen
		if e.deadline.Before(call.Deadline) {
			call.Deadline = e.deadline
		}
	}
	b.finishes[call.ID] = batch
	b.emit(call)
}

// Stored says that a running save has stored everything that a ticket promises, and goes on for others: its
// blocks stay pinned, but nobody waits with a ticket for it. It is of no use where a part of the save has
// failed already: what a consumer can get is known when the save is over.
func (b *Tracker) Stored(now time.Time, id CallID) []Action {
	c := b.calls[id]
	if c == nil || c.op.kind != Save || c.op.stored {
		return nil
	}
	o := c.op
	c.stored = true
	if o.planning || len(o.failed)+len(o.skipped) > 0 {
		return nil
	}
	for _, other := range o.calls {
		if other.state != over && !other.stored {
			return nil
		}
	}
	o.waited()
	b.emit(Tell{Event{Kind: Stored, Request: o.t.Request, Step: o.step}})
	if r := o.req; r.saves == 0 && r.ending != nil {
		b.finishReady(now, []*ending{r.ending})
	}
	return b.take()
}

// waited notes that no ticket waits for a save any more.
func (o *op) waited() {
	if !o.stored {
		o.stored = true
		o.req.saves--
	}
}

// FinishAnswered brings the holds for the requests of a Finish call, in order, or an error.
func (b *Tracker) FinishAnswered(now time.Time, id CallID, holds []connector.Hold, err error) []Action {
	batch := b.finishes[id]
	if batch == nil {
		b.counters.Unknown++
		return nil
	}
	if err == nil && len(holds) != len(batch) {
		b.counters.Violations++
		err = errViolation
	}
	if err != nil {
		holds = nil
	}
	b.answerFinish(now, id, holds)
	return b.take()
}

func (b *Tracker) answerFinish(now time.Time, id CallID, holds []connector.Hold) {
	batch := b.finishes[id]
	delete(b.finishes, id)
	for i, e := range batch {
		if b.endings[e.id] == nil {
			continue // its deadline has passed
		}
		e.finish = answered
		if i < len(holds) {
			e.hold = holds[i]
		}
		b.finishEnding(now, e)
	}
	b.endedEarly()
}

// finishEnding reports an ended request, once.
func (b *Tracker) finishEnding(now time.Time, e *ending) {
	if b.endings[e.id] == nil {
		return
	}
	delete(b.endings, e.id)
	e.req.ending = nil
	h := b.checked(e)
	ev := Event{Kind: Finished, Request: e.ended.Request, Step: e.step, Hold: h}
	if h.ID != 0 && !h.Weak && len(e.ended.Blocks) > 0 {
		ev.Held = true
		b.keep(now, e, h)
	} else {
		ev.Blocks = ids(e.ended.Blocks)
		b.keepWeak(h)
	}
	if e.ended.Remote {
		ev.Ticket = b.ticket(e.req, &e.ended, e.tail, h)
	}
	b.emit(Tell{ev})
}

// lastFull is the address of the last full block of an ended request's leading tokens.
func (b *Tracker) lastFull(e *connector.Ended, tokens int) (last connector.BlockKey) {
	size := b.cfg.Groups[0].BlockTokens
	n := 0
	for _, bl := range e.Blocks {
		if bl.Group == 0 && n < tokens/size {
			last = bl.Key
			n++
		}
	}
	if n < tokens/size {
		return connector.BlockKey{}
	}
	return last
}

// checked is the hold of an ending, or none if it breaks the contract: a hold without a consumer (rule
// HOLD-01), under an id in use, or with numbers that mean nothing.
func (b *Tracker) checked(e *ending) connector.Hold {
	h := e.hold
	if h.ID == 0 {
		return connector.Hold{}
	}
	if !e.ended.Remote || b.holds[h.ID] != nil || h.TTL < 0 || h.Consumers < 0 {
		b.counters.Violations++
		return connector.Hold{}
	}
	if h.TTL == 0 {
		h.TTL = b.cfg.Hold
	}
	if e.ended.Weak {
		if b.cfg.Role != connector.RoleBoth {
			return connector.Hold{} // nobody made digests of what a consumer has
		}
		h.Weak = true
	}
	h.TTL, h.Consumers = min(h.TTL, b.cfg.HoldMax), max(h.Consumers, 1)
	return h
}

// maxWeak bounds the weak holds that are remembered. A report of one that was forgotten counts as unknown.
const maxWeak = 1 << 14

// keepWeak remembers a hold that keeps no blocks, so that its consumer is known when it reports.
func (b *Tracker) keepWeak(h connector.Hold) {
	if h.ID == 0 {
		return
	}
	if len(b.weak) >= maxWeak {
		clear(b.weak)
	}
	b.weak[h.ID] = h.Consumers
}

func (b *Tracker) keep(now time.Time, e *ending, h connector.Hold) {
	kept := &hold{
		id: h.ID, gen: e.gen, req: e.ended.Request, step: e.step, blocks: ids(e.ended.Blocks),
		consumers: h.Consumers, began: now, ttl: h.TTL, deadline: now.Add(h.TTL),
	}
	b.holds[h.ID] = kept
	b.wakes.at(kept.deadline)
}

// endedEarly applies what was reported before the answer that announces a hold.
func (b *Tracker) endedEarly() {
	for _, id := range slices.Sorted(maps.Keys(b.early)) {
		h, e := b.holds[id], b.early[id]
		if h == nil {
			continue
		}
		delete(b.early, id)
		if e.died {
			b.died(h, e.lost)
		} else {
			b.consume(h, e.consumers)
		}
	}
	if len(b.finishes) == 0 {
		b.counters.Unknown += len(b.early) // nobody announced them
		clear(b.early)
	}
}

func (b *Tracker) consume(h *hold, consumers int) {
	if h.consumers -= consumers; h.consumers <= 0 {
		b.release(h, ReleasedConsumed)
	}
}

// available counts the leading tokens that a consumer can get: all that a Holder keeps, or what was
// stored, or will have been when the saves still under way are over.
func (b *Tracker) available(r *request, ended *connector.Ended, h connector.Hold) int {
	if h.ID != 0 {
		return ended.Tokens
	}
	if b.isHolder() || !b.cfg.Role.Saves() {
		return 0
	}
	n := ended.Tokens
	for from := range r.unsaved {
		n = min(n, from)
	}
	if r.tainted {
		n = min(n, r.clean)
	}
	return n - n%b.unit()
}

// Promise is the ticket of a request that is about to end: of all that a consumer will be able to get when the
// saves under way are over. Nil: of nothing, or of a Holder's blocks, which must be asked.
func (b *Tracker) Promise(ended *connector.Ended) *Ticket {
	r := b.requests[ended.Request]
	if r == nil {
		r = &request{}
	}
	if b.closed || b.state == broken {
		return nil
	}
	return b.ticket(r, ended, connector.BlockKey{}, connector.Hold{})
}

// Over gives the holds of generation gen whose end its Leaser has not heard of: they are over, or could not be
// renewed. They are given again until Renewed says that the Leaser has answered.
func (b *Tracker) Over(gen uint64) []connector.HoldID {
	if gen != b.gen {
		return nil
	}
	b.heard = len(b.over)
	return slices.Clone(b.over)
}

// Renewed restarts the TTL of these holds of generation gen, but not beyond HoldMax after they began. Its Leaser
// has heard what Over gave.
func (b *Tracker) Renewed(now time.Time, gen uint64, list []connector.HoldID) {
	if gen != b.gen {
		return
	}
	b.over, b.heard = b.over[b.heard:], 0
	for _, id := range list {
		h := b.holds[id]
		if h == nil || h.gen != gen || now.Add(h.ttl).After(h.began.Add(b.cfg.HoldMax)) {
			b.over = append(b.over, id)
			continue
		}
		if end := now.Add(h.ttl); end.After(h.deadline) { // longer, never shorter
			h.deadline = end
			b.wakes.at(end)
		}
	}
}

// maxOver bounds the holds that a Leaser has not heard of; it is sure to know of those that were fetched.
const maxOver = 1 << 12

// Consumed says that a consumer has fetched each of these holds of generation gen.
func (b *Tracker) Consumed(gen uint64, list []connector.HoldID) []Action {
	for _, id := range list {
		h := b.holds[id]
		switch n := b.weak[id]; {
		case h == nil && n == 1:
			delete(b.weak, id)
		case h == nil && n > 0:
			b.weak[id]--
		case b.mayBeAnnounced(gen, id):
			e := b.early[id]
			e.consumers++
			b.early[id] = e
		case h == nil || h.gen != gen:
			b.counters.Unknown++
		default:
			b.consume(h, 1)
		}
	}
	return b.take()
}

// mayBeAnnounced says whether a report is of a hold that a running Finish may announce, and has room.
func (b *Tracker) mayBeAnnounced(gen uint64, id connector.HoldID) bool {
	return b.holds[id] == nil && len(b.finishes) > 0 && gen == b.gen && len(b.early) < maxEarly
}

// HoldsDied says that these holds of generation gen are over because a part of the connector died that kept blocks for
// them. Abandoned says that it left somebody behind who may use the blocks for ever: they are lost.
func (b *Tracker) HoldsDied(gen uint64, list []connector.HoldID, abandoned bool) []Action {
	for _, id := range list {
		switch h := b.holds[id]; {
		case b.mayBeAnnounced(gen, id):
			e := b.early[id]
			e.died, e.lost = true, e.lost || abandoned
			b.early[id] = e
		case h == nil || h.gen != gen:
			b.counters.Unknown++
		default:
			b.died(h, abandoned)
		}
	}
	return b.take()
}

// died ends a hold that nobody keeps any more. If its blocks are lost they stay pinned.
func (b *Tracker) died(h *hold, lost bool) {
	if h.lost = lost; lost {
		b.forfeit(h.blocks)
	}
	b.release(h, ReleasedPluginDied)
}

func (b *Tracker) release(h *hold, reason string) {
	delete(b.holds, h.id)
	if b.cfg.Can&connector.CanLease != 0 && reason != ReleasedConsumed && h.gen == b.gen && len(b.over) < maxOver {
		b.over = append(b.over, h.id)
	}
	b.emit(Tell{Event{Kind: Released, Request: h.req, Step: h.step, Blocks: h.blocks, Lost: h.lost, Reason: reason}})
}
