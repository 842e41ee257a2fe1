package tracker

import (
	"errors"
	"slices"

	"github.com/kvport/kvport/connector"
)

// Landing is the account of landing memory: which slot of which rank belongs to which call. A slot
// is given back when nothing can touch it any more, and the one that has been free for longest is
// given out first, so that a write that comes too late most likely meets an empty slot.
//
// Loads and saves each have a quarter of the slots to themselves, so that neither can keep the other
// waiting. It is not safe for concurrent use.
type Landing struct {
	slots   int
	reserve int
	ranks   []rankSlots
}

type rankSlots struct {
	free []connector.BlockID
	used [2]int // by Kind-1
}

// NewLanding makes the account of some ranks with slots each, all free.
func NewLanding(ranks, slots int) *Landing {
	l := &Landing{slots: slots, reserve: slots / 4, ranks: make([]rankSlots, ranks)}
	for r := range l.ranks {
		for s := range slots {
			l.ranks[r].free = append(l.ranks[r].free, connector.BlockID(s))
		}
	}
	return l
}

// Most is how many slots one call can have at all.
func (l *Landing) Most() int { return l.slots - l.reserve }

// Piece is how many blocks a part of a divided transfer has: so few that several parts are on their
// way at once.
func (l *Landing) Piece() int { return max(1, l.slots/4) }

// Take gives n slots of a rank to a call, or nil if they are not free now.
func (l *Landing) Take(rank int, kind Kind, n int) []connector.BlockID {
	r := &l.ranks[rank]
	if n > len(r.free) || r.used[kind-1]+n > l.Most() {
		return nil
	}
	taken := r.free[:n:n]
	r.free = r.free[n:]
	r.used[kind-1] += n
	return taken
}

// Give takes slots back.
func (l *Landing) Give(rank int, kind Kind, slots []connector.BlockID) {
	r := &l.ranks[rank]
	r.free = append(r.free, slots...)
	r.used[kind-1] -= len(slots)
}

// Used counts the slots that are given out, over all ranks.
func (l *Landing) Used() int {
	n := 0
	for i := range l.ranks {
		n += l.slots - len(l.ranks[i].free)
	}
	return n
}

// Divide cuts a transfer into parts no larger than most, each with blocks of one group that
// follow one another; a transfer that is small enough stays whole. Parts share t's blocks.
func Divide(t *connector.Transfer, groups []connector.Group, most int) []*connector.Transfer {
	if len(t.Blocks) <= most {
		return []*connector.Transfer{t}
	}
	left := make([]int, len(groups)) // blocks of each group that are not in a part yet
	for _, k := range t.Blocks {
		if int(k.Group) < len(left) {
			left[k.Group]++
		}
	}
	var parts []*connector.Transfer
	for rest := t.Blocks; len(rest) > 0; {
		group := rest[0].Group
		n := 1
		for n < len(rest) && n < most && rest[n].Group == group {
			n++
		}
		p := *t
		p.Blocks, rest = rest[:n:n], rest[n:]
		if int(group) < len(groups) {
			p.From, p.Tokens = span(t, groups[group].BlockTokens, left[group], n)
			left[group] -= n
		}
		parts = append(parts, &p)
	}
	return parts
}

// span gives the tokens that n blocks cover, the first of which is left blocks before the end of t:
// the blocks of every group end with the last token.
func span(t *connector.Transfer, blockTokens, left, n int) (from, tokens int) {
	last := t.From + t.Tokens
	end := (last + blockTokens - 1) / blockTokens // in blocks
	from = max(0, end-left) * blockTokens
	return from, max(0, min((end-left+n)*blockTokens, last)-from)
}

// line is the calls that wait for landing slots, in the order in which they came: by rank and kind.
type line struct{ waiting []*call }

// queue lets the ready calls of an op wait for slots.
func (b *Tracker) queue(o *op) {
	for _, c := range o.calls {
		if c.state == ready && !c.waiting {
			c.waiting = true
			l := b.line(c)
			l.waiting = append(l.waiting, c)
		}
	}
}

func (b *Tracker) line(c *call) *line {
	rank := c.rank
	if c.op.source != nil {
		rank = b.cfg.Ranks
	}
	return &b.lines[2*rank+int(c.op.kind)-1]
}

// room takes slots for a call, or a window, and gives nil if they are not free now.
func (b *Tracker) room(c *call) []connector.BlockID {
	if c.op.source != nil {
		return b.windows.Take(0, Load, 1)
	}
	return b.landing.Take(c.rank, c.op.kind, len(c.part.Blocks))
}

