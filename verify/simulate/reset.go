package simulate

import (
	"time"

	"github.com/kvport/kvport/internal/tracker"
)

// reset empties the prefix cache and the connector's: package engine's Reset. Now and then its caller has little
// time, or goes away.
func (e *engine) reset(d *rng) {
	h := e.host
	if d.n(4) == 1 {
		e.leaveReset()
	}
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
		e.w.second.clear()
	}
	limit := 10 * time.Second
	if d.n(4) == 3 {
		limit = time.Duration(d.n(500)) * time.Millisecond
	}
	id, actions := h.tracker.Reset(e.w.now, e.w.now.Add(limit))
	h.reset = id
	h.do(actions)
}

// resetSoon resets an engine now or when it does more harm.
func (e *engine) resetSoon(d *rng) {
	if e.lurks = e.host != nil && d.n(4) > 0; !e.lurks {
		e.reset(d)
	}
}

// resetInTime resets an engine when it does most harm: while what a prompt begins with is being saved, which
// somebody asks again afterwards.
func (e *engine) resetInTime(d *rng) {
	h := e.host
	if !e.lurks || h.proc == nil {
		return
	}
	for _, m := range h.proc.moves {
		if st := e.streams[m.Transfer.Request]; m.Kind == tracker.Save && m.Transfer.From == 0 && m.done == 0 && st != nil {
			e.lurks, e.again = false, st.client
			e.reset(d)
			return
		}
	}
}

// leaveReset is the end of whoever waits for a reset.
func (e *engine) leaveReset() {
	if h := e.host; h != nil && h.reset != 0 {
		h.do(h.tracker.GiveUpReset(e.w.now, h.reset, errCanceled))
	}
}

func (e *engine) emptied() {
	e.empty = e.gen
	e.w.stats.Resets++
	e.w.say("%s is empty", e.name)
	if c := e.again; c != nil && !e.w.router.given {
		e.again = nil
		e.w.router.enter(c.prompt, c.salt, c.max)
	}
}

// resetOver is followed by the engine's part, in its next turn.
func (h *host) resetOver(a *tracker.ResetOver) {
	if h.reset != a.ID {
		h.w.fail('d', "%s is told that a reset is over, which is not under way", h.e.name)
	}
	switch {
	case h.w.is(ResetUntold) && a.Err != nil:
		return
	case a.Err != nil:
		h.w.stats.ResetsFailed++
		h.w.say("%s: the reset fails: %v", h.e.name, a.Err)
	case !a.Emptied:
		h.w.stats.ResetsKept++
	}
	h.reset = 0
	h.e.forget, h.e.willBeEmpty = true, a.Emptied || a.Err != nil && h.w.is(ResetGone)
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
