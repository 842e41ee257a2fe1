package mutants

import (
	"context"

	"github.com/kvport/kvport/connector"
)

// life is what the sides of one engine life have in common: those with the same arena. The backend's
// lock guards it.
type life struct {
	arenaLog
	sides int
	saved int // blocks
	seq   uint64
	queue []connector.BlockEvent
	told  map[connector.BlockKey]bool
	wake  chan struct{}
}

func newLife(arena []byte) *life {
	return &life{arenaLog: arenaLog{mem: arena}, told: map[connector.BlockKey]bool{}, wake: make(chan struct{})}
}

// tell adds an event.
func (l *life) tell(kind connector.BlockEventKind, keys ...connector.BlockKey) {
	l.seq++
	l.queue = append(l.queue, connector.BlockEvent{Seq: l.seq, Kind: kind, Keys: keys, Medium: "memory", Scope: connector.ScopeNode})
	l.queue = l.queue[max(0, len(l.queue)-connector.MaxEvents):]
	close(l.wake)
	l.wake = make(chan struct{})
}

// note counts a saved block and reports it if all ranks have it now.
func (w *worker) note(b connector.Block) {
	s := &scheduler{backend: w.backend, env: w.env}
	there := s.all(b.Key, s.present)
	w.backend.mu.Lock()
	defer w.backend.mu.Unlock()
	w.life.saved++
	if there && !w.life.told[b.Key] {
		w.life.told[b.Key] = true
		w.life.tell(connector.BlocksStored, b.Key)
	}
}

// statInfos is what the reference counts.
func statInfos() []connector.StatInfo {
	return []connector.StatInfo{
		{Name: "saved_blocks_total", Help: "Blocks saved.", Kind: connector.Counter, Labels: []string{"medium"}},
		{Name: "stored_blocks", Help: "Blocks stored.", Kind: connector.Gauge},
	}
}

// Stats implements connector.StatsSource.
func (s *scheduler) Stats(context.Context) ([]connector.Stat, error) {
	s.backend.mu.Lock()
	defer s.backend.mu.Unlock()
	return []connector.Stat{
		{Name: "saved_blocks_total", Labels: []string{"memory"}, Value: float64(s.life.saved)},
		{Name: "stored_blocks", Value: float64(len(s.backend.blocks))},
	}, nil
}

// Events implements connector.EventSource.
func (s *scheduler) Events(ctx context.Context) ([]connector.BlockEvent, error) {
	for {
		s.backend.mu.Lock()
		events, wake := s.life.queue, s.life.wake
		s.life.queue = nil
		s.backend.mu.Unlock()
		if len(events) > 0 {
			return events, nil
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
