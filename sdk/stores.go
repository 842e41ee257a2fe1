package sdk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
)

// stores are the open Stores of one Definition.
type stores struct {
	shares[sharedStore]
	definition Definition
	arena      func(raw json.RawMessage, env *connector.Env) (int64, error) // the size that a config asks for
}

// sharedStore is one Store and what the sdk adds to it.
type sharedStore struct {
	store connector.Store
	watch *watch // nil without CanEvents
}

// newStores makes the table of Stores that open returns.
func newStores(d Definition, arena func(json.RawMessage, *connector.Env) (int64, error),
	open func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Store, error),
) *stores {
	s := &stores{definition: d, arena: arena}
	s.shut = func(e sharedStore, _ *slog.Logger) error { return e.store.Close() }
	s.open = func(ctx context.Context, env connector.Env, raw json.RawMessage) (e sharedStore, err error) {
		if e.store, err = open(ctx, env, raw); err != nil {
			return e, err
		}
		if e.store == nil {
			return e, fmt.Errorf("open returned no store: %w", connector.ErrIncompatible)
		}
		if err := s.definition.has(e.store, len(env.Arena) > 0); err != nil {
			return e, errors.Join(err, wire.Guard(env.Log, "close", e.store.Close))
		}
		return e, s.observe(&e, &env)
	}
	return s
}

// observe makes a Store that is [Watchable] report which blocks it drops.
func (s *stores) observe(e *sharedStore, env *connector.Env) error {
	if s.definition.Capabilities&connector.CanEvents == 0 {
		return nil
	}
	e.watch = newWatch(&s.definition, env)
	return wire.Guard(env.Log, "watch", func() error {
		if w, ok := e.store.(Watchable); ok { // has saw it
			w.Watch(e.watch.removed)
		}
		return nil
	})
}
