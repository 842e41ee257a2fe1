// Package peer is how connectors that sdk.FromPipe makes speak to each other: consumers ask producers for
// blocks, and producers push them, whole or layer by layer.
package peer

import (
	"cmp"
	"context"
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

// Open starts what one engine epoch needs, including a listener if the engine saves. layered says that
// it pushes layers to consumers that subscribe, and counts them.
func Open(ctx context.Context, env connector.Env, peers pipe.Peers, layered bool) (*Store, error) {
	if peers.Network == nil {
		return nil, fmt.Errorf("open returned no network: %w", connector.ErrIncompatible)
	}
	peers.Bytes = cmp.Or(peers.Bytes, defaultPeerBytes)
	peers.Wait = cmp.Or(peers.Wait, defaultPeerWait)
	peers.Patience = cmp.Or(peers.Patience, defaultPatience)
	var pool *lookupbuffer.Pool
	if peers.Spill > 0 {
		var err error
		if pool, err = lookupbuffer.NewPool(peers.Spill); err != nil {
			return nil, err
		}
	}
	log := cmp.Or(env.Log, slog.New(slog.DiscardHandler))
	s := newStore(peers, pool, log)
	s.layered = layered
	if env.Role.Saves() || peers.Pushed {
		err := wire.Guard(log, "listen", func() (err error) {
			s.listener, err = peers.Network.Listen(ctx)
			return err
		})
		if err != nil {
			return nil, errors.Join(fmt.Errorf("listen: %w", err), s.Close())
		}
		s.tasks.Go(s.accept)
	}
	if env.Role.Loads() {
		for _, address := range peers.Subscribe {
			if s.listener != nil && address == s.listener.Address() {
				continue // what this engine computes is here
			}
			s.tasks.Go((&subscription{store: s, address: address}).run)
		}
	}
	return s, nil
}

// side is one side of one rank.
type side struct {
	env   connector.Env
	peers *Store
}

// key is the key of a rank's part of a block.
func (s *side) key(k connector.BlockKey, group uint16, rank int) connector.StoreKey {
	return connector.NewStoreKey(k, s.env.Shape, group, connector.Shard{Rank: rank, World: max(1, s.env.World)})
}

// keys are the keys of the parts of full blocks on some ranks, from the first up to but not including the last.
func (s *side) keys(blocks []connector.Block, first, last int) (keys []connector.StoreKey) {
	for _, b := range blocks {
		for rank := first; rank < last && b.Key != (connector.BlockKey{}); rank++ {
			keys = append(keys, s.key(b.Key, b.Group, rank))
		}
	}
	return keys
}

// Scheduler is what a scheduler side does for peers, beside what it does for its own store.
type Scheduler struct{ side }

// Worker is what the worker side of one rank does for peers, beside what it does for its own store.
type Worker struct{ side }

// Scheduler is the scheduler side that belongs to env.
func (s *Store) Scheduler(env connector.Env) *Scheduler {
	return &Scheduler{side{env, s}}
}

// Worker is the worker side that belongs to env.
func (s *Store) Worker(env connector.Env) *Worker { return &Worker{side{env, s}} }

// Ask asks for the blocks of a prompt that are not here, and reports whether some are on their way. It does
// nothing for a probe, which must leave no trace.
func (s *Scheduler) Ask(q *connector.Query) (waits bool) {
	if q.Request == "" {
		return false
	}
	addresses := s.peers.peers.Addresses
	t, err := parseTicket(q.Ticket)
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
			for _, k := range blocks {
				keys = append(keys, s.key(k, uint16(g), rank))
			}
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
func (s *Scheduler) Finish(_ context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	holds := make([]connector.Hold, len(ended))
	for i := range ended {
		e := &ended[i]
		if e.Remote && len(e.Blocks) > 0 && s.peers.listener != nil {
			t := ticket{hold: s.peers.holds.open(consumersOf(e)), address: s.peers.listener.Address()}
			if to := s.peers.target(e.Request); to != "" {
				t.pushed = s.rest(to, e, t)
			}
			holds[i] = connector.Hold{ID: t.hold, Weak: true, Consumers: consumersOf(e), Ticket: t.encode()}
		}
		s.peers.pushing.end(e.Request)
	}
	return holds, nil
}

// turnLoads is how many loads the answer of a conversation serves: as many follow-ups may go on from it. The buffer
// keeps nothing for them, so it only bounds what hosts remember of a ticket.
const turnLoads = 256

// consumersOf is how many loads the blocks of an ended request serve.
func consumersOf(e *connector.Ended) int {
	if e.Weak {
		return turnLoads
	}
	return 1
}

// rest sends a consumer the blocks that an earlier request computed, and says that this is all: after the layers that went to it over
// another link, so that it does not ask for what is still on its way.
func (s *Scheduler) rest(to string, e *connector.Ended, t ticket) bool {
	p := s.peers.producer(to)
	if p == nil {
		return false
	}
	if keys := s.peers.pushing.add(e.Request, s.keys(e.Blocks, 0, max(1, s.env.World))); len(keys) > 0 && !p.enqueue(&message{kind: kindPush, keys: keys}) {
		return false
	}
	m := &message{kind: kindPushed, hold: t.hold, from: t.address}
	if over, until := s.peers.pushing.layers(e.Request); over != nil {
		s.peers.pushes.after(over, until, func() { p.enqueue(m) })
		return true
	}
	return p.enqueue(m)
}

// Consumed implements connector.Holder.
func (s *Scheduler) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	return s.peers.holds.consumed(ctx)
}

// Fetched tells the producer of a ticket that its blocks have been loaded.
func (w *Worker) Fetched(t connector.Ticket) {
	from, err := parseTicket(t)
	if err != nil {
		return
	}
	if l := w.peers.listener; l != nil && from.address == l.Address() {
		w.peers.holds.fetched(from.hold)
	} else if p := w.peers.producer(from.address); p != nil {
		p.enqueue(&message{kind: kindFetched, hold: from.hold})
	}
}

// PushSaved sends the blocks of a request that are stored now to the consumer that the request names.
func (w *Worker) PushSaved(ctx context.Context, t *connector.Transfer) {
	to := w.peers.target(t.Request)
	if to == "" {
		return
	}
	stored := slices.DeleteFunc(w.keys(t.Blocks, w.env.Rank, w.env.Rank+1), func(k connector.StoreKey) bool { return !w.peers.has(k) })
	if keys := w.peers.pushing.add(t.Request, stored); len(keys) > 0 {
		w.peers.push(ctx, to, &message{kind: kindPush, keys: keys})
	}
}

// PushLayers copies blocks to the buffer layer by layer, pushes them to the subscribers meanwhile, and returns when all layers are
// final. The blocks can be found then, except for those of left, which the caller has to store: all of them where nobody has
// subscribed, and else those for which there was no room while the others were being computed, and those that another
// transfer pushes at that time.
func (w *Worker) PushLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, progress connector.Progress) (left []connector.Block, err error) {
	if !w.env.Role.Saves() {
		return nil, fmt.Errorf("this engine is a %v: %w", w.env.Role, connector.ErrIncompatible)
	}
	to := w.peers.target(t.Request)
	push, left := w.peers.beginPush(to), t.Blocks
	var blocks []*layered
	if len(push.to) > 0 {
		if blocks, left, err = w.reserve(t, kv); err != nil {
			push.giveUp(blocks, err)
			return nil, err
		}
	}
	layers := kv.Layout().Layers()
	for n := 0; n < layers; {
		final, err := progress.Wait(ctx, n)
		if err == nil {
			if final == layers {
				push.early()
				push.until = time.Now().Add(w.peers.peers.Patience)
			}
			push.layers(ctx, blocks, kv, n, final)
			n, err = final, ctx.Err()
		}
		if err != nil {
			push.giveUp(blocks, err)
			return nil, err
		}
	}
	var sent []connector.StoreKey
	for _, b := range blocks {
		if b.end(w.peers, nil) != nil { // the buffer is closed
			left = append(left, b.block)
			continue
		}
		sent = append(sent, b.key)
	}
	w.peers.pushes.end(blocks)
	if over := push.reached(to); over != nil {
		w.peers.pushing.addLayers(t.Request, sent, over)
	}
	return left, nil
}

// reserve takes room for the blocks of a transfer that are not stored yet. left are those for which there is none, and those whose
// layers another transfer sends. With an error some blocks may have room.
func (w *Worker) reserve(t *connector.Transfer, kv *connector.KV) (blocks []*layered, left []connector.Block, err error) {
	for _, b := range t.Blocks {
		if b.Key == (connector.BlockKey{}) {
			continue
		}
		spans, err := kv.Spans(b)
		if err != nil {
			return blocks, nil, err
		}
		key := w.key(b.Key, b.Group, w.env.Rank)
		if !t.Replace && w.peers.has(key) {
			continue
		}
		if !w.peers.pushes.begin(key) {
			left = append(left, b)
			continue
		}
		l := &layered{key: key, block: b, offsets: map[int]int{}}
		size := 0
		for i, s := range kv.Segments(b.Group) {
			l.offsets[s] = size
			size += len(spans[i])
		}
		if l.slot, err = w.peers.roomForLayers(key, size); err != nil {
			w.peers.pushes.end([]*layered{l})
			left = append(left, b)
			continue
		}
		blocks = append(blocks, l)
	}
	return blocks, left, nil
}
