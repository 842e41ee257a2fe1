package nixl

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/nixl"
)

// maxWorld bounds the ranks of an engine.
const maxWorld = 4096

// baseOf is the base that a question carries if the engine's blocks can be cut, and nil otherwise.
func baseOf(e *connector.Env) []byte {
	if e.Base == (connector.Fingerprint{}) {
		return nil
	}
	return e.Base[:]
}

// producerRank is the rank of the producer that a question is about.
func (q *question) producerRank() int {
	if q.Reshape {
		return q.Of
	}
	return q.Rank
}

// readers is how many ranks read a hold before it is over; same is how many do with equal shapes.
func (q *question) readers(same int) int {
	if q.Reshape {
		return q.World
	}
	return same
}

// sameShape reports why a consumer cannot use what is here: its shape must be ours, or, for what it
// reshapes and for signs of life, its base.
func (n *Node) sameShape(q *question) error {
	base := baseOf(&n.env)
	cuts := base != nil && bytes.Equal(q.Base, base)
	switch {
	case q.World < 1 || q.World > maxWorld || q.Rank < 0 || q.Rank >= q.World:
		return fmt.Errorf("rank %d of %d: %w", q.Rank, q.World, connector.ErrIncompatible)
	case q.Reshape && !cuts:
		return fmt.Errorf("another layout or kernel, or blocks that cannot be cut: %w", connector.ErrIncompatible)
	case q.Reshape && (q.Of < 0 || q.Of >= n.env.World):
		return fmt.Errorf("about rank %d, and here are %d: %w", q.Of, n.env.World, connector.ErrIncompatible)
	case q.Reshape, cuts && len(q.Beats) > 0:
		return nil
	case !bytes.Equal(q.Shape, n.env.Shape[:]):
		return fmt.Errorf("another layout, block size, kernel or parallelism: %w", connector.ErrIncompatible)
	case q.World != n.env.World:
		return fmt.Errorf("rank %d of %d, and here are %d: %w", q.Rank, q.World, n.env.World, connector.ErrIncompatible)
	}
	return nil
}

// mayReshape reports why what a hold keeps cannot be reshaped.
func (q *question) mayReshape(e *connector.Ended) error {
	switch {
	case !q.Reshape:
		return nil
	case e.Weak:
		return fmt.Errorf("hold %d is weak, and only digests tell whether its blocks are still there: %w", q.Hold, connector.ErrIncompatible)
	case q.Push != nil:
		return fmt.Errorf("what is reshaped is read, not pushed: %w", connector.ErrIncompatible)
	}
	return nil
}

// describe adds what a consumer of another shape must know.
func (n *Node) describe(q *question, a *answer) {
	if !q.Reshape {
		return
	}
	a.World = n.env.World
	for _, g := range n.env.Layout.Groups {
		a.Sizes = append(a.Sizes, g.BlockTokens)
	}
}

// Reshape implements connector.Reshaper: it reads this rank's share of the tokens out of the caches of the
// producer's ranks that have some of it.
func (w *worker) Reshape(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	from, err := parseTicket(t.Ticket)
	if err != nil {
		return err
	}
	if err := w.rank.register(kv); err != nil {
		return err
	}
	env := &w.rank.env
	q := newQuestion(env)
	q.Base, q.Hold, q.Secret, q.Reshape = baseOf(env), from.Hold, from.Secret, true
	defer w.rank.node.heartbeats.read(&from)()
	r := &reshaping{worker: w, from: &from, q: q}
	defer r.leave()
	err = r.read(ctx, t, kv)
	if err == nil {
		q.Load = rand.Text()
		if err = w.confirm(ctx, &pendingQuestion{ticket: &from, q: q}); err == nil {
			err = r.untouched()
		}
		if err != nil {
			w.rank.node.tally.add(&read{mode: modePull, transport: "none", err: err})
		}
	}
	if err == nil && len(r.missing) > 0 {
		err = &connector.BlockError{Blocks: r.missing, Err: fmt.Errorf("the producer does not hold all of their tokens: %w", connector.ErrGone)}
	}
	return err
}

// reshaping is one Reshape. It reads even where the config says to push: a producer's rank that pushes takes the
// end of its own write for the end of the whole load.
type reshaping struct {
	worker   *worker
	from     *ticket
	q        *question
	landings []*landing
	missing  []connector.BlockID
}

// read reads from one rank of the producer after the other.
func (r *reshaping) read(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	q, theirs := r.q, r.from.World
	if theirs == 0 {
		return fmt.Errorf("the ticket does not say how many ranks its producer has: %w", connector.ErrIncompatible)
	}
	for q.Of = range theirs {
		if q.Of*q.World >= (q.Rank+1)*theirs || (q.Of+1)*q.World <= q.Rank*theirs {
			continue // it has other heads
		}
		a, err := r.worker.rank.node.pool.ask(ctx, r.from.Address, q)
		if err != nil {
			return err
		}
		if a.World != theirs {
			return fmt.Errorf("the producer has %d ranks, its ticket says %d: %w", a.World, theirs, connector.ErrIncompatible)
		}
		c := &cutter{kv: kv, t: t, answer: a, rank: q.Rank, world: q.World, of: q.Of}
		p, err := c.plan()
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		r.missing = p.missing // the same of every rank
		moved := read{mode: modePull, transport: "none"}
		if len(p.local) > 0 {
			moved.err = r.pull(ctx, a, p, &moved)
		}
		r.worker.rank.node.tally.add(&moved)
		if moved.err != nil {
			return moved.err
		}
	}
	return nil
}

