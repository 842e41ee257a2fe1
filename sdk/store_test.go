package sdk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// memory is a Store in a map, with a hook before each call.
type memory struct {
	mu     sync.Mutex
	data   map[connector.StoreKey][][]byte
	before func(call string, n int) error
	closed atomic.Int32
}

func newMemory() *memory {
	return &memory{data: map[connector.StoreKey][][]byte{}, before: func(string, int) error { return nil }}
}

func (m *memory) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	if err := m.before("lookup", len(runs)); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	found := make([]int, len(runs))
	for i, run := range runs {
		for found[i] < len(run) && m.data[run[found[i]]] != nil {
			found[i]++
		}
	}
	return found, nil
}

func (m *memory) Get(_ context.Context, items []connector.Item) error {
	if err := m.before("get", len(items)); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var missing []int
	for i, item := range items {
		stored := m.data[item.Key]
		if stored == nil {
			missing = append(missing, i)
			continue
		}
		for s, span := range item.Spans {
			copy(span, stored[s])
		}
	}
	if missing != nil {
		return &connector.ItemError{Items: missing, Err: connector.ErrGone}
	}
	return nil
}

func (m *memory) Put(_ context.Context, items []connector.Item) error {
	if err := m.before("put", len(items)); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, item := range items {
		if m.data[item.Key] != nil && !item.Replace {
			continue
		}
		var spans [][]byte
		for _, s := range item.Spans {
			spans = append(spans, append([]byte(nil), s...))
		}
		m.data[item.Key] = spans
	}
	return nil
}

func (m *memory) Close() error {
	m.closed.Add(1)
	return m.before("close", 0)
}

type noConfig struct {
	Size int `json:"size" jsonschema:"default=3"`
}

// storePlugin is a connector of m that counts how often it is opened.
func storePlugin(m *memory, opens *atomic.Int32) connector.Plugin {
	return FromStore(Definition{Name: "Memory", Version: "1", Scope: connector.ScopeEngine},
		func(context.Context, connector.Env, noConfig) (connector.Store, error) {
			opens.Add(1)
			return m, m.before("open", 0)
		})
}

const testBlock = 48 // bytes of one block: two layers of 16 and a digest of 16

func testLayout() connector.Layout {
	return connector.Layout{
		Name: "test", Blocks: 8, Groups: []connector.Group{{BlockTokens: 4, Policy: connector.PolicyAll}},
		Segments: []connector.Segment{
			{Layer: 0, Offset: 0, BlockStride: 32, Bytes: 16},
			{Layer: 1, Offset: 16, BlockStride: 32, Bytes: 16},
			{Layer: connector.DigestLayer, Offset: 256, BlockStride: 16, Bytes: 16},
		},
	}
}

func testEnv(rank, world int) connector.Env {
	return connector.Env{
		Engine: "e", Epoch: 1, Role: connector.RoleBoth, Rank: rank, World: world,
		Model: connector.NewFingerprint("m"), Shape: connector.NewFingerprint("s"), Layout: testLayout(),
	}
}

// testKV is a cache whose block i is full of fill+i.
func testKV(t *testing.T, fill byte) *connector.KV {
	kv, err := connector.NewKV(testLayout(), [][]byte{make([]byte, 8*testBlock)})
	require.NoError(t, err)
	for id := range connector.BlockID(8) {
		for s := range 3 {
			for i := range kv.View(s, id) {
				kv.View(s, id)[i] = fill + byte(id)
			}
		}
	}
	return kv
}

func keys(n int) []connector.BlockKey {
	space := connector.KeySpace{Model: connector.NewFingerprint("m")}
	return space.Keys(make([]int32, 4*n), 4)
}

// blocks are the first n blocks of a prompt in slots 0..n-1.
func blocks(n int) []connector.Block {
	out := make([]connector.Block, n)
	for i, k := range keys(n) {
		out[i] = connector.Block{Key: k, ID: connector.BlockID(i)}
	}
	return out
}

func open(t *testing.T, p connector.Plugin, env connector.Env) (connector.Scheduler, connector.Worker) {
	t.Helper()
	w, err := p.Worker(t.Context(), env, nil)
	require.NoError(t, err)
	env.Rank = 0
	s, err := p.Scheduler(t.Context(), env, nil)
	require.NoError(t, err)
	return s, w
}

func match(t *testing.T, s connector.Scheduler, q connector.Query) connector.Match {
	t.Helper()
	got, err := s.Match(t.Context(), []connector.Query{{}, q, {}})
	require.NoError(t, err)
	require.Equal(t, []connector.Match{{}, got[1], {}}, got)
	return got[1]
}

