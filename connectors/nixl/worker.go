package nixl

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/nixl"
)

// worker is the worker side of one rank.
type worker struct {
	rank  *rank
	leave func() error
}

// RegisterKV implements connector.Registerer: consumers can read the rank's blocks from the first prompt on, even if it fills none and
// nothing is saved.
func (w *worker) RegisterKV(_ context.Context, kv *connector.KV) error {
	w.rank.start(kv)
	return nil
}

// Save implements connector.Worker. The blocks stay where they are; consumers read them there.
func (w *worker) Save(context.Context, *connector.Transfer, *connector.KV) error { return nil }

// Load implements connector.Worker: it reads the blocks of a ticket out of the producer's cache, or has the
// producer write them.
func (w *worker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	from, err := parseTicket(t.Ticket)
	if err != nil {
		return err
	}
	if err := w.rank.registered(ctx); err != nil {
		return err
	}
	w.rank.prefetch.learn(from.Address)
	t = w.rank.prefetch.take(t, kv)
	defer w.rank.node.heartbeats.read(&from)()
	at := &pendingQuestion{ticket: &from, sum: sumOf(t.Ticket)}
	at.from = w.rank.producers.get(from.Life)
	if at.a = at.from.answers(&from, t, kv.Layout()); at.a != nil {
		at.ask(w).Sum = at.sum[:]
		if err = w.fetch(ctx, at, t, kv); !at.lost || ctx.Err() != nil {
			return err
		}
		w.rank.producers.forget(from.Life) // it may say more if it is asked
	}
	began := monotonic()
	if at.a, err = w.rank.node.pool.ask(ctx, from.Address, at.ask(w)); err != nil {
		return err
	}
	at.from = w.rank.remember(&from, at.a, began)
	return w.fetch(ctx, at, t, kv)
}

// fetch brings blocks here whose places are known.
func (w *worker) fetch(ctx context.Context, at *pendingQuestion, t *connector.Transfer, kv *connector.KV) error {
	plan, err := plan(kv, t, at.a)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	var moved read
	moved.err = w.move(ctx, at, plan, &moved)
	w.rank.node.tally.add(&moved)
	if moved.err != nil {
		return moved.err
	}
	return plan.lacking()
}

// asked is a load whose producer has said where the blocks are, now or earlier.
type pendingQuestion struct {
	ticket *ticket
	sum    ticketSum // of the ticket
	from   *producer // nil: not known
	q      *question
	a      *answer
	lost   bool // nothing came, and nothing will
}

// ask begins a question about the ticket's hold.
func (at *pendingQuestion) ask(w *worker) *question {
	at.q = newQuestion(&w.rank.env)
	at.q.Hold, at.q.Secret = at.ticket.Hold, at.ticket.Secret
	return at.q
}

// move brings the bytes of a plan here, by whichever way is right, and makes sure that they were held until
// the end. Nothing writes them when it returns.
func (w *worker) move(ctx context.Context, at *pendingQuestion, p *reads, m *read) error {
	a := at.a
	at.q.Load = rand.Text()
	m.mode, m.transport = modePull, "none"
	if len(p.local) == 0 {
		return w.confirm(ctx, at)
	}
	m.transport, m.mode = at.from.transport, at.from.mode
	l, err := w.rank.land(a, p)
	defer l.leave()
	switch {
	case err == nil:
	case m.mode == modePush && w.rank.node.config.Mode == modePush:
		return fmt.Errorf("mode push: %w: %w", err, connector.ErrIncompatible)
	default:
		m.mode = modePull
	}
	if m.mode == modePush {
		if err = l.push(ctx, at, m); err == nil {
			at.q.Push = nil
			w.tell(at) // the bytes are here and were held
		}
	} else if err = l.pull(ctx, m); err == nil {
		if w.rank.node.moved != nil {
			w.rank.node.moved()
		}
		at.q.Bytes = m.bytes
		err = w.confirm(ctx, at)
	}
	at.lost = err != nil && !errors.Is(err, errUnfinished)
	if err == nil {
		err = l.untouched()
	}
	return err
}

