package peer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/pipe"
)

// producer is another engine's plugin from which blocks are fetched.
type producer struct {
	store   *Store
	address string
	queue   chan *message
	ctx     context.Context //nolint:containedctx // ends when the producer is forgotten
	cancel  context.CancelFunc

	mu        sync.Mutex
	asked     map[connector.StoreKey]asking
	failed    time.Time // of the last link
	quiet     time.Time // when it was first asked for something after its last message; zero if no answer is due
	used      uint64    // Store.uses when somebody last wanted something of it
	met       bool      // there was a link: it has the key
	dealing   bool      // a message is being sent, or the link for it is being made
	forgotten bool      // nothing is sent any more
}

// asking is what is known about a block that was asked for and has not arrived.
type asking struct {
	at   time.Time // when it was asked for, or when it was reported gone
	gone bool
}

// ask asks for blocks that nobody has asked for yet. It reports whether some are on their way, and which
// ones this producer does not have.
func (p *producer) ask(keys []connector.StoreKey) (waits bool, gone []connector.StoreKey) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.failed.IsZero() && now.Sub(p.failed) < redialAfter {
		return false, keys
	}
	if len(p.asked)+len(keys) > maxAsked {
		p.forget(now)
	}
	var want []connector.StoreKey
	for _, k := range keys {
		switch p.known(k, now) {
		case blockComes:
			waits = true
		case blockGone:
			gone = append(gone, k)
		case blockUnknown:
			if len(p.asked)+len(want) < maxAsked {
				want = append(want, k)
			}
		}
	}
	for len(want) > 0 {
		n := min(len(want), maxWant)
		if !p.put(&message{kind: kindWant, keys: want[:n]}) {
			return true, gone // too many requests wait already, or it was just forgotten: ask again
		}
		for _, k := range want[:n] {
			p.asked[k] = asking{at: now}
		}
		if p.quiet.IsZero() {
			p.quiet = now
		}
		want, waits = want[n:], true
	}
	return waits, gone
}

// What is known about a block at a producer.
const (
	blockUnknown = iota // the producer was not asked, or was asked long ago
	blockComes
	blockGone // it does not have it, or did not send it in time
)

// known is the result of the last request for a block. The caller holds mu.
func (p *producer) known(k connector.StoreKey, now time.Time) int {
	a, asked := p.asked[k]
	age, wait := now.Sub(a.at), p.store.peers.Wait
	switch {
	case !asked:
		return blockUnknown
	case !a.gone && age < wait:
		return blockComes
	case a.gone && age < forgetGone, !a.gone && age < wait+forgetGone:
		return blockGone
	}
	return blockUnknown
}

// forget drops the entries that are over. The caller holds mu.
func (p *producer) forget(now time.Time) {
	for k, a := range p.asked {
		if now.Sub(a.at) > p.store.peers.Wait+forgetGone {
			delete(p.asked, k)
		}
	}
}

// enqueue has a message sent. It is false where that cannot be.
func (p *producer) enqueue(m *message) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.put(m)
}

// put is enqueue for a caller that holds mu.
func (p *producer) put(m *message) bool {
	if p.forgotten {
		return false
	}
	select {
	case p.queue <- m:
		return true
	default:
		return false
	}
}

// run sends requests as long as the store is open, over one link after another.
func (p *producer) run() {
	var link *producerLink
	defer func() {
		p.cancel()
		if link != nil {
			link.close()
		}
		p.drop()
	}()
	tick := time.NewTicker(p.store.peers.Patience / 4)
	defer tick.Stop()
	for {
		var m *message
		var lost <-chan struct{}
		if link != nil {
			lost = link.done
		}
		select {
		case m = <-p.queue:
		case <-lost:
		case <-tick.C:
			if link = p.cutDeaf(link); link == nil {
				p.store.forgetDead(p)
			}
			continue
		case <-p.ctx.Done():
			return
		}
		if link != nil && (m == nil || link.over()) {
			link.close()
			p.lost(link.err)
			link = nil
		}
		if m != nil {
			link = p.deal(link, m)
		}
	}
}

// deal sends the queued messages, unless the peer has just failed, and returns the link if it still works.
func (p *producer) deal(link *producerLink, m *message) *producerLink {
	p.setDealing(true)
	defer p.setDealing(false)
	defer m.over()
	if !p.justFailed() {
		return p.tell(link, m)
	}
	p.unsent(m)
	return link
}

func (p *producer) setDealing(is bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dealing = is
}

// unsent counts the blocks of a message that is not sent.
func (p *producer) unsent(m *message) {
	if m.kind == kindPush {
		p.store.counts.pushFailed.Add(int64(len(m.keys)))
	}
}

// drop ends the messages of a producer that is forgotten, so that nobody waits for them.
func (p *producer) drop() {
	for {
		select {
		case m := <-p.queue:
			p.unsent(m)
			m.over()
		default:
			return
		}
	}
}

