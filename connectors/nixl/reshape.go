package nixl

import (
	"bytes"
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
		return fmt.Errorf("hold %d is weak, and its blocks are for engines of the same shape: %w", q.Hold, connector.ErrIncompatible)
	case q.Push != nil:
		return fmt.Errorf("what is reshaped is read, not pushed: %w", connector.ErrIncompatible)
	}
	return nil
}

// Reshape implements connector.Reshaper: it reads whole blocks out of the cache of a rank of the producer. It reads even
// where the config says to push: one call is a part of a load, and a push is the whole of it.
func (w *worker) Reshape(ctx context.Context, t *connector.Transfer, source connector.Source, kv *connector.KV) error {
	from, err := parseTicket(t.Ticket)
	if err != nil {
		return err
	}
	if err := w.rank.registerSources(kv); err != nil {
		return err
	}
	q := newQuestion(&w.rank.env)
	q.Base, q.Hold, q.Secret, q.Reshape, q.Of, q.Last = baseOf(&w.rank.env), from.Hold, from.Secret, true, source.Rank, source.Last
	defer w.rank.node.heartbeats.read(&from)()
	at := &pendingQuestion{ticket: &from, q: q}
	if at.a, err = w.rank.node.pool.ask(ctx, from.Address, q); err != nil {
		return err
	}
	p, err := plan(kv, t, at.a, 0)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	moved := read{mode: modePull, transport: "none"}
	moved.err = w.readWhole(ctx, at, p, &moved)
	w.rank.node.tally.add(&moved)
	if moved.err != nil {
		return moved.err
	}
	return p.lacking()
}

// readWhole reads what is planned, in an alias mapping where there is one, and makes sure that it was held until the end.
func (w *worker) readWhole(ctx context.Context, at *pendingQuestion, p *reads, m *read) error {
	at.q.Load = rand.Text()
	if len(p.local) == 0 {
		return w.confirm(ctx, at)
	}
	rank := w.rank
	m.transport = rank.node.transports.transport(rank.backend.Name(), at.a.Host, at.a.PID, p.remote[0].Addr)
	l, _ := rank.land(at.a, p) // without an alias mapping, into the memory itself
	defer l.leave()
	err := l.pull(ctx, m)
	if err == nil {
		at.q.Bytes = m.bytes
		err = w.confirm(ctx, at)
	}
	if err == nil {
		err = l.untouched()
	}
	return err
}

// registerSources makes the memory known to NIXL into which the blocks of engines of other shapes are read, once.
func (r *rank) registerSources(kv *connector.KV) error {
	l := kv.Layout()
	memory := kv.Region(int(l.Segments[0].Region))
	if len(memory) == 0 {
		return fmt.Errorf("no memory for blocks of engines of other shapes: %w", connector.ErrIncompatible)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sources.Load() != nil {
		return nil
	}
	area := nixl.Bytes(memory)
	if _, err := r.agent.Register(r.backend, nixl.DRAM, area); err != nil {
		return err
	}
	r.sources.Store(&area)
	r.remap()
	return nil
}
