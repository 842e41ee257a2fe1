package multiconnector_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

const blockTokens = 4

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shelf is a child that keeps blocks in memory and does as it is told.
type shelf struct {
	mu      sync.Mutex
	blocks  map[connector.BlockKey]byte
	tickets []string // it was shown
	asked   int      // blocks that it was asked for
	loads   []connector.Transfer
	saves   []connector.Transfer
	loadErr error
	saveErr error
	hang    chan struct{} // Match and Load wait for it to close
	began   chan struct{} // closed when a Load waits
	later   bool
	tail    bool // it offers a prompt to its end, for a ticket
	resets  bool
}

func newShelf(keys ...connector.BlockKey) *shelf {
	s := &shelf{blocks: map[connector.BlockKey]byte{}, resets: true}
	for _, k := range keys {
		s.blocks[k] = k[0]
	}
	return s
}

func (s *shelf) Close() error { return nil }

func (s *shelf) Match(_ context.Context, qs []connector.Query) ([]connector.Match, error) {
	if s.hang != nil {
		<-s.hang
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]connector.Match, len(qs))
	for i, q := range qs {
		if q.Ticket != nil {
			s.tickets = append(s.tickets, string(q.Ticket))
		}
		n := q.Computed / blockTokens
		s.asked += max(0, len(q.Keys)-n)
		for n < len(q.Keys) {
			if _, has := s.blocks[q.Keys[n]]; !has {
				break
			}
			n++
		}
		out[i] = connector.Match{Tokens: max(0, n*blockTokens-q.Computed), Later: s.later}
		if s.tail && len(q.Ticket) > 0 {
			out[i].Tokens = q.Tokens - q.Computed
		}
	}
	return out, nil
}

func (s *shelf) Reset(context.Context) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.blocks)
	return s.resets, nil
}

// hand is the worker side.
type hand struct{ *shelf }

func (h hand) Load(_ context.Context, t *connector.Transfer, kv *connector.KV) error {
	if h.hang != nil {
		if h.began != nil {
			close(h.began)
		}
		<-h.hang
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.loads = append(h.loads, *t)
	if h.loadErr != nil {
		return h.loadErr
	}
	failed := &connector.BlockError{Err: connector.ErrGone}
	for _, b := range t.Blocks {
		v, has := h.blocks[b.Key]
		if !has {
			failed.Blocks = append(failed.Blocks, b.ID)
			continue
		}
		kv.View(0, b.ID)[0] = v
	}
	if len(failed.Blocks) > 0 {
		return failed
	}
	return nil
}

func (h hand) Save(_ context.Context, t *connector.Transfer, kv *connector.KV) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.saves = append(h.saves, *t)
	if h.saveErr != nil {
		return h.saveErr
	}
	for _, b := range t.Blocks {
		h.blocks[b.Key] = kv.View(0, b.ID)[0]
	}
	return nil
}

// rig is a composite of shelves around a small cache.
type rig struct {
	t       *testing.T
	multi   *multiconnector.Multi
	sched   connector.Scheduler
	worker  connector.Worker
	kv      *connector.KV
	shelves []*shelf
}

func groups() []connector.Group {
	return []connector.Group{{BlockTokens: blockTokens, Policy: connector.PolicyAll}}
}

func newRig(t *testing.T, change func([]multiconnector.Child), shelves ...*shelf) *rig {
	t.Helper()
	children := make([]multiconnector.Child, len(shelves))
	names := make([]string, len(shelves))
	for i := range names {
		names[i] = "Shelf"
	}
	for i, name := range multiconnector.Tags(names) {
		children[i] = multiconnector.Child{
			Name: name, Role: connector.RoleBoth, Patience: time.Minute,
			Info: connector.Info{Name: name, Groups: true, Scope: connector.ScopeNode, Capabilities: connector.CanReset},
		}
	}
	if change != nil {
		change(children)
	}
	m, err := multiconnector.New("Multi", children)
	require.NoError(t, err)
	r := &rig{t: t, multi: m, shelves: shelves}
	scheds, workers := make([]connector.Scheduler, len(shelves)), make([]connector.Worker, len(shelves))
	for i, s := range shelves {
		scheds[i], workers[i] = s, hand{s}
	}
	r.sched, r.worker = m.Scheduler(scheds, groups(), nil), m.Worker(workers, groups(), nil)
	layout := connector.Layout{
		Name: "test", Blocks: 64, Groups: groups(), Segments: []connector.Segment{{BlockStride: 1, Bytes: 1}},
	}
	r.kv, err = connector.NewKV(layout, [][]byte{make([]byte, 64)})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, r.sched.Close())
		require.NoError(t, r.worker.Close())
	})
	return r
}

