package sdk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/sdk/internal/peer"
)

// FromPipe makes a connector of a pipe.Network. C is the struct of its config, see [DecodeConfig].
//
// Producers keep what they save in a bounded buffer and listen. The ticket of a request says at which
// address. When a consumer is asked about a request with a ticket, it asks the producer for the blocks,
// answers Later, and puts what arrives into a bounded buffer of its own, from which it loads: a pipe that
// ended in the engine's blocks themselves would stall as soon as its first frame belonged to a request that
// has no blocks yet. If anything breaks (the connection, either process) or a buffer is full, the blocks
// that were on their way are lost and are computed; the next request dials again. Any number of consumers
// may ask any number of producers. If a producer's Peers.Push knows the consumer of a request, the producer
// sends it the blocks as they are saved; the consumer asks for those that do not come. Loads go layer by layer (connector.LayerLoader). With d.LayerWise a
// producer sends what it computes, layer by layer and while it computes, to the consumers that have
// subscribed (Peers.Subscribe). With d.Stats, which must begin with [PeerStats], and with d.LayerWise
// include [LayerStats], the connector reports numbers. Keys, ranks, groups and partial blocks are handled as by [FromStore]. Scope is
// ScopeEngine, because other engines see a block only by ticket, or if they name this engine in their
// config. A config with a method UnsignedPairs() bool says by it whether Peers.Push and Peers.Find believe request ids that no router has
// signed, as in connector.Info.
func FromPipe[C any](d Definition, open func(ctx context.Context, env connector.Env, config C) (pipe.Peers, error)) connector.Plugin {
	d.Scope, d.Capabilities, d.Reset = connector.ScopeEngine, connector.CanHold|connector.CanOverlap, false
	if len(d.Stats) > 0 {
		d.Capabilities |= connector.CanStat
	}
	d.Capabilities = d.powers()
	noArena := func(json.RawMessage, *connector.Env) (int64, error) { return 0, nil }
	stores := newStores(d, noArena, func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Store, error) {
		config, err := DecodeConfig[C](raw)
		if err != nil {
			return nil, err
		}
		peers, err := open(ctx, env, config)
		if err != nil {
			return nil, err
		}
		return peer.Open(ctx, env, peers, d.LayerWise)
	})
	return connector.Plugin{
		Name: d.Name, Aliases: d.Aliases, Version: d.Version, Environment: d.Environment, Needs: d.Needs, Schema: SchemaOf[C](),
		Capabilities: d.Capabilities,
		Describe: func(_ context.Context, raw json.RawMessage) (connector.Info, error) {
			config, err := DecodeConfig[C](raw)
			if err == nil {
				err = d.checkLayers()
			}
			info := connector.Info{Name: d.Name, Scope: d.Scope, Groups: d.Groups, Capabilities: d.Capabilities, Stats: d.Stats, MatchFetches: true}
			if c, ok := any(&config).(interface{ UnsignedPairs() bool }); ok && err == nil {
				info.UnsignedPairs = c.UnsignedPairs()
			}
			return info, err
		},
		Scheduler: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
			side, peers, err := stores.peers(ctx, env, raw)
			if err != nil {
				return nil, err
			}
			return &pipeScheduler{storeScheduler{side, d.Capabilities}, peers.Scheduler(side.env)}, nil
		},
		Worker: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
			side, peers, err := stores.peers(ctx, env, raw)
			if err != nil {
				return nil, err
			}
			return &pipeWorker{storeWorker{storeSide: side}, peers.Worker(side.env), d.Capabilities}, nil
		},
	}
}

// PeerStats declares what connectors made by [FromPipe] count, for Definition.Stats. With them the
// connector has connector.CanStat. The numbers of Peers.Stats are shown as well; the Definition must
// declare them after these.
func PeerStats() []connector.StatInfo { return peer.Stats() }

// LayerStats declares what connectors made by [FromPipe] with Definition.LayerWise count about layers, for
// Definition.Stats.
func LayerStats() []connector.StatInfo { return peer.LayerStats() }

// checkLayers returns an error unless layers are counted if and only if they are pushed.
func (d *Definition) checkLayers() error {
	first := peer.LayerStats()[0].Name
	counted := slices.ContainsFunc(d.Stats, func(s connector.StatInfo) bool { return s.Name == first })
	switch {
	case len(d.Stats) == 0 || counted == d.LayerWise:
		return nil
	case counted:
		return fmt.Errorf("Definition.Stats includes LayerStats, but Definition.LayerWise is not set: %w", connector.ErrIncompatible)
	}
	return fmt.Errorf("Definition.LayerWise is set, but Definition.Stats lacks LayerStats: %w", connector.ErrIncompatible)
}