func TestStoreSavesMatchesLoads(t *testing.T) {
	var opens atomic.Int32
	m := newMemory()
	s, w := open(t, storePlugin(m, &opens), testEnv(0, 1))
	q := connector.Query{Request: "r", Tokens: 18, Keys: keys(4)}
	require.Zero(t, match(t, s, q))

	partial := append(blocks(3), connector.Block{ID: 3})
	require.NoError(t, w.Save(t.Context(), &connector.Transfer{Tokens: 14, Blocks: partial}, testKV(t, 10)))
	require.Len(t, m.data, 3, "the partial block is not stored")
	require.Equal(t, connector.Match{Tokens: 12, Async: true}, match(t, s, q))
	q.Computed = 8
	require.Equal(t, connector.Match{Tokens: 4, Async: true}, match(t, s, q))
	q.Computed = 12
	require.Zero(t, match(t, s, q))
	q.Computed = 16
	require.Zero(t, match(t, s, q))
	q.Computed = 17 // not a multiple: beyond all keys
	require.Zero(t, match(t, s, q))

	into := testKV(t, 100)
	require.NoError(t, w.Load(t.Context(), &connector.Transfer{Tokens: 12, Blocks: blocks(3)}, into))
	require.Equal(t, byte(12), into.View(2, 2)[15])
	require.Equal(t, byte(103), into.View(0, 3)[0], "no other block is touched")

	var failed *connector.BlockError
	missing := append(blocks(3), connector.Block{Key: connector.BlockKey{9}, ID: 5}, connector.Block{ID: 6})
	require.ErrorAs(t, w.Load(t.Context(), &connector.Transfer{Blocks: missing}, into), &failed)
	require.ElementsMatch(t, []connector.BlockID{5, 6}, failed.Blocks)
	require.ErrorIs(t, failed, connector.ErrGone)
	require.ErrorAs(t, w.Load(t.Context(), &connector.Transfer{Blocks: missing[4:]}, into), &failed)
	require.Equal(t, []connector.BlockID{6}, failed.Blocks)
	require.NoError(t, w.Save(t.Context(), &connector.Transfer{Blocks: missing[4:]}, into), "nothing to store")

	require.NoError(t, w.Save(t.Context(), &connector.Transfer{Blocks: blocks(1), Replace: true}, testKV(t, 50)))
	require.NoError(t, w.Load(t.Context(), &connector.Transfer{Blocks: blocks(1)}, into))
	require.Equal(t, byte(50), into.View(0, 0)[0])
	require.EqualValues(t, 1, opens.Load(), "both sides share one store")
	require.NoError(t, s.Close())
	require.Zero(t, m.closed.Load())
	require.NoError(t, w.Close())
	require.NoError(t, w.Close(), "closing again does nothing")
	require.EqualValues(t, 1, m.closed.Load())
}

// Rule STORE-03: a block counts only if the shards of all ranks are there.
func TestStoreWantsAllShards(t *testing.T) {
	var opens atomic.Int32
	p := storePlugin(newMemory(), &opens)
	s, w0 := open(t, p, testEnv(0, 2))
	w1, err := p.Worker(t.Context(), testEnv(1, 2), nil)
	require.NoError(t, err)
	q := connector.Query{Request: "r", Tokens: 16, Keys: keys(4)}

	require.NoError(t, w0.Save(t.Context(), &connector.Transfer{Blocks: blocks(3)}, testKV(t, 10)))
	require.Zero(t, match(t, s, q))
	require.NoError(t, w1.Save(t.Context(), &connector.Transfer{Blocks: blocks(2)}, testKV(t, 20)))
	require.Equal(t, 8, match(t, s, q).Tokens)

	for rank, w := range []connector.Worker{w0, w1} {
		into := testKV(t, 100)
		require.NoError(t, w.Load(t.Context(), &connector.Transfer{Blocks: blocks(2)}, into))
		require.Equal(t, byte(10*(rank+1)), into.View(0, 0)[0], "each rank gets its own part")
	}
	require.EqualValues(t, 1, opens.Load())
}

func TestStoreRoles(t *testing.T) {
	var opens atomic.Int32
	m := newMemory()
	p := storePlugin(m, &opens)
	producer, consumer := testEnv(0, 1), testEnv(0, 1)
	producer.Role, consumer.Role, consumer.Epoch = connector.RoleProducer, connector.RoleConsumer, 2
	ps, pw := open(t, p, producer)
	cs, cw := open(t, p, consumer)
	require.EqualValues(t, 2, opens.Load(), "each epoch has its own store")
	tr := &connector.Transfer{Blocks: blocks(2)}
	require.NoError(t, pw.Save(t.Context(), tr, testKV(t, 1)))
	require.ErrorIs(t, pw.Load(t.Context(), tr, testKV(t, 1)), connector.ErrIncompatible)
	require.ErrorIs(t, cw.Save(t.Context(), tr, testKV(t, 1)), connector.ErrIncompatible)
	q := connector.Query{Request: "r", Tokens: 16, Keys: keys(4)}
	require.Zero(t, match(t, ps, q))
	require.Equal(t, 8, match(t, cs, q).Tokens)
}

