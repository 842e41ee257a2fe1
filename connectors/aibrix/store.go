package aibrix

import (
	"context"
	"errors"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/remote"
	"github.com/kvport/kvport/connectors/internal/tier"
)

// Open opens the tiers of config and environment for the engine of env. Errors name the variable and wrap
// connector.ErrIncompatible.
func Open(ctx context.Context, env connector.Env, config Config) (connector.Store, error) {
	s, err := config.settings()
	if err != nil {
		return nil, err
	}
	s.warn(env.Log)
	var lower connector.Store
	if s.l2 {
		s.remote.Log = env.Log
		if lower, err = remote.Open(ctx, s.remote); err != nil {
			return nil, err
		}
	}
	if s.memory == 0 {
		return lower, nil
	}
	sizes := make([]int64, len(env.Layout.Groups))
	for g := range sizes {
		sizes[g] = env.Layout.BlockBytes(uint16(g))
	}
	o := tier.Options{
		SlotBytes: slices.Max(sizes), SameSize: slices.Min(sizes) == slices.Max(sizes), Policy: s.policy, Lower: lower, AdmitAfter: 1,
		Prefetch: ahead, Memory: env.Arena, MemoryBytes: s.memory, Log: env.Log,
	}
	if s.hot {
		o.AdmitAfter = 2
	}
	store, err := tier.Open(o)
	if err != nil {
		if lower != nil {
			err = errors.Join(err, lower.Close())
		}
		return nil, err
	}
	return store, nil
}

// ahead is how many blocks of a matched prompt are fetched from L2 before they are asked for.
const ahead = 16
