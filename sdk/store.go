package sdk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/kvport/kvport/connector"
)

// Definition says what a connector is.
type Definition struct {
	Name        string   // kv_connector value it answers to
	Aliases     []string // further values
	Version     string
	Environment []string // environment variables that the process needs; nothing else is passed
	Scope       connector.Scope
}

// FromStore makes a connector of a Store. C is the struct of its config, see [DecodeConfig].
//
// open is called once for each engine epoch and config; both sides and all ranks share the Store,
// which is closed with the last of them. Its Env is that of the side that came first, so Rank means
// nothing to it. Full blocks are stored under a key for each rank and count as present only if every
// rank's part is (rule STORE-03); partial blocks have no key and are recomputed.
func FromStore[C any](d Definition, open func(ctx context.Context, env connector.Env, config C) (connector.Store, error)) connector.Plugin {
	stores := &stores{open: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Store, error) {
		config, err := DecodeConfig[C](raw)
		if err != nil {
			return nil, err
		}
		return open(ctx, env, config)
	}}
	return connector.Plugin{
		Name: d.Name, Aliases: d.Aliases, Version: d.Version, Environment: d.Environment, Schema: SchemaOf[C](),
		Describe: func(_ context.Context, raw json.RawMessage) (connector.Info, error) {
			_, err := DecodeConfig[C](raw)
			return connector.Info{Name: d.Name, Scope: d.Scope}, err
		},
		Scheduler: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
			side, err := stores.side(ctx, env, raw)
			if err != nil {
				return nil, err
			}
			return &storeScheduler{side}, nil
		},
		Worker: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
			side, err := stores.side(ctx, env, raw)
			if err != nil {
				return nil, err
			}
			return &storeWorker{side}, nil
		},
	}
}

// storeSide is what both sides have in common.
type storeSide struct {
	env   connector.Env
	log   *slog.Logger
	store connector.Store
	free  func() error // gives the reference to the store back
}

// Close implements connector.Scheduler and connector.Worker.
func (s *storeSide) Close() error { return s.free() }

func (s *stores) side(ctx context.Context, env connector.Env, raw json.RawMessage) (storeSide, error) {
	if n := len(env.Layout.Groups); n != 1 || env.Layout.Groups[0].Policy != connector.PolicyAll {
		return storeSide{}, fmt.Errorf("the cache has %d groups, a store needs one of full attention: %w", n, connector.ErrIncompatible)
	}
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	store, free, err := s.acquire(ctx, env, raw)
	return storeSide{env: env, log: env.Log, store: store, free: free}, err
}

type storeScheduler struct{ storeSide }

// Match implements connector.Scheduler: it looks up the blocks that the engine lacks, one run of
// keys for each query and rank.
func (s *storeScheduler) Match(ctx context.Context, queries []connector.Query) ([]connector.Match, error) {
	matches := make([]connector.Match, len(queries))
	if !s.env.Role.Loads() {
		return matches, nil
	}
	blockTokens, world := s.env.Layout.Groups[0].BlockTokens, max(1, s.env.World)
	var runs [][]connector.StoreKey
	var asked []int // the query of every run, world runs each
	for i, q := range queries {
		if first := q.Computed / blockTokens; first < len(q.Keys) {
			runs = append(runs, s.keys(q.Keys[first:], world)...)
			asked = append(asked, i)
		}
	}
	if len(runs) == 0 {
		return matches, nil
	}
	found, err := s.lookup(ctx, runs)
	if err != nil {
		return nil, err
	}
	for n, i := range asked {
		blocks := found[n*world]
		for _, f := range found[n*world : (n+1)*world] {
			blocks = min(blocks, f)
		}
		q := &queries[i]
		if tokens := (q.Computed/blockTokens+blocks)*blockTokens - q.Computed; blocks > 0 && tokens > 0 {
			matches[i] = connector.Match{Tokens: tokens, Async: true}
		}
	}
	return matches, nil
}