func TestStoreErrors(t *testing.T) {
	var opens atomic.Int32
	m := newMemory()
	s, w := open(t, storePlugin(m, &opens), testEnv(0, 1))
	kv, tr := testKV(t, 1), &connector.Transfer{Blocks: blocks(2)}
	q := []connector.Query{{Tokens: 16, Keys: keys(4)}}
	fail := func(err error) { m.before = func(string, int) error { return err } }

	fail(fmt.Errorf("disk: %w", connector.ErrBusy))
	_, err := s.Match(t.Context(), q)
	require.ErrorIs(t, err, connector.ErrBusy)
	require.ErrorIs(t, w.Load(t.Context(), tr, kv), connector.ErrBusy)
	require.ErrorIs(t, w.Save(t.Context(), tr, kv), connector.ErrBusy)

	var failed *connector.BlockError
	fail(fmt.Errorf("disk: %w", &connector.ItemError{Items: []int{1}, Err: connector.ErrCorrupt}))
	require.ErrorAs(t, w.Save(t.Context(), tr, kv), &failed)
	require.Equal(t, []connector.BlockID{1}, failed.Blocks)
	require.ErrorIs(t, failed, connector.ErrCorrupt)
	for _, items := range [][]int{nil, {2}, {-1}} { // a store that names nonsense fails the whole call
		fail(&connector.ItemError{Items: items, Err: connector.ErrGone})
		err := w.Load(t.Context(), tr, kv)
		require.ErrorIs(t, err, connector.ErrGone)
		require.NotErrorAs(t, err, &failed)
	}
	bad := &connector.Transfer{Blocks: []connector.Block{{Key: connector.BlockKey{1}, ID: 8}}}
	require.ErrorIs(t, w.Load(t.Context(), bad, kv), connector.ErrIncompatible)
	require.ErrorIs(t, w.Save(t.Context(), bad, kv), connector.ErrIncompatible)
}

func TestStorePanicsAreContained(t *testing.T) {
	var opens atomic.Int32
	m := newMemory()
	p := storePlugin(m, &opens)
	s, w := open(t, p, testEnv(0, 1))
	m.before = func(call string, _ int) error { panic("boom in " + call) }
	kv, tr := testKV(t, 1), &connector.Transfer{Blocks: blocks(2)}
	_, err := s.Match(t.Context(), []connector.Query{{Tokens: 16, Keys: keys(4)}})
	require.ErrorIs(t, err, ErrPanic)
	require.ErrorContains(t, err, "boom in lookup")
	require.ErrorIs(t, w.Load(t.Context(), tr, kv), ErrPanic)
	require.ErrorIs(t, w.Save(t.Context(), tr, kv), ErrPanic)
	require.NoError(t, s.Close())
	require.ErrorIs(t, w.Close(), ErrPanic)
	_, err = p.Worker(t.Context(), testEnv(0, 1), nil)
	require.ErrorIs(t, err, ErrPanic, "a panic in open")
	m.before = func(string, int) error { return nil }
	_, err = p.Worker(t.Context(), testEnv(0, 1), nil)
	require.NoError(t, err, "and it left nothing behind")
}

// wrongStore breaks rule STORE-02.
type wrongStore struct {
	*memory
	found []int
}

func (s wrongStore) Lookup(context.Context, [][]connector.StoreKey) ([]int, error) {
	return s.found, nil
}

func TestStoreAnswersAreChecked(t *testing.T) {
	for _, found := range [][]int{nil, {1, 1}, {-1}, {5}} {
		p := FromStore(Definition{Name: "x"}, func(context.Context, connector.Env, noConfig) (connector.Store, error) {
			return wrongStore{newMemory(), found}, nil
		})
		s, err := p.Scheduler(t.Context(), testEnv(0, 1), nil)
		require.NoError(t, err)
		_, err = s.Match(t.Context(), []connector.Query{{Tokens: 16, Keys: keys(4)}})
		require.ErrorContains(t, err, "STORE-02")
	}
}

