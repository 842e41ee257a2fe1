// Package mutants holds a connector that keeps every rule of docs/spec, and one wrong version of it
// for each case of package conformance. A case that no mutant fails would prove nothing.
package mutants

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// allPowers is every optional interface.
const allPowers = connector.CanPlan | connector.CanHold | connector.CanReset | connector.CanStat | connector.CanEvents | connector.CanLayers | connector.CanLease | connector.CanOverlap

// Reference is a correct connector with every optional power. It keeps blocks in memory; engines
// that were opened with the same value see each other.
func Reference() connector.Plugin {
	return newBackend().plugin(wrappers{})
}

// Private is the Reference with Scope engine: what it stores ends with its process.
func Private() connector.Plugin {
	return newBackend().plugin(wrappers{info: func(i *connector.Info) { i.Scope = connector.ScopeEngine }})
}

func newBackend() *backend {
	return &backend{
		blocks: map[connector.StoreKey][]byte{}, holds: map[connector.HoldID]*hold{}, key: connector.NewStoreKey,
		lives: map[*byte]*life{},
	}
}

// wrappers change what the sides of a connector do. A nil field changes nothing.
type wrappers struct {
	scheduler func(*scheduler) connector.Scheduler
	worker    func(*worker) connector.Worker
	info      func(*connector.Info)
	decode    func(json.RawMessage) error
	check     func(*connector.Env) error
	describe  func()
}

type config struct{}

func decode(raw json.RawMessage) error {
	_, err := sdk.DecodeConfig[config](raw)
	return err
}

// plugin makes a connector of the backend, changed by w.
func (b *backend) plugin(w wrappers) connector.Plugin {
	if w.decode == nil {
		w.decode = decode
	}
	if w.check == nil {
		w.check = func(env *connector.Env) error { return errors.Join(env.Validate(), env.CheckArena(arenaSize)) }
	}
	return connector.Plugin{
		Name: "ReferenceConnector", Version: "1", Capabilities: allPowers, Schema: sdk.SchemaOf[config](),
		Describe: func(_ context.Context, raw json.RawMessage) (connector.Info, error) {
			info := connector.Info{
				Name: "ReferenceConnector", Capabilities: allPowers, Groups: true, Scope: connector.ScopeNode,
				ArenaBytes: arenaSize, Stats: statInfos(),
			}
			if w.info != nil {
				w.info(&info)
			}
			if w.describe != nil {
				w.describe()
			}
			return info, w.decode(raw)
		},
		Scheduler: func(_ context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
			if err := errors.Join(w.decode(raw), w.check(&env)); err != nil {
				return nil, err
			}
			s := &scheduler{backend: b, env: env, life: b.join(env.Arena)}
			if w.scheduler != nil {
				return w.scheduler(s), nil
			}
			return s, nil
		},
		Worker: func(_ context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
			if err := errors.Join(w.decode(raw), w.check(&env)); err != nil {
				return nil, err
			}
			k := &worker{backend: b, env: env, life: b.join(env.Arena)}
			if w.worker != nil {
				return w.worker(k), nil
			}
			return k, nil
		},
	}
}

// backend is what all engines share.
type backend struct {
	mu     sync.Mutex
	blocks map[connector.StoreKey][]byte // spans back to back
	holds  map[connector.HoldID]*hold
	last   connector.HoldID
	lives  map[*byte]*life // those in use

	// key derives where a shard of a block is stored.
	key func(connector.BlockKey, connector.Fingerprint, uint16, connector.Shard) connector.StoreKey
}

// hold is one open hold. Its engine waits for fetched.
type hold struct {
	fetched chan connector.HoldID
	wanted  bool // a consumer has asked for it since the last renewal
}

func (b *backend) get(k connector.StoreKey) ([]byte, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	data, ok := b.blocks[k]
	return data, ok
}

func (b *backend) put(k connector.StoreKey, data []byte, replace bool, life *life) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, known := b.blocks[k]; !known || replace {
		b.blocks[k] = data
		life.add(k, data)
	}
}

