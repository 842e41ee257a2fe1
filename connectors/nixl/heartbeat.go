package nixl

import (
	"context"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

const (
	linger       = 2 * time.Second // after a Match; the host asks again as long as the request waits
	beatShare    = 6               // heartbeats sent during one lease
	minHeartbeat = 5 * time.Millisecond
	maxHeartbeat = 5 * time.Second
)

// heartbeats sends the heartbeats of a consumer: for holds that requests wait for, from their Match on, and
// while they are read. One goroutine an address, as long as there is something to say there.
type heartbeats struct {
	node *Node
	ctx  context.Context //nolint:containedctx // the node's life

	mu  sync.Mutex
	all map[string]map[connector.HoldID]*heartbeat // by address
}

// heartbeat is one hold that a request of this consumer waits for or reads.
type heartbeat struct {
	secret []byte
	every  time.Duration
	until  time.Time
	reads  int // that run: they keep it beating by themselves
}

// begin makes heartbeats ready; the function that it returns ends them.
func (p *heartbeats) begin(ctx context.Context, n *Node) context.CancelFunc {
	life, leave := context.WithCancel(context.WithoutCancel(ctx))
	p.node, p.ctx, p.all = n, life, map[string]map[connector.HoldID]*heartbeat{}
	return leave
}

// wait says that a request waits for a ticket's blocks.
func (p *heartbeats) wait(t *ticket) { p.note(t, 0) }

// read says that a ticket's blocks are being read, until done is called.
func (p *heartbeats) read(t *ticket) (done func()) {
	h := p.note(t, 1)
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if h.reads--; h.reads == 0 {
			h.until = time.Time{}
		}
	}
}

func (p *heartbeats) note(t *ticket, reads int) *heartbeat {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := p.all[t.Address]
	if at == nil {
		at = map[connector.HoldID]*heartbeat{}
		p.all[t.Address] = at
		if p.ctx.Err() == nil {
			p.node.tasks.Go(func() { p.run(t.Address) })
		}
	}
	h := at[t.Hold]
	if h == nil {
		lease := time.Duration(t.LeaseMS) * time.Millisecond
		h = &heartbeat{secret: t.Secret, every: min(max(lease/beatShare, minHeartbeat), maxHeartbeat)}
		at[t.Hold] = h
	}
	h.until = time.Now().Add(linger)
	h.reads += reads
	return h
}

// run sends what there is to say at one address.
func (p *heartbeats) run(address string) {
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
func (p *heartbeats) due(address string) (beats []beat, next time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	next = maxHeartbeat
	now := time.Now()
	for id, h := range p.all[address] {
		if h.reads == 0 && now.After(h.until) {
			delete(p.all[address], id)
			continue
		}
		if len(beats) < maxBeats {
			beats = append(beats, beat{Hold: id, Secret: h.secret})
		}
		next = min(next, h.every)
	}
	if len(beats) == 0 {
		delete(p.all, address)
	}
	return beats, next
}

func (p *heartbeats) send(address string, beats []beat) ([]connector.HoldID, error) {
	e := &p.node.env
	a, err := p.node.pool.ask(p.ctx, address, &question{
		Version: protocolVersion, Model: e.Model[:], Shape: e.Shape[:], Base: baseOf(e), World: e.World, Beats: beats,
	})
	if err != nil {
		return nil, err
	}
	return a.Over, nil
}

// sentTo notes what became of signs of life: holds that are over need no more of them.
func (p *heartbeats) sentTo(address string, over []connector.HoldID, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.node.tally.count("heartbeats_total", 1, "failed")
		p.node.log.Debug("sign of life", "peer", address, "error", err)
		return
	}
	p.node.tally.count("heartbeats_total", 1, "ok")
	for _, id := range over {
		if h := p.all[address][id]; h != nil && h.reads == 0 {
			delete(p.all[address], id)
		}
	}
}
