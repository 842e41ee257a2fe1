package multiconnector

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// maxEarly bounds the reports of one child about holds that it has not announced yet.
const maxEarly = 1 << 10

// retryPoll is the pause after a long poll that failed.
const retryPoll = 100 * time.Millisecond

// HoldsOver are ends of holds.
type HoldsOver struct {
	Fetched []connector.HoldID // each once for every consumer that has come
	Died    []connector.HoldID // each once: the process that kept it is gone
	Lost    []connector.HoldID // as Died, and somebody may use the blocks for ever
}

// HoldWatcher is a Holder that knows how its holds end. The scheduler side of a composite is one, and those of its
// children may be.
type HoldWatcher interface {
	// HoldsOver waits as Consumed does, and says more: only one of the two is called.
	HoldsOver(ctx context.Context) (HoldsOver, error)
}

// Consumed is what a Holder reports, which has no word for holds that nobody came for. Those that are lost are left out:
// whoever hears that they are consumed uses their blocks again at once.
func (o *HoldsOver) Consumed() []connector.HoldID { return slices.Concat(o.Fetched, o.Died) }

// empty says that there are none.
func (o *HoldsOver) empty() bool { return len(o.Fetched)+len(o.Died)+len(o.Lost) == 0 }

// WaitHoldsOver waits for ends of a Holder's holds. One that does not know how they end says that consumers have come.
func WaitHoldsOver(ctx context.Context, h connector.Holder) (o HoldsOver, err error) {
	if w, knows := h.(HoldWatcher); knows {
		return w.HoldsOver(ctx)
	}
	o.Fetched, err = h.Consumed(ctx)
	return o, err
}

// childHold names one child's hold.
type childHold struct {
	child int
	id    connector.HoldID
}

// held is one composite hold: it is over when no child waits for consumers any more.
type held struct {
	id      connector.HoldID
	waiting map[childHold]int // consumers that have not fetched yet
	ttl     time.Duration
	expires time.Time // the host has released it by then
	over    bool      // it was reported, or the host has released it before all was fetched
	told    bool      // the host has released it, and its children learn about that
	died    bool      // a child that kept a part is gone
}

// tellOver is how long after the end of a hold the host may still speak of it.
const tellOver = 10 * time.Second

// renew notes that a hold's time begins again.
func (h *held) renew(now time.Time) { h.expires = now.Add(2*h.ttl + tellOver) }

// ledger counts holds. It alone knows which children keep a part of a hold; which process of a child keeps which part, and
// under which number, is the child's business (package host has tracker.HoldTable for that).
type ledger struct {
	mu    sync.Mutex
	last  connector.HoldID
	open  map[childHold]*held
	early map[childHold]earlyEnd // reported before they were announced
	asked bool                   // Finish runs: what is reported now may be announced by it
	over  HoldsOver
	wake  chan struct{}
}

// earlyEnd is what a child has reported of a hold before its answer that announces it was added.
type earlyEnd struct {
	consumers  int
	died, lost bool
}

func newLedger() ledger {
	return ledger{open: map[childHold]*held{}, early: map[childHold]earlyEnd{}, wake: make(chan struct{}, 1)}
}

// Finish implements connector.Holder. Every child that holds is asked; the composite holds as long as
// one of them does, and its ticket has a section of each.
func (s *scheduler) Finish(ctx context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	answers := make([][]connector.Hold, len(s.lanes))
	s.ledger.ask(true)
	defer s.ledger.ask(false)
	s.together(len(s.lanes), func(i int) {
		holder, can := connector.As[connector.Holder](s.lanes[i].side)
		if !can {
			return
		}
		holds, err := try(ctx, s.lanes[i], untilDeadline(ctx), func(ctx context.Context) ([]connector.Hold, error) { return holder.Finish(ctx, ended) })
		if err == nil && len(holds) == len(ended) {
			answers[i] = holds
		}
	})
	out := make([]connector.Hold, len(ended))
	for k := range ended {
		out[k] = s.hold(k, &ended[k], answers)
		s.routes.forget(ended[k].Request)
	}
	return out, nil
}

