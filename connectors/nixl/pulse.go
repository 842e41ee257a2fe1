package nixl

import (
	"context"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

const (
	linger    = 2 * time.Second // after a Match; the host asks again as long as the request waits
	beatShare = 6               // of a lease: so often a sign of life is sent
	minPulse  = 5 * time.Millisecond
	maxPulse  = 5 * time.Second
)

// pulse sends the signs of life of a consumer: for holds that requests wait for, from their Match on, and
// while they are read. One goroutine an address, as long as there is something to say there.
type pulse struct {
	node *Node
	ctx  context.Context //nolint:containedctx // the node's life

	mu     sync.Mutex
	hearts map[string]map[connector.HoldID]*heart // by address
	sent   float64
	failed float64
}

// heart is one hold that somebody here is interested in.
type heart struct {
	secret []byte
	every  time.Duration
	until  time.Time
	reads  int // that run: they keep it beating by themselves
}

// begin makes a pulse ready; the function that it gives ends it.
func (p *pulse) begin(ctx context.Context, n *Node) context.CancelFunc {
	life, leave := context.WithCancel(context.WithoutCancel(ctx))
	p.node, p.ctx, p.hearts = n, life, map[string]map[connector.HoldID]*heart{}
	return leave
}

// wait says that a request waits for a ticket's blocks.
func (p *pulse) wait(t *ticket) { p.note(t, 0) }

// read says that a ticket's blocks are being read, until done is called.
func (p *pulse) read(t *ticket) (done func()) {
	h := p.note(t, 1)
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if h.reads--; h.reads == 0 {
			h.until = time.Time{}
		}
	}
}

func (p *pulse) note(t *ticket, reads int) *heart {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := p.hearts[t.Address]
	if at == nil {
		at = map[connector.HoldID]*heart{}
		p.hearts[t.Address] = at
		if p.ctx.Err() == nil {
			p.node.tasks.Go(func() { p.run(t.Address) })
		}
	}
	h := at[t.Hold]
	if h == nil {
		lease := time.Duration(t.LeaseMS) * time.Millisecond
		h = &heart{secret: t.Secret, every: min(max(lease/beatShare, minPulse), maxPulse)}
		at[t.Hold] = h
	}
	h.until = time.Now().Add(linger)
	h.reads += reads
	return h
}

// run sends what there is to say at one address.
func (p *pulse) run(address string) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-p.ctx.Done():
			return
		}
		beats, next := p.due(address)
		if len(beats) == 0 {
			return
		}
		over, err := p.send(address, beats)
		p.sentTo(address, over, err)
		timer.Reset(next)
	}
}

// due are the holds to be named now and when to come again; none: the address is forgotten.
func (p *pulse) due(address string) (beats []beat, next time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	next = maxPulse
	now := time.Now()
	for id, h := range p.hearts[address] {
		if h.reads == 0 && now.After(h.until) {
			delete(p.hearts[address], id)
			continue
		}
		if len(beats) < maxBeats {
			beats = append(beats, beat{Hold: id, Secret: h.secret})
		}
		next = min(next, h.every)
	}
	if len(beats) == 0 {
		delete(p.hearts, address)
	}
	return beats, next
}

func (p *pulse) send(address string, beats []beat) ([]connector.HoldID, error) {
	e := &p.node.env
	a, err := p.node.lines.ask(p.ctx, address, &question{
		Version: protocolVersion, Model: e.Model[:], Shape: e.Shape[:], Base: baseOf(e), World: e.World, Beats: beats,
	})
	if err != nil {
		return nil, err
	}
	return a.Over, nil
}

// sentTo notes what became of signs of life: holds that are over need no more of them.
func (p *pulse) sentTo(address string, over []connector.HoldID, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.failed++
		p.node.log.Debug("sign of life", "peer", address, "error", err)
		return
	}
	p.sent++
	for _, id := range over {
		if h := p.hearts[address][id]; h != nil && h.reads == 0 {
			delete(p.hearts[address], id)
		}
	}
}
