package nixl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/nixl"
)

const (
	// settleTime is what is left of a load's time, or waited for after its end, for a transfer to end by itself
	// before what it writes to is taken away. With landGrace it is less than hosts wait.
	settleTime = 100 * time.Millisecond
	// minTime is what a load has to have for its end to be moved forward.
	minTime = 4 * (settleTime + landGrace)
)

// landing is the bytes of one load on their way into an alias mapping.
type landing struct {
	rank          *rank
	mapping       *aliasMapping // nil: the cache cannot be mapped twice, and local is the cache itself
	metadata      []byte        // of the producer
	local, remote []nixl.Region
}

// land prepares for a plan's bytes: in the mapping that loads go to now, or, with an error that wraps
// errNoWindow, in the cache itself. The caller leaves it.
func (r *rank) land(a *answer, p *reads) (*landing, error) {
	l := &landing{rank: r, metadata: a.Metadata, local: p.local, remote: p.remote}
	mapping, err := r.aliasMapping()
	if err != nil {
		return l, err
	}
	l.mapping, l.local = mapping, make([]nixl.Region, len(p.local))
	for i, region := range p.local {
		l.local[i] = mapping.at(region)
	}
	return l, nil
}

// untouched reports what was taken from the landing for another load's sake.
func (l *landing) untouched() error {
	if l.mapping != nil && l.mapping.touched(l.local) {
		return errRevoked
	}
	return nil
}

func (l *landing) leave() {
	if l.mapping != nil {
		l.mapping.leave()
	}
}

// mode says who is to move the bytes.
func (r *rank) mode(a *answer, transport string) string {
	if own := r.cache(); bytes.Equal(own.metadata, a.Metadata) {
		return modePull // a ticket of this engine's own: a copy
	}
	if m := r.node.config.Mode; m != modeAuto {
		return m
	}
	if overTCP(transport, rdmaDevices) {
		return modePush
	}
	return modePull
}

// early ends a context long enough before its deadline for a load to end in an orderly way.
func early(ctx context.Context) (context.Context, context.CancelFunc) {
	d, ok := ctx.Deadline()
	if !ok || time.Until(d) < minTime {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, d.Add(-minTime/2))
}

// pull reads. A peer that stalls costs the mapping: what may still arrive is written to memory that nobody reads.
func (l *landing) pull(ctx context.Context, done *read) error {
	if l.mapping == nil {
		ctx = context.Background() // only NIXL can say when it is over
	}
	ctx, cancel := early(ctx)
	defer cancel()
	m := move{op: nixl.Read, metadata: l.metadata, local: l.local, remote: l.remote, transport: done.transport}
	err := l.rank.move(ctx, &m, done)
	if errors.Is(err, errUnfinished) {
		l.rank.node.tally.revoke()
		return errors.Join(err, l.mapping.revoke(l.local))
	}
	return err
}

// push has the producer write, and waits until it says that it has. If it does not, its writes are made
// to go nowhere.
func (l *landing) push(ctx context.Context, at *pendingQuestion, done *read) error {
	ctx, cancel := early(ctx)
	defer cancel()
	limit := maxPush
	if d, ok := ctx.Deadline(); ok {
		limit = min(limit, time.Until(d))
	}
	at.q.Push = newPush(l, limit)
	done.descriptors = len(l.local)
	began := time.Now()
	a, err := l.await(ctx, at, done.transport)
	done.took = time.Since(began)
	if err == nil && a.Written != total(l.local) {
		err = fmt.Errorf("the producer wrote %d of %d bytes: %w", a.Written, total(l.local), connector.ErrGone)
	}
	if err == nil {
		done.bytes = a.Written
		return nil
	}
	if a != nil && a.Refusal != "" && !a.Unsure {
		return err
	}
	l.rank.node.tally.revoke()
	return errors.Join(fmt.Errorf("%w: %w", errUnfinished, err), l.mapping.revoke(l.local))
}

// await asks, and lets NIXL work meanwhile. After the end of ctx it waits a little for the answer.
func (l *landing) await(ctx context.Context, at *pendingQuestion, transport string) (a *answer, err error) {
	asking, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	over := make(chan struct{})
	go func() {
		defer close(over)
		a, err = l.rank.node.pool.ask(asking, at.ticket.Address, at.q)
	}()
	late := time.AfterFunc(time.Hour, stop)
	defer late.Stop()
	defer context.AfterFunc(ctx, func() { late.Reset(settleTime) })()
	l.rank.work(over, copied(transport, rdmaDevices))
	return a, err
}

func total(regions []nixl.Region) (n uint64) {
	for _, r := range regions {
		n += r.Len
	}
	return n
}

// move is one transfer.
type move struct {
	op            nixl.Op
	metadata      []byte // of the peer
	transport     string
	local, remote []nixl.Region
}

var (
	// errUnfinished is what a transfer ends with that was given up.
	errUnfinished = errors.New("the transfer did not end in time")
	// errUnsure is what a write ends with that was posted and not seen to end well.
	errUnsure = errors.New("not all may have been written")
)

// move makes a transfer and tells done about it. Errors wrap connector.ErrGone.
func (r *rank) move(ctx context.Context, m *move, done *read) (err error) {
	done.transport = m.transport
	if m.transport == unreached {
		return errUnreached
	}
	peer, err := r.peers.use(m.metadata, m.transport)
	if err != nil {
		return err
	}
	done.transport, done.descriptors = peer.transport, len(m.local)
	defer func() { r.peers.giveBack(peer, err != nil) }()
	r.wake()
	began := time.Now()
	t, err := r.agent.Prepare(nixl.Request{Op: m.op, Peer: peer.name, Local: m.local, Remote: m.remote, Backend: r.backend})
	if err != nil {
		return fmt.Errorf("%w: %w", err, connector.ErrGone)
	}
	posted := time.Now()
	ended, err := t.Post()
	done.post = time.Since(began)
	if err == nil && !ended {
		err = finish(ctx, t)
	}
	done.took = time.Since(posted)
	if err != nil && m.op == nixl.Write {
		err = fmt.Errorf("%w: %w", errUnsure, err)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("%w: %w", err, connector.ErrGone), t.Close())
	}
	done.bytes = total(m.local)
	return t.Close()
}

// finish waits for the end of a transfer, and a little beyond the end of ctx.
func finish(ctx context.Context, t *nixl.Transfer) error {
	err := t.Wait(ctx)
	if err == nil || ctx.Err() == nil {
		return err
	}
	more, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	if err = t.Wait(more); err != nil && more.Err() != nil {
		err = fmt.Errorf("%w: %w", errUnfinished, err)
	}
	return err
}