func TestStoreOpens(t *testing.T) {
	refused := errors.New("refused")
	var got noConfig
	p := FromStore(Definition{Name: "x"}, func(_ context.Context, _ connector.Env, c noConfig) (connector.Store, error) {
		got = c
		if c.Size == 0 {
			return nil, nil
		}
		return nil, refused
	})
	_, err := p.Worker(t.Context(), testEnv(0, 1), nil)
	require.ErrorIs(t, err, refused)
	require.Equal(t, 3, got.Size)
	_, err = p.Scheduler(t.Context(), testEnv(0, 1), json.RawMessage(`{"size": 0}`))
	require.ErrorContains(t, err, "no store")
	_, err = p.Scheduler(t.Context(), testEnv(0, 1), json.RawMessage(`{"sice": 0}`))
	require.ErrorContains(t, err, `did you mean "size"?`)
	_, err = p.Describe(t.Context(), json.RawMessage(`{"sice": 0}`))
	require.ErrorIs(t, err, connector.ErrIncompatible)
	two := testEnv(0, 1)
	two.Layout.Groups = append(two.Layout.Groups, two.Layout.Groups[0])
	_, err = p.Worker(t.Context(), two, nil)
	require.ErrorIs(t, err, connector.ErrIncompatible)
}

// Sides that open and close at random moments never see a closed store or two at once.
func TestStoreIsOpenedOnceAtATime(t *testing.T) {
	var live, most, opens atomic.Int32
	p := FromStore(Definition{Name: "x"}, func(context.Context, connector.Env, noConfig) (connector.Store, error) {
		opens.Add(1)
		most.Store(max(most.Load(), live.Add(1)))
		m := newMemory()
		m.before = func(call string, _ int) error {
			if call == "close" {
				live.Add(-1)
			} else if m.closed.Load() > 0 {
				return errors.New("used after close")
			}
			return nil
		}
		return m, nil
	})
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 100 {
				s, err := p.Scheduler(context.Background(), testEnv(0, 1), nil)
				if err == nil {
					_, err = s.Match(context.Background(), []connector.Query{{Tokens: 16, Keys: keys(4)}})
					err = errors.Join(err, s.Close())
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	require.Zero(t, live.Load())
	require.EqualValues(t, 1, most.Load())
	require.Positive(t, opens.Load())
}

// The first side's deadline is not everybody's.
func TestStoreOpenIsRetriedAfterAnothersDeadline(t *testing.T) {
	started := make(chan struct{})
	var opens atomic.Int32
	p := FromStore(Definition{Name: "x"}, func(ctx context.Context, _ connector.Env, _ noConfig) (connector.Store, error) {
		if opens.Add(1) == 1 {
			close(started)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return newMemory(), nil
	})
	first, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := p.Scheduler(first, testEnv(0, 1), nil)
		failed <- err
	}()
	<-started
	gone, giveUp := context.WithCancel(t.Context())
	giveUp()
	_, err := p.Worker(gone, testEnv(0, 1), nil)
	require.ErrorIs(t, err, context.Canceled, "a waiter gives up by its own context")
	opened := make(chan error, 1)
	go func() {
		w, err := p.Worker(t.Context(), testEnv(0, 1), nil)
		if err == nil {
			err = w.Close()
		}
		opened <- err
	}()
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)
	require.NoError(t, <-opened)
	require.EqualValues(t, 2, opens.Load())
}

// forgetful is a store that can forget.
type forgetful struct {
	connector.Store
	resets int
}

func (f *forgetful) Reset(context.Context) (bool, error) { f.resets++; return true, nil }

func TestStoreThatResets(t *testing.T) {
	store := &forgetful{Store: newMemory()}
	for _, declared := range []bool{false, true} {
		p := FromStore(Definition{Name: "forgetful", Scope: connector.ScopeEngine, Reset: declared}, func(context.Context, connector.Env, struct{}) (connector.Store, error) {
			return store, nil
		})
		info, err := p.Describe(t.Context(), nil)
		require.NoError(t, err)
		require.Equal(t, declared, info.Capabilities == connector.CanReset)
		s, err := p.Scheduler(t.Context(), testEnv(0, 1), nil)
		require.NoError(t, err)
		r, ok := connector.As[connector.Resetter](s)
		require.Equal(t, declared, ok)
		if ok {
			emptied, err := r.Reset(t.Context())
			require.NoError(t, err)
			require.True(t, emptied)
		}
		require.NoError(t, s.Close())
	}
	require.Equal(t, 1, store.resets)

	p := FromStore(Definition{Name: "not so", Scope: connector.ScopeEngine, Reset: true}, func(context.Context, connector.Env, struct{}) (connector.Store, error) {
		return newMemory(), nil
	})
	_, err := p.Scheduler(t.Context(), testEnv(0, 1), nil)
	require.ErrorIs(t, err, connector.ErrIncompatible)
}
