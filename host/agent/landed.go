package agent

import (
	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// arrival is a load on its way. Its bytes are in the cache before their digests are checked: an engine
// that can take back what it computes on them need not wait for that.
type arrival struct {
	step  uint64
	ranks int // whose bytes are not there yet
}

// expect notes the loads of a step. The caller holds the server's mu.
func (o *session) expect(step *connector.Step) {
	for i := range step.Admitted {
		o.arriving[step.Admitted[i].Request] = &arrival{step.ID, o.ranks}
	}
}

// landed is told that the bytes of a load have arrived on a rank, and tells the ranks when they have on
// all.
func (s *server) landed(request connector.RequestID, _ int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session == nil || s.session.arriving[request] == nil {
		return
	}
	a := s.session.arriving[request]
	if a.ranks--; a.ranks > 0 {
		return
	}
	m := &kvportv1.AgentEvent{Kind: kvportv1.AgentEventKind_AGENT_EVENT_KIND_LANDED, Request: string(request), Step: a.step}
	for _, seat := range s.seats {
		if seat.conn.joined {
			seat.conn.send(&kvportv1.AgentAnswer{Result: &kvportv1.AgentAnswer_Event{Event: m}})
		}
	}
}
