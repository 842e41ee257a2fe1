package tracker

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

var errNotUp = fmt.Errorf("the plugin is not running: %w", connector.ErrGone)

// reset is a Reset that is not over: it waits for saves, or the plugin works on it.
type reset struct {
	started  bool
	saved    bool // since it was started: the plugin may have stored that before or after
	deadline time.Time
}

// Reset makes the connector forget every block. The plugin is called once no save is under way, and ResetOver says
// how it ended, no later than at the deadline. If the deadline is zero, all this may take as long as a save.
func (b *Tracker) Reset(now, deadline time.Time) (CallID, []Action) {
	if deadline.IsZero() {
		deadline = now.Add(b.cfg.Save)
	}
	id := CallID(b.id())
	b.resets[id] = &reset{deadline: deadline}
	b.wakes.at(deadline)
	return id, b.take()
}

// startResets starts the resets that wait for saves once none is under way, or ends those that cannot start.
func (b *Tracker) startResets() {
	for _, id := range slices.Sorted(maps.Keys(b.resets)) {
		r := b.resets[id]
		switch {
		case r.started:
		case b.cfg.Can&connector.CanReset == 0:
			b.endReset(id, false, nil)
		case b.Saving():
		case b.state != up || b.closed:
			b.endReset(id, false, errNotUp)
		default:
			r.started, r.saved = true, false
			b.emit(Reset{ID: id, Gen: b.gen, Deadline: r.deadline})
		}
	}
}

// ResetAnswered brings the answer to a Reset. It counts only if nothing was saved meanwhile.
func (b *Tracker) ResetAnswered(now time.Time, id CallID, emptied bool, err error) []Action {
	r := b.resets[id]
	if r == nil || !r.started {
		b.counters.Unknown++
		return nil
	}
	b.forget(now)
	b.endReset(id, emptied && err == nil && !r.saved, err)
	return b.take()
}

// GiveUpReset ends a reset that nobody waits for any longer, and does nothing if it is over.
func (b *Tracker) GiveUpReset(id CallID, why error) []Action {
	b.giveUpReset(id, why)
	return b.take()
}

func (b *Tracker) giveUpReset(id CallID, why error) {
	switch r := b.resets[id]; {
	case r == nil:
	case r.started:
		b.endReset(id, false, why)
	default:
		b.endReset(id, false, fmt.Errorf("saves are under way: %w", why))
	}
}

func (b *Tracker) tickResets(now time.Time) {
	for _, id := range slices.Sorted(maps.Keys(b.resets)) {
		if !now.Before(b.resets[id].deadline) {
			b.giveUpReset(id, context.DeadlineExceeded)
		}
	}
}

// resetsLost ends the resets that the plugin was working on when it went away: it may have forgotten anything.
func (b *Tracker) resetsLost(now time.Time) {
	for _, id := range slices.Sorted(maps.Keys(b.resets)) {
		if b.resets[id].started {
			b.forget(now)
			b.endReset(id, false, errNotUp)
		}
	}
}

func (b *Tracker) endReset(id CallID, emptied bool, err error) {
	delete(b.resets, id)
	b.emit(ResetOver{ID: id, Emptied: emptied, Err: err})
}

// forget drops every answer: the connector was reset.
func (b *Tracker) forget(now time.Time) {
	for _, id := range slices.Sorted(maps.Keys(b.requests)) {
		r := b.requests[id]
		r.match.known, r.match.end = false, 0
		b.cancelAsk(&r.match)
		b.askAgain(now, r)
	}
}