func keys(n int) []connector.BlockKey {
	out := make([]connector.BlockKey, n)
	for i := range out {
		out[i] = connector.BlockKey{byte(i + 1), 7}
	}
	return out
}

func (r *rig) match(id connector.RequestID, ks []connector.BlockKey) connector.Match {
	r.t.Helper()
	ms, err := r.sched.Match(r.t.Context(), []connector.Query{{Request: id, Tokens: len(ks)*blockTokens + 1, Keys: ks}})
	require.NoError(r.t, err)
	require.Len(r.t, ms, 1)
	return ms[0]
}

func transfer(id connector.RequestID, ks []connector.BlockKey) *connector.Transfer {
	t := &connector.Transfer{Request: id, Tokens: len(ks) * blockTokens}
	for i, k := range ks {
		t.Blocks = append(t.Blocks, connector.Block{Key: k, ID: connector.BlockID(i)})
	}
	return t
}

// loadedOf gives the blocks that a child was asked for.
func loadedOf(s *shelf) (out []connector.BlockID) {
	for _, t := range s.loads {
		for _, b := range t.Blocks {
			out = append(out, b.ID)
		}
	}
	return out
}

func TestPrefixComposed(t *testing.T) {
	ks := keys(6)
	a, b, c := newShelf(ks[0], ks[1], ks[4]), newShelf(ks[2], ks[3]), newShelf(ks[0], ks[1], ks[2], ks[5])
	r := newRig(t, nil, a, b, c)
	require.Equal(t, connector.Match{Tokens: 6 * blockTokens}, r.match("r", ks))
	require.NoError(t, r.worker.Load(t.Context(), transfer("r", ks), r.kv))
	require.Equal(t, []connector.BlockID{0, 1, 4}, loadedOf(a))
	require.ElementsMatch(t, []connector.BlockID{3}, loadedOf(b), "C had block 2 when all were asked at once")
	for i := range ks {
		require.Equal(t, ks[i][0], r.kv.View(0, connector.BlockID(i))[0])
	}
	for _, s := range r.shelves {
		for _, l := range s.loads {
			require.Equal(t, len(l.Blocks)*blockTokens, l.Tokens)
			require.Equal(t, int(l.Blocks[0].ID)*blockTokens, l.From)
		}
	}
}

func TestLoadFallsBack(t *testing.T) {
	ks := keys(3)
	a, b := newShelf(ks...), newShelf(ks[:2]...)
	r := newRig(t, nil, a, b)
	require.Equal(t, 3*blockTokens, r.match("r", ks).Tokens)
	a.loadErr = connector.ErrGone
	err := r.worker.Load(t.Context(), transfer("r", ks), r.kv)
	var some *connector.BlockError
	require.ErrorAs(t, err, &some)
	require.Equal(t, []connector.BlockID{2}, some.Blocks)
	require.ErrorIs(t, err, connector.ErrGone)
	require.Equal(t, ks[1][0], r.kv.View(0, 1)[0])
}

func TestFailPolicyEndsTheSearch(t *testing.T) {
	ks := keys(2)
	a, b := newShelf(ks...), newShelf(ks...)
	r := newRig(t, func(cs []multiconnector.Child) { cs[0].Fail = true }, a, b)
	r.match("r", ks)
	a.loadErr = connector.ErrGone
	err := r.worker.Load(t.Context(), transfer("r", ks), r.kv)
	require.ErrorIs(t, err, multiconnector.ErrFail)
	require.Empty(t, b.loads)
}

func TestSaveGoesToAll(t *testing.T) {
	ks := keys(2)
	a, b, c := newShelf(), newShelf(), newShelf()
	r := newRig(t, func(cs []multiconnector.Child) { cs[1].Role = connector.RoleConsumer }, a, b, c)
	require.NoError(t, r.worker.Save(t.Context(), transfer("r", ks), r.kv))
	require.Len(t, a.blocks, 2)
	require.Empty(t, b.saves)
	require.Len(t, c.blocks, 2)
	c.saveErr = connector.ErrGone
	require.NoError(t, r.worker.Save(t.Context(), transfer("r", ks), r.kv), "one has it")
	a.saveErr = connector.ErrBusy
	err := r.worker.Save(t.Context(), transfer("r", ks), r.kv)
	require.ErrorIs(t, err, connector.ErrBusy)
	require.ErrorContains(t, err, "Shelf#3")
}

