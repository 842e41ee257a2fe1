package sdk

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
)

// powerful is a Store with every power that a Store can have.
type powerful struct {
	*memory
	removed func([]connector.StoreKey)
	resets  atomic.Int32
	used    []uint32
}

func (p *powerful) Watch(removed func([]connector.StoreKey)) { p.removed = removed }

func (p *powerful) Reset(context.Context) (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.data)
	return p.resets.Add(1) == 1, nil
}

func (p *powerful) Stats(context.Context) ([]connector.Stat, error) {
	return []connector.Stat{{Name: "blocks", Value: float64(len(p.data))}}, nil
}

// Placed says that each block lies in the slot that its key begins with.
func (p *powerful) Placed(keys []connector.StoreKey) (slots []uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range keys {
		if _, ok := p.data[k]; ok {
			slots = append(slots, uint32(k[0]))
		}
	}
	return slots
}

func (p *powerful) Used(slots []uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used = append(p.used, slots...)
}

func powerfulDefinition() Definition {
	return Definition{
		Name: "Powerful", Version: "1", Scope: connector.ScopeNode, Groups: true, Medium: "memory", Capabilities: storePowers,
		Stats: []connector.StatInfo{{Name: "blocks", Help: "Blocks stored.", Kind: connector.Gauge}},
	}
}

func storeOf(d Definition, s connector.Store) connector.Plugin {
	return FromStore(d, func(context.Context, connector.Env, struct{}) (connector.Store, error) { return s, nil })
}

func take(t *testing.T, s connector.Scheduler) []connector.BlockEvent {
	t.Helper()
	source, ok := connector.As[connector.EventSource](s)
	require.True(t, ok)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	events, err := source.Events(ctx)
	require.NoError(t, err)
	return events
}

func TestStorePowers(t *testing.T) {
	store := &powerful{memory: newMemory()}
	p := storeOf(powerfulDefinition(), store)
	info, err := p.Describe(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, storePowers&^connector.CanPlace, info.Capabilities, "there is no memory to place anything")
	require.Equal(t, storePowers, p.Capabilities)
	require.Equal(t, "blocks", info.Stats[0].Name)
	scheduler, worker := open(t, p, testEnv(0, 1))
	defer scheduler.Close()
	defer worker.Close()
	require.Equal(t, storePowers&^connector.CanPlace, connector.CapabilitiesOf(scheduler))
	require.Equal(t, connector.CanPlace, connector.CapabilitiesOf(worker))

	bs, kv := blocks(3), testKV(t, 1)
	require.NoError(t, worker.Save(t.Context(), &connector.Transfer{Blocks: bs}, kv))
	require.Equal(t, []connector.BlockEvent{{
		Seq: 1, Kind: connector.BlocksStored, Keys: keys(3), Medium: "memory", Scope: connector.ScopeNode,
	}}, take(t, scheduler))
	source, _ := connector.As[connector.StatsSource](scheduler)
	stats, err := source.Stats(t.Context())
	require.NoError(t, err)
	require.Equal(t, []connector.Stat{{Name: "blocks", Value: 3}}, stats)

	resetter, _ := connector.As[connector.Resetter](scheduler)
	for _, want := range []bool{true, false} {
		emptied, err := resetter.Reset(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, emptied)
	}
	events := take(t, scheduler)
	require.Len(t, events, 1, "only what emptied clears")
	require.Equal(t, connector.BlocksCleared, events[0].Kind)
}

