package sdk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/pipe"
)

// The defaults of pipe.Peers.
const (
	defaultPeerBytes = 1 << 30
	defaultPeerWait  = 1500 * time.Millisecond
	defaultPatience  = 10 * time.Second
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
// sends it the blocks as they are saved; the consumer asks for those that do not come. With d.Stats, which
// must begin with [PeerStats], the connector reports numbers. If they include [LayerStats], a producer
// sends what it computes, layer by layer and while it computes, to the consumers that have subscribed
// (Peers.Subscribe). Keys, ranks, groups and partial blocks are handled as by [FromStore]. Scope is
// ScopeEngine, because other engines see a block only by ticket, or if they name this engine in their
// config.
func FromPipe[C any](d Definition, open func(ctx context.Context, env connector.Env, config C) (pipe.Peers, error)) connector.Plugin {
	d.Scope, d.Capabilities, d.Reset = connector.ScopeEngine, 0, false
	powers := connector.CanHold
	if len(d.Stats) > 0 {
		powers |= connector.CanStat
	}
	layered := slices.ContainsFunc(d.Stats, func(s connector.StatInfo) bool { return s.Name == layerStat })
	if layered {
		powers |= connector.CanLayers
	}
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
		s, err := openPeerStore(ctx, env, peers)
		if err == nil {
			s.layered = layered
		}
		return s, err
	})
	return connector.Plugin{
		Name: d.Name, Aliases: d.Aliases, Version: d.Version, Environment: d.Environment, Schema: SchemaOf[C](),
		Capabilities: powers,
		Describe: func(_ context.Context, raw json.RawMessage) (connector.Info, error) {
			_, err := DecodeConfig[C](raw)
			return connector.Info{Name: d.Name, Scope: d.Scope, Groups: d.Groups, Capabilities: powers, Stats: d.Stats}, err
		},
		Scheduler: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
			side, peers, err := stores.peers(ctx, env, raw)
			if err != nil {
				return nil, err
			}
			return &pipeScheduler{storeScheduler{side, powers &^ connector.CanLayers}, peers}, nil
		},
		Worker: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
			side, peers, err := stores.peers(ctx, env, raw)
			if err != nil {
				return nil, err
			}
			return &pipeWorker{storeWorker{side}, peers}, nil
		},
	}
}

// peers is side for stores that FromPipe makes.
func (s *stores) peers(ctx context.Context, env connector.Env, raw json.RawMessage) (storeSide, *peerStore, error) {
	side, err := s.side(ctx, env, raw)
	if err != nil {
		return side, nil, err
	}
	peers, ok := side.store.(*peerStore)
	if !ok {
		return side, nil, errors.Join(fmt.Errorf("a store of type %T: %w", side.store, connector.ErrIncompatible), side.free())
	}
	return side, peers, nil
}

// pipeScheduler is the scheduler side.
type pipeScheduler struct {
	storeScheduler
	peers *peerStore
}

