package simulate

import (
	"time"

	"github.com/kvport/kvport/connector"
)

// resetting is a reset of an engine's caches under way: package engine's Reset.
type resetting struct {
	deadline time.Time
	asked    bool
}

// reset empties the prefix cache and the connector's.
func (e *engine) reset() {
	h := e.host
	if e.forget || h != nil && h.reset != nil {
		return
	}
	e.gen++
	if h == nil {
		e.sched.Forget()
		e.emptied()
		return
	}
	e.w.say("%s is reset", e.name)
	h.reset = &resetting{deadline: e.w.now.Add(10 * time.Second)}
	h.pumpReset()
}

func (e *engine) emptied() {
	e.empty = e.gen
	e.w.stats.Resets++
	e.w.say("%s is empty", e.name)
}

// pumpReset asks the connector once no save is under way.
func (h *host) pumpReset() {
	if h.reset == nil || h.reset.asked || h.tracker.Saving() && !h.w.is(ResetInHaste) {
		return
	}
	h.reset.asked = true
	if h.proc == nil || h.can&connector.CanReset == 0 {
		h.endReset(false)
		return
	}
	h.send(&job{reset: h.reset, deadline: h.reset.deadline})
}

// endReset is followed by the engine's part, in its next turn.
func (h *host) endReset(emptied bool) {
	h.reset = nil
	h.e.forget, h.e.willBeEmpty = true, emptied
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
