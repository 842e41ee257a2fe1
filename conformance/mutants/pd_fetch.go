package mutants

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"github.com/kvport/kvport/connector"
)

// Load implements connector.Worker.
func (w *pdWorker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	n := w.node
	if n.tooBusy() {
		return fmt.Errorf("other calls are under way: %w", connector.ErrBusy)
	}
	var from pdTicket
	if err := json.Unmarshal(t.Ticket, &from); err != nil {
		return errPDGone("ticket", err)
	}
	if n.doneAnyway && ctx.Err() != nil {
		_ = n.tellDone(context.Background(), &from, w.env.Rank) //nolint:contextcheck // the fault
	}
	if n.lateWrite {
		done := make(chan error, 1)
		go func() { done <- w.load(context.WithoutCancel(ctx), &from, t, kv) }()
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if n.push {
		return w.pushed(ctx, &from, t, kv)
	}
	if n.joinsRanks {
		_, err, _ := n.flights.Do(fmt.Sprint(from.Hold, t.Blocks[0].ID), func() (any, error) { return nil, w.load(ctx, &from, t, kv) })
		return err
	}
	err := w.load(ctx, &from, t, kv)
	for n.redialsForever && err != nil && !errors.As(err, new(*connector.BlockError)) {
		<-time.After(10 * time.Millisecond)
		err = w.load(context.WithoutCancel(ctx), &from, t, kv)
	}
	return err
}

func (w *pdWorker) load(ctx context.Context, from *pdTicket, t *connector.Transfer, kv *connector.KV) error {
	n := w.node
	defer n.occupy()()
	c, err := n.dial(ctx, from)
	if err != nil {
		return err
	}
	defer c.close()
	failed := &connector.BlockError{Err: fmt.Errorf("the producer does not hold them: %w", connector.ErrGone)}
	for i, b := range n.first(t.Blocks, kv) {
		if n.tailless && b.Key == (connector.BlockKey{}) {
			continue
		}
		a, err := c.ask(ctx, pdQuestion{Rank: n.asks(w.env.Rank), Group: b.Group, Place: n.placeOf(t, i) - n.forgotten(t, w.env.Rank), Layout: n.told(kv)})
		switch {
		case err != nil && n.eofIsEnd:
			return nil
		case err != nil:
			return err
		case a.Gone || !n.isFor(a, b):
			failed.Blocks = append(failed.Blocks, b.ID)
			continue
		case n.sameSlots:
			b.ID = t.Blocks[0].ID + connector.BlockID(i)
		}
		w.put(kv, b, a.Data)
	}
	if _, err := c.ask(ctx, pdQuestion{Rank: w.env.Rank, Done: true}); err != nil && !n.oneCheck {
		return err // it may have read what was no longer held
	}
	if len(failed.Blocks) > 0 && !n.hidesMissing {
		return failed
	}
	return nil
}

// pdMostParts is how many parts of blocks a fault has fetched at once.
const pdMostParts = 1024

// first is the blocks that are fetched: all, and for a fault as many as one call of the system takes.
func (f *pdFaults) first(bs []connector.Block, kv *connector.KV) []connector.Block {
	if f.fewParts {
		return bs[:min(len(bs), pdMostParts/len(kv.Segments(0)))]
	}
	return bs
}

// asks is the rank whose part is fetched: the own one, and for a fault the last bit of its number.
func (f *pdFaults) asks(rank int) int {
	if f.oneBit {
		return rank & 1
	}
	return rank
}

// told is what a question tells about the cache of who asks. Only faults have to know.
func (f *pdFaults) told(kv *connector.KV) *connector.Layout {
	if f.ownLayout || f.ownBlocks {
		return kv.Layout()
	}
	return nil
}

// isFor reports whether an answer is the block that was asked for.
func (n *pdNode) isFor(a *pdAnswer, b connector.Block) bool {
	return n.noKeys || bytes.Equal(a.Key, b.Key[:])
}

// placeOf is where a transfer's block lies in its prompt: a group's blocks end with the last token.
func (n *pdNode) placeOf(t *connector.Transfer, i int) int {
	place := (t.From + t.Tokens + pdBlockTokens - 1) / pdBlockTokens
	for _, b := range t.Blocks[i:] {
		if b.Group == t.Blocks[i].Group {
			place--
		}
	}
	if n.ignoresFrom {
		place -= t.From / pdBlockTokens
	}
	return place
}

// put writes a block where it belongs.
func (w *pdWorker) put(kv *connector.KV, b connector.Block, data []byte) {
	if n := w.node; n.sharedScratch {
		n.mu.Lock()
		n.scratch = data
		n.mu.Unlock()
		<-time.After(time.Millisecond)
		n.mu.Lock()
		data = n.scratch
		n.mu.Unlock()
	}
	if w.node.lateWrite {
		<-time.After(time.Millisecond) // so that it is late in every run
	}
	spans, err := kv.Spans(b)
	if err != nil {
		return // a fault's slot that is none
	}
	rest := data
	for _, s := range spans {
		rest = rest[copy(s, rest):]
	}
	if w.node.overrun {
		b.ID++
		if spans, err := kv.Spans(b); err == nil {
			copy(spans[0], data)
		}
	}
}

// pdConn is a consumer's connection for one load.
type pdConn struct {
	net.Conn
	node    *pdNode
	from    *pdTicket
	stop    func() bool
	answers chan *pdAnswer // of a push; else nil
}

func (n *pdNode) dial(ctx context.Context, from *pdTicket) (*pdConn, error) {
	n.all.mu.Lock()
	dead := n.all.dead[from.Address]
	n.all.mu.Unlock()
	if dead {
		return nil, errPDGone("producer "+from.Address+" is dead", nil)
	}
	host, _, err := net.SplitHostPort(from.Address)
	if ip := net.ParseIP(host); err != nil || ip == nil || !ip.IsLoopback() {
		return nil, errPDGone("producer "+from.Address+" is not on this machine", err)
	}
	conn, err := (&net.Dialer{Timeout: pdPatience}).DialContext(ctx, "tcp", from.Address)
	if err != nil {
		n.failed(from)
		return nil, errPDGone("producer", err)
	}
	c := &pdConn{Conn: conn, node: n, from: from}
	c.stop = context.AfterFunc(ctx, func() {
		if !n.ignoresDeadline {
			_ = conn.SetDeadline(time.Unix(1, 0))
		}
	})
	return c, nil
}

// failed remembers a dead address, for a fault.
func (n *pdNode) failed(from *pdTicket) {
	if n.remembersDead {
		n.all.mu.Lock()
		defer n.all.mu.Unlock()
		n.all.dead[from.Address] = true
	}
}

func (c *pdConn) close() {
	c.stop()
	_ = c.Close()
}

// ask asks one question. Errors wrap connector.ErrGone.
func (c *pdConn) ask(ctx context.Context, q pdQuestion) (*pdAnswer, error) {
	q.Engine, q.Epoch, q.Hold, q.Slot, q.Nonce = c.from.Engine, c.from.Epoch, c.from.Hold, c.from.Slot, rand.Uint64()
	if err := ctx.Err(); err != nil && !c.node.ignoresDeadline {
		return nil, err
	}
	hear := c.read
	if c.answers != nil {
		hear = c.hear
	} else if !c.node.ignoresDeadline && !c.node.lateWrite {
		_ = c.SetDeadline(time.Now().Add(pdPatience))
	}
	var a *pdAnswer
	err := writePD(c, c.from.Secret, q)
	if err == nil {
		a, err = hear(ctx)
	}
	if err == nil && !c.node.noMAC && a.Nonce != q.Nonce {
		err = fmt.Errorf("the answer is one to something else: %w", connector.ErrCorrupt)
	}
	if err != nil {
		c.node.failed(c.from)
		return nil, errPDGone("producer "+c.from.Address, err)
	}
	return a, nil
}

// read reads the next answer.
func (c *pdConn) read(context.Context) (*pdAnswer, error) {
	data, signed, err := readPD(c, c.node.oneRead)
	if err != nil {
		return nil, err
	}
	if !c.node.noMAC && !signed(c.from.Secret) {
		return nil, fmt.Errorf("the answer was changed on its way: %w", connector.ErrCorrupt)
	}
	a := new(pdAnswer)
	return a, json.Unmarshal(data, a)
}

// tellDone says that a rank needs nothing more of a hold.
func (n *pdNode) tellDone(ctx context.Context, from *pdTicket, rank int) error {
	c, err := n.dial(ctx, from)
	if err != nil {
		return err
	}
	defer c.close()
	_, err = c.ask(ctx, pdQuestion{Rank: rank, Done: true})
	return err
}
