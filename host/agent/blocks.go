package agent

import (
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

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
		pause := time.NewTimer(readPause)
		select {
		case <-o.over:
			pause.Stop()
			return false
		case <-pause.C:
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