// join gives the life of an engine, known by its arena, and what that holds to the backend. The last
// to leave forgets it.
func (b *backend) join(arena []byte) *life {
	b.mu.Lock()
	defer b.mu.Unlock()
	first := unsafe.SliceData(arena)
	l := b.lives[first]
	if l == nil {
		l = newLife(arena)
		b.lives[first] = l
		l.recover(func(k connector.StoreKey, data []byte, sound bool) {
			if sound && b.blocks[k] == nil { // another life may have replaced it
				b.blocks[k] = data
			}
		})
	}
	l.sides++
	return l
}

func (b *backend) leave(l *life) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if l.sides--; l.sides == 0 {
		delete(b.lives, unsafe.SliceData(l.mem))
	}
}

// scheduler is the scheduler side.
type scheduler struct {
	backend *backend
	env     connector.Env
	life    *life
	left    sync.Once

	once    sync.Once
	fetched chan connector.HoldID // holds of this engine that were fetched
}

// consumed is the channel on which consumers report.
func (s *scheduler) consumed() chan connector.HoldID {
	s.once.Do(func() { s.fetched = make(chan connector.HoldID, 1024) })
	return s.fetched
}

// present reports whether every rank's shard of a group's block is stored.
func (s *scheduler) present(group int, k connector.BlockKey) bool {
	if k == (connector.BlockKey{}) {
		return false
	}
	for rank := range s.env.World {
		shard := connector.Shard{Rank: rank, World: s.env.World}
		if _, ok := s.backend.get(s.backend.key(k, s.env.Shape, uint16(group), shard)); !ok {
			return false
		}
	}
	return true
}

// Match implements connector.Scheduler.
func (s *scheduler) Match(_ context.Context, queries []connector.Query) ([]connector.Match, error) {
	out := make([]connector.Match, len(queries))
	for i, q := range queries {
		out[i] = s.match(q, s.present)
		if q.Request != "" {
			s.backend.want(q.Ticket)
		}
	}
	return out, nil
}

// want notes that a consumer waits for what a ticket names.
func (b *backend) want(t connector.Ticket) {
	if len(t) != 8 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if h := b.holds[connector.HoldID(binary.LittleEndian.Uint64(t))]; h != nil {
		h.wanted = true
	}
}

// match offers the longest prefix that every group with policy all has and of which every other
// group has the last blocks that it needs.
func (s *scheduler) match(q connector.Query, present func(group int, k connector.BlockKey) bool) connector.Match {
	size := s.env.Layout.Groups[0].BlockTokens
	first := q.Computed / size
	n := first
	for n < len(q.Keys) && s.all(q.Keys[n], present) {
		n++
	}
	for n > first && !s.trailing(q.Keys[first:n], present) {
		n--
	}
	if tokens := n*size - q.Computed; tokens > 0 {
		return connector.Match{Tokens: tokens, Async: true}
	}
	return connector.Match{}
}

// all reports whether every group with policy all has a block.
func (s *scheduler) all(k connector.BlockKey, present func(int, connector.BlockKey) bool) bool {
	for g, group := range s.env.Layout.Groups {
		if group.Policy == connector.PolicyAll && !present(g, k) {
			return false
		}
	}
	return true
}

// trailing reports whether every group with policy trailing has the last blocks of an offer.
func (s *scheduler) trailing(offer []connector.BlockKey, present func(int, connector.BlockKey) bool) bool {
	for g, group := range s.env.Layout.Groups {
		if group.Policy != connector.PolicyTrailing {
			continue
		}
		for _, k := range offer[max(0, len(offer)-group.Trailing):] {
			if !present(g, k) {
				return false
			}
		}
	}
	return true
}

// Plan implements connector.Planner.
func (s *scheduler) Plan(_ context.Context, step *connector.Step) (*connector.Plan, error) {
	gone := map[connector.RequestID]bool{}
	for _, id := range step.Preempted {
		gone[id] = true
	}
	for _, e := range step.Ended {
		gone[e.Request] = true
	}
	kept := func(ts []connector.Transfer) []connector.Transfer {
		return slices.DeleteFunc(slices.Clone(ts), func(t connector.Transfer) bool { return gone[t.Request] })
	}
	return &connector.Plan{Loads: kept(step.Admitted), Saves: kept(step.Computed)}, nil
}

