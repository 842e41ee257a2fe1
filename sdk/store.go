package sdk

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
)

// Definition describes a connector.
type Definition struct {
	Name        string   // kv_connector value it answers to
	Aliases     []string // further values
	Version     string
	Environment []string        // environment variables that the process needs; nothing else is passed
	Needs       connector.Needs // what it needs of the machine where it runs in a sandbox
	Scope       connector.Scope
	Groups      bool // the Store accepts blocks of different sizes, so it can serve caches of several groups
	Reset       bool // the Store is also a connector.Resetter; short for Capabilities with CanReset
	LayerWise   bool // a connector of [FromPipe] pushes layers while others are computed; short for Capabilities with CanLayers

	// MatchFetches is the field of connector.Info: to ask the Store for blocks has them sent here. A connector
	// of [FromPipe] has it in any case.
	MatchFetches bool

	// Capabilities are the optional powers of the Store that open returns: CanReset for a method Reset
	// (connector.Resetter), CanStat for Stats (connector.StatsSource), CanEvents for Watch ([Watchable]), CanPlace for [Placing]
	// where the config asks for an arena. If the Store lacks one of them, the side does not open.
	Capabilities connector.Capability
	Stats        []connector.StatInfo // what the Store's Stats method reports
	Medium       string               // BlockEvent.Medium of its blocks, such as "disk"
}

// FromStore makes a connector of a Store. C is the struct of its config, see [DecodeConfig]. If C has a
// method Scope() connector.Scope, that method instead of d.Scope says who sees the blocks with that config.
//
// open is called once for each engine epoch and config. Both sides and all ranks share the Store, which is
// closed when the last of them closes. Its Env is that of the first side, so Rank has no meaning there.
// Full blocks are stored under one key for each rank and count as present only if the parts of all ranks
// are present (rule STORE-03); partial blocks have no key and are recomputed. Blocks of different groups
// have different keys. A prefix counts as present if all the blocks are present that its groups need to
// continue after it (rule GROUP-02): either all blocks or the last ones.
//
// A config with a method ArenaBytes() int64 asks the host for that much memory, which open gets as
// Env.Arena. The memory keeps its bytes when the plugin restarts, as long as the engine runs, and the Store
// must verify what it finds there (rules ARENA-01 to ARENA-04). It may be used until the Store's Close
// returns. A method ArenaBlocks() int64 adds room for that many of the engine's blocks on each rank, and
// with ArenaBlockTokens() int64 these are blocks of that many tokens, see connector.Info. A method
// ArenaField() string names the field of the config that an operator must change if the machine has no room
// for the arena.
//
// A config with a method Complete() bool says by it whether all that the Store has lies in slots that Placed has named, as in
// connector.Info. It counts only with CanPlace and an arena, and only for the scope engine.
//
// A config with a method BeyondMachine() string says by it why other machines may see the blocks, as in
// connector.Info.
func FromStore[C any](d Definition, open func(ctx context.Context, env connector.Env, config C) (connector.Store, error)) connector.Plugin {
	d.Capabilities = d.powers()
	stores := newStores(d, func(raw json.RawMessage, env *connector.Env) (int64, error) {
		config, err := DecodeConfig[C](raw)
		info := connector.Info{}
		askArena(&info, &config)
		return info.ArenaSize(&env.Layout, env.World), err
	}, func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Store, error) {
		config, err := DecodeConfig[C](raw)
		if err != nil {
			return nil, err
		}
		return open(ctx, env, config)
	})
	return connector.Plugin{
		Name: d.Name, Aliases: d.Aliases, Version: d.Version, Environment: d.Environment, Needs: d.Needs, Schema: SchemaOf[C](),
		Capabilities: d.Capabilities,
		Describe: func(_ context.Context, raw json.RawMessage) (connector.Info, error) {
			config, err := DecodeConfig[C](raw)
			info := connector.Info{Name: d.Name, Scope: d.Scope, Groups: d.Groups, Capabilities: d.Capabilities, Stats: d.Stats, MatchFetches: d.MatchFetches}
			if err != nil {
				return info, err
			}
			askArena(&info, &config)
			if c, ok := any(&config).(interface{ BeyondMachine() string }); ok {
				info.BeyondMachine = c.BeyondMachine()
			}
			if scoped, ok := any(config).(interface{ Scope() connector.Scope }); ok {
				info.Scope = scoped.Scope()
			}
			err = askComplete(&info, &config)
			return info, cmp.Or(d.check(), err)
		},
		Scheduler: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
			side, err := stores.side(ctx, env, raw)
			if err != nil {
				return nil, err
			}
			return &storeScheduler{side, d.Capabilities}, nil
		},
		Worker: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
			side, err := stores.side(ctx, env, raw)
			if err != nil {
				return nil, err
			}
			powers := d.Capabilities
			if _, ok := side.store.(Placing); !ok {
				powers &^= connector.CanPlace // of a config without an arena
			}
			return &storeWorker{storeSide: side, powers: powers}, nil
		},
	}
}

