package conformance

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
)

// Staged runs the connectors of another harness at trust level staged: they reach the cache only
// through landing memory, with the host's own code in between. The memory has room for a third of
// the cache, so that transfers are divided and wait for each other.
func Staged(inner Maker) Maker {
	return func() (Harness, error) {
		h, err := inner()
		if err != nil {
			return nil, err
		}
		return &staged{h}, nil
	}
}

type staged struct{ Harness }

// Start implements Harness.
func (h *staged) Start(ctx context.Context, ranks int, size int64) (*Instance, error) {
	inner, err := h.Harness.Start(ctx, ranks, size)
	if err != nil {
		return nil, err
	}
	memory := make([][]byte, ranks)
	for r := range memory {
		memory[r] = make([]byte, size)
	}
	return stage(inner, memory), nil
}

// stage puts landing memory between a connector and the cache.
func stage(inner *Instance, memory [][]byte) *Instance {
	i := *inner
	i.Memory = memory
	i.Worker = func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Worker, error) {
		return openStaged(ctx, inner, env, config)
	}
	i.Fit = func(size int64) error {
		err := inner.Fit(size)
		i.Arena = inner.Arena
		return err
	}
	i.Again = func(ctx context.Context) (*Instance, error) {
		again, err := inner.Again(ctx)
		if err != nil {
			return nil, err
		}
		return stage(again, memory), nil
	}
	return &i
}

// openStaged opens a worker side on landing memory. A cache that landing memory cannot stand for is
// the connector's to refuse, so it sees that cache as it is.
func openStaged(ctx context.Context, inner *Instance, env connector.Env, config json.RawMessage) (connector.Worker, error) {
	if env.Rank < 0 || env.Rank >= len(inner.Memory) {
		return inner.Worker(ctx, env, config)
	}
	memory := inner.Memory[env.Rank]
	if env.Layout.Validate([]int64{int64(len(memory))}) != nil {
		return inner.Worker(ctx, env, config)
	}
	cut := env.Layout
	cut.Blocks = max(1, cut.Blocks/3)
	layout, _, err := host.LandingLayout(cut, int64(len(memory)))
	if errors.Is(err, connector.ErrIncompatible) {
		cut.Blocks = 1 // alignment leaves no room: one slot, where the cache has its first block
		layout, err = cut, nil
	}
	if err != nil {
		return nil, err
	}
	landing, err := connector.NewKV(layout, [][]byte{memory})
	if err != nil {
		return nil, err
	}
	env.Layout = layout
	w, err := inner.Worker(ctx, env, config)
	if err != nil {
		return nil, err
	}
	return host.Staged(w, landing), nil
}
