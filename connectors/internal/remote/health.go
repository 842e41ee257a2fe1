package remote

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

const (
	firstWait   = 100 * time.Millisecond // after the first failure to reach the server
	longestWait = 2 * time.Second
	fullWait    = time.Second // saves are refused after the server had no memory
	patience    = time.Second // a server that is silent for so long in a call that was cut short counts as away
)

// errAway is why a call fails at once while the server is away.
var errAway = errors.New("server is away")

// health decides when the server is asked at all. While it is away calls fail at once, so that
// nobody waits for it again and again; one call after each pause finds out whether it is back. What
// changes is logged once.
type health struct {
	log   *slog.Logger
	where string

	mu      sync.Mutex
	away    bool
	retryAt time.Time
	wait    time.Duration
	full    bool
	fullAt  time.Time // until then saves are refused
}

// ask reports why the server is not asked now.
func (h *health) ask(now time.Time) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.away {
		return nil
	}
	if now.Before(h.retryAt) {
		return fmt.Errorf("%s: %w, next attempt soon: %w", h.where, errAway, connector.ErrGone)
	}
	h.retryAt = now.Add(h.wait) // others wait for what this call finds out
	return nil
}

// room reports why nothing can be saved now.
func (h *health) room(now time.Time) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if now.Before(h.fullAt) {
		return fmt.Errorf("%s: server has no memory left: %w", h.where, connector.ErrGone)
	}
	return nil
}

// failed takes note of what a call met, at whose end the server had been silent for so long. A call that
// its caller cut short says nothing by itself.
func (h *health) failed(err error, silent time.Duration, now time.Time) {
	c := causeOf(err)
	short := c == causeCaller || timeOut(err)
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case c == causeFull:
		h.fullAt = now.Add(fullWait)
		if !h.full {
			h.full = true
			h.log.Error("server has no memory left: nothing is saved, stored blocks are still loaded", "server", h.where)
		}
	case c == causeRefused, c == causeMode, c == causeAway && !short, short && silent >= patience:
		h.lost(err, now)
	}
}

// lost begins or prolongs an outage. Calls that began before the last attempt say nothing new.
func (h *health) lost(err error, now time.Time) {
	switch {
	case !h.away:
		h.away, h.wait = true, firstWait
		h.log.Error("server cannot be used, computing instead", "server", h.where, "error", err)
	case now.Before(h.retryAt.Add(-h.wait)):
		return
	default:
		h.wait = min(2*h.wait, longestWait)
	}
	h.retryAt = now.Add(h.wait)
}

// worked takes note that the server answered.
func (h *health) worked() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.away {
		h.away = false
		h.log.Info("server is back", "server", h.where)
	}
}

// roomy takes note that the server had room for values.
func (h *health) roomy() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.full {
		h.full, h.fullAt = false, time.Time{}
		h.log.Info("server has room again", "server", h.where)
	}
}

// timeOut reports whether an error is a time-out, which a short deadline can cause too.
func timeOut(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}
