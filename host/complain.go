package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// complaints says how often failed transfers of one direction were logged.
type complaints struct {
	next    time.Time // not before
	dropped int       // since the last that was logged
}

// complain logs a transfer that failed, but not more than one a second: what fails once often fails
// for every request. The end of a request that nobody waits for is not a failure, nor is what a connector
// chose not to store. The caller holds mu.
func (h *Host) complain(direction string, c *complaints, b *tracker.Event) {
	if len(b.Failed) == 0 || b.Err == nil || errors.Is(b.Err, context.Canceled) || errors.Is(b.Err, connector.ErrDeclined) {
		return
	}
	now := time.Now()
	if now.Before(c.next) {
		c.dropped++
		return
	}
	h.log.Warn("transfer failed", "connector", h.info.Name, "direction", direction, "request", b.Request,
		"blocks", len(b.Failed), "error", b.Err, "not_logged", c.dropped)
	*c = complaints{next: now.Add(time.Second)}
}

// missed logs that matches stayed undecided, which looks like a cold cache otherwise, but not more often than
// missedEvery: a slow store is slow for every request. The caller holds mu.
func (h *Host) missed(matches int) {
	now, c := time.Now(), &h.misses
	if now.Before(c.next) {
		c.dropped += matches
		return
	}
	later := h.cfg.Settings.Deadlines.Later
	h.log.Warn(fmt.Sprintf("match undecided after %s, counted as a miss; raise kvport.deadlines.later if the connector's store is that slow", later),
		"connector", h.info.Name, "matches", matches, "not_logged", c.dropped)
	*c = complaints{next: now.Add(missedEvery)}
}