// startQueued starts the calls that are first in line and have slots. None overtakes another of its
// rank and kind, so each has its turn: a call has at most as many blocks as there are slots, and
// slots come back when a call returns or its generation is reaped.
func (b *Tracker) startQueued() {
	for i := range b.lines {
		l := &b.lines[i]
		for len(l.waiting) > 0 {
			c := l.waiting[0]
			if c.state == ready {
				if b.state != up {
					break
				}
				if c.slots = b.room(c); c.slots == nil {
					break
				}
				b.start(c, b.gen)
			}
			c.waiting = false
			l.waiting[0] = nil
			l.waiting = l.waiting[1:]
		}
	}
}

// vacate gives back the slots of a call that nothing touches any more.
func (b *Tracker) vacate(c *call) {
	switch {
	case c.slots == nil:
		return
	case c.op.source != nil:
		b.windows.Give(0, Load, c.slots)
	default:
		b.landing.Give(c.rank, c.op.kind, c.slots)
	}
	c.slots = nil
}

// divide cuts the parts of an op so that each fits into landing memory. A part with bytes of the
// connector's own stays whole, because only the connector knows which bytes belong to which block; so does what a
// producer holds, because the hold is over when a load has fetched it. One that does not fit fails.
func (b *Tracker) divide(o *op, parts []*connector.Transfer) []*connector.Transfer {
	var out []*connector.Transfer
	held := o.kind == Load && len(o.t.Ticket) > 0 && b.isHolder()
	for _, p := range parts {
		switch {
		case len(p.Extra) == 0 && !held:
			out = append(out, Divide(p, b.cfg.Groups, b.landing.Piece())...)
		case len(p.Blocks) <= b.landing.Most():
			out = append(out, p)
		default:
			o.fail(p.Blocks, errLanding)
		}
	}
	return out
}

// LandingUsed counts the landing slots that calls have, over all ranks; 0 without landing memory.
func (b *Tracker) LandingUsed() int {
	if b.landing == nil {
		return 0
	}
	return b.landing.Used()
}

// Copy is one block on its way between the cache and a slot of landing memory.
type Copy struct {
	Group       uint16
	Block, Slot connector.BlockID
}

// Seen is the transfer as the plugin sees it, with landing slots in place of the cache's blocks. Without landing
// memory it is the transfer itself.
func (m *Move) Seen() *connector.Transfer {
	if m.Slots == nil {
		return m.Transfer
	}
	t := *m.Transfer
	t.Blocks = slices.Clone(t.Blocks)
	for i := range t.Blocks {
		t.Blocks[i].ID = m.Slots[i]
	}
	return &t
}

// noBlock stands for a slot that the plugin named and was not given.
const noBlock connector.BlockID = -1

// Back translates the slots that the plugin's error names into the cache's blocks.
func (m *Move) Back(err error) error {
	var some *connector.BlockError
	if m.Slots == nil || !errors.As(err, &some) || len(some.Blocks) == 0 {
		return err
	}
	blocks := make([]connector.BlockID, len(some.Blocks))
	for i, slot := range some.Blocks {
		blocks[i] = noBlock
		if at := slices.Index(m.Slots, slot); at >= 0 {
			blocks[i] = m.Transfer.Blocks[at].ID
		}
	}
	return &connector.BlockError{Blocks: blocks, Err: some.Err}
}

// Out lists what is copied to landing memory before a save: all of it.
func (m *Move) Out() []Copy { return m.In(nil) }

// In lists what is copied to the cache after a load: what has arrived, as the error says that Back gave. What the plugin
// writes from then on changes nothing: each byte is read once, and checked where nobody but the host can write.
func (m *Move) In(err error) (in []Copy) {
	missing := missing(err)
	for i, s := range m.Slots {
		if b := m.Transfer.Blocks[i]; !missing(b.ID) {
			in = append(in, Copy{b.Group, b.ID, s})
		}
	}
	return in
}

// Arrived gives those of a load's blocks that are there, as its error says.
func Arrived(blocks []connector.Block, err error) []connector.Block {
	if err == nil {
		return blocks
	}
	missing := missing(err)
	return slices.DeleteFunc(slices.Clone(blocks), func(b connector.Block) bool { return missing(b.ID) })
}

// missing tells which blocks are not there after a load: those that its error names, or all if it names none.
func missing(err error) func(connector.BlockID) bool {
	var some *connector.BlockError
	if !errors.As(err, &some) || len(some.Blocks) == 0 {
		return func(connector.BlockID) bool { return err != nil }
	}
	named := make(map[connector.BlockID]bool, len(some.Blocks))
	for _, id := range some.Blocks {
		named[id] = true
	}
	return func(id connector.BlockID) bool { return named[id] }
}
