package agent

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// session is an open connector and what belongs to it.
type session struct {
	s       *server
	host    *host.Host
	layout  *connector.Layout
	keys    *keyring
	pages   *pageStore              // nil: the engine has a scheduler and ranks
	reports <-chan host.BlockReport // nil: nobody asked, or the connector does not report
	over    chan struct{}           // closed when the connector is closed
	work    sync.WaitGroup          // done when the last event was passed on

	tickets  map[connector.RequestID]chan []byte // finish calls that wait; guarded by s.mu
	ranks    int
	arriving map[connector.RequestID]*arrival // loads; guarded by s.mu
}

func newSession(s *server, h *host.Host, first *rankAttach, keys *keyring, news <-chan host.BlockReport) *session {
	o := &session{
		s: s, host: h, pages: first.pages, layout: &first.layout, keys: keys, over: make(chan struct{}), tickets: map[connector.RequestID]chan []byte{},
		ranks: first.world, arriving: map[connector.RequestID]*arrival{},
	}
	o.work.Go(o.forward)
	if news != nil && h.Info().Capabilities&connector.CanEvents != 0 {
		o.reports = news
		o.work.Go(o.publish)
	}
	return o
}

// publishes says whether events of blocks come from here. A nil session publishes none.
func (o *session) publishes() bool { return o != nil && o.reports != nil }

// close ends the connector. Every Step has had its events then.
func (o *session) close(patience time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := o.host.Close(ctx); err != nil {
		o.s.log.Warn("connector is closed", "error", err)
	}
	close(o.over)
	o.work.Wait()
}

// forward passes events on: a load's end to all, everything else to the scheduler.
func (o *session) forward() {
	for e := range o.host.Events() {
		if o.pages != nil {
			o.pages.take(&e)
			continue
		}
		if e.Kind == host.Stored {
			continue // the engine's processes wait for Saved or the ticket
		}
		if e.Kind == host.Arriving {
			o.passLayers(&e)
			continue
		}
		o.s.mu.Lock()
		if e.Kind == host.Finished {
			if answer := o.tickets[e.Request]; answer != nil {
				delete(o.tickets, e.Request)
				answer <- e.Ticket // has room
			}
		}
		if e.Kind == host.Loaded {
			delete(o.arriving, e.Request)
		}
		switch {
		case e.Lost && e.Kind == host.Loaded: // the engine keeps the blocks until it is told otherwise, and must keep them for good
			o.s.log.Error("blocks of a request are lost, it waits until its client gives up", "request", e.Request, "blocks", len(e.Blocks), "error", e.Err)
		case e.Lost:
			o.s.log.Error("saved or held blocks of a request are lost", "request", e.Request, "blocks", len(e.Blocks), "error", e.Err)
			fallthrough
		default:
			o.s.tellEvent(&e)
		}
		o.s.mu.Unlock()
	}
}

// tellEvent sends an event. The caller holds mu.
func (s *server) tellEvent(e *host.Event) {
	m := eventToProto(e)
	if s.sched != nil && s.sched.joined {
		s.sched.send(m)
	}
	if e.Kind == host.Loaded {
		s.tellRanks(m)
	}
}

// tellRanks sends a message to all ranks. The caller holds mu.
func (s *server) tellRanks(m *kvportv1.AgentAnswer) {
	for _, seat := range s.seats {
		if seat.conn.joined {
			seat.conn.send(m)
		}
	}
}

func eventToProto(e *host.Event) *kvportv1.AgentAnswer {
	m := &kvportv1.AgentEvent{
		Kind: kvportv1.AgentEventKind(e.Kind), Request: string(e.Request), Step: e.Step,
		Blocks: numbers(e.Blocks), Failed: numbers(e.Failed), Held: e.Held, Unverified: e.Unverified, Error: wire.ErrorToProto(e.Err).GetMessage(),
		TookUs: uint64(e.Took.Microseconds()),
	}
	if e.Lost {
		m.Kind, m.Held = kvportv1.AgentEventKind_AGENT_EVENT_KIND_LOST, e.Kind == host.Released
	}
	return &kvportv1.AgentAnswer{Result: &kvportv1.AgentAnswer_Event{Event: m}}
}

func numbers(ids []connector.BlockID) []int32 {
	out := make([]int32, len(ids))
	for i, id := range ids {
		out[i] = int32(id)
	}
	return out
}

// check makes sure that a step names only blocks that the cache has, and no more of them than its
// tokens fill: what is behind believes it (rule AGENT-03).
func (o *session) check(s *connector.Step) error {
	for _, list := range []struct {
		name      string
		transfers []connector.Transfer
	}{{"admitted", s.Admitted}, {"computed", s.Computed}} {
		for i := range list.transfers {
			t := &list.transfers[i]
			err := checkBlocks(o.layout, t.Blocks)
			if err == nil {
				err = checkSpan(o.layout, t)
			}
			if err != nil {
				return fmt.Errorf("step %d: %s[%d]: %w", s.ID, list.name, i, err)
			}
		}
	}
	for i := range s.Ended {
		if err := checkBlocks(o.layout, s.Ended[i].Blocks); err != nil {
			return fmt.Errorf("step %d: ended[%d]: %w", s.ID, i, err)
		}
	}
	return nil
}

