package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/tracker"
)

// maxAbandoned is how many lives of one plugin may leave such memory behind. It is not started again then.
const maxAbandoned = 3

// abandon gives a fence up.
func (s *source) abandon(f *plugin.Fence) {
	s.left.Add(f)
	s.log.Error("a plugin left a process behind that holds its fence and may write its memory for ever: "+
		"that memory is lost until the engine is started again", "plugin", s.prog.Path, "waited", s.cfg.Settings.Deadlines.Fence)
}

// renew gives the next life of the plugin other memory where somebody may still write that of the last one:
// an arena, and landing memory if it is this plugin's alone. Cache blocks cannot be replaced: the tracker keeps
// those that the last life had from ever being used again.
func (s *source) renew() error {
	if n := s.left.Count(); n >= maxAbandoned {
		return fmt.Errorf("%d lives of the plugin did not give their fences back, so it is not started until the engine is started again: %w", n, plugin.ErrAbandoned)
	}
	if !s.left.Spoil(false) {
		return nil
	}
	err := s.arena.Renew()
	if err == nil && s.reland != nil {
		err = s.reland()
	}
	if err != nil {
		s.left.Spoil(true)
		return fmt.Errorf("memory in place of what was lost: %w", err)
	}
	return nil
}

// Renew replaces the arena by an empty one of the same size. No process may be using it except one that
// nobody can find any more.
func (a *Arena) Renew() error {
	next, err := NewArena()
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mem != nil {
		if err := next.Fit(a.mem.Size()); err != nil {
			return errors.Join(err, next.Close())
		}
		err = a.mem.Close()
	}
	old := a.file
	a.file, a.mem = next.file, next.mem
	return errors.Join(err, old.Close())
}

// reland gives every rank other landing memory. No transfer may be running.
func (h *Host) reland() error {
	for i, r := range h.ranks {
		size := r.landing.region.Size()
		next, err := newLanding(*h.lands, size)
		if err != nil {
			return fmt.Errorf("landing memory of %d bytes: %w", size, err)
		}
		old := r.landing
		r.landing, h.src.regions[i] = next, next.region
		if err := old.region.Close(); err != nil {
			return err
		}
	}
	return nil
}

// lostSome says in the health of a plugin that is up that it is not as it was. The caller holds mu.
func (h *Host) lostSome(s *Health) {
	if h.src == nil {
		return
	}
	if s.FencesLost = h.src.left.Count(); s.FencesLost > 0 {
		s.State = "degraded"
	}
}

// loserKey is the key of a function in the context of a transfer's call: to be called by whoever finds that
// the blocks of the call are lost, although the call goes on. Composites pass contexts on as they are.
type loserKey struct{}

// losing gives a call's context the function.
func (h *Host) losing(ctx context.Context, id tracker.CallID) context.Context {
	return context.WithValue(ctx, loserKey{}, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.do(h.tracker.Lose(time.Now(), id))
	})
}

// loseBlocks says that the blocks of a call are lost. It is false if there is nobody to hear it.
func loseBlocks(ctx context.Context) bool {
	lose, ok := ctx.Value(loserKey{}).(func())
	if ok {
		lose()
	}
	return ok
}