// A power must be claimed by the Definition and implemented by the Store, or the side does not open.
func TestStorePowersAreClaimed(t *testing.T) {
	d := powerfulDefinition()
	_, err := storeOf(d, newMemory()).Scheduler(t.Context(), testEnv(0, 1), nil)
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "claims reset,stat,events, but the Store lacks its methods")

	d.Capabilities, d.Stats = 0, nil
	s, err := storeOf(d, &powerful{memory: newMemory()}).Scheduler(t.Context(), testEnv(0, 1), nil)
	require.NoError(t, err)
	defer s.Close()
	require.Zero(t, connector.CapabilitiesOf(s))
	require.Error(t, func() error { _, err := s.(connector.EventSource).Events(t.Context()); return err }())

	for want, change := range map[string]func(*Definition){
		"cannot have hold":    func(d *Definition) { d.Capabilities |= connector.CanHold },
		"Definition.Stats":    func(d *Definition) { d.Stats = nil },
		"must consist of a-z": func(d *Definition) { d.Stats[0].Name = "A" },
		"Definition.Medium":   func(d *Definition) { d.Medium = string(make([]byte, 65)) },
	} {
		d := powerfulDefinition()
		change(&d)
		_, err := storeOf(d, newMemory()).Describe(t.Context(), nil)
		require.ErrorIs(t, err, connector.ErrIncompatible)
		require.ErrorContains(t, err, want)
	}
}

// What was read counts before the save, and a save that fails names nothing.
func TestSavePlaced(t *testing.T) {
	store := &powerful{memory: newMemory()}
	_, worker := open(t, storeOf(powerfulDefinition(), store), testEnv(0, 1))
	defer worker.Close()
	placer, ok := connector.As[connector.Placer](worker)
	require.True(t, ok)
	bs, kv := blocks(3), testKV(t, 1)
	fail := error(nil)
	store.before = func(call string, _ int) error {
		if call == "put" {
			require.Len(t, store.used, 2)
			return fail
		}
		return nil
	}
	slots, err := placer.SavePlaced(t.Context(), &connector.Transfer{Blocks: append(blocks(3), connector.Block{ID: 5})}, kv, []uint32{7, 1 << 31})
	require.NoError(t, err)
	want := make([]uint32, len(bs))
	for i, b := range bs {
		k := connector.NewStoreKey(b.Key, testEnv(0, 1).Shape, b.Group, connector.Shard{World: 1})
		want[i] = uint32(k[0])
	}
	require.Equal(t, want, slots, "the partial block lies nowhere")
	require.Equal(t, []uint32{7, 1 << 31}, store.used)
	fail = errors.New("disk")
	slots, err = placer.SavePlaced(t.Context(), &connector.Transfer{Blocks: bs}, kv, nil)
	require.ErrorIs(t, err, fail)
	require.Empty(t, slots)
	fail = nil
	slots, err = placer.SavePlaced(t.Context(), &connector.Transfer{Blocks: bs[:1]}, kv, nil)
	require.NoError(t, err)
	require.Equal(t, want[:1], slots)

	d := powerfulDefinition()
	d.Capabilities &^= connector.CanPlace
	_, other := open(t, storeOf(d, &powerful{memory: newMemory()}), testEnv(0, 1))
	defer other.Close()
	_, ok = connector.As[connector.Placer](other)
	require.False(t, ok, "the definition does not claim it")
}

// Rule PLACE-25: what was read counts before the load, too, which may evict, and the load names what it has brought.
func TestLoadPlaced(t *testing.T) {
	store := &powerful{memory: newMemory()}
	_, worker := open(t, storeOf(powerfulDefinition(), store), testEnv(0, 1))
	defer worker.Close()
	placer, ok := connector.As[connector.Placer](worker)
	require.True(t, ok)
	saved, err := placer.SavePlaced(t.Context(), &connector.Transfer{Blocks: blocks(3)}, testKV(t, 1), nil)
	require.NoError(t, err)
	require.Len(t, saved, 3)
	store.before = func(call string, _ int) error {
		if call == "get" {
			require.NotEmpty(t, store.used)
		}
		return nil
	}
	kv := testKV(t, 9)
	slots, err := placer.LoadPlaced(t.Context(), &connector.Transfer{Blocks: blocks(3)}, kv, []uint32{7, 1 << 31})
	require.NoError(t, err)
	require.Equal(t, saved, slots)
	require.Equal(t, []uint32{7, 1 << 31}, store.used)
	require.Equal(t, testKV(t, 1).View(0, 2), kv.View(0, 2))
	clear(store.data)
	slots, err = placer.LoadPlaced(t.Context(), &connector.Transfer{Blocks: blocks(3)}, kv, nil)
	require.ErrorIs(t, err, connector.ErrGone)
	require.Empty(t, slots)
}