func checkBlocks(l *connector.Layout, blocks []connector.Block) error {
	for i, b := range blocks {
		if int(b.ID) >= l.Blocks || int(b.Group) >= len(l.Groups) {
			return fmt.Errorf("blocks[%d] is block %d of group %d, the cache has %d blocks and %d groups: %w",
				i, b.ID, b.Group, l.Blocks, len(l.Groups), wire.ErrMalformed)
		}
	}
	return nil
}

// checkSpan compares the number of blocks of each group with the tokens that they are for.
func checkSpan(l *connector.Layout, t *connector.Transfer) error {
	counts := make([]int, len(l.Groups))
	for _, b := range t.Blocks {
		counts[b.Group]++
	}
	for g, n := range counts {
		size := l.Groups[g].BlockTokens
		if room := (t.From+t.Tokens+size-1)/size - t.From/size; n > room {
			return fmt.Errorf("%d blocks of group %d for tokens %d to %d, want at most %d: %w", n, g, t.From, t.From+t.Tokens, room, wire.ErrMalformed)
		}
	}
	return nil
}

// refuse gives a step its events where no connector is open: every load failed, nothing is saved, and
// nothing is held (rule AGENT-07). The caller holds mu.
func (s *server) refuse(step *connector.Step) {
	fail := func(kind host.EventKind, t *connector.Transfer) {
		blocks := ids(t.Blocks)
		s.tellEvent(&host.Event{Kind: kind, Request: t.Request, Step: step.ID, Blocks: blocks, Failed: blocks, Err: errNotOpen})
	}
	for i := range step.Admitted {
		fail(host.Loaded, &step.Admitted[i])
	}
	for i := range step.Computed {
		fail(host.Saved, &step.Computed[i])
	}
	for i := range step.Ended {
		e := &step.Ended[i]
		s.tellEvent(&host.Event{Kind: host.Finished, Request: e.Request, Step: step.ID, Blocks: ids(e.Blocks)})
	}
}

var errNotOpen = fmt.Errorf("the connector is not open: %w", connector.ErrGone)

func ids(blocks []connector.Block) []connector.BlockID {
	out := make([]connector.BlockID, len(blocks))
	for i, b := range blocks {
		out[i] = b.ID
	}
	return out
}

const (
	waitingReports = 64                    // of the host; more are lost, which shows as a gap
	frameKeys      = 1 << 10               // keys of one AgentBlocks, 32 KiB: always less than a socket takes
	readPause      = 20 * time.Millisecond // between looks whether the scheduler has read
)

// publish passes on to the scheduler what the connector reports about its blocks, until the connector is
// closed (rule AGENT-13). It sends no more than the scheduler reads: an engine without requests reads
// nothing, and must not be cut for it. What waits longer than the host's channel has room is a gap.
func (o *session) publish() {
	for {
		select {
		case <-o.over:
			return
		case r := <-o.reports:
			for _, m := range o.answers(&r) {
				if !o.deliver(m) {
					return
				}
			}
		}
	}
}

// deliver sends a message when the scheduler has read what it was sent before; false: the connector is
// closed. Without a scheduler the message is lost: the next one begins with a gap.
func (o *session) deliver(m *kvportv1.AgentAnswer) bool {
	for {
		o.s.mu.Lock()
		c := o.s.sched
		ready := c != nil && c.joined
		o.s.mu.Unlock()
		if !ready {
			return true
		}
		if c.idle() {
			c.send(m)
			return true
		}
		select {
		case <-o.over:
			return false
		case <-time.After(readPause):
		}
	}
}

// answers makes messages of a report, in the engine's own hashes.
func (o *session) answers(r *host.BlockReport) []*kvportv1.AgentAnswer {
	var out []*kvportv1.AgentAnswer
	if r.Gap {
		out = append(out, blocksAnswer(true, nil))
	}
	var batch []connector.BlockEvent
	n := 0
	for _, e := range r.Events {
		hashes := o.keys.back.hashes(e.Keys)
		if len(hashes) == 0 && e.Kind != connector.BlocksCleared {
			continue
		}
		if len(hashes) == 0 {
			batch = append(batch, e)
			continue
		}
		for part := range slices.Chunk(hashes, frameKeys) {
			if n+len(part) > frameKeys {
				out, batch, n = append(out, blocksAnswer(false, batch)), nil, 0
			}
			e.Keys = part
			batch, n = append(batch, e), n+len(part)
		}
	}
	if len(batch) > 0 {
		out = append(out, blocksAnswer(false, batch))
	}
	return out
}

func blocksAnswer(gap bool, events []connector.BlockEvent) *kvportv1.AgentAnswer {
	return &kvportv1.AgentAnswer{Result: &kvportv1.AgentAnswer_Blocks{Blocks: &kvportv1.AgentBlocks{
		Gap: gap, Events: wire.BlockEventsToProto(events),
	}}}
}
