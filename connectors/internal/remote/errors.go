package remote

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/kvport/kvport/connector"
)

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
		user := o.Username
		if user == "" {
			user = "default"
		}
		return fmt.Errorf("%s: server %s refuses user %q: %w: %w", o.CredentialField, o.where(), user, o.scrub(err), connector.ErrIncompatible)
	case causeMode:
		return fmt.Errorf("url: server %s is of another kind, write redis-cluster:// for a cluster, redis:// for one server and a database that it has: %w: %w",
			o.where(), o.scrub(err), connector.ErrIncompatible)
	default:
	}
	return nil
}
