package aibrix

import (
	"context"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/remote"
	"github.com/kvport/kvport/sdk/tier"
)

// Open opens the tiers of config and environment for the engine of env. Errors name the variable and wrap
// connector.ErrIncompatible.
func Open(ctx context.Context, env connector.Env, config Config) (connector.Store, error) {
	s, err := config.settings()
	if err != nil {
		return nil, err
	}
	s.warn(env.Log)
	var far *remote.Store
	var lower connector.Store // stays nil without L2
	if s.l2 {
		s.remote.Log = env.Log
		if far, err = remote.Open(ctx, s.remote); err != nil {
			return nil, err
		}
		lower = far
	}
	if s.memory == 0 {
		return &Store{Store: far, far: far}, nil
	}
	o := tier.OptionsFor(&env)
	o.Lend = true
	o.MemoryBytes, o.Policy, o.Lower, o.AdmitAfter, o.Prefetch = s.memory, s.policy, lower, 1, ahead
	if s.hot {
		o.AdmitAfter = 2
	}
	if s.behind > 0 {
		o.WriteBehind = max(1, s.behind/env.Layout.Groups[0].BlockTokens)
	}
	store, err := tier.Open(o)
	if err != nil {
		return nil, err
	}
	return &Store{Store: store, Near: tier.Near{Memory: store}, far: far}, nil
}

// Capabilities are the optional powers of a Store. Without L1 nothing is placed.
const Capabilities = connector.CanStat | connector.CanPlace

// Store is a connector.Store over L1 and L2.
type Store struct {
	connector.Store
	tier.Near
	far *remote.Store // nil without L2
}

// StatInfos declares what Stats gives.
func StatInfos() []connector.StatInfo { return append(tier.Infos(), remote.Infos()...) }

// Stats implements connector.StatsSource.
func (s *Store) Stats(context.Context) (stats []connector.Stat, err error) {
	if s.Memory != nil {
		stats = s.Memory.Values()
	}
	if s.far != nil {
		stats = append(stats, s.far.Stats().Values()...)
	}
	return stats, nil
}

// ahead is how many blocks of a matched prompt are fetched from L2 before they are asked for.
const ahead = 16