// peers is side for stores that FromPipe makes.
func (s *stores) peers(ctx context.Context, env connector.Env, raw json.RawMessage) (storeSide, *peer.Store, error) {
	side, err := s.side(ctx, env, raw)
	if err != nil {
		return side, nil, err
	}
	peers, ok := side.store.(*peer.Store)
	if !ok {
		return side, nil, errors.Join(fmt.Errorf("a store of type %T: %w", side.store, connector.ErrIncompatible), side.free())
	}
	return side, peers, nil
}

// pipeScheduler is the scheduler side: that of a Store, which asks producers and keeps tickets, too.
type pipeScheduler struct {
	storeScheduler
	*peer.Scheduler
}

// Match implements connector.Scheduler. It asks producers to send what is missing, and offers what has
// arrived.
func (s *pipeScheduler) Match(ctx context.Context, queries []connector.Query) ([]connector.Match, error) {
	waits := make([]bool, len(queries))
	queries = s.whole(queries)
	if s.env.Role.Loads() {
		for i := range queries {
			waits[i] = s.Ask(&queries[i])
		}
	}
	matches, err := s.storeScheduler.Match(ctx, queries)
	if err != nil {
		return nil, err
	}
	for i, q := range queries {
		whole := q.Computed+matches[i].Tokens >= len(q.Keys)*s.env.Layout.Groups[0].BlockTokens
		matches[i].Later = waits[i] && !whole
	}
	return matches, nil
}

// whole leaves the last block out of queries whose ticket allows an offer up to the end of the prompt: the
// host would take all of that block except its last token, and partial blocks are not sent.
func (s *pipeScheduler) whole(queries []connector.Query) []connector.Query {
	n := s.env.Layout.Groups[0].BlockTokens
	queries = slices.Clone(queries)
	for i := range queries {
		if q := &queries[i]; q.Ticket != nil && len(q.Keys)*n >= q.Tokens {
			q.Keys = q.Keys[:min(len(q.Keys), max(0, (q.Tokens-1)/n))]
		}
	}
	return queries
}

// pipeWorker is the worker side of one rank: that of a Store, which pushes what it saves, too.
type pipeWorker struct {
	storeWorker
	*peer.Worker
	powers connector.Capability
}

// Capabilities implements connector.Partial.
func (w *pipeWorker) Capabilities() connector.Capability { return w.powers }

// Load implements connector.Worker. The first rank tells the producer when it has everything.
func (w *pipeWorker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	err := w.storeWorker.Load(ctx, t, kv)
	if err == nil && w.env.Rank == 0 {
		w.Fetched(t.Ticket)
	}
	return err
}

// LoadLayers implements connector.LayerLoader: it copies the digests of all blocks, and then one layer after the other. What it lacks
// a block of it loads as Load does.
func (w *pipeWorker) LoadLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, arrived connector.Arrivals) error {
	items, _, partial, err := w.items(t, kv)
	if err != nil || len(partial) > 0 || !w.env.Role.Loads() {
		return w.Load(ctx, t, kv)
	}
	held, ok := w.Hold(items, t.Blocks, kv.Layout())
	if !ok {
		return w.Load(ctx, t, kv)
	}
	defer held.Release()
	err = wire.Guard(w.log, "get", func() error { return held.Get(ctx, arrived) })
	if err == nil && w.env.Rank == 0 {
		w.Fetched(t.Ticket)
	}
	return err
}

// Save implements connector.Worker. It also sends the saved blocks to the consumer that the request names.
func (w *pipeWorker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	return w.save(ctx, t, t.Blocks, kv)
}

// SaveLayers implements connector.LayerWorker. It pushes each layer to the subscribers; where there are none, and of blocks for
// which there is no room until others are stored, it waits for the last layer and saves as Save does.
func (w *pipeWorker) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, progress connector.Progress) error {
	left, err := w.PushLayers(ctx, t, kv, progress)
	if err != nil {
		return fmt.Errorf("save: %w", err)
	}
	return w.save(ctx, t, left, kv)
}

// save stores what is left of a transfer, and then sends those of all its blocks that are stored to the consumer that the request
// names.
func (w *pipeWorker) save(ctx context.Context, t *connector.Transfer, left []connector.Block, kv *connector.KV) error {
	rest := *t
	rest.Blocks = left
	err := w.storeWorker.Save(ctx, &rest, kv)
	w.PushSaved(ctx, t)
	return err
}
