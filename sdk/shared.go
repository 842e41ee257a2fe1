package sdk

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
)

// shares keeps one value for each engine epoch and config, which both sides and all ranks use, and only one
// for each arena. A zero value in which open and shut are set is ready to use.
type shares[V any] struct {
	open func(ctx context.Context, env connector.Env, raw json.RawMessage) (V, error)
	shut func(v V, log *slog.Logger) error // after the last user

	mu    sync.Mutex
	byKey map[shareID]*share[V]
}

type shareID struct {
	engine string
	epoch  uint64
	config [sha256.Size]byte
	arena  *byte // its first byte; nil without an arena
}

// shareIDOf says which value serves a side. An arena has only one user in a process, whichever engine
// epochs open with it: two Stores would both write its first slot.
func shareIDOf(env *connector.Env, raw json.RawMessage) shareID {
	id := shareID{engine: env.Engine, epoch: env.Epoch, config: sha256.Sum256(raw)}
	if len(env.Arena) > 0 {
		id.epoch, id.arena = 0, &env.Arena[0]
	}
	return id
}

// share is one value and the number of its users. It stays in the table until it is closed, so that no
// second value touches the same files in the meantime.
type share[V any] struct {
	refs  int           // sides that use or await it, under shares.mu; 0 while it closes
	ready chan struct{} // closed when value or err is set
	gone  chan struct{} // closed when the value was closed and has left the table
	value V
	err   error
}

// acquire opens the value of an engine's epoch and config, or joins the open one. free gives it back; the
// last caller of free closes the value and gets the error of that.
func (s *shares[V]) acquire(ctx context.Context, env connector.Env, raw json.RawMessage) (value V, free func() error, err error) {
	if err := env.Validate(); err != nil {
		return value, nil, err
	}
	id := shareIDOf(&env, raw)
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
			return value, nil, err
		}
		switch {
		case closing:
		case e.err == nil:
			return e.value, sync.OnceValue(func() error { return s.release(id, e, env.Log) }), nil
		case first || ctx.Err() != nil || !isDone(e.err):
			return value, nil, e.err
		}
		// The deadline of the first side ended the attempt, not that of this one: try again.
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
func (s *shares[V]) join(id shareID) (e *share[V], first, closing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e = s.byKey[id]
	if e == nil {
		e = &share[V]{ready: make(chan struct{}), gone: make(chan struct{})}
		if s.byKey == nil {
			s.byKey = map[shareID]*share[V]{}
		}
		s.byKey[id], first = e, true
	} else if e.refs == 0 {
		return e, false, true
	}
	e.refs++
	return e, first, false
}

// start opens the value of a new entry. An entry that fails leaves the table at once.
func (s *shares[V]) start(ctx context.Context, id shareID, e *share[V], env connector.Env, raw json.RawMessage) {
	e.err = wire.Guard(env.Log, "open", func() (err error) {
		e.value, err = s.open(ctx, env, raw)
		return err
	})
	if e.err != nil {
		s.remove(id, e)
	}
	close(e.ready)
}

// release gives one reference back.
func (s *shares[V]) release(id shareID, e *share[V], log *slog.Logger) error {
	s.mu.Lock()
	e.refs--
	last := e.refs == 0
	s.mu.Unlock()
	if !last || e.err != nil {
		return nil
	}
	defer s.remove(id, e)
	return wire.Guard(log, "close", func() error { return s.shut(e.value, log) })
}

func (s *shares[V]) remove(id shareID, e *share[V]) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byKey[id] == e {
		delete(s.byKey, id)
	}
	close(e.gone)
}