// A Store that has methods for placing with an arena alone opens without one, and does not place then.
func TestStoreWithoutArenaNeedNotPlace(t *testing.T) {
	d := Definition{Name: "T", Version: "1", Scope: connector.ScopeEngine, Capabilities: connector.CanPlace}
	p := FromStore(d, func(context.Context, connector.Env, arenaTest) (connector.Store, error) { return newMemory(), nil })
	worker, err := p.Worker(t.Context(), testEnv(0, 1), []byte(`{"bytes": 0}`))
	require.NoError(t, err)
	defer worker.Close()
	_, places := connector.As[connector.Placer](worker)
	require.False(t, places)
	env := testEnv(0, 1)
	env.Arena = make([]byte, 64)
	_, err = p.Worker(t.Context(), env, []byte(`{"bytes": 64}`))
	require.ErrorContains(t, err, "claims place, but the Store lacks its methods")
}

// Rule PLACE-26: what is stored although another block of the save was declined is named by the next answer, and once.
func TestPlacedThoughOthersFailed(t *testing.T) {
	store := &powerful{memory: newMemory()}
	_, worker := open(t, storeOf(powerfulDefinition(), store), testEnv(0, 1))
	defer worker.Close()
	placer, ok := connector.As[connector.Placer](worker)
	require.True(t, ok)
	bs, kv := blocks(4), testKV(t, 1)
	all, err := placer.SavePlaced(t.Context(), &connector.Transfer{Blocks: bs}, kv, nil)
	require.NoError(t, err)
	require.Len(t, all, 4)
	fail := error(&connector.ItemError{Items: []int{1}, Err: connector.ErrDeclined})
	store.before = func(string, int) error { return fail }
	slots, err := placer.SavePlaced(t.Context(), &connector.Transfer{Blocks: bs[:3]}, kv, nil)
	require.ErrorIs(t, err, connector.ErrDeclined)
	require.Empty(t, slots)
	fail = nil
	for _, want := range [][]uint32{{all[3], all[0], all[2]}, {all[3]}} {
		slots, err = placer.LoadPlaced(t.Context(), &connector.Transfer{Blocks: bs[3:]}, kv, nil)
		require.NoError(t, err)
		require.Equal(t, want, slots)
	}
	for range wire.MaxUnnamed {
		fail = &connector.ItemError{Items: []int{1}, Err: connector.ErrDeclined}
		_, err = placer.SavePlaced(t.Context(), &connector.Transfer{Blocks: bs[:3]}, kv, nil)
		require.ErrorIs(t, err, connector.ErrDeclined)
	}
	fail = nil
	slots, err = placer.LoadPlaced(t.Context(), &connector.Transfer{Blocks: bs[3:]}, kv, nil)
	require.NoError(t, err)
	require.Len(t, slots, 1+wire.MaxUnnamed)
}

// Rule EVENT-01: a block is stored when all ranks have it, and removed with the first part.
func TestWatchedRanks(t *testing.T) {
	store := &powerful{memory: newMemory()}
	p := storeOf(powerfulDefinition(), store)
	scheduler, first := open(t, p, testEnv(0, 2))
	defer scheduler.Close()
	defer first.Close()
	second, err := p.Worker(t.Context(), testEnv(1, 2), nil)
	require.NoError(t, err)
	defer second.Close()
	bs, kv := blocks(2), testKV(t, 1)
	save := func(w connector.Worker, bs ...connector.Block) {
		require.NoError(t, w.Save(t.Context(), &connector.Transfer{Blocks: bs}, kv))
	}
	save(first, bs...)
	save(second, bs[1])
	save(second, bs[1], connector.Block{ID: 5}) // again, and a partial one
	save(second, bs[0])
	events := take(t, scheduler)
	require.Len(t, events, 2)
	require.Equal(t, keys(2)[1:], events[0].Keys)
	require.Equal(t, keys(2)[:1], events[1].Keys)

	shard := func(rank int) connector.StoreKey {
		return connector.NewStoreKey(bs[0].Key, testEnv(0, 2).Shape, 0, connector.Shard{Rank: rank, World: 2})
	}
	store.removed([]connector.StoreKey{{1, 2, 3}, shard(1)})
	store.removed([]connector.StoreKey{shard(0)}) // it is gone already
	events = take(t, scheduler)
	require.Len(t, events, 1)
	require.Equal(t, connector.BlocksRemoved, events[0].Kind)
	require.Equal(t, keys(1), events[0].Keys)
	store.removed(nil)
	require.Equal(t, connector.BlocksCleared, take(t, scheduler)[0].Kind)
}