// cutDeaf closes a link on which the peer does not answer.
func (p *producer) cutDeaf(link *producerLink) *producerLink {
	if link == nil || !p.deaf() {
		return link
	}
	p.store.counts.cut.Add(1)
	link.close()
	p.lost(errDeaf)
	return nil
}

// errDeaf is the reason for closing a link on which the peer does not answer.
var errDeaf = errors.New("the peer does not answer")

// deaf reports whether an answer from the peer has been due for too long.
func (p *producer) deaf() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.quiet.IsZero() || time.Since(p.quiet) <= p.store.peers.Patience {
		return false
	}
	for _, a := range p.asked {
		if !a.gone {
			return true
		}
	}
	p.quiet = time.Time{}
	return false
}

// heard records that a message came from the peer.
func (p *producer) heard() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.quiet.IsZero() {
		p.quiet = time.Now()
	}
}

// tell sends a message, over a new link if there is none, and returns the link if it still works.
func (p *producer) tell(link *producerLink, m *message) *producerLink {
	var err error
	if link == nil {
		link, err = p.dial()
	}
	switch {
	case err != nil:
		p.unsent(m)
	case m.kind == kindPush:
		err = p.pushAll(link, m)
	default:
		err = p.store.send(link.Out, m, nil)
	}
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			p.store.counts.cut.Add(1)
		}
		if link != nil {
			link.close()
		}
		p.lost(err)
		return nil
	}
	return link
}

// justFailed reports whether it is too early to dial again. If so, the blocks that were asked for count as
// gone.
func (p *producer) justFailed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.failed.IsZero() && time.Since(p.failed) < redialAfter
}

// lost records that none of the blocks that were asked for will come.
func (p *producer) lost(err error) {
	if p.ctx.Err() != nil {
		return
	}
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.quiet = time.Time{}
	for k, a := range p.asked {
		if !a.gone {
			p.asked[k] = asking{at: now, gone: true}
		}
	}
	if p.failed.IsZero() || now.Sub(p.failed) > time.Minute { // a failure that repeats is not logged each time
		if held, due := p.store.unreachable.due(now); due {
			p.store.log.Warn("a producer cannot be reached, so its blocks are computed", "address", p.address, "error", err, "held_back", held)
		}
	}
	p.failed = now
}

// producerLink is a link with the goroutine that receives from it.
type producerLink struct {
	pipe.Link
	done chan struct{} // closed when nothing is received any more
	err  error         // why, valid after done
}

func (l *producerLink) over() bool {
	select {
	case <-l.done:
		return true
	default:
		return false
	}
}

func (l *producerLink) close() {
	_ = l.Close()
	<-l.done
}

func (p *producer) dial() (*producerLink, error) {
	ctx, cancel := context.WithTimeout(p.ctx, p.store.peers.Wait)
	defer cancel()
	var link pipe.Link
	err := wire.Guard(p.store.log, "dial", func() (err error) {
		link, err = p.store.peers.Network.Dial(ctx, p.address)
		return err
	})
	if err != nil {
		return nil, err
	}
	p.store.meet(p)
	l := &producerLink{Link: link, done: make(chan struct{})}
	p.store.tasks.Go(func() {
		defer close(l.done)
		for l.err == nil {
			l.err = wire.Guard(p.store.log, "receive", func() error { return p.receive(link.In) })
		}
	})
	return l, nil
}

// errUnwanted refuses a frame; the link continues.
var errUnwanted = errors.New("not wanted")

// receive handles one frame: a block that was asked for, or the keys of blocks that the producer does not
// have.
func (p *producer) receive(in pipe.Pipe) error {
	m, err := p.store.receive(in, p.room)
	if err != nil {
		return err
	}
	p.heard()
	if m == nil {
		return nil
	}
	switch m.kind {
	case kindBlock:
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.asked, m.key)
		return nil
	case kindGone:
		p.gone(m)
		return nil
	}
	return fmt.Errorf("a producer sent a message of kind %d: %w", m.kind, connector.ErrIncompatible)
}

// room returns the memory for a block that was asked for.
func (p *producer) room(k connector.StoreKey, size int) (*lookupbuffer.Slot, error) {
	p.mu.Lock()
	a, known := p.asked[k]
	p.mu.Unlock()
	if !known || a.gone {
		return nil, errUnwanted
	}
	if p.store.has(k) { // it has come over another link meanwhile
		p.mu.Lock()
		delete(p.asked, k)
		p.mu.Unlock()
		return nil, errUnwanted
	}
	slot, err := p.store.memory.Reserve(k, size)
	if err != nil {
		p.mu.Lock()
		p.asked[k] = asking{at: time.Now(), gone: true}
		p.mu.Unlock()
		return nil, fmt.Errorf("%w: %w", errUnwanted, err)
	}
	return slot, nil
}

// gone records which blocks the producer does not have.
func (p *producer) gone(m *message) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range m.keys {
		if _, known := p.asked[k]; known {
			p.asked[k] = asking{at: now, gone: true}
		}
	}
}
