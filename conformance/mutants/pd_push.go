package mutants

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"time"

	"github.com/kvport/kvport/connector"
)

// Pairs whose producer writes. The consumer opens a window onto the blocks of a load and asks the producer to
// write into it. What lands there does so whatever has become of the load, as with a network card: only the
// window decides whether it reaches a block. A load that gives up takes the window away first.

// PDPushReference is PDReference, with the producer writing.
func PDPushReference() connector.Plugin { return (&pdFaults{push: true}).plugin() }

func pushMutants() []Mutant {
	return []Mutant{
		pdMutant("a consumer that leaves a silent writer its window", "pd-asked-late", pdFaults{push: true, windowStays: true}),
		pdMutant("windows that are known by their blocks", "pd-late-next", pdFaults{push: true, sameWindow: true}),
		pdMutant("a consumer that ends a hold before the writer has ended", "pd-under-way", pdFaults{push: true, earlyDone: true, oneCheck: true}),
		pdMutant("a producer that says that it has written, and writes", "pd-handoff", pdFaults{push: true, toldEarly: true}),
		pdMutant("a producer that writes on when it has closed", "pd-closed-reading", pdFaults{push: true, keepsConnections: true}),
		pdMutant("a producer that looks at the lease before it writes, not after", "pd-expired-reading", pdFaults{push: true, oneCheck: true}),
		pdMutant("a consumer that takes what was not written for written", "pd-named", pdFaults{push: true, hidesMissing: true}),
	}
}

// pdPush asks for blocks to be written into a window, each at its place in this list.
type pdPush struct {
	Window uint64    `json:"window"`
	Blocks []pdWhere `json:"blocks"`
}

type pdWhere struct {
	Group uint16 `json:"group"`
	Place int    `json:"place"`
}

// pdWindow is what the writes of one load may reach.
type pdWindow struct {
	kv     *connector.KV
	blocks []connector.Block
}

// open makes a window, and close takes it away: when it returns, nothing is written through it any more.
func (n *pdNode) open(kv *connector.KV, blocks []connector.Block) (id uint64, closeWindow func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lastWindow++
	id = n.lastWindow
	if n.sameWindow {
		id = uint64(blocks[0].ID) + 1<<32
	}
	n.windows[id] = pdWindow{kv, blocks}
	return id, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.windows, id)
	}
}

// pushed is load where the producer writes.
func (w *pdWorker) pushed(ctx context.Context, from *pdTicket, t *connector.Transfer, kv *connector.KV) error {
	n := w.node
	c, err := n.dial(ctx, from)
	if err != nil {
		return err
	}
	c.stop() // the connection outlives the load, unless all was written
	c.answers = make(chan *pdAnswer, len(t.Blocks)+2)
	n.mu.Lock()
	n.conns[c.Conn] = struct{}{}
	n.mu.Unlock()
	n.tasks.Go(c.land)
	window, shut := n.open(kv, t.Blocks)
	push := &pdPush{Window: window}
	for i, b := range t.Blocks {
		push.Blocks = append(push.Blocks, pdWhere{b.Group, n.placeOf(t, i)})
	}
	a, err := c.ask(ctx, pdQuestion{Rank: w.env.Rank, Push: push})
	if err == nil || !n.windowStays {
		shut()
	}
	if err != nil {
		return err
	}
	defer c.close()
	_, _ = c.ask(ctx, pdQuestion{Rank: w.env.Rank, Done: true}) // unheard, the hold lasts as long as its lease
	failed := &connector.BlockError{Err: fmt.Errorf("the producer does not hold them: %w", connector.ErrGone)}
	for i, b := range t.Blocks {
		if i >= len(a.Keys) || len(a.Keys[i]) == 0 || !n.isFor(&pdAnswer{Key: a.Keys[i]}, b) {
			failed.Blocks = append(failed.Blocks, b.ID)
		}
	}
	if len(failed.Blocks) > 0 && !n.hidesMissing {
		return failed
	}
	return nil
}

