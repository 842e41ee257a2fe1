package remote

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

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

// cause is what an error means for the store.
type cause uint8

const (
	causeNone     cause = iota
	causeCaller         // the caller's context was cancelled
	causeAway           // the server cannot be reached, or does not answer in time
	causeRefused        // it refuses the user or the password, or the user may not do this
	causeBusy           // it is starting, failing over or moving slots: ask again
	causeFull           // no memory for a value
	causeReadOnly       // it is a replica
	causeMode           // cluster where one server was expected, or the reverse; no such database
	causeCommand        // another error that it answered
)

// answers maps the first word of a server's error to what it means.
func answers(word string) cause {
	switch word {
	case "WRONGPASS", "NOAUTH", "NOPERM":
		return causeRefused
	case "LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "ASK":
		return causeBusy
	case "OOM", "MISCONF":
		return causeFull
	case "READONLY":
		return causeReadOnly
	case "MOVED", "CROSSSLOT":
		return causeMode
	}
	return causeCommand
}

// causeOf says what an error means.
func causeOf(err error) cause {
	var answer redis.Error
	var network net.Error
	switch {
	case err == nil:
		return causeNone
	case errors.Is(err, context.Canceled):
		return causeCaller
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &network):
		return causeAway
	case errors.As(err, &answer):
		return causeOfText(answer.Error())
	}
	return causeAway
}

// causeOfText says what a server's error means. Where old servers have no word for it, it goes by what they
// say.
func causeOfText(text string) cause {
	word, _, _ := strings.Cut(text, " ")
	c := answers(word)
	if c != causeCommand {
		return c
	}
	low := strings.ToLower(text)
	switch {
	case strings.Contains(low, "password"), strings.Contains(low, "auth"):
		return causeRefused
	case strings.Contains(low, "db index"), strings.Contains(low, "select is not allowed"), strings.Contains(low, "cluster support disabled"):
		return causeMode
	case strings.Contains(low, "max number of clients"):
		return causeBusy
	}
	return causeCommand
}

// scrub takes the password out of an error, which some servers repeat.
func (o *Options) scrub(err error) error {
	if err == nil || o.Password == "" || !strings.Contains(err.Error(), o.Password) {
		return err
	}
	return errors.New(strings.ReplaceAll(err.Error(), o.Password, "***"))
}

// where names the server in messages.
func (o *Options) where() string { return strings.Join(o.Addresses, ",") }

// explain makes of an error one that a host can act on. ctx is the caller's.
func (o *Options) explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("server %s: %w: %w", o.where(), ctx.Err(), connector.ErrGone)
	}
	clean := o.scrub(err)
	switch causeOf(err) {
	case causeBusy:
		return fmt.Errorf("server %s: %w: %w", o.where(), clean, connector.ErrBusy)
	case causeFull:
		return fmt.Errorf("server %s has no memory left, give it more (maxmemory) or an eviction policy: %w: %w", o.where(), clean, connector.ErrGone)
	case causeReadOnly:
		return fmt.Errorf("server %s is a replica, name the primary: %w: %w", o.where(), clean, connector.ErrGone)
	default:
	}
	return fmt.Errorf("server %s: %w: %w", o.where(), clean, connector.ErrGone)
}

// configError makes of what went wrong at the first contact an error of the config; nil if it is the
// server's and may pass.
func (o *Options) configError(err error) error {
	switch causeOf(err) {
	case causeRefused:
		user := cmp.Or(o.Username, "default")
		return fmt.Errorf("%s: server %s refuses user %q: %w: %w", o.CredentialField, o.where(), user, o.scrub(err), connector.ErrIncompatible)
	case causeMode:
		return fmt.Errorf("url: server %s is of another kind, write redis-cluster:// for a cluster, redis:// for one server and a database that it has: %w: %w",
			o.where(), o.scrub(err), connector.ErrIncompatible)
	default:
	}
	return nil
}