// hold joins the children's holds of one ended request. Where nothing is kept for consumers, it serves as many as the
// child that serves the fewest.
func (s *scheduler) hold(k int, e *connector.Ended, answers [][]connector.Hold) connector.Hold {
	now := s.run.Now()
	joint, serves := connector.Hold{Consumers: 1, Weak: true}, math.MaxInt
	h := &held{waiting: map[childHold]int{}}
	var sections []section
	for i, holds := range answers {
		if holds == nil || holds[k].ID == 0 {
			continue
		}
		one := holds[k]
		if one.TTL <= 0 {
			one.TTL = HoldTTL
		}
		weak := one.Weak || e.Weak
		joint.TTL, joint.Weak, serves = max(joint.TTL, one.TTL), joint.Weak && weak, min(serves, max(one.Consumers, 1))
		sections = append(sections, section{s.children[i].Name, one.Ticket})
		if !weak {
			h.waiting[childHold{i, one.ID}] = max(one.Consumers, 1)
		}
	}
	if len(sections) == 0 {
		return connector.Hold{}
	}
	if joint.Weak {
		joint.Consumers = serves
	}
	h.ttl = joint.TTL
	h.renew(now)
	joint.ID, joint.Ticket = s.ledger.add(h, now), sealTicket(append(sections, s.inStores(e)...))
	return joint
}

// add takes on a hold and gives it a number.
func (l *ledger) add(h *held, now time.Time) connector.HoldID {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c, old := range l.open {
		if now.After(old.expires) {
			delete(l.open, c) // the host has released it long ago
		}
	}
	l.last++
	h.id = l.last
	for c := range h.waiting {
		l.open[c] = h
	}
	for c := range h.waiting {
		e := l.early[c]
		delete(l.early, c)
		for range e.consumers {
			l.fetched(c)
		}
		if e.died {
			l.die(c, e.lost)
		}
	}
	return h.id
}

// ask notes that Finish begins, or that all that its children have answered was added.
func (l *ledger) ask(begins bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked = begins
	if !begins {
		clear(l.early) // nobody announced them
	}
}

// ended takes what one child says about the ends of its holds.
func (l *ledger) ended(child int, o *HoldsOver) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range o.Fetched {
		c := childHold{child, id}
		if !l.fetched(c) {
			l.note(c, earlyEnd{consumers: 1})
		}
	}
	for _, id := range o.Died {
		c := childHold{child, id}
		if !l.die(c, false) {
			l.note(c, earlyEnd{died: true})
		}
	}
	for _, id := range o.Lost {
		c := childHold{child, id}
		if !l.die(c, true) {
			l.note(c, earlyEnd{died: true, lost: true})
		}
	}
}

// note remembers the end of a hold that is not known and may be announced yet; otherwise it is one that nothing is kept for.
func (l *ledger) note(c childHold, e earlyEnd) {
	if !l.asked || len(l.early) >= maxEarly {
		return
	}
	was := l.early[c]
	l.early[c] = earlyEnd{was.consumers + e.consumers, was.died || e.died, was.lost || e.lost}
}

// fetched counts one consumer of a child's hold; false: that is not open. The caller holds mu.
func (l *ledger) fetched(c childHold) bool {
	h := l.open[c]
	if h == nil {
		return false
	}
	if h.waiting[c]--; h.waiting[c] <= 0 {
		l.close(c, h)
	}
	return true
}

// die ends a child's hold because the process that kept it is gone; false: it is not open. Once the blocks are lost nobody
// waits for the other children: the host keeps the blocks for good. The caller holds mu.
func (l *ledger) die(c childHold, lost bool) bool {
	h := l.open[c]
	if h == nil {
		return false
	}
	if lost && !h.over {
		h.over = true
		l.over.Lost = append(l.over.Lost, h.id)
		l.tell()
	}
	h.died = true
	l.close(c, h)
	return true
}

// close ends the part of a hold that a child kept. After the last part the hold is over.
func (l *ledger) close(c childHold, h *held) {
	delete(h.waiting, c)
	delete(l.open, c)
	switch {
	case len(h.waiting) > 0 || h.over:
		return
	case h.died:
		l.over.Died = append(l.over.Died, h.id)
	default:
		l.over.Fetched = append(l.over.Fetched, h.id)
	}
	l.tell()
}

// renew gives the composite holds that a child renews its parts of, and what it named that is not an
// open hold.
func (l *ledger) renew(child int, ids []connector.HoldID, now time.Time) (own, unknown []connector.HoldID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		h := l.open[childHold{child, id}]
		if h == nil || h.over {
			unknown = append(unknown, id)
			continue
		}
		h.renew(now)
		own = append(own, h.id)
	}
	return own, unknown
}

// end notes that the host has released composite holds, and gives the parts that children keep of them.
func (l *ledger) end(ids []connector.HoldID) (parts []childHold) {
	if len(ids) == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for c, h := range l.open {
		if !h.told && slices.Contains(ids, h.id) {
			parts = append(parts, c)
		}
	}
	for _, c := range parts {
		l.open[c].over, l.open[c].told = true, true
	}
	return parts
}

// tell says that holds are over.
func (l *ledger) tell() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// Consumed implements connector.Holder.
func (s *scheduler) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	o, err := s.HoldsOver(ctx)
	return o.Consumed(), err
}