// land takes what the producer sends until one of the two has closed: writes go through their window, answers to whoever asked.
func (c *pdConn) land() {
	n := c.node
	defer func() {
		_ = c.Close()
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.conns, c.Conn)
		close(c.answers)
	}()
	for done := n.earlyDone; ; {
		_ = c.SetReadDeadline(time.Now().Add(2 * pdPatience))
		data, signed, err := readPD(c, false)
		var a pdAnswer
		if err != nil || !signed(c.from.Secret) || json.Unmarshal(data, &a) != nil {
			return
		}
		if a.Window == 0 {
			select {
			case c.answers <- &a:
			default: // who asked has gone
			}
			continue
		}
		n.written(&a)
		q := pdQuestion{Engine: c.from.Engine, Epoch: c.from.Epoch, Hold: c.from.Hold, Slot: c.from.Slot, Rank: a.Rank, Nonce: a.Nonce, Done: done}
		if done = false; writePD(c, c.from.Secret, q) != nil {
			return
		}
	}
}

// written lets a write reach its block, if its window is there.
func (n *pdNode) written(a *pdAnswer) {
	n.mu.Lock()
	defer n.mu.Unlock()
	w, ok := n.windows[a.Window]
	if !ok || a.Item < 0 || a.Item >= len(w.blocks) {
		return
	}
	spans, err := w.kv.Spans(w.blocks[a.Item])
	if err != nil {
		return
	}
	rest := a.Data
	for _, s := range spans {
		rest = rest[copy(s, rest):]
	}
}

// hear waits for the next answer.
func (c *pdConn) hear(ctx context.Context) (*pdAnswer, error) {
	late := time.NewTimer(pdPatience)
	defer late.Stop()
	select {
	case a, ok := <-c.answers:
		if ok {
			return a, nil
		}
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-late.C:
		return nil, context.DeadlineExceeded
	}
}

// write answers a push: each block is read when the one before has landed, and the hold is looked at each time
// and at the end. False: the connection is of no use any more.
func (n *pdNode) write(c net.Conn, conn int, q *pdQuestion, signed func([]byte) bool) bool {
	var kept *pdHold // for a fault
	over, by := n.whatIsHeld(conn, q, signed, &kept)
	if over == nil || n.toldEarly && writePD(c, by, over) != nil {
		return false
	}
	if n.toldEarly {
		<-time.After(time.Millisecond) // so that it is early in every run
	}
	for i := range q.Push.Blocks {
		a, _ := n.answer(conn, q.item(i), signed, &kept)
		if a == nil {
			return false
		}
		if a.Gone {
			continue
		}
		a.Window, a.Item, a.Rank = q.Push.Window, i, q.Rank
		ack, landed := writeOne(c, by, a)
		if ack == nil {
			return false
		}
		if ack.Done { // which only a fault says here
			n.answer(conn, ack, landed, &kept)
		}
	}
	if still, _ := n.whatIsHeld(conn, q, signed, &kept); still == nil {
		return false
	}
	_ = c.SetWriteDeadline(time.Now().Add(pdPatience))
	return n.toldEarly || writePD(c, by, over) == nil
}

// writeOne writes a block and waits until it has landed; nil: it does not say so.
func writeOne(c net.Conn, by []byte, a *pdAnswer) (ack *pdQuestion, signed func([]byte) bool) {
	_ = c.SetDeadline(time.Now().Add(2 * pdPatience))
	if writePD(c, by, a) != nil {
		return nil, nil
	}
	data, signed, err := readPD(c, false)
	if err != nil || !signed(by) || json.Unmarshal(data, &ack) != nil {
		return nil, nil
	}
	return ack, signed
}

// whatIsHeld is the answer at the end of a push, signed with a hold's secret; nil if there is no such hold.
func (n *pdNode) whatIsHeld(conn int, q *pdQuestion, signed func([]byte) bool, kept **pdHold) (over *pdAnswer, by []byte) {
	over = &pdAnswer{Nonce: q.Nonce}
	for i := range q.Push.Blocks {
		a, secret := n.answer(conn, q.item(i), signed, kept)
		if a == nil {
			return nil, nil
		}
		over.Keys, by = append(over.Keys, a.Key), secret
	}
	return over, by
}

// item is the question for one block of a push.
func (q *pdQuestion) item(i int) *pdQuestion {
	one := *q
	one.Push, one.Group, one.Place = nil, q.Push.Blocks[i].Group, q.Push.Blocks[i].Place
	return &one
}
