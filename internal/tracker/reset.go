package tracker

import (
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
)

var errNotUp = fmt.Errorf("the plugin is not running: %w", connector.ErrGone)

// reset is a Reset that is not over: it waits for saves, or the plugin works on it.
type reset struct {
	id       CallID
	deadline time.Time
	patient  bool // it waits for saves and nobody named a deadline: the plugin gets time of its own then
	started  bool
	saved    bool // since it was started: the plugin may have stored that before or after
}

// Reset makes the connector forget every block. The plugin is called once no save is under way, and ResetOver says
// how it ended, no later than at the deadline. If the deadline is zero, the wait for saves may take as long as a save,
// and so may the plugin after it.
func (b *Tracker) Reset(now, deadline time.Time) (CallID, []Action) {
	r := &reset{id: CallID(b.id()), deadline: deadline}
	if deadline.IsZero() {
		r.deadline = now.Add(b.cfg.Save)
	}
	b.resets[r.id] = r
	b.wakes.at(r.deadline)
	actions := b.take()
	r.patient = deadline.IsZero() && !r.started
	return r.id, actions
}

// startResets starts the resets that wait for saves once none is under way, or ends those that cannot start.
func (b *Tracker) startResets() {
	for _, r := range sorted(b.resets) {
		switch {
		case r.started:
		case b.cfg.Can&connector.CanReset == 0:
			b.endReset(r, false, nil)
		case b.Saving():
		case b.state != up || b.closed:
			b.endReset(r, false, errNotUp)
		default:
			r.started, r.saved = true, false
			if r.patient {
				r.deadline = r.deadline.Add(b.cfg.Save)
				b.wakes.at(r.deadline)
			}
			b.emit(Reset{ID: r.id, Gen: b.gen, Deadline: r.deadline})
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
	b.endReset(r, emptied && err == nil && !r.saved, err)
	return b.take()
}

// GiveUpReset ends a reset that nobody waits for any longer, and does nothing if it is over.
func (b *Tracker) GiveUpReset(now time.Time, id CallID, why error) []Action {
	b.failResets(now, func(r *reset) bool { return r.id == id }, why)
	return b.take()
}

// failResets ends some resets without an answer. The plugin may have forgotten anything.
func (b *Tracker) failResets(now time.Time, which func(*reset) bool, why error) {
	for _, r := range sorted(b.resets) {
		switch {
		case !which(r):
		case r.started:
			b.forget(now)
			b.endReset(r, false, why)
		default:
			b.endReset(r, false, fmt.Errorf("saves are under way: %w", why))
		}
	}
}

func (b *Tracker) endReset(r *reset, emptied bool, err error) {
	delete(b.resets, r.id)
	b.emit(ResetOver{ID: r.id, Emptied: emptied, Err: err})
}

// forget drops every answer: the connector was reset.
func (b *Tracker) forget(now time.Time) {
	for _, r := range sorted(b.requests) {
		r.match.known, r.match.end = false, 0
		b.cancelAsk(&r.match)
		b.askAgain(now, r)
	}
}