// pull reads what is planned, in an alias mapping where there is one.
func (r *reshaping) pull(ctx context.Context, a *answer, p *reads, m *read) error {
	rank := r.worker.rank
	m.transport = rank.node.transports.transport(rank.backend.Name(), a.Host, a.PID, p.remote[0].Addr)
	l, _ := rank.land(a, p) // without an alias mapping, into the cache itself
	r.landings = append(r.landings, l)
	return l.pull(ctx, m)
}

// untouched reports what was taken from a read after it had ended.
func (r *reshaping) untouched() error {
	for _, l := range r.landings {
		if err := l.untouched(); err != nil {
			return err
		}
	}
	return nil
}

func (r *reshaping) leave() {
	for _, l := range r.landings {
		l.leave()
	}
}

// cutter plans the reads from one rank of a producer with another shape.
type cutter struct {
	kv          *connector.KV
	t           *connector.Transfer
	answer      *answer
	rank, world int
	of          int
}

// plan finds for each token of a transfer's blocks where the producer's rank has it, by its place in the
// prompt. Errors wrap connector.ErrIncompatible.
func (c *cutter) plan() (*reads, error) {
	l, a := c.kv.Layout(), c.answer
	if len(a.Segments) != len(l.Segments) || len(a.Sizes) != len(l.Groups) || a.Tokens <= 0 || a.Tokens > maxTokens {
		return nil, fmt.Errorf("the producer has %d segments, %d groups and %d tokens, we have %d segments and %d groups: %w",
			len(a.Segments), len(a.Sizes), a.Tokens, len(l.Segments), len(l.Groups), connector.ErrIncompatible)
	}
	p := &reads{}
	for g := range l.Groups {
		spans, err := c.spans(uint16(g), p)
		if err != nil {
			return nil, err
		}
		for _, s := range c.kv.Segments(uint16(g)) {
			if l.Segments[s].Layer == connector.DigestLayer {
				continue // of other blocks than ours
			}
			if err := c.cut(p, s, spans); err != nil {
				return nil, err
			}
		}
	}
	return p, nil
}

// span is a run of tokens that one of our blocks is to get.
type span struct {
	block    connector.Block
	from, to int
	theirs   func(place int) connector.BlockID // the producer's block at a place of the prompt
}

// spans are the runs of tokens of a group's blocks that the producer has; it notes the others' blocks as
// missing.
func (c *cutter) spans(group uint16, p *reads) ([]span, error) {
	size, other := c.kv.Layout().Groups[group].BlockTokens, c.answer.Sizes[group]
	if other <= 0 {
		return nil, fmt.Errorf("the producer has blocks of %d tokens in group %d: %w", other, group, connector.ErrIncompatible)
	}
	ours, theirs := ofGroup(group, c.t, c.answer)
	for _, b := range theirs {
		if b.ID < 0 {
			return nil, fmt.Errorf("the producer names block %d: %w", b.ID, connector.ErrIncompatible)
		}
	}
	// The blocks of a group end with the last token (rule GROUP-01).
	end := c.t.From + c.t.Tokens
	first, firstTheirs := (end+size-1)/size-len(ours), (c.answer.Tokens+other-1)/other-len(theirs)
	var list []span
	for i, b := range ours {
		s := span{
			block: b, from: max((first+i)*size, c.t.From), to: min((first+i+1)*size, end),
			theirs: func(place int) connector.BlockID { return theirs[place-firstTheirs].ID },
		}
		if s.from < firstTheirs*other || s.to > c.answer.Tokens || s.from >= s.to {
			p.missing = append(p.missing, b.ID)
			continue
		}
		list = append(list, s)
	}
	return list, nil
}

// cut adds the reads of one segment.
func (c *cutter) cut(p *reads, segment int, spans []span) error {
	l, from := c.kv.Layout(), c.answer.Segments[segment]
	own, err := l.CutOf(segment, c.rank, c.world)
	if err != nil {
		return err
	}
	group := l.Segments[segment].Group
	other := connector.Cut{
		BlockTokens: c.answer.Sizes[group], Bytes: int64(from.Bytes), Planes: from.Planes, Heads: from.Heads, Rank: c.of, World: c.answer.World,
	}
	if err := own.Fits(&other); err != nil || from.Group != group {
		return fmt.Errorf("segments[%d] of the producer, of group %d: %w", segment, from.Group, cmp.Or(err, connector.ErrIncompatible))
	}
	for _, s := range spans {
		own.Pieces(&other, s.from, s.to, func(piece connector.Piece) {
			at := from.Addr + uint64(s.theirs(piece.There))*from.Stride + uint64(piece.From)
			p.add(nixl.Bytes(c.kv.View(segment, s.block.ID)[piece.At:piece.At+piece.Len]), nixl.Region{Addr: at, Len: uint64(piece.Len)})
		})
	}
	return nil
}
