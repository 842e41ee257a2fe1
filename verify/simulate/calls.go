package simulate

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// doJob carries out a call of the scheduler side; its answer is then on its way.
func (p *proc) doJob(j *job, d *rng, f Fault) {
	p.begin(j)
	switch f {
	case faultStuck, faultLost:
		j.stuck = true
		return
	case faultBusy:
		j.err = connector.ErrBusy
	case faultError:
		j.err = errBackend
	default:
	}
	j.answered = true
	switch {
	case j.ask != nil:
		j.match = p.lookup(&j.ask.Query, d, f)
	case j.plan != nil:
		j.planned = p.choose(j.plan.Step, d, f)
	case j.finish != nil:
		j.given = p.finish(j.finish.Ended, d, f)
	case j.reset != nil:
		p.reset(j, d, f)
	}
}

// reset is the connector's Reset: it forgets everything, or fails, or says that it kept what it has.
func (p *proc) reset(j *job, d *rng, f Fault) {
	if j.err != nil || f == faultPartial || d.n(4) == 1 && p.h.w.opt.Rough > 0 {
		p.h.w.say("%s: the connector is not reset", p.h.e.name)
		return
	}
	p.h.w.say("%s: the connector is reset", p.h.e.name)
	if !p.h.w.is(ResetLies) && !p.h.w.is(ResetInHaste) {
		p.store().clear()
	}
	j.emptied = true
}

// lookup is the connector's Match.
func (p *proc) lookup(q *connector.Query, d *rng, f Fault) connector.Match {
	o := &p.h.w.opt
	var m connector.Match
	if p.medium() == ThroughHolds {
		if t, ok := parseTicket(q.Ticket); ok {
			m.Tokens = min(t.tokens, q.Tokens) - q.Computed
			if q.Reshaped > 0 {
				m.Tokens = min(m.Tokens, q.Reshaped-q.Computed)
			}
		}
	} else {
		m.Tokens = p.store().prefix(q.Keys, q.Computed/o.BlockTokens, o)*o.BlockTokens - q.Computed
	}
	m.Tokens = max(m.Tokens, 0)
	switch f {
	case faultLater:
		m.Later = true
	case faultWild:
		m.Tokens = d.n(2*q.Tokens) - 5
	case faultForeign:
		m.Groups = uint32(1 << d.n(9))
	default:
	}
	return m
}

// choose is the connector's Plan: mostly everything, sometimes less, and with a fault nonsense.
func (p *proc) choose(s *connector.Step, d *rng, f Fault) *connector.Plan {
	return &connector.Plan{Loads: pickSome(s.Admitted, d, f), Saves: pickSome(s.Computed, d, f)}
}

func pickSome(offered []connector.Transfer, d *rng, f Fault) (out []connector.Transfer) {
	for _, t := range offered {
		k := d.n(8)
		switch {
		case k == 0:
			continue
		case k == 1 && len(t.Blocks) > 1:
			t.Blocks = t.Blocks[:1+d.n(len(t.Blocks)-1)]
		}
		switch f {
		case faultForeign:
			t.Blocks = []connector.Block{{ID: connector.BlockID(d.n(40))}}
		case faultWild:
			t.From, t.Tokens = d.n(9)-4, d.n(99)-9
		case faultTwice:
			out = append(out, t)
		default:
		}
		out = append(out, t)
	}
	return out
}

// finish is the connector's Finish: it keeps the blocks of requests that have a consumer.
func (p *proc) finish(ended []connector.Ended, d *rng, f Fault) []connector.Hold {
	var list []connector.Hold
	for _, e := range ended {
		var hold connector.Hold
		if e.Remote && e.Tokens > 0 {
			p.last++
			hold = connector.Hold{ID: p.last, TTL: time.Duration(d.n(4)) * 5 * time.Second, Consumers: (d.n(6) + 1) % 3}
			hold.Ticket = ticketBytes{p.h.e.index, p.h.e.epoch, p.last, e.Tokens, p.n, p.kind()}.encode()
			p.holds = append(p.holds, &kept{p.last, append([]connector.Block(nil), e.Blocks...), e.Tokens})
			switch f {
			case faultWild:
				hold.TTL = -1
			case faultTwice:
				hold.ID = max(1, p.last-1)
			default:
			}
		}
		list = append(list, hold)
	}
	if f == faultForeign {
		list = append(list, connector.Hold{ID: 77})
	}
	return list
}

// ticketBytes is the plugin's own part of a ticket.
type ticketBytes struct {
	engine int
	epoch  uint64
	hold   connector.HoldID
	tokens int
	life   uint64 // of the plugin: what only digests protect does not look at it
	child  int
}

