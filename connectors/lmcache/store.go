package lmcache

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/remote"
	"github.com/kvport/kvport/internal/storekit"
	"github.com/kvport/kvport/sdk/tier"
)

// Open opens the tiers for the engine of env. Errors name the field of the configuration that is wrong and
// wrap connector.ErrIncompatible.
func Open(ctx context.Context, env connector.Env, config Config) (connector.Store, error) {
	s, err := config.settings()
	if err != nil {
		return nil, err
	}
	s.warn(env.Log)
	piece, err := s.piece(env.Layout.Groups)
	if err != nil {
		return nil, err
	}
	o := s.options(&env)
	out := &Store{piece: piece}
	lower, err := s.lower(ctx, &env, o, out)
	if err != nil {
		return nil, err
	}
	if s.memory == 0 {
		out.Store = lower
		return out, nil
	}
	o.Lower = lower
	store, err := tier.Open(o)
	if err != nil {
		return nil, err
	}
	out.Store, out.Memory, out.values = store, store, append(out.values, store.Values)
	return out, nil
}

// piece is how many blocks of the engine a chunk has. A cache of several groups is served block by block.
func (s *settings) piece(groups []connector.Group) (int, error) {
	own := groups[0].BlockTokens
	if s.chunk%own != 0 {
		return 0, fmt.Errorf("lmcache.chunk_size is %d, want a multiple of the engine's block size %d: %w", s.chunk, own, connector.ErrIncompatible)
	}
	if len(groups) > 1 || groups[0].Policy != connector.PolicyAll {
		return 1, nil
	}
	return s.chunk / own, nil
}

// lower opens what is below memory: disk, remote store, or both in this order; nil if neither.
func (s *settings) lower(ctx context.Context, env *connector.Env, o tier.Options, out *Store) (connector.Store, error) {
	var disk connector.Store
	if s.disk != "" {
		d, err := tier.OpenDisk(tier.DiskOptions{Path: s.disk, Field: field(diskSize), Bytes: s.diskSize, SlotBytes: o.SlotBytes + tier.LowerHeader, Policy: s.policy, Log: env.Log})
		if err != nil {
			return nil, fmt.Errorf("lmcache.local_disk: %w", err)
		}
		disk = d
		out.values = append(out.values, d.Values)
	}
	if s.remote == nil {
		return disk, nil
	}
	far, err := s.openRemote(ctx, env, out)
	switch {
	case err != nil && disk != nil:
		return nil, errors.Join(err, disk.Close())
	case err != nil:
		return nil, err
	case disk == nil:
		return far, nil
	}
	return &both{near: disk, far: far}, nil
}

func (s *settings) openRemote(ctx context.Context, env *connector.Env, out *Store) (connector.Store, error) {
	s.remote.Log = env.Log
	var far interface {
		connector.Store
		Stats() remote.Stats
	}
	var err error
	if s.lm {
		far, err = remote.OpenLM(*s.remote)
	} else {
		far, err = remote.Open(ctx, *s.remote)
	}
	if err != nil {
		return nil, err
	}
	out.values = append(out.values, func() []connector.Stat { return far.Stats().Values() })
	return far, nil
}

// Capabilities are the optional powers of a Store. Without a memory tier nothing is placed.
const Capabilities = connector.CanStat | connector.CanPlace

// Store is a connector.Store over the tiers, whose hits end with a whole chunk.
type Store struct {
	connector.Store
	tier.Near
	piece  int                       // blocks
	values []func() []connector.Stat // of each tier
}

// StatInfos declares what Stats gives.
func StatInfos() []connector.StatInfo {
	return slices.Concat(tier.Infos(), tier.DiskInfos(), remote.Infos())
}

// Stats implements connector.StatsSource.
func (s *Store) Stats(context.Context) (stats []connector.Stat, err error) {
	for _, values := range s.values {
		stats = append(stats, values()...)
	}
	return stats, nil
}

// Lookup implements connector.Store.
func (s *Store) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	found, err := s.Store.Lookup(ctx, runs)
	for i := range found {
		found[i] -= found[i] % s.piece
	}
	return found, err
}

// both is a Store over two: what the near one lacks comes from the far one, and what is saved goes to both.
type both struct{ near, far connector.Store }

// Lookup implements connector.Store.
func (b *both) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	found, err := b.near.Lookup(ctx, runs)
	if err != nil {
		found = make([]int, len(runs))
	}
	rest := make([][]connector.StoreKey, len(runs))
	for i, run := range runs {
		rest[i] = run[found[i]:]
	}
	more, farErr := b.far.Lookup(ctx, rest)
	if farErr != nil {
		return found, err // what is near is still there
	}
	for i := range found {
		found[i] += more[i]
	}
	return found, nil
}

// Get implements connector.Store.
func (b *both) Get(ctx context.Context, items []connector.Item) error {
	err := b.near.Get(ctx, items)
	if err == nil {
		return nil
	}
	var rest []connector.Item
	var missing []int
	for i, e := range storekit.ErrorsOf(err, len(items)) {
		if e != nil {
			rest, missing = append(rest, items[i]), append(missing, i)
		}
	}
	errs := make([]error, len(items))
	for i, e := range storekit.ErrorsOf(b.far.Get(ctx, rest), len(rest)) {
		errs[missing[i]] = e
	}
	return storekit.ItemError(errs)
}

// Put implements connector.Store. It succeeds if either store has taken the blocks.
func (b *both) Put(ctx context.Context, items []connector.Item) error {
	near, far := b.near.Put(ctx, items), b.far.Put(ctx, items)
	if near == nil {
		return nil
	}
	return far
}

// Renewals implements tier.Renewer: what the near store has lost is saved to both again.
func (b *both) Renewals() uint32 {
	if near, is := b.near.(tier.Renewer); is {
		return near.Renewals()
	}
	return 0
}

// Close implements connector.Store.
func (b *both) Close() error { return errors.Join(b.near.Close(), b.far.Close()) }
