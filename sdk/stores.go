package sdk

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/kvport/kvport/connector"
)

// stores keeps one Store for each engine epoch and config, and only one for each arena. The zero value with open set is ready.
type stores struct {
	open       func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Store, error)
	definition Definition
	arena      func(raw json.RawMessage, env *connector.Env) (int64, error) // the size that a config asks for

	mu    sync.Mutex
	byKey map[storeID]*sharedStore
}

type storeID struct {
	engine string
	epoch  uint64
	config [sha256.Size]byte
	arena  *byte // its first byte; nil without an arena
}

// storeKeyOf says which Store serves a side. An arena has one user in a process, whatever lives of an engine open
// with it: two Stores would both write its first slot.
func storeKeyOf(env *connector.Env, raw json.RawMessage) storeID {
	id := storeID{engine: env.Engine, epoch: env.Epoch, config: sha256.Sum256(raw)}
	if len(env.Arena) > 0 {
		id.epoch, id.arena = 0, &env.Arena[0]
	}
	return id
}

// sharedStore is one Store and those who use it. It stays in the table until it is closed, so that
// no second one touches the same files meanwhile.
type sharedStore struct {
	refs  int           // sides that use or await it, under stores.mu; 0 while it closes
	ready chan struct{} // closed when store or err is set
	gone  chan struct{} // closed when it was closed and has left the table
	store connector.Store
	watch *watch // nil without CanEvents
	err   error
}

// acquire opens the Store of an engine's epoch and config, or joins the open one. free gives it
// back; the last one to do so closes it and gets its error.
func (s *stores) acquire(ctx context.Context, env connector.Env, raw json.RawMessage) (_ *sharedStore, free func() error, _ error) {
	if err := env.Validate(); err != nil {
		return nil, nil, err
	}
	id := storeKeyOf(&env, raw)
	for {
		e, first, closing := s.join(id)
		if first {
			s.start(ctx, id, e, env, raw)
		}
		wait := e.ready
		if closing {
			wait = e.gone
		}
		if err := await(ctx, wait); err != nil && !first {
			if !closing {
				err = errors.Join(err, s.release(id, e, env.Log))
			}
			return nil, nil, err
		}
		switch {
		case closing:
		case e.err == nil:
			return e, sync.OnceValue(func() error { return s.release(id, e, env.Log) }), nil
		case first || ctx.Err() != nil || !isDone(e.err):
			return nil, nil, e.err
		}
		// It was the first side's deadline that ended the attempt, not ours: try again.
	}
}

func await(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func isDone(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// join finds or makes the entry of id and takes a reference, unless it is closing.
func (s *stores) join(id storeID) (e *sharedStore, first, closing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e = s.byKey[id]
	if e == nil {
		e = &sharedStore{ready: make(chan struct{}), gone: make(chan struct{})}
		if s.byKey == nil {
			s.byKey = map[storeID]*sharedStore{}
		}
		s.byKey[id], first = e, true
	} else if e.refs == 0 {
		return e, false, true
	}
	e.refs++
	return e, first, false
}

// start opens the Store of a new entry. One that fails leaves the table at once.
func (s *stores) start(ctx context.Context, id storeID, e *sharedStore, env connector.Env, raw json.RawMessage) {
	e.err = guard(env.Log, "open", func() (err error) {
		e.store, err = s.open(ctx, env, raw)
		return err
	})
	if e.err == nil && e.store == nil {
		e.err = fmt.Errorf("open gave no store: %w", connector.ErrIncompatible)
	}
	if e.err == nil {
		if e.err = s.definition.has(e.store); e.err != nil {
			e.err = errors.Join(e.err, guard(env.Log, "close", e.store.Close))
		}
	}
	if e.err == nil && s.definition.Capabilities&connector.CanEvents != 0 {
		e.watch = newWatch(&s.definition, &env)
		e.err = guard(env.Log, "watch", func() error {
			if w, ok := e.store.(Watchable); ok { // has saw it
				w.Watch(e.watch.removed)
			}
			return nil
		})
	}
	if e.err != nil {
		e.store = nil
		s.remove(id, e)
	}
	close(e.ready)
}

// release gives one reference back.
func (s *stores) release(id storeID, e *sharedStore, log *slog.Logger) error {
	s.mu.Lock()
	e.refs--
	last := e.refs == 0
	s.mu.Unlock()
	if !last || e.store == nil {
		return nil
	}
	defer s.remove(id, e)
	return guard(log, "close", e.store.Close)
}

func (s *stores) remove(id storeID, e *sharedStore) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byKey[id] == e {
		delete(s.byKey, id)
	}
	close(e.gone)
}
