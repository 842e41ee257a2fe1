package sdk

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"log/slog"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
)

// shares keeps one value for each engine epoch and config, which both sides and all ranks use, and only one
// for each arena. A zero value in which open and shut are set is ready to use.
type shares[V any] struct {
	open func(ctx context.Context, env connector.Env, raw json.RawMessage) (V, error)
	shut func(v V, log *slog.Logger) error // after the last user

	values handles[shareID, V]
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

// acquire opens the value of an engine's epoch and config, or joins the open one. free gives it back; the
// last caller of free closes the value and gets the error of that.
func (s *shares[V]) acquire(ctx context.Context, env connector.Env, raw json.RawMessage) (value V, free func() error, err error) {
	if err := env.Validate(); err != nil {
		return value, nil, err
	}
	open := func(ctx context.Context) (v V, err error) {
		err = wire.Guard(env.Log, "open", func() (err error) {
			v, err = s.open(ctx, env, raw)
			return err
		})
		return v, err
	}
	shut := func(v V) error {
		return wire.Guard(env.Log, "close", func() error { return s.shut(v, env.Log) })
	}
	return s.values.acquire(ctx, shareIDOf(&env, raw), open, shut)
}