// HoldsOver implements HoldWatcher. A composite hold is reported once, when the last child's part of it is over; as lost
// as soon as one part is.
func (s *scheduler) HoldsOver(ctx context.Context) (HoldsOver, error) {
	for {
		s.ledger.mu.Lock()
		over := s.ledger.over
		s.ledger.over = HoldsOver{}
		s.ledger.mu.Unlock()
		if !over.empty() {
			return over, nil
		}
		if err := s.run.Wait(ctx, s.ledger.wake, time.Time{}); err != nil {
			return HoldsOver{}, err
		}
	}
}

// watchHolds learns which holds of one child are over.
func (s *scheduler) watchHolds(child int, holder connector.Holder) {
	for s.life.Err() == nil {
		over, err := WaitHoldsOver(s.life, holder)
		if err != nil {
			s.pause(s.life, retryPoll)
			continue
		}
		s.ledger.ended(child, &over)
	}
}

const (
	renewWait    = 500 * time.Millisecond // for a child that renews a hold (rule LEASE-01)
	restRenewals = 5 * time.Millisecond   // after a call: a child that never waits gets no more of the processor than this
	maxOver      = 1 << 12                // ended holds that one child has not heard of
)

// leases carry renewals from the children to the host and the host's answers back (rule MULTI-11). A
// child is called again only after the host has answered what it named, because that call tells it
// that the host agrees (LEASE-02).
type leases struct {
	begin sync.Once // of the calls

	mu       sync.Mutex
	children []lease
	wake     chan struct{} // of one: a child has named holds
}

// lease is what one child and the host have to say to each other.
type lease struct {
	leaser   bool
	named    []connector.HoldID // by the child's last call, in its own numbers
	passed   bool               // named was passed to the host, which has not answered yet
	answered chan struct{}      // closed when the host has answered named
	over     []connector.HoldID // ended holds that the child must be told about
}

func newLeases(children []connector.Scheduler) leases {
	list := make([]lease, len(children))
	for i, side := range children {
		_, list[i].leaser = connector.As[connector.Leaser](side)
	}
	return leases{children: list, wake: make(chan struct{}, 1)}
}

// Renewals implements connector.Leaser. A composite hold is renewed when any child renews its part,
// and every child that keeps a part of an ended hold learns about its end.
func (s *scheduler) Renewals(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
	s.leases.begin.Do(func() {
		for i, l := range s.lanes {
			if leaser, ok := connector.As[connector.Leaser](l.side); ok {
				s.beside(&s.work, func() { s.watchLeases(i, leaser) })
			}
		}
	})
	s.leases.answer(s.ledger.end(ended))
	for until := s.run.Now().Add(renewWait); ; {
		if ids := s.renewed(); len(ids) > 0 {
			return ids, nil
		}
		if s.run.Wait(ctx, s.leases.wake, until) != nil {
			return nil, ctx.Err()
		}
	}
}