func (t ticketBytes) encode() []byte {
	b := binary.AppendUvarint(nil, uint64(t.engine))
	b = binary.AppendUvarint(b, t.epoch)
	b = binary.AppendUvarint(b, uint64(t.hold))
	b = binary.AppendUvarint(b, uint64(t.tokens))
	b = binary.AppendUvarint(b, t.life)
	return binary.AppendUvarint(b, uint64(t.child))
}

func parseTicket(b []byte) (t ticketBytes, ok bool) {
	var f [6]uint64
	for i := range f {
		v, n := binary.Uvarint(b)
		if n <= 0 {
			return t, false
		}
		f[i], b = v, b[n:]
	}
	return ticketBytes{int(f[0]), f[1], connector.HoldID(f[2]), int(f[3]), f[4], int(f[5])}, true
}

// answerJob gives the answer to the first job to the host.
func (p *proc) answerJob(f Fault) {
	j := p.jobs[0]
	if f == faultLost {
		j.answered, j.stuck = false, true
		return
	}
	p.jobs = p.jobs[1:]
	if p.child != nil {
		j.over = true
		return
	}
	h := p.h
	h.remember(j.id)
	for range 1 + twice(f) {
		switch {
		case j.ask != nil:
			h.offers.answered(j)
			h.do(h.tracker.Matched(h.w.now, j.id, j.match, j.err))
		case j.plan != nil:
			h.do(h.tracker.Planned(h.w.now, j.id, j.planned, j.err))
		case j.finish != nil:
			h.do(h.tracker.FinishAnswered(h.w.now, j.id, j.given, j.err))
		case j.reset != nil:
			if h.w.is(ResetUnheard) {
				j.emptied, j.err = true, nil
			}
			h.do(h.tracker.ResetAnswered(h.w.now, j.id, j.emptied, j.err))
		}
	}
}

func twice(f Fault) int {
	if f == faultTwice {
		return 1
	}
	return 0
}

func (h *host) remember(id tracker.CallID) {
	h.answer = append(h.answer, id)
	if len(h.answer) > 16 {
		h.answer = h.answer[1:]
	}
}

// answerAsk answers the question about a request at once, with all that was asked before it.
func (p *proc) answerAsk(id connector.RequestID) {
	d := rng(len(p.jobs))
	for len(p.jobs) > 0 && p.hung.IsZero() && !p.dying {
		j := p.jobs[0]
		if j.ask == nil || j.stuck {
			return
		}
		if !j.answered {
			p.doJob(j, &d, faultNone)
		}
		last := j.ask.Query.Request == id
		p.answerJob(faultNone)
		if last {
			return
		}
	}
}

// doMove does up to n blocks of a load or save.
func (p *proc) doMove(m *move, n int, d *rng, f Fault) {
	p.beginMove(m, d, f)
	if f == faultStuck {
		m.stuck = true
		return
	}
	if err := m.refusal(d, f); err != nil {
		m.end(err, p)
		return
	}
	blocks := m.Transfer.Blocks
	for ; n > 0 && m.done < len(m.reads); n-- {
		p.read(m, &m.reads[m.done], d, f)
		m.done++
	}
	if m.byLayer && !p.doLayers(m, n, d, f) {
		return
	}
	for ; n > 0 && m.Source == nil && !m.byLayer && m.done < len(blocks); n-- {
		if !p.touch(m, blocks[m.done], m.done, d, f) {
			return
		}
		m.done++
	}
	if m.done == m.items() {
		p.finishMove(m, n, d)
	}
}

// items is how many things a call moves.
func (m *move) items() int {
	if m.Source != nil {
		return len(m.reads)
	}
	if m.byLayer {
		return layers * len(m.Transfer.Blocks)
	}
	return len(m.Transfer.Blocks)
}

// beginMove is what happens before a plugin sees the blocks of a call.
func (p *proc) beginMove(m *move, d *rng, f Fault) {
	if m.begun {
		return
	}
	m.begun = true
	if m.Kind == tracker.Save && m.of == nil { // of a child's call the composite's is served so
		if !p.h.w.is(AckBeforeSave) {
			p.h.makeDigests(m)
		}
		p.h.copyOut(m)
	}
	p.beginLayers(m)
	if o := &p.h.w.opt; f == faultScribble || m.Kind == tracker.Save && m.Slots != nil && o.Rough > 0 && !p.h.w.quiet && d.n(3) == 1 {
		p.scribbleOn(m.Rank, m.Slots, d)
	}
}