// Match implements connector.Scheduler. It asks producers to send what is missing, and offers what has
// arrived.
func (s *pipeScheduler) Match(ctx context.Context, queries []connector.Query) ([]connector.Match, error) {
	waits := make([]bool, len(queries))
	queries = s.whole(queries)
	if s.env.Role.Loads() {
		for i := range queries {
			waits[i] = s.ask(&queries[i])
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

// ask asks for the blocks of a prompt that are not here, and reports whether some are on their way. It does
// nothing for a probe, which must leave no trace.
func (s *pipeScheduler) ask(q *connector.Query) (waits bool) {
	if q.Request == "" {
		return false
	}
	addresses := s.peers.peers.Addresses
	t, err := parsePeerTicket(q.Ticket)
	switch {
	case err == nil:
		addresses = []string{t.address}
	case s.peers.peers.Find != nil:
		addresses = append(s.peers.peers.Find(q.Request), addresses...)
	}
	first := min(q.Computed/s.env.Layout.Groups[0].BlockTokens, len(q.Keys))
	if len(addresses) == 0 || first == len(q.Keys) {
		return false
	}
	blocks, size := q.Keys[first:], int64(0)
	for g := range s.env.Layout.Groups {
		size += s.env.Layout.BlockBytes(uint16(g)) * int64(max(1, s.env.World))
	}
	if most := s.peers.peers.Bytes / 2 / max(1, size); int64(len(blocks)) > most { // leaves room for other requests
		blocks = blocks[:most]
	}
	var keys []connector.StoreKey
	for g := range s.env.Layout.Groups {
		for rank := range max(1, s.env.World) {
			keys = append(keys, s.keys(blocks, uint16(g), rank)...)
		}
	}
	if t.pushed && s.peers.peers.Pushed && len(s.peers.missing(keys)) > 0 && s.peers.coming.waits(t, 2*s.peers.peers.Wait/3) {
		return true
	}
	return s.peers.fetch(addresses, keys)
}

// Finish implements connector.Holder. Saved blocks are in the buffer, so the engine gets its own blocks
// back at once: the hold is weak. If blocks are pushed to a consumer, Finish sends those that have not been
// sent yet.
func (s *pipeScheduler) Finish(_ context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	holds := make([]connector.Hold, len(ended))
	for i := range ended {
		e := &ended[i]
		if e.Remote && len(e.Blocks) > 0 && s.peers.listener != nil {
			t := peerTicket{hold: s.peers.holds.open(), address: s.peers.listener.Address()}
			if to := s.peers.target(e.Request); to != "" {
				t.pushed = s.rest(to, e, t)
			}
			holds[i] = connector.Hold{ID: t.hold, Weak: true, Consumers: 1, Ticket: t.encode()}
		}
		s.peers.pushing.end(e.Request)
	}
	return holds, nil
}

// rest sends a consumer the blocks that an earlier request computed, and says that this is all.
func (s *pipeScheduler) rest(to string, e *connector.Ended, t peerTicket) bool {
	var keys []connector.StoreKey
	for _, b := range e.Blocks {
		if b.Key == (connector.BlockKey{}) {
			continue
		}
		for rank := range max(1, s.env.World) {
			keys = append(keys, s.keys([]connector.BlockKey{b.Key}, b.Group, rank)...)
		}
	}
	p := s.peers.producer(to)
	if p == nil {
		return false
	}
	if keys = s.peers.pushing.add(e.Request, keys); len(keys) > 0 && !p.enqueue(&message{kind: kindPush, keys: keys}) {
		return false
	}
	return p.enqueue(&message{kind: kindPushed, hold: t.hold, from: t.address})
}

// Consumed implements connector.Holder.
func (s *pipeScheduler) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	return s.peers.holds.consumed(ctx)
}

// pipeWorker is the worker side of one rank.
type pipeWorker struct {
	storeWorker
	peers *peerStore
}

// Load implements connector.Worker. The first rank tells the producer when it has everything.
func (w *pipeWorker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	err := w.storeWorker.Load(ctx, t, kv)
	if err != nil || w.env.Rank != 0 || len(t.Ticket) == 0 {
		return err
	}
	if from, bad := parsePeerTicket(t.Ticket); bad == nil {
		w.peers.fetched(from)
	}
	return nil
}

// Save implements connector.Worker. It also sends the saved blocks to the consumer that the request names.
func (w *pipeWorker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	err := w.storeWorker.Save(ctx, t, kv)
	w.pushSaved(ctx, t)
	return err
}

// pushSaved sends the saved blocks of a request to the consumer that the request names.
func (w *pipeWorker) pushSaved(ctx context.Context, t *connector.Transfer) {
	to := w.peers.target(t.Request)
	if to == "" {
		return
	}
	shard := connector.Shard{Rank: w.env.Rank, World: max(1, w.env.World)}
	var keys []connector.StoreKey
	for _, b := range t.Blocks {
		if b.Key != (connector.BlockKey{}) {
			keys = append(keys, connector.NewStoreKey(b.Key, w.env.Shape, b.Group, shard))
		}
	}
	if keys = w.peers.pushing.add(t.Request, keys); len(keys) > 0 {
		w.peers.push(ctx, to, &message{kind: kindPush, keys: keys})
	}
}

// openPeerStore starts what one engine epoch needs, including a listener if the engine saves.
func openPeerStore(ctx context.Context, env connector.Env, peers pipe.Peers) (*peerStore, error) {
	if peers.Network == nil {
		return nil, fmt.Errorf("open returned no network: %w", connector.ErrIncompatible)
	}
	if peers.Bytes == 0 {
		peers.Bytes = defaultPeerBytes
	}
	if peers.Wait == 0 {
		peers.Wait = defaultPeerWait
	}
	if peers.Patience == 0 {
		peers.Patience = defaultPatience
	}
	var pool *lookupbuffer.Pool
	if peers.Spill > 0 {
		var err error
		if pool, err = lookupbuffer.NewPool(peers.Spill); err != nil {
			return nil, err
		}
	}
	log := env.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := newPeerStore(peers, pool, log)
	if env.Role.Loads() {
		for _, address := range peers.Subscribe {
			s.tasks.Go((&subscription{store: s, address: address}).run)
		}
	}
	if !env.Role.Saves() && !peers.Pushed {
		return s, nil
	}
	var err error
	err = wire.Guard(log, "listen", func() error {
		s.listener, err = peers.Network.Listen(ctx)
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen: %w", err), s.Close())
	}
	s.tasks.Go(s.accept)
	return s, nil
}