// A child that did not replace a block may serve it as it was, so the save has failed although another child has replaced it.
func TestReplaceReplacesEverywhere(t *testing.T) {
	ks := keys(2)
	a, b := newShelf(ks...), newShelf(ks...)
	r := newRig(t, nil, a, b)
	again := transfer("r", ks)
	again.Replace = true
	require.NoError(t, r.worker.Save(t.Context(), again, r.kv))
	b.saveErr = connector.ErrGone
	require.ErrorIs(t, r.worker.Save(t.Context(), again, r.kv), connector.ErrGone)
	b.saveErr = connector.ErrDeclined // it keeps none of it
	require.NoError(t, r.worker.Save(t.Context(), again, r.kv))
}

// What only this engine can see does not count for a consumer.
func TestStoredMeansReachable(t *testing.T) {
	ks := keys(1)
	private, shared := newShelf(), newShelf()
	r := newRig(t, func(cs []multiconnector.Child) { cs[0].Info.Scope = connector.ScopeEngine }, private, shared)
	shared.saveErr = connector.ErrGone
	require.ErrorIs(t, r.worker.Save(t.Context(), transfer("r", ks), r.kv), connector.ErrGone)
	require.Len(t, private.blocks, 1)
}

// What a shared store was seen to have it gets again: another engine may have reset it since.
func TestKnownIsSentAgain(t *testing.T) {
	ks := keys(2)
	local, one, two := newShelf(), newShelf(ks...), newShelf()
	r := newRig(t, func(cs []multiconnector.Child) {
		cs[1].Info.Scope, cs[2].Info.Scope = connector.ScopeShared, connector.ScopeShared
	}, local, one, two)
	require.Equal(t, 2*blockTokens, r.match("r", ks).Tokens)
	clear(one.blocks)
	require.NoError(t, r.worker.Save(t.Context(), transfer("r", ks), r.kv))
	for _, child := range []*shelf{local, one, two} {
		require.Len(t, child.blocks, 2)
	}
}

// vllm#34526: a block is not stored before it is loaded.
func TestNotStoredBeforeLoaded(t *testing.T) {
	ks := keys(2)
	a, b := newShelf(ks...), newShelf()
	r := newRig(t, nil, a, b)
	a.hang, a.began = make(chan struct{}), make(chan struct{})
	loaded := make(chan error, 1)
	go func() { loaded <- r.worker.Load(t.Context(), transfer("r", ks[:1]), r.kv) }()
	<-a.began
	var some *connector.BlockError
	require.ErrorAs(t, r.worker.Save(t.Context(), transfer("r", ks), r.kv), &some)
	require.Equal(t, []connector.BlockID{0}, some.Blocks)
	require.NotContains(t, b.blocks, ks[0])
	close(a.hang)
	require.NoError(t, <-loaded)
	require.NoError(t, r.worker.Save(t.Context(), transfer("r", ks), r.kv))
	require.Equal(t, ks[0][0], b.blocks[ks[0]])
}

// A child that hangs costs the others its patience once.
func TestSlowChild(t *testing.T) {
	ks := keys(2)
	a, b := newShelf(ks...), newShelf(ks[0])
	a.hang = make(chan struct{})
	r := newRig(t, func(cs []multiconnector.Child) { cs[0].Patience = 300 * time.Millisecond }, a, b)
	require.Equal(t, blockTokens, r.match("r", ks).Tokens)
	began := time.Now()
	for range 100 {
		require.Equal(t, blockTokens, r.match("r", ks).Tokens)
	}
	require.Less(t, time.Since(began), 15*time.Second, "100 times its patience are 30 s")
	close(a.hang)
	require.Eventually(t, func() bool { return r.match("r", ks).Tokens == 2*blockTokens }, time.Minute, time.Millisecond)
}

func TestLaterIsBounded(t *testing.T) {
	ks := keys(2)
	a, b := newShelf(), newShelf(ks[0])
	a.later = true
	r := newRig(t, func(cs []multiconnector.Child) { cs[0].Later = 30 * time.Millisecond }, a, b)
	m := r.match("r", ks)
	require.True(t, m.Later)
	require.Equal(t, blockTokens, m.Tokens)
	require.Eventually(t, func() bool { return !r.match("r", ks).Later }, time.Minute, time.Millisecond)
	b.blocks[ks[1]] = 1
	require.False(t, r.match("s", ks).Later, "all of it is there: nothing to wait for")
}