// finishMove is what is left when all blocks of a call are done: a save that was told to be stored reads some
// again, for others.
func (p *proc) finishMove(m *move, n int, d *rng) {
	blocks := m.Transfer.Blocks
	for ; n > 0 && len(m.again) > 0; n-- {
		b := m.again[0]
		if m.again = m.again[1:]; !p.touch(m, b, slices.Index(blocks, b), d, faultNone) {
			return
		}
	}
	if m.Kind == tracker.Save && p.h.w.opt.Tells && !m.told && len(m.missing) == 0 && !p.dying {
		p.tellStored(m, d)
		return
	}
	if len(m.again) == 0 {
		p.releasePart(m)
		var err error
		if len(m.missing) > 0 {
			err = &connector.BlockError{Blocks: m.missing, Err: connector.ErrGone}
		}
		m.end(err, p)
	}
}

// refusal is the error with which a call gives up, if it does.
func (m *move) refusal(d *rng, f Fault) error {
	switch f {
	case faultBusy:
		return connector.ErrBusy
	case faultError:
		return errBackend
	case faultForeign:
		return &connector.BlockError{Blocks: []connector.BlockID{connector.BlockID(1000 + d.n(9))}, Err: connector.ErrGone}
	case faultWild:
		return connector.ErrCorrupt
	default:
	}
	if (m.canceled || m.of != nil && m.of.canceled) && d.n(2) == 0 {
		return errCanceled
	}
	return nil
}

// end sends a call's answer on its way.
func (m *move) end(err error, p *proc) {
	if !p.dying {
		m.answered, m.out = true, tracker.Outcome{Err: m.Back(err), Layers: m.Layers}
		if p.h.w.is(CheckThenCopy) && m.Kind == tracker.Load {
			m.bad, _ = p.h.checkDigests(m, p.h.seen)
		}
		if err == nil {
			p.h.cutFirst(m)
		}
	}
}

// mayTouch verifies that the blocks of a transfer are pinned.
func (p *proc) mayTouch(m *move, b connector.Block) bool {
	open := m.grant != nil && m.grant.open
	if !open {
		what := "writes"
		if m.Kind == tracker.Save {
			what = "reads"
		}
		p.h.w.fail('c', "%s: the plugin %s block %d for a %s of %s, which is over for the engine", p.h.e.name, what, b.ID, m.Kind, m.Transfer.Request)
	}
	return open
}

// touch reads or writes one block of a transfer. This is what pins are for.
func (p *proc) touch(m *move, b connector.Block, i int, d *rng, f Fault) bool {
	if !p.mayTouch(m, b) {
		return false
	}
	h := p.h
	c := h.seen(m, i)
	if m.Kind == tracker.Save {
		p.save(m, b, c, d, f)
		return true
	}
	if h.w.opt.Lossy {
		p.bring(m, b, i, c, f)
		return true
	}
	if f == faultNothing {
		c.orphan()
		return true
	}
	from, ok := p.source(m, b, i)
	if f == faultWrong && d.n(2) == 0 {
		wrong, elsewhere := p.misplaced(m, b)
		if other, found := p.source(wrong, elsewhere, i); found {
			c.set(other)
			return true
		}
	}
	if !ok || f == faultPartial {
		m.lacks(b)
		clear(c.tags) // what it wrote before it gave up
		return true
	}
	switch f {
	case faultHalf:
		c.orphan()
		copy(c.tags, from.tags[:len(from.tags)/2])
		c.sum, c.foreign = from.sum, from.foreign
	case faultWrong:
		c.set(from)
		c.tags[d.n(len(c.tags))].kv ^= 1 << d.n(64)
	default:
		c.set(from)
	}
	return true
}

// misplaced is a load of another rank or group by mistake.
func (p *proc) misplaced(m *move, b connector.Block) (*move, connector.Block) {
	o, wrong := &p.h.w.opt, *m
	if o.Ranks > 1 {
		wrong.Rank = (m.Rank + 1) % o.Ranks
	} else {
		b.Group = uint16((int(b.Group) + 1) % o.Groups)
	}
	return &wrong, b
}

// save stores one block, or says so. Partial blocks have no key.
func (p *proc) save(m *move, b connector.Block, c *cell, d *rng, f Fault) {
	if p.medium() != ThroughStore || b.Key == (connector.BlockKey{}) || f == faultNothing {
		return
	}
	k := storeKey{b.Key, b.Group, uint8(m.Rank)}
	switch f {
	case faultPartial:
		m.lacks(b)
		return
	case faultHalf, faultWrong:
		torn := &cell{tags: append([]tag(nil), c.tags...), sum: c.sum}
		torn.tags[d.n(len(torn.tags))].kv ^= 1 << d.n(64)
		p.store().put(k, torn, m.Transfer.Replace)
		return
	default:
	}
	if p.h.w.is(DigestOfCopy) && m.Slots != nil {
		c.sum = p.h.sum(c, b, m.Rank)
	}
	p.store().put(k, c, m.Transfer.Replace)
}

