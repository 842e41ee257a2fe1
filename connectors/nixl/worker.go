package nixl

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/nixl"
)

// worker is the worker side of one rank.
type worker struct {
	rank  *rank
	leave func() error
}

// Save implements connector.Worker. The blocks stay where they are; consumers read them there.
func (w *worker) Save(_ context.Context, _ *connector.Transfer, kv *connector.KV) error {
	return w.rank.register(kv)
}

// Load implements connector.Worker: it reads the blocks of a ticket out of the producer's cache. The end
// of ctx ends questions, but not a read: only NIXL can say when that is over.
func (w *worker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	from, err := parseTicket(t.Ticket)
	if err != nil {
		return err
	}
	if err := w.rank.register(kv); err != nil {
		return err
	}
	env := &w.rank.env
	q := &question{
		Version: protocolVersion, Model: env.Model[:], Shape: env.Shape[:], Rank: env.Rank, World: env.World,
		Hold: from.Hold, Secret: from.Secret,
	}
	defer w.rank.node.pulse.read(&from)()
	a, err := w.rank.node.lines.ask(ctx, from.Address, q)
	if err != nil {
		return err
	}
	plan, err := plan(kv, t, a)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	var moved read
	err = w.read(a, plan, &moved)
	if err == nil {
		q.Done, q.Load = true, rand.Text()
		if _, gone := w.rank.node.lines.ask(ctx, from.Address, q); gone != nil { // it may have read what was held no more
			err = fmt.Errorf("%w: %w", errStale, gone)
		}
	}
	moved.err = err
	w.rank.node.tally.add(&moved)
	if err != nil {
		return err
	}
	if len(plan.missing) > 0 {
		return &connector.BlockError{Blocks: plan.missing, Err: fmt.Errorf("the producer does not hold them: %w", connector.ErrGone)}
	}
	return nil
}

// errStale says that a producer did not confirm what was read.
var errStale = errors.New("the producer does not confirm what was read")

// read moves the bytes of a plan.
func (w *worker) read(a *answer, p *reads, r *read) (err error) {
	r.transport = "none"
	if len(p.local) == 0 {
		return nil
	}
	peer, err := w.rank.peers.use(a)
	if err != nil {
		return err
	}
	r.transport, r.descriptors = peer.transport, len(p.local)
	defer func() { w.rank.peers.giveBack(peer, err != nil) }()
	w.rank.rouse()
	began := time.Now()
	t, err := w.rank.agent.Prepare(nixl.Request{Op: nixl.Read, Peer: peer.name, Local: p.local, Remote: p.remote, Backend: w.rank.backend})
	if err != nil {
		return fmt.Errorf("%w: %w", err, connector.ErrGone)
	}
	posted := time.Now()
	done, err := t.Post()
	r.post = time.Since(began)
	if err == nil && !done {
		err = t.Wait(context.Background()) // a peer that stands still is the host's deadline's matter
	}
	r.took = time.Since(posted)
	if err != nil {
		return errors.Join(fmt.Errorf("%w: %w", err, connector.ErrGone), t.Close())
	}
	for i := range p.local {
		r.bytes += p.local[i].Len
	}
	return t.Close()
}

// Close implements connector.Worker.
func (w *worker) Close() error { return errors.Join(w.rank.close(), w.leave()) }

// reads are the descriptors of one transfer, runs of blocks merged.
type reads struct {
	local, remote []nixl.Region
	missing       []connector.BlockID
}

// plan finds the producer's block for each of a transfer's, by its place in the prompt. One whose key is
// another is missing. Errors wrap connector.ErrIncompatible.
func plan(kv *connector.KV, t *connector.Transfer, a *answer) (*reads, error) {
	l := kv.Layout()
	if err := sameShape(l, a); err != nil {
		return nil, err
	}
	p := &reads{}
	for g := range l.Groups {
		group := uint16(g)
		size := l.Groups[g].BlockTokens
		var theirs []heldBlock
		for _, b := range a.Blocks {
			if b.Group == group {
				theirs = append(theirs, b)
			}
		}
		var ours []connector.Block
		for _, b := range t.Blocks {
			if b.Group == group {
				ours = append(ours, b)
			}
		}
		// The blocks of a group end with the last token (rule GROUP-01).
		shift := (t.From+t.Tokens+size-1)/size - len(ours) - ((a.Tokens+size-1)/size - len(theirs))
		var pairs [][2]connector.BlockID
		for i, b := range ours {
			at := i + shift
			if at < 0 || at >= len(theirs) || theirs[at].ID < 0 || b.Key != (connector.BlockKey{}) && !bytes.Equal(theirs[at].Key, b.Key[:]) {
				p.missing = append(p.missing, b.ID)
				continue
			}
			pairs = append(pairs, [2]connector.BlockID{b.ID, theirs[at].ID})
		}
		for _, s := range kv.Segments(group) {
			for _, pair := range pairs {
				from := a.Segments[s]
				p.add(nixl.Bytes(kv.View(s, pair[0])), nixl.Region{Addr: from.Addr + uint64(pair[1])*from.Stride, Len: from.Bytes})
			}
		}
	}
	return p, nil
}

// add adds a block's part, to the descriptor before it where both ends touch.
func (p *reads) add(local, remote nixl.Region) {
	if n := len(p.local) - 1; n >= 0 {
		l, r := &p.local[n], &p.remote[n]
		if l.Addr+l.Len == local.Addr && r.Addr+r.Len == remote.Addr {
			l.Len += local.Len
			r.Len += remote.Len
			return
		}
	}
	p.local, p.remote = append(p.local, local), append(p.remote, remote)
}

// sameShape makes sure that a peer's segments have our sizes, whatever its fingerprint says.
func sameShape(l *connector.Layout, a *answer) error {
	if len(a.Segments) != len(l.Segments) || a.Tokens <= 0 || a.Tokens > maxTokens {
		return fmt.Errorf("the producer has %d segments and %d tokens, we have %d segments: %w", len(a.Segments), a.Tokens, len(l.Segments), connector.ErrIncompatible)
	}
	for i, s := range a.Segments {
		if s.Group != l.Segments[i].Group || s.Bytes != uint64(l.Segments[i].Bytes) {
			return fmt.Errorf("segments[%d] of the producer has %d bytes of group %d: %w", i, s.Bytes, s.Group, connector.ErrIncompatible)
		}
	}
	return nil
}