func TestResetIsAllOfThem(t *testing.T) {
	a, b := newShelf(keys(1)...), newShelf(keys(1)...)
	r := newRig(t, nil, a, b)
	reset, ok := connector.As[connector.Resetter](r.sched)
	require.True(t, ok)
	emptied, err := reset.Reset(t.Context())
	require.NoError(t, err)
	require.True(t, emptied)
	b.resets = false
	emptied, err = reset.Reset(t.Context())
	require.NoError(t, err)
	require.False(t, emptied)
}

// TestFoldBeyondMachine: a composite names the child whose blocks other machines see.
func TestFoldBeyondMachine(t *testing.T) {
	info, err := multiconnector.Fold("M", []multiconnector.Child{
		{Name: "a", Role: connector.RoleBoth}, {Name: "b", Role: connector.RoleBoth, Info: connector.Info{BeyondMachine: "url has the address x"}},
	})
	require.NoError(t, err)
	require.Equal(t, "connectors[1].kv_connector_extra_config.url has the address x", info.BeyondMachine)
}

// TestFoldUnsignedPairs: a composite trusts what one of its children trusts.
func TestFoldUnsignedPairs(t *testing.T) {
	for _, trusts := range []bool{false, true} {
		info, err := multiconnector.Fold("M", []multiconnector.Child{
			{Name: "a", Role: connector.RoleBoth, Info: connector.Info{UnsignedPairs: trusts}}, {Name: "b", Role: connector.RoleBoth},
		})
		require.NoError(t, err)
		require.Equal(t, trusts, info.UnsignedPairs)
	}
}

func TestFold(t *testing.T) {
	child := func(name string, role connector.Role, info connector.Info) multiconnector.Child {
		return multiconnector.Child{Name: name, Role: role, Info: info}
	}
	both, producer, consumer := connector.RoleBoth, connector.RoleProducer, connector.RoleConsumer
	plain := connector.Info{Groups: true, Scope: connector.ScopeEngine}
	with := func(change func(*connector.Info)) connector.Info {
		i := plain
		change(&i)
		return i
	}
	lossy := with(func(i *connector.Info) { i.Lossy = true })
	for _, c := range []struct {
		name     string
		children []multiconnector.Child
		want     connector.Info
		err      string
	}{
		{name: "nobody", err: "no children"},
		{name: "one", children: []multiconnector.Child{child("a", both, plain)}, want: plain},
		{
			name: "powers are those of any", want: with(func(i *connector.Info) { i.Capabilities = connector.CanHold | connector.CanReset }),
			children: []multiconnector.Child{
				child("a", both, with(func(i *connector.Info) { i.Capabilities = connector.CanHold })),
				child("b", both, with(func(i *connector.Info) { i.Capabilities = connector.CanReset })),
			},
		},
		{
			name: "groups need all", want: with(func(i *connector.Info) { i.Groups = false }),
			children: []multiconnector.Child{child("a", both, plain), child("b", both, with(func(i *connector.Info) { i.Groups = false }))},
		},
		{name: "one lossy makes all", want: lossy, children: []multiconnector.Child{child("a", both, plain), child("b", both, lossy)}},
		{name: "a lossy one that only saves does not", want: plain, children: []multiconnector.Child{child("a", both, plain), child("b", producer, lossy)}},
		{
			name: "the widest scope of those that save", want: with(func(i *connector.Info) { i.Scope = connector.ScopeNode }),
			children: []multiconnector.Child{
				child("a", both, plain), child("b", both, with(func(i *connector.Info) { i.Scope = connector.ScopeNode })),
				child("c", consumer, with(func(i *connector.Info) { i.Scope = connector.ScopeShared })),
			},
		},
		{
			name: "layouts that all take", want: with(func(i *connector.Info) { i.Layouts = []string{"y"} }),
			children: []multiconnector.Child{
				child("a", both, with(func(i *connector.Info) { i.Layouts = []string{"x", "y"} })), child("b", both, plain),
				child("c", both, with(func(i *connector.Info) { i.Layouts = []string{"y", "z"} })),
			},
		},
		{
			name: "no common layout", err: `b needs one of the layouts ["z"]`,
			children: []multiconnector.Child{
				child("a", both, with(func(i *connector.Info) { i.Layouts = []string{"x"} })),
				child("b", both, with(func(i *connector.Info) { i.Layouts = []string{"z"} })),
			},
		},
		{name: "one name twice", err: `two children are called "a"`, children: []multiconnector.Child{child("a", both, plain), child("a", both, plain)}},
		{name: "too many", err: "at most 16", children: make([]multiconnector.Child, 17)},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := multiconnector.Fold("", c.children)
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				require.ErrorIs(t, err, connector.ErrIncompatible)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
}

// Against a model: whatever children have and however they fail, each block arrives if and only if
// somebody had it, with the bytes that belong to it, and the offer is the longest that all together
// can make.
func TestAgainstModel(t *testing.T) {
	for seed := range uint64(300) {
		modelRun(t, seed)
	}
}

func modelRun(t *testing.T, seed uint64) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 1))
	n := 1 + rnd.IntN(4)
	ks := keys(1 + rnd.IntN(10))
	shelves := make([]*shelf, n)
	broken := make([]bool, n)
	for i := range shelves {
		shelves[i] = newShelf()
		for _, k := range ks {
			if rnd.IntN(2) == 0 {
				shelves[i].blocks[k] = k[0]
			}
		}
		if broken[i] = rnd.IntN(4) == 0; broken[i] {
			shelves[i].loadErr = fmt.Errorf("told to: %w", connector.ErrGone)
		}
	}
	r := newRig(t, nil, shelves...)
	offered := 0
	for offered < len(ks) && slices.ContainsFunc(shelves, func(s *shelf) bool { return s.blocks[ks[offered]] != 0 }) {
		offered++
	}
	if seed%2 == 0 { // without a Match there is no route
		require.Equal(t, offered*blockTokens, r.match("r", ks).Tokens, "seed %d", seed)
	}
	err := r.worker.Load(t.Context(), transfer("r", ks), r.kv)
	r.expect(seed, ks, broken, err)
}