// source finds what a block is filled from.
func (p *proc) source(m *move, b connector.Block, i int) (*cell, bool) {
	w := p.h.w
	if p.medium() == ThroughStore {
		c := p.store().cells[storeKey{b.Key, b.Group, uint8(m.Rank)}]
		return c, c != nil && b.Key != (connector.BlockKey{})
	}
	t, ok := parseTicket(m.Transfer.Ticket)
	if !ok {
		return nil, false
	}
	from := w.pluginOf(t)
	if from == nil {
		return nil, false
	}
	return from.fetch(t.hold, m, b, i)
}

// pluginOf is the plugin that gave a ticket, nil if it does not answer any more.
func (w *World) pluginOf(t ticketBytes) *proc {
	if t.engine >= len(w.engines) {
		return nil
	}
	e := w.engines[t.engine]
	if e.epoch != t.epoch || e.host == nil {
		return nil
	}
	p := e.host.proc
	if p != nil && p.comp != nil {
		p = p.comp.backend(t.child)
	}
	if p == nil || p.dying || !p.hung.IsZero() {
		return nil
	}
	return p
}

// fetch serves a consumer: it reads the producer's memory as it is now. If the hold is over the block
// may hold anything, and only the digest tells.
func (p *proc) fetch(id connector.HoldID, m *move, b connector.Block, i int) (*cell, bool) {
	for _, k := range p.holds {
		if k.id != id {
			continue
		}
		size, t := p.h.e.size, m.Transfer
		at := position(t.Blocks, b, t.From+t.Tokens, size)
		for _, have := range k.blocks {
			if have.Group != b.Group || position(k.blocks, have, k.tokens, size) != at {
				continue
			}
			if i == len(t.Blocks)-1 && m.Rank == 0 {
				p.taken = append(p.taken, id)
			}
			return &p.h.e.mem[m.Rank][have.ID], true
		}
	}
	return nil, false
}

// position is which block of the prefix b is: each group's blocks end with the last one of end tokens.
func position(blocks []connector.Block, b connector.Block, end, size int) int {
	at := (end + size - 1) / size
	for _, other := range blocks {
		if other.Group == b.Group {
			at--
		}
	}
	for _, other := range blocks {
		switch {
		case other.ID == b.ID && other.Group == b.Group:
			return at
		case other.Group == b.Group:
			at++
		}
	}
	return -1
}

// consume reports what consumers have fetched.
func (p *proc) consume(f Fault) {
	if p.comp != nil {
		p.comp.consume(f)
		return
	}
	if len(p.taken) == 0 || p.isDown || !p.hung.IsZero() {
		return
	}
	list := p.taken
	p.taken = nil
	switch f {
	case faultLost:
		return
	case faultTwice:
		list = append(list, list...)
	case faultForeign:
		list = append(list, 999)
	default:
	}
	for _, id := range list {
		p.fetched[id]++
	}
	if p.h.w.is(FirstConsumerFrees) {
		list = append(list, list...)
	}
	if p.child != nil {
		p.child.holds.Consumed(p.n, list)
		return
	}
	p.h.do(p.h.tracker.Consumed(p.n, list))
}

// moved is the answer of a worker call at the host.
func (h *host) moved(p *proc, m *move) {
	for i := range p.moves {
		if p.moves[i] == m {
			p.moves = append(p.moves[:i:i], p.moves[i+1:]...)
			break
		}
	}
	if m.reported {
		return
	}
	h.remember(m.ID)
	h.noteEarly(m)
	if m.Kind == tracker.Load {
		h.unsigned(m)
		m.grant.claimed = m.grant.claimed || isCorrupt(m.out.Err)
		h.copyIn(m)
		switch {
		case m.Source != nil:
			h.reshaped(m)
		case !h.overlooks(m):
			m.out.Corrupt, m.out.Foreign = h.checkDigests(m, h.cached)
			if h.w.is(CheckThenCopy) && m.Slots != nil {
				m.out.Corrupt = m.bad
			}
			if !m.grant.turn { // what was reused is gone, not damaged
				h.w.stats.Damaged += len(m.out.Corrupt)
			}
			h.vouch(m)
		}
	}
	h.noteForeign(m)
	if h.w.tracing() {
		h.w.say("%s: %s of %s on rank %d returns: %s", h.e.name, m.Kind, m.Transfer.Request, m.Rank, describeOutcome(&m.out))
	}
	h.do(h.tracker.Moved(h.w.now, m.ID, m.out))
}