// askArena sets in info what a config asks for: its ArenaBytes, ArenaBlocks and ArenaBlockTokens. Without memory nothing is placed.
func askArena(info *connector.Info, config any) {
	if c, ok := config.(interface{ ArenaBytes() int64 }); ok {
		info.ArenaBytes = c.ArenaBytes()
	}
	if c, ok := config.(interface{ ArenaBlocks() int64 }); ok {
		info.ArenaBlocks = c.ArenaBlocks()
	}
	if c, ok := config.(interface{ ArenaBlockTokens() int64 }); ok {
		info.ArenaBlockTokens = c.ArenaBlockTokens()
	}
	if c, ok := config.(interface{ ArenaField() string }); ok {
		info.ArenaField = c.ArenaField()
	}
	if info.ArenaBytes == 0 && info.ArenaBlocks == 0 {
		info.Capabilities &^= connector.CanPlace
	}
}

// askComplete sets in info whether what is placed is all there is, as the config says. The error is that it cannot know that.
func askComplete(info *connector.Info, config any) error {
	c, ok := config.(interface{ Complete() bool })
	if !ok || info.Capabilities&connector.CanPlace == 0 || !c.Complete() {
		return nil
	}
	if info.Scope != connector.ScopeEngine {
		return fmt.Errorf("the config says Complete with the scope %v, in which others store what this one never learns of: %w", info.Scope, connector.ErrIncompatible)
	}
	info.Complete = true
	return nil
}

// storeSide is the common part of both sides.
type storeSide struct {
	env   connector.Env
	log   *slog.Logger
	store connector.Store
	watch *watch       // nil without CanEvents
	free  func() error // gives back the reference to the store
}

// Close implements connector.Scheduler and connector.Worker.
func (s *storeSide) Close() error { return s.free() }

func (s *stores) side(ctx context.Context, env connector.Env, raw json.RawMessage) (storeSide, error) {
	if err := s.fits(env.Layout.Groups); err != nil {
		return storeSide{}, err
	}
	size, err := s.arena(raw, &env)
	if err != nil {
		return storeSide{}, err
	}
	if err := env.CheckArena(size); err != nil {
		return storeSide{}, err
	}
	env.Log = cmp.Or(env.Log, slog.New(slog.DiscardHandler))
	shared, free, err := s.acquire(ctx, env, raw)
	if err != nil {
		return storeSide{}, err
	}
	return storeSide{env: env, log: env.Log, store: shared.store, watch: shared.watch, free: free}, nil
}

// fits refuses caches whose groups a Store cannot serve.
func (s *stores) fits(groups []connector.Group) error {
	switch n := len(groups); {
	case n == 0:
		return fmt.Errorf("the cache has no group: %w", connector.ErrIncompatible)
	case !s.definition.Groups && (n > 1 || groups[0].Policy != connector.PolicyAll):
		return fmt.Errorf("the cache has %d groups, this store requires one of full attention: %w", n, connector.ErrIncompatible)
	}
	for i, g := range groups {
		if g.BlockTokens != groups[0].BlockTokens {
			return fmt.Errorf("group %d has blocks of %d tokens, group 0 of %d; a store requires them to be equal: %w",
				i, g.BlockTokens, groups[0].BlockTokens, connector.ErrIncompatible)
		}
	}
	return nil
}

type storeScheduler struct {
	storeSide
	powers connector.Capability
}

// Match implements connector.Scheduler.
func (s *storeScheduler) Match(ctx context.Context, queries []connector.Query) ([]connector.Match, error) {
	matches := make([]connector.Match, len(queries))
	if !s.env.Role.Loads() {
		return matches, nil
	}
	blockTokens := s.env.Layout.Groups[0].BlockTokens
	searches := make([]*search, len(queries))
	for i, q := range queries {
		first := min(q.Computed/blockTokens, len(q.Keys))
		searches[i] = &search{keys: q.Keys, first: first, end: len(q.Keys), fresh: true}
	}
	if err := s.find(ctx, searches); err != nil {
		return nil, err
	}
	for i, found := range searches {
		if tokens := found.end*blockTokens - queries[i].Computed; found.end > found.first && tokens > 0 {
			matches[i] = connector.Match{Tokens: tokens, Async: true}
		}
	}
	return matches, nil
}

