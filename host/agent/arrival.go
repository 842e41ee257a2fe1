package agent

import (
	"context"
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// arrival is a load on its way. An engine that can take back what it computes need not wait for its end: it may begin when
// all bytes are in the cache and their digests are still being checked, or, where it waits layer by layer, with the layers
// that are verified.
type arrival struct {
	step      uint64
	ranks     int  // whose bytes are not there yet
	layerWise bool // the ranks wait for one layer after the other
}

// chosen finds the loads of a step that are named as layer-wise.
func chosen(step *connector.Step, names []string) (map[connector.RequestID]bool, error) {
	if len(names) == 0 {
		return nil, nil
	}
	admitted := map[connector.RequestID]bool{}
	for i := range step.Admitted {
		admitted[step.Admitted[i].Request] = true
	}
	out := map[connector.RequestID]bool{}
	for _, name := range names {
		id := connector.RequestID(name)
		if !admitted[id] {
			return nil, fmt.Errorf("step %d: layer_wise names %q, of which it admits no load: %w", step.ID, name, wire.ErrMalformed)
		}
		out[id] = true
	}
	return out, nil
}

// expect notes the loads of a step, and which of them are waited for layer by layer. The caller holds the server's mu.
func (o *session) expect(step *connector.Step, layerWise map[connector.RequestID]bool) {
	for i := range step.Admitted {
		id := step.Admitted[i].Request
		o.arriving[id] = &arrival{step: step.ID, ranks: o.ranks, layerWise: layerWise[id]}
	}
}

// arrivingOf gives a load that is under way, nil if it is over. The caller holds the server's mu.
func (o *session) arrivingOf(step uint64, request connector.RequestID) *arrival {
	if a := o.arriving[request]; a != nil && a.step == step {
		return a
	}
	return nil
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
	s.tellRanks(arrivalAnswer(&kvportv1.AgentEvent{
		Kind: kvportv1.AgentEventKind_AGENT_EVENT_KIND_LANDED, Request: string(request), Step: a.step,
	}))
}

// layerWise says to the host whether the ranks wait for a load layer by layer.
func (s *server) layerWise(step uint64, request connector.RequestID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session == nil {
		return false
	}
	a := s.session.arrivingOf(step, request)
	return a != nil && a.layerWise
}

// passLayers tells the ranks which layers of a load are verified, until the load is over (rule AGENT-15). Layers of which
// the host speaks at the same time are one message.
func (o *session) passLayers(e *host.Event) {
	o.work.Go(func() {
		ctx := context.Background() // the host ends every load, and with it its layers
		atOnce, stop := context.WithCancel(ctx)
		stop()
		for n := 0; ; {
			more, err := e.Layers.Wait(ctx, n)
			if err != nil {
				return
			}
			for err == nil {
				n = more
				more, err = e.Layers.Wait(atOnce, n)
			}
			if !o.tellLayers(e, n) {
				return
			}
		}
	})
}

// tellLayers tells the ranks that the first n layers of a load are verified on all of them; false: the load is over.
func (o *session) tellLayers(e *host.Event, n int) bool {
	o.s.mu.Lock()
	defer o.s.mu.Unlock()
	if o.arrivingOf(e.Step, e.Request) == nil {
		return false
	}
	o.s.tellRanks(arrivalAnswer(&kvportv1.AgentEvent{
		Kind: kvportv1.AgentEventKind_AGENT_EVENT_KIND_LAYERS, Request: string(e.Request), Step: e.Step, Layers: uint32(n),
	}))
	return true
}

func arrivalAnswer(e *kvportv1.AgentEvent) *kvportv1.AgentAnswer {
	return &kvportv1.AgentAnswer{Result: &kvportv1.AgentAnswer_Event{Event: e}}
}