// keys derives the keys of every rank's part of some blocks, one run for each rank.
func (s *storeScheduler) keys(blocks []connector.BlockKey, world int) [][]connector.StoreKey {
	runs := make([][]connector.StoreKey, world)
	for rank := range runs {
		runs[rank] = make([]connector.StoreKey, len(blocks))
		for i, k := range blocks {
			runs[rank][i] = connector.NewStoreKey(k, s.env.Shape, 0, connector.Shard{Rank: rank, World: world})
		}
	}
	return runs
}

func (s *storeScheduler) lookup(ctx context.Context, runs [][]connector.StoreKey) (found []int, err error) {
	err = guard(s.log, "lookup", func() (err error) {
		found, err = s.store.Lookup(ctx, runs)
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(found) != len(runs) {
		return nil, fmt.Errorf("store answered %d of %d runs (rule STORE-02): %w", len(found), len(runs), connector.ErrIncompatible)
	}
	for i, n := range found {
		if n < 0 || n > len(runs[i]) {
			return nil, fmt.Errorf("store found %d of %d keys (rule STORE-02): %w", n, len(runs[i]), connector.ErrIncompatible)
		}
	}
	return found, nil
}

type storeWorker struct{ storeSide }

// Load implements connector.Worker.
func (w *storeWorker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if !w.env.Role.Loads() {
		return fmt.Errorf("load: this engine is a %v: %w", w.env.Role, connector.ErrIncompatible)
	}
	items, blocks, partial, err := w.items(t, kv)
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	if len(items) > 0 {
		err = blockError(guard(w.log, "get", func() error { return w.store.Get(ctx, items) }), blocks)
	}
	if len(partial) == 0 {
		return err
	}
	var failed *connector.BlockError
	if err != nil && !errors.As(err, &failed) {
		return err // nothing arrived anyway
	}
	if failed == nil {
		failed = &connector.BlockError{Err: fmt.Errorf("partial blocks are not stored: %w", connector.ErrGone)}
	}
	return &connector.BlockError{Blocks: append(partial, failed.Blocks...), Err: failed.Err}
}

// Save implements connector.Worker. It skips partial blocks.
func (w *storeWorker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if !w.env.Role.Saves() {
		return fmt.Errorf("save: this engine is a %v: %w", w.env.Role, connector.ErrIncompatible)
	}
	items, blocks, _, err := w.items(t, kv)
	if err != nil {
		return fmt.Errorf("save: %w", err)
	}
	if len(items) == 0 {
		return nil
	}
	return blockError(guard(w.log, "put", func() error { return w.store.Put(ctx, items) }), blocks)
}

// items are the full blocks of a transfer, their ids, and the ids of the partial ones.
func (w *storeWorker) items(t *connector.Transfer, kv *connector.KV) (items []connector.Item, full, partial []connector.BlockID, err error) {
	shard := connector.Shard{Rank: w.env.Rank, World: max(1, w.env.World)}
	items = make([]connector.Item, 0, len(t.Blocks))
	full = make([]connector.BlockID, 0, len(t.Blocks))
	for _, b := range t.Blocks {
		if b.Key == (connector.BlockKey{}) {
			partial = append(partial, b.ID)
			continue
		}
		spans, err := kv.Spans(b)
		if err != nil {
			return nil, nil, nil, err
		}
		key := connector.NewStoreKey(b.Key, w.env.Shape, b.Group, shard)
		items = append(items, connector.Item{Key: key, Replace: t.Replace, Spans: spans})
		full = append(full, b.ID)
	}
	return items, full, partial, nil
}

// blockError turns the items of an *ItemError into blocks. An error whose items do not exist is
// taken to mean all of them.
func blockError(err error, blocks []connector.BlockID) error {
	var failed *connector.ItemError
	if !errors.As(err, &failed) {
		return err
	}
	ids := make([]connector.BlockID, 0, len(failed.Items))
	for _, i := range failed.Items {
		if i < 0 || i >= len(blocks) {
			return fmt.Errorf("store named item %d of %d: %w", i, len(blocks), failed.Err)
		}
		ids = append(ids, blocks[i])
	}
	if len(ids) == 0 {
		return fmt.Errorf("store named no item: %w", failed.Err)
	}
	return &connector.BlockError{Blocks: ids, Err: failed.Err}
}