// search looks for the longest prefix of a query from which a request could continue. Such a prefix has, on
// all ranks, every block of the groups of full attention, and the last blocks before its end of the other
// groups.
type search struct {
	keys  []connector.BlockKey
	first int  // the engine has the blocks before this one
	end   int  // no prefix beyond this one is possible
	fresh bool // nothing has been looked up yet
	done  bool
}

// find narrows down all searches, with one Lookup for all of them in each round. A round ends a search or
// makes its prefix shorter; if everything is present, one round is enough.
func (s *storeScheduler) find(ctx context.Context, searches []*search) error {
	for {
		var l lookups
		for _, q := range searches {
			if !q.done && q.end > q.first {
				s.add(&l, q)
			}
		}
		if len(l.runs) == 0 {
			return nil
		}
		found, err := s.lookup(ctx, l.runs)
		if err != nil {
			return err
		}
		for i, q := range l.owner {
			if n := l.from[i] + found[i]; found[i] < len(l.runs[i]) && n < q.end {
				q.end, q.done = n, false
			}
		}
	}
}

// lookups is one round: runs of keys, the search of each run, and the block at which it begins.
type lookups struct {
	runs  [][]connector.StoreKey
	owner []*search
	from  []int
}

// add adds the runs that check whether a search's current prefix is present. It is present unless a run
// ends early.
func (s *storeScheduler) add(l *lookups, q *search) {
	for g, group := range s.env.Layout.Groups {
		first := q.first
		switch {
		case group.Policy == connector.PolicyTrailing:
			first = max(first, q.end-group.Trailing)
		case !q.fresh:
			continue // known from the first round
		}
		for rank := range max(1, s.env.World) {
			l.runs = append(l.runs, s.keys(q.keys[first:q.end], uint16(g), rank))
			l.owner, l.from = append(l.owner, q), append(l.from, first)
		}
	}
	q.fresh, q.done = false, true
}

// keys derives the keys of one rank's parts of blocks.
func (s *storeScheduler) keys(blocks []connector.BlockKey, group uint16, rank int) []connector.StoreKey {
	run := make([]connector.StoreKey, len(blocks))
	shard := connector.Shard{Rank: rank, World: max(1, s.env.World)}
	for i, k := range blocks {
		run[i] = connector.NewStoreKey(k, s.env.Shape, group, shard)
	}
	return run
}

func (s *storeScheduler) lookup(ctx context.Context, runs [][]connector.StoreKey) (found []int, err error) {
	err = wire.Guard(s.log, "lookup", func() (err error) {
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

type storeWorker struct {
	storeSide
	powers  connector.Capability
	unnamed unnamed
}

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
		err = blockError(wire.Guard(w.log, "get", func() error { return w.store.Get(ctx, items) }), blocks)
	}
	if len(partial) == 0 {
		return err
	}
	failed, some := errors.AsType[*connector.BlockError](err)
	if err != nil && !some {
		return err // nothing has arrived in any case
	}
	if !some {
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
	return blockError(w.put(ctx, items, t), blocks)
}

// items returns the full blocks of a transfer, their ids, and the ids of the partial blocks.
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
		items = append(items, connector.Item{Key: key, Replace: t.Replace, Tenant: t.Tenant, Spans: spans})
		full = append(full, b.ID)
	}
	return items, full, partial, nil
}

// blockError turns the items of an *ItemError into blocks. If the error names items that do not exist, it
// counts for all blocks.
func blockError(err error, blocks []connector.BlockID) error {
	failed, some := errors.AsType[*connector.ItemError](err)
	if !some {
		return err
	}
	ids := make([]connector.BlockID, 0, len(failed.Items))
	for _, i := range failed.Items {
		if i < 0 || i >= len(blocks) {
			return fmt.Errorf("store reported item %d of %d: %w", i, len(blocks), failed.Err)
		}
		ids = append(ids, blocks[i])
	}
	if len(ids) == 0 {
		return fmt.Errorf("store reported no item: %w", failed.Err)
	}
	return &connector.BlockError{Blocks: ids, Err: failed.Err}
}
