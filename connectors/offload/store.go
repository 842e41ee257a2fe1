// Package offload keeps KV blocks of one engine in the host's memory and, below it, on disk.
//
// The memory tier lies in an arena that the host owns, so that it survives the plugin: the next process
// finds every block that was whole. The disk tier survives the engine too. What is lost, damaged or
// evicted is a miss, and the engine computes it.
package offload

import (
	"context"
	"sync/atomic"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk/tier"
)

// tiers is the library's store, named here so that its methods are the Store's.
type tiers = tier.Store

// Store is a connector.Store over the two tiers.
type Store struct {
	*tiers
	disk  *tier.Disk // nil without a disk tier
	piece int        // blocks

	removed atomic.Pointer[func([]connector.StoreKey)]
}

// Open opens the tiers of config for the engine of env. Errors name the config field and wrap
// connector.ErrIncompatible.
func Open(_ context.Context, env connector.Env, config Config) (connector.Store, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	config.warn(env.Log)
	piece, err := config.piece(env.Layout.Groups)
	if err != nil {
		return nil, err
	}
	s := &Store{piece: piece}
	o := config.options(&env)
	o.Changed = func(k connector.StoreKey, stored bool) {
		s.changed(k, stored, func(k connector.StoreKey) bool { return s.disk != nil && s.disk.Has(k) })
	}
	if config.DiskPath != "" {
		s.disk, err = tier.OpenDisk(tier.DiskOptions{
			Path: config.DiskPath, Field: "disk_bytes", Bytes: config.DiskBytes, SlotBytes: o.SlotBytes + tier.LowerHeader, Policy: o.Policy, TTL: o.TTL > 0, Log: env.Log,
			Changed: func(k connector.StoreKey, stored bool) {
				s.changed(k, stored, func(k connector.StoreKey) bool { return s.tiers != nil && s.Has(k) })
			},
		})
		if err != nil {
			return nil, err
		}
		o.Lower = s.disk
	}
	if s.tiers, err = tier.Open(o); err != nil {
		return nil, err
	}
	return s, nil
}

// Lookup implements connector.Store. What is found ends with a whole piece.
func (s *Store) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	found, err := s.tiers.Lookup(ctx, runs)
	for i := range found {
		found[i] -= found[i] % s.piece
	}
	return found, err
}

// Capabilities are the optional powers of a Store.
const Capabilities = connector.CanReset | connector.CanStat | connector.CanEvents | connector.CanPlace

// Medium is where the blocks are, for whoever is told that they come and go.
const Medium = connector.MediumMemory

// StatInfos declares what Stats gives.
func StatInfos() []connector.StatInfo { return append(tier.Infos(), tier.DiskInfos()...) }

// Stats implements connector.StatsSource.
func (s *Store) Stats(context.Context) ([]connector.Stat, error) {
	stats := s.Values()
	if s.disk != nil {
		stats = append(stats, s.disk.Values()...)
	}
	return stats, nil
}

// Watch implements sdk.Watchable: removed is called for every block that neither tier has any longer.
func (s *Store) Watch(removed func(keys []connector.StoreKey)) { s.removed.Store(&removed) }

// changed is called for every change of one tier; other asks the other tier whether it has a block.
func (s *Store) changed(k connector.StoreKey, stored bool, other func(connector.StoreKey) bool) {
	if removed := s.removed.Load(); !stored && removed != nil && !other(k) {
		(*removed)([]connector.StoreKey{k})
	}
}
