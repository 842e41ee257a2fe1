package simulate

import (
	"time"

	"github.com/kvport/kvport/internal/tracker"
)

// reset empties the prefix cache and the connector's: package engine's Reset.
func (e *engine) reset() {
	h := e.host
	if e.forget || h != nil && h.reset != 0 {
		return
	}
	e.gen++
	if h == nil {
		e.sched.Forget()
		e.emptied()
		return
	}
	e.w.say("%s is reset", e.name)
	if e.w.is(ResetInHaste) {
		e.w.store.clear()
	}
	id, actions := h.tracker.Reset(e.w.now, e.w.now.Add(10*time.Second))
	h.reset = id
	h.do(actions)
}

func (e *engine) emptied() {
	e.empty = e.gen
	e.w.stats.Resets++
	e.w.say("%s is empty", e.name)
}

// resetOver is followed by the engine's part, in its next turn.
func (h *host) resetOver(a *tracker.ResetOver) {
	if h.reset != a.ID {
		h.w.fail('d', "%s is told that a reset is over, which is not under way", h.e.name)
	}
	h.reset = 0
	h.e.forget, h.e.willBeEmpty = true, a.Emptied
}

// finishReset is the engine's part: the prefix cache, last, because until the connector was empty its
// blocks could still come into it.
func (e *engine) finishReset() {
	if !e.forget {
		return
	}
	e.forget = false
	if !e.w.is(ResetHalf) {
		e.sched.Forget()
	}
	if e.willBeEmpty {
		e.emptied()
	}
}