// renewed are the composite holds that children have named since the last call. What a child names
// that is not an open hold of ours is refused.
func (s *scheduler) renewed() []connector.HoldID {
	s.leases.mu.Lock()
	defer s.leases.mu.Unlock()
	var ids []connector.HoldID
	for i := range s.leases.children {
		c := &s.leases.children[i]
		if len(c.named) == 0 || c.passed {
			continue
		}
		own, unknown := s.ledger.renew(i, c.named, s.run.Now())
		c.end(unknown)
		if len(own) == 0 {
			c.settle()
			continue
		}
		c.passed = true
		ids = append(ids, own...)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// watchLeases learns which holds one child renews and tells it which are over. A call that fails
// renews nothing and is made again; the other children do not wait for it.
func (s *scheduler) watchLeases(child int, leaser connector.Leaser) {
	for s.life.Err() == nil {
		over := s.leases.overOf(child)
		ids, err := leaser.Renewals(s.life, slices.Clone(over))
		if err != nil {
			s.pause(s.life, retryPoll)
			continue
		}
		_ = s.run.Wait(s.life, s.leases.name(child, ids, len(over)), time.Time{})
		s.pause(s.life, restRenewals)
	}
}

// overOf are the ended holds that a child has not heard of. The caller does not change them.
func (l *leases) overOf(child int) []connector.HoldID {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.children[child].over
}

// name takes the answer of a child that has been told about heard ended holds. The channel is closed when
// the host has answered what the child named.
func (l *leases) name(child int, ids []connector.HoldID, heard int) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &l.children[child]
	c.over = slices.Clone(c.over[heard:])
	answered := make(chan struct{})
	c.named, c.answered = ids, answered
	if len(ids) == 0 {
		c.settle()
		return answered
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
	return answered
}

// answer takes the host's word on what it was told last: all is renewed, except for these parts.
func (l *leases) answer(ended []childHold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, part := range ended {
		l.children[part.child].end([]connector.HoldID{part.id})
	}
	for i := range l.children {
		if c := &l.children[i]; c.passed {
			c.settle()
		}
	}
}

// settle lets the child be called again.
func (c *lease) settle() {
	c.named, c.passed = nil, false
	close(c.answered)
}

// end notes that the child must be told about the end of holds.
func (c *lease) end(ids []connector.HoldID) {
	if c.leaser && len(c.over)+len(ids) <= maxOver {
		c.over = append(c.over, ids...)
	}
}

// A composite ticket is a version byte and sections: u16 length and name of a child, u32 length and
// that child's ticket. Lengths are big endian. Sections of children that the reader does not have
// are skipped, so that P and D need not have the same children. A section whose name begins with storeSection names
// a shared store: it says, as an unsigned varint, how many leading tokens are there. No child is called so.

const ticketVersion = 1

// maxTicketSections bounds a ticket of hostile bytes.
const maxTicketSections = 4 * MaxChildren

// storeSection begins the name of the section of a shared store, before the child's name.
const storeSection = "shared/"

var errTicket = errors.New("composite ticket is malformed")

type section struct {
	child  string
	ticket []byte
}

func sealTicket(sections []section) []byte {
	if len(sections) == 0 {
		return nil
	}
	out := []byte{ticketVersion}
	for _, s := range sections {
		out = binary.BigEndian.AppendUint16(out, uint16(len(s.child)))
		out = append(out, s.child...)
		out = binary.BigEndian.AppendUint32(out, uint32(len(s.ticket)))
		out = append(out, s.ticket...)
	}
	return out
}

// openTicket reads a composite ticket. The sections share its bytes.
func openTicket(t []byte) ([]section, error) {
	if len(t) == 0 {
		return nil, nil
	}
	if t[0] != ticketVersion {
		return nil, errTicket
	}
	var out []section
	for rest := t[1:]; len(rest) > 0; {
		var name, ticket []byte
		var ok bool
		if name, rest, ok = cut(rest, 2); ok {
			ticket, rest, ok = cut(rest, 4)
		}
		if !ok || len(out) == maxTicketSections {
			return nil, errTicket
		}
		out = append(out, section{string(name), ticket})
	}
	return out, nil
}

// cut takes a field after a length of n bytes off b.
func cut(b []byte, n int) (field, rest []byte, ok bool) {
	if len(b) < n {
		return nil, nil, false
	}
	size := uint64(0)
	for _, c := range b[:n] {
		size = size<<8 | uint64(c)
	}
	b = b[n:]
	if uint64(len(b)) < size {
		return nil, nil, false
	}
	return b[:size], b[size:], true
}

// ticketOf is the part of a composite ticket that is for one child: nil when there is none.
func (m *Multi) ticketOf(child int, t connector.Ticket) connector.Ticket {
	sections, err := openTicket(t)
	if err != nil {
		return nil
	}
	for _, s := range sections {
		if s.child == m.children[child].Name {
			return append(connector.Ticket{}, s.ticket...)
		}
	}
	if t != nil && m.children[child].Info.Capabilities&connector.CanHold == 0 {
		return connector.Ticket{} // stores learn that there is one
	}
	return nil
}

// inStores are the sections that say which leading tokens of an ended request are in shared stores: what was loaded
// from there or saved there, or was found there.
func (s *scheduler) inStores(e *connector.Ended) (list []section) {
	if len(s.groups) != 1 || s.groups[0].Policy != connector.PolicyAll {
		return nil // blocks do not go one to one with the prompt's keys
	}
	for i := range s.children {
		if !s.children[i].isSharedStore() {
			continue
		}
		if n := s.stored.prefix(i, e.Blocks) * s.unit; n > 0 {
			list = append(list, section{storeSection + s.children[i].Name, binary.AppendUvarint(nil, uint64(n))})
		}
	}
	return list
}

// namedBy is how many leading tokens a ticket says are in the shared store of each child.
func (m *Multi) namedBy(t connector.Ticket) []int {
	named := make([]int, len(m.children))
	sections, err := openTicket(t)
	if err != nil {
		return named
	}
	for _, s := range sections {
		name, isStore := strings.CutPrefix(s.child, storeSection)
		if !isStore {
			continue
		}
		for i := range m.children {
			if n, size := binary.Uvarint(s.ticket); size > 0 && n <= math.MaxInt32 && m.children[i].Name == name && m.children[i].isSharedStore() {
				named[i] = int(n)
			}
		}
	}
	return named
}