// expect checks that exactly the blocks failed that nobody could give.
func (r *rig) expect(seed uint64, ks []connector.BlockKey, broken []bool, err error) {
	t := r.t
	t.Helper()
	var want []connector.BlockID
	for b, k := range ks {
		arrived := false
		for i, s := range r.shelves {
			arrived = arrived || !broken[i] && s.blocks[k] != 0
		}
		if !arrived {
			want = append(want, connector.BlockID(b))
			continue
		}
		require.Equal(t, k[0], r.kv.View(0, connector.BlockID(b))[0], "seed %d block %d", seed, b)
	}
	var some *connector.BlockError
	switch {
	case len(want) == 0:
		require.NoError(t, err, "seed %d", seed)
	case len(want) == len(ks):
		require.ErrorIs(t, err, connector.ErrGone, "seed %d", seed)
	default:
		require.ErrorAs(t, err, &some, "seed %d", seed)
		require.ElementsMatch(t, want, some.Blocks, "seed %d", seed)
	}
}

// TestFound: each part of a prompt has its child, and a child that does not answer is named.
func TestFound(t *testing.T) {
	ks := keys(6)
	a, b, c := newShelf(ks[0], ks[1], ks[4]), newShelf(ks[2], ks[3]), newShelf(ks[5])
	c.hang = make(chan struct{})
	r := newRig(t, func(cs []multiconnector.Child) { cs[2].Patience = 50 * time.Millisecond }, a, b, c)
	found := func() ([]multiconnector.Piece, []bool) {
		r.match("r", ks)
		return r.multi.Found("r")
	}
	pieces, silent := found()
	require.Equal(t, []multiconnector.Piece{{Child: 0, End: 2 * blockTokens}, {Child: 1, End: 4 * blockTokens}, {Child: 0, End: 5 * blockTokens}}, pieces)
	require.Equal(t, []bool{false, false, true}, silent)
	close(c.hang)
	require.Eventually(t, func() bool {
		pieces, silent = found()
		return !silent[2]
	}, time.Minute, time.Millisecond)
	require.Equal(t, multiconnector.Piece{Child: 2, End: 6 * blockTokens}, pieces[3])
	b.later = true
	_, silent = found()
	require.True(t, silent[1], "it may have more")
	_, silent = r.multi.Found("another")
	require.Nil(t, silent)
}