// confirm finds out whether what was read was held until now: it looks at the producer's board, or asks.
func (w *worker) confirm(ctx context.Context, at *pendingQuestion) error {
	if at.from.holds(at.ticket.Slot, at.sum) {
		w.tell(at)
		return nil
	}
	at.q.Done = true
	if _, gone := w.rank.node.pool.ask(ctx, at.ticket.Address, at.q); gone != nil { // it may have read what was held no more
		return fmt.Errorf("%w: %w", errStale, gone)
	}
	return nil
}

// tellPause is how long a producer hears later than it could that a hold has served: first the host here is
// woken, which waits for the load.
const tellPause = time.Millisecond

// tell says that the hold has served, for the producer to give it up; without that it ends by itself.
func (w *worker) tell(at *pendingQuestion) {
	q := *at.q
	q.Done = true
	r := w.rank
	r.tasks.Add(1)
	time.AfterFunc(tellPause, func() {
		defer r.tasks.Done()
		if _, err := r.node.pool.ask(r.node.heartbeats.ctx, at.ticket.Address, &q); err != nil {
			r.env.Log.Debug("the producer does not know that its hold was fetched", "peer", at.ticket.Address, "error", err)
		}
	})
}

// errStale says that a producer did not confirm what was read.
var errStale = errors.New("the producer does not confirm what was read")

// Close implements connector.Worker.
func (w *worker) Close() error { return errors.Join(w.rank.close(), w.leave()) }

// reads are the descriptors of one transfer, runs of blocks merged.
type reads struct {
	local, remote []nixl.Region
	missing       []connector.BlockID
}

// lacking names the blocks that the producer does not hold; nil without any.
func (p *reads) lacking() error {
	if len(p.missing) == 0 {
		return nil
	}
	return &connector.BlockError{Blocks: p.missing, Err: fmt.Errorf("the producer does not hold them: %w", connector.ErrGone)}
}

// plan finds the producer's block for each of a transfer's, by its place in the prompt. One whose key is
// another is missing. Errors wrap connector.ErrIncompatible.
func plan(kv *connector.KV, t *connector.Transfer, a *answer) (*reads, error) {
	l := kv.Layout()
	if err := sameShape(l, a); err != nil {
		return nil, err
	}
	room := len(t.Blocks) * len(l.Segments) / len(l.Groups)
	p := &reads{local: make([]nixl.Region, 0, room), remote: make([]nixl.Region, 0, room)}
	for g := range l.Groups {
		group := uint16(g)
		size := l.Groups[g].BlockTokens
		ours, theirs := ofGroup(group, t, a)
		// The blocks of a group end with the last token (rule GROUP-01).
		shift := (t.From+t.Tokens+size-1)/size - len(ours) - ((a.Tokens+size-1)/size - len(theirs))
		pairs := make([][2]connector.BlockID, 0, len(ours))
		for i, b := range ours {
			at := i + shift
			if at < 0 || at >= len(theirs) || !theirs[at].is(&b) {
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

// is says whether a producer's block is the one that is wanted. Without a key the ticket has said so of all.
func (h *heldBlock) is(b *connector.Block) bool {
	return h.ID >= 0 && (h.Key == nil || b.Key == (connector.BlockKey{}) || bytes.Equal(h.Key, b.Key[:]))
}

// ofGroup are the blocks of one group, of a transfer and of what its producer holds.
func ofGroup(group uint16, t *connector.Transfer, a *answer) (ours []connector.Block, theirs []heldBlock) {
	if !slices.ContainsFunc(t.Blocks, func(b connector.Block) bool { return b.Group != group }) &&
		!slices.ContainsFunc(a.Blocks, func(b heldBlock) bool { return b.Group != group }) {
		return t.Blocks, a.Blocks
	}
	for _, b := range t.Blocks {
		if b.Group == group {
			ours = append(ours, b)
		}
	}
	for _, b := range a.Blocks {
		if b.Group == group {
			theirs = append(theirs, b)
		}
	}
	return ours, theirs
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
		l.rank.node.tally.count("revoked_total", 1)
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
	l.rank.node.tally.count("revoked_total", 1)
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