// A block that goes while it is being saved is not reported as stored, and neither is one that was not
// stored.
func TestWatchedFailures(t *testing.T) {
	store := &powerful{memory: newMemory()}
	p := storeOf(powerfulDefinition(), store)
	scheduler, worker := open(t, p, testEnv(0, 1))
	defer scheduler.Close()
	defer worker.Close()
	bs, kv := blocks(3), testKV(t, 1)
	fail := error(nil)
	store.before = func(call string, _ int) error {
		if call == "put" {
			store.removed([]connector.StoreKey{connector.NewStoreKey(bs[0].Key, testEnv(0, 1).Shape, 0, connector.Shard{World: 1})})
			return fail
		}
		return nil
	}
	save := func() error { return worker.Save(t.Context(), &connector.Transfer{Blocks: bs}, kv) }
	fail = errors.New("disk")
	require.Error(t, save())
	fail = &connector.ItemError{Items: []int{1}, Err: connector.ErrBusy}
	require.Error(t, save())
	events := take(t, scheduler)
	require.Len(t, events, 1)
	require.Equal(t, keys(3)[2:], events[0].Keys)
}

// A watch is bounded in blocks and events, and a gap shows what it drops.
func TestWatchIsBounded(t *testing.T) {
	env := testEnv(0, 1)
	d := powerfulDefinition()
	w := newWatch(&d, &env)
	key := func(i int) (k [32]byte) {
		k[0], k[1], k[2] = byte(i), byte(i>>8), byte(i>>16)
		return k
	}
	const all = watchedBlocks + 100
	for i := range all {
		items, ks := []connector.Item{{Key: key(i)}}, []connector.BlockKey{key(i)}
		w.saving(items, ks)
		w.saved(items, nil)
	}
	require.Len(t, w.blocks, watchedBlocks)
	require.Len(t, w.shards, watchedBlocks)
	events, err := w.log.Next(t.Context())
	require.NoError(t, err)
	require.LessOrEqual(t, len(events), connector.MaxEvents)
	require.EqualValues(t, all+100, events[len(events)-1].Seq, "100 blocks were reported as removed")
	require.Greater(t, events[0].Seq, uint64(1), "a gap")
	removed := 0
	for _, e := range events {
		if e.Kind == connector.BlocksRemoved {
			removed++
		}
	}
	require.Equal(t, 100, removed)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = w.log.Next(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

type arenaTest struct {
	Bytes int64 `json:"bytes"`
}

// ArenaBytes says what the test asks for.
func (c arenaTest) ArenaBytes() int64 { return c.Bytes }

// Rules LIFE-03 and ARENA-02: one Store works in an arena, even if the engine's next epoch opens with it
// before the last one has closed; another arena has another Store.
func TestStoreForEachArena(t *testing.T) {
	opened := 0
	p := FromStore(Definition{Name: "A", Scope: connector.ScopeEngine}, func(context.Context, connector.Env, arenaTest) (connector.Store, error) {
		opened++
		return newMemory(), nil
	})
	env := testEnv(0, 1)
	env.Arena = make([]byte, 64)
	for range 3 {
		s, err := p.Scheduler(t.Context(), env, json.RawMessage(`{"bytes": 64}`))
		require.NoError(t, err)
		defer func() { require.NoError(t, s.Close()) }()
		env.Epoch++
	}
	require.Equal(t, 1, opened)
	env.Arena = make([]byte, 64)
	s, err := p.Scheduler(t.Context(), env, json.RawMessage(`{"bytes": 64}`))
	require.NoError(t, err)
	require.NoError(t, s.Close())
	require.Equal(t, 2, opened)
}

// Rule ARENA-01: a Store gets the arena that its config asks for, on both sides, or does not open.
func TestStoreArena(t *testing.T) {
	var got []byte
	p := FromStore(Definition{Name: "A", Scope: connector.ScopeEngine, Capabilities: connector.CanPlace}, func(_ context.Context, env connector.Env, _ arenaTest) (connector.Store, error) {
		got = env.Arena
		return &powerful{memory: newMemory()}, nil
	})
	config := json.RawMessage(`{"bytes": 64}`)
	info, err := p.Describe(t.Context(), config)
	require.NoError(t, err)
	require.EqualValues(t, 64, info.ArenaBytes)
	require.Equal(t, connector.CanPlace, info.Capabilities)
	env := testEnv(0, 1)
	for _, size := range []int{0, 63, 65} {
		env.Arena = make([]byte, size)
		_, err := p.Scheduler(t.Context(), env, config)
		require.ErrorIs(t, err, connector.ErrIncompatible)
		_, err = p.Worker(t.Context(), env, config)
		require.ErrorIs(t, err, connector.ErrIncompatible)
	}
	env.Arena = make([]byte, 64)
	s, err := p.Scheduler(t.Context(), env, config)
	require.NoError(t, err)
	require.Len(t, got, 64)
	require.NoError(t, s.Close())
}

type completeTest struct {
	Bytes int64 `json:"bytes"`
	Below bool  `json:"below"`
	Who   uint8 `json:"who"`
}

func (c completeTest) ArenaBytes() int64 { return c.Bytes }

func (c completeTest) Complete() bool { return !c.Below }

func (c completeTest) Scope() connector.Scope {
	return connector.ScopeEngine + connector.Scope(c.Who)
}

// Rule PLACE-27: a config says that what is placed is all there is, where something is placed and nobody else sees the blocks.
func TestStoreComplete(t *testing.T) {
	open := func(context.Context, connector.Env, completeTest) (connector.Store, error) {
		return &powerful{memory: newMemory()}, nil
	}
	d := Definition{Name: "A", Scope: connector.ScopeEngine, Capabilities: connector.CanPlace}
	p := FromStore(d, open)
	for config, want := range map[string]bool{
		`{"bytes": 64}`: true, `{"bytes": 64, "below": true}`: false, `{"bytes": 0}`: false, `{"bytes": 0, "who": 1}`: false, `{"bytes": 64, "who": 2, "below": true}`: false,
	} {
		info, err := p.Describe(t.Context(), json.RawMessage(config))
		require.NoError(t, err, config)
		require.Equal(t, want, info.Complete, config)
	}
	for _, config := range []string{`{"bytes": 64, "who": 1}`, `{"bytes": 64, "who": 2}`} {
		_, err := p.Describe(t.Context(), json.RawMessage(config))
		require.ErrorIs(t, err, connector.ErrIncompatible)
		require.ErrorContains(t, err, "others store what this one never learns of")
	}
	d.Capabilities = 0
	info, err := FromStore(d, open).Describe(t.Context(), json.RawMessage(`{"bytes": 64}`))
	require.NoError(t, err)
	require.False(t, info.Complete, "it does not place")
	info, err = FromStore(d, func(context.Context, connector.Env, arenaTest) (connector.Store, error) { return newMemory(), nil }).Describe(t.Context(), json.RawMessage(`{"bytes": 64}`))
	require.NoError(t, err)
	require.False(t, info.Complete, "the config does not say")
}