// Finish implements connector.Holder.
func (s *scheduler) Finish(_ context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	holds := make([]connector.Hold, len(ended))
	for i, e := range ended {
		if !e.Remote || len(e.Blocks) == 0 {
			continue
		}
		b := s.backend
		b.mu.Lock()
		b.last++
		id := b.last
		b.holds[id] = &hold{fetched: s.consumed()}
		b.mu.Unlock()
		holds[i] = connector.Hold{ID: id, Consumers: 1, Ticket: binary.LittleEndian.AppendUint64(nil, uint64(id))}
	}
	return holds, nil
}

// Consumed implements connector.Holder.
func (s *scheduler) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	select {
	case id := <-s.consumed():
		return []connector.HoldID{id}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// leaseWait is how long Renewals waits for consumers.
const leaseWait = 50 * time.Millisecond

// Renewals implements connector.Leaser.
func (s *scheduler) Renewals(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
	s.backend.mu.Lock()
	for _, id := range ended {
		delete(s.backend.holds, id)
	}
	s.backend.mu.Unlock()
	timer := time.NewTimer(leaseWait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return s.renewed(), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// renewed are this engine's holds that consumers have asked for since the last call.
func (s *scheduler) renewed() (ids []connector.HoldID) {
	s.backend.mu.Lock()
	defer s.backend.mu.Unlock()
	for id, h := range s.backend.holds {
		if h.wanted && h.fetched == s.consumed() {
			h.wanted = false
			ids = append(ids, id)
		}
	}
	return ids
}

// Reset implements connector.Resetter.
func (s *scheduler) Reset(context.Context) (bool, error) {
	s.backend.mu.Lock()
	defer s.backend.mu.Unlock()
	clear(s.backend.blocks)
	for _, l := range s.backend.lives {
		l.clear()
		clear(l.told)
		l.tell(connector.BlocksCleared)
	}
	return true, nil
}

// Close implements connector.Scheduler.
func (s *scheduler) Close() error {
	s.left.Do(func() { s.backend.leave(s.life) })
	return nil
}

// worker is the worker side.
type worker struct {
	backend *backend
	env     connector.Env
	life    *life
	left    sync.Once
}

// key is where a block of this rank is stored.
func (w *worker) key(b connector.Block) connector.StoreKey {
	return w.backend.key(b.Key, w.env.Shape, b.Group, connector.Shard{Rank: w.env.Rank, World: w.env.World})
}

// Load implements connector.Worker.
func (w *worker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	failed := &connector.BlockError{}
	for _, b := range t.Blocks {
		err := ctx.Err()
		if err == nil {
			err = w.loadBlock(b, kv)
		}
		if err != nil {
			failed.Blocks, failed.Err = append(failed.Blocks, b.ID), err
		}
	}
	if failed.Err != nil {
		return failed
	}
	return w.fetched(t.Ticket)
}

func (w *worker) loadBlock(b connector.Block, kv *connector.KV) error {
	data, ok := w.backend.get(w.key(b))
	if !ok || b.Key == (connector.BlockKey{}) {
		return fmt.Errorf("block is not stored: %w", connector.ErrGone)
	}
	spans, err := kv.Spans(b)
	if err != nil {
		return err
	}
	for _, s := range spans {
		data = data[copy(s, data):]
	}
	return nil
}

// fetched tells the producer that its hold was fetched.
func (w *worker) fetched(ticket connector.Ticket) error {
	if len(ticket) == 0 || w.env.Rank != 0 {
		return nil
	}
	if len(ticket) != 8 {
		return errors.New("ticket is not ours")
	}
	id := connector.HoldID(binary.LittleEndian.Uint64(ticket))
	w.backend.mu.Lock()
	h := w.backend.holds[id]
	delete(w.backend.holds, id)
	w.backend.mu.Unlock()
	if h != nil {
		h.fetched <- id
	}
	return nil
}

// Save implements connector.Worker.
func (w *worker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	for _, b := range t.Blocks {
		if err := ctx.Err(); err != nil {
			return err
		}
		if b.Key == (connector.BlockKey{}) {
			continue
		}
		spans, err := kv.Spans(b)
		if err != nil {
			return err
		}
		old, _ := w.backend.get(w.key(b))
		w.backend.put(w.key(b), slices.Concat(spans...), t.Replace || !sameVersion(old, spans), w.life)
		w.note(b)
	}
	return nil
}

// Close implements connector.Worker.
func (w *worker) Close() error {
	w.left.Do(func() { w.backend.leave(w.life) })
	return nil
}
