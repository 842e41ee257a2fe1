package tier_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/sdk"
	"github.com/kvport/kvport/sdk/tier"
)

// What docs/write-a-connector.md shows keeps the rules, those of placement too.
func TestMemoryFirst(t *testing.T) {
	profiles := []conformance.Profile{conformance.Store, conformance.MultiRank, conformance.Groups, conformance.Place}
	conformance.Run(t, conformance.InProcess(plugin(), json.RawMessage(`{"memory_bytes": 16777216, "dir": "@TMP@/kv"}`)), profiles...)
}

// Two engines with one config do not see each other's blocks below: a reset of one, whose weights have changed, takes nothing from the
// other, and what that one stores afterwards is nothing to the first.
func TestEnginesHaveFoldersOfTheirOwn(t *testing.T) {
	ctx, size := t.Context(), 64
	dir, stores := t.TempDir(), map[string]*tier.Store{}
	for _, name := range []string{"../a", "b"} {
		env := connector.Env{Engine: name, Arena: make([]byte, tier.ArenaBytes(2, int64(size)))}
		env.Layout = connector.Layout{Name: "test", Blocks: 4, Groups: []connector.Group{{BlockTokens: 16}}, Segments: []connector.Segment{{BlockStride: int64(size), Bytes: int64(size)}}}
		s, err := open(ctx, env, config{Dir: filepath.Join(dir, "below")})
		require.NoError(t, err)
		defer s.Close()
		stores[name] = s.(*tier.Store)
	}
	ks := []connector.StoreKey{{1}, {2}, {3}}
	for range 2 { // twice, so that it is written below
		for _, k := range ks {
			require.NoError(t, stores["b"].Put(ctx, []connector.Item{{Key: k, Spans: [][]byte{make([]byte, size)}}}))
			require.NoError(t, stores["b"].Flush(ctx))
		}
	}
	for range 2 {
		found, err := stores["../a"].Lookup(ctx, [][]connector.StoreKey{ks})
		require.NoError(t, err)
		require.Equal(t, []int{0}, found)
		emptied, err := stores["../a"].Reset(ctx)
		require.NoError(t, err)
		require.True(t, emptied)
	}
	found, err := stores["b"].Lookup(ctx, [][]connector.StoreKey{ks})
	require.NoError(t, err)
	require.Equal(t, []int{3}, found)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "a name with .. stays inside")
}

// closing is a Store that says how often it was closed.
type closing struct {
	folder
	closed *int
}

func (c closing) Close() error {
	*c.closed++
	return nil
}

// Whoever hands over a lower tier has not to close it, whatever comes of it.
func TestOpenOwnsTheLowerTier(t *testing.T) {
	closed := 0
	lower := closing{folder{t.TempDir()}, &closed}
	_, err := tier.Open(tier.Options{SlotBytes: 16, MemoryBytes: 1, Lower: lower})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.Equal(t, 1, closed)
	s, err := tier.Open(tier.Options{SlotBytes: 16, MemoryBytes: tier.ArenaBytes(1, 16), Lower: lower})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	require.Equal(t, 2, closed)
	_, err = tier.Open(tier.OptionsFor(&connector.Env{}))
	require.ErrorIs(t, err, connector.ErrIncompatible)
}

// The host reads the arena as it has placed it, so no Store puts its blocks elsewhere, and no two of them into the same slots.
func TestOneStoreForAnArena(t *testing.T) {
	var o tier.Options
	h := newHostEnd(t, func(used *tier.Options) { o = *used })
	o.Lower = nil
	refused := func(o tier.Options) {
		t.Helper()
		_, err := tier.Open(o)
		require.ErrorIs(t, err, connector.ErrIncompatible)
	}
	refused(o)
	require.NoError(t, h.save(h.blocks(0, 2)), "the first one goes on")
	require.Len(t, h.placed(h.blocks(0, 2)), 2)
	require.NoError(t, h.store.Close())
	for range 2 { // one that failed uses nothing
		wrong := o
		wrong.Policy = "none"
		refused(wrong)
		wrong = o
		wrong.Memory = append(make([]byte, 0, 2*len(o.Memory)), o.Memory...)
		refused(wrong)
		wrong.Memory = o.Memory[:len(o.Memory)-1]
		refused(wrong)
		wrong.Memory, wrong.MemoryBytes = nil, int64(len(o.Memory))
		refused(wrong)
		wrong = o
		wrong.Memory, wrong.Placement = make([]byte, len(o.Memory)), nil
		other, err := tier.Open(wrong)
		require.NoError(t, err)
		require.NoError(t, other.Close())
	}
	again, err := tier.Open(o)
	require.NoError(t, err)
	require.NoError(t, again.Close())
}

// hostEnd is a worker of memory before a folder, and what its host knows of it.
type hostEnd struct {
	*testing.T
	env    connector.Env
	kv     *connector.KV
	store  *tier.Store
	worker connector.Placer
	host   *place.Host
	rank   func(number, world int) connector.Worker // opens another worker of the same Store
}

const (
	fewSlots  = 8
	blockSize = 64
	manyIDs   = 64
)

func newHostEnd(t *testing.T, change func(o *tier.Options)) *hostEnd {
	return newHostEndOf(t, fewSlots, change)
}

func newHostEndOf(t *testing.T, slots int, change func(o *tier.Options)) *hostEnd {
	g := place.Geometry{Slots: slots, SlotBytes: blockSize}
	arena := make([]byte, g.ArenaBytes())
	memory, err := place.Private(arena)
	require.NoError(t, err)
	h := &hostEnd{T: t}
	h.host, err = place.NewReader(memory, g)
	require.NoError(t, err)
	opening, err := h.host.Reopen()
	require.NoError(t, err)
	h.env = connector.Env{
		Engine: "e", Epoch: 1, Role: connector.RoleBoth, World: 1, Model: connector.NewFingerprint("m"), Shape: connector.NewFingerprint("s"), Arena: arena,
		Placement: &connector.Placement{Slots: slots, SlotBytes: blockSize, Epoch: opening.Epoch, Serial: h.host.Draw(1 << 40)},
		Layout: connector.Layout{
			Name: "test", Blocks: manyIDs, Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}},
			Segments: []connector.Segment{{BlockStride: blockSize, Bytes: blockSize}},
		},
	}
	h.kv, err = connector.NewKV(h.env.Layout, [][]byte{make([]byte, manyIDs*blockSize)})
	require.NoError(t, err)
	d := sdk.Definition{Name: "T", Version: "1", Scope: connector.ScopeEngine, Capabilities: tier.Capabilities, Stats: tier.Infos()}
	p := sdk.FromStore(d, func(_ context.Context, env connector.Env, c config) (connector.Store, error) {
		o := tier.OptionsFor(&env)
		o.Lower, o.AdmitAfter = folder{c.Dir}, 1
		change(&o)
		h.store, err = tier.Open(o)
		return h.store, err
	})
	raw := fmt.Sprintf(`{"memory_bytes": %d, "dir": %q}`, len(arena), t.TempDir())
	h.rank = func(number, world int) connector.Worker {
		env := h.env
		env.Rank, env.World = number, world
		worker, err := p.Worker(t.Context(), env, json.RawMessage(raw))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, worker.Close()) })
		return worker
	}
	var places bool
	h.worker, places = connector.As[connector.Placer](h.rank(0, 1))
	require.True(t, places)
	return h
}

// blocks are those with the numbers from first to before end.
func (h *hostEnd) blocks(first, end int) *connector.Transfer {
	transfer := &connector.Transfer{}
	for n := first; n < end; n++ {
		key := connector.BlockKey{1, byte(n), byte(n >> 8)}
		transfer.Blocks = append(transfer.Blocks, connector.Block{ID: connector.BlockID(n % manyIDs), Key: key})
	}
	return transfer
}

// save saves blocks, which go to the folder, too.
func (h *hostEnd) save(t *connector.Transfer) error {
	slots, err := h.worker.SavePlaced(h.Context(), t, h.kv, nil)
	h.learn(slots)
	require.NoError(h, h.store.Flush(h.Context()))
	return err
}

func (h *hostEnd) load(t *connector.Transfer, used []uint32) {
	slots, err := h.worker.LoadPlaced(h.Context(), t, h.kv, used)
	require.NoError(h, err)
	h.learn(slots)
}

func (h *hostEnd) learn(slots []uint32) {
	for _, s := range slots {
		require.NoError(h, h.host.Notice(&place.Notice{Slots: []place.Slot{place.Slot(s)}}, 0))
	}
}

// placed gives the slots of blocks, if the host knows all of them.
func (h *hostEnd) placed(t *connector.Transfer) (slots []uint32) {
	var keys []connector.StoreKey
	for _, b := range t.Blocks {
		keys = append(keys, connector.NewStoreKey(b.Key, h.env.Shape, 0, connector.Shard{World: 1}))
	}
	refs, err := h.host.Find(keys, 0)
	if err != nil {
		require.ErrorIs(h, err, place.ErrMiss)
	}
	for _, r := range refs {
		slots = append(slots, uint32(r.Slot))
	}
	return slots
}

// Blocks that the host reads all the time stay in memory while others are loaded from below, and those are placed as well.
func TestLoadsPlace(t *testing.T) {
	h := newHostEnd(t, func(*tier.Options) {})
	const cold = 16
	for first := 0; first < cold; first += 4 {
		require.NoError(t, h.save(h.blocks(first, first+4)))
	}
	hot := h.blocks(cold, cold+2)
	require.NoError(t, h.save(hot))
	for round := range 8 {
		used := h.placed(hot)
		require.Len(t, used, 2, "round %d", round)
		other := h.blocks(round%4*4, round%4*4+4)
		h.load(other, used)
		require.Len(t, h.placed(other), 4, "round %d", round)
	}
	h.load(h.blocks(0, 4), nil) // without a word about the hot ones
	h.load(h.blocks(4, 8), nil)
	require.Empty(t, h.placed(hot))
	h.load(hot, nil)
	require.Len(t, h.placed(hot), 2, "once out of memory, and placed again")
}

// Rule PLACE-26: of a save of which one block is declined, the host learns where the others lie.
func TestDeclinedBlockDoesNotHideOthers(t *testing.T) {
	h := newHostEnd(t, func(o *tier.Options) { o.TenantBytes = 3 * blockSize })
	require.ErrorIs(t, h.save(h.blocks(0, 4)), connector.ErrDeclined)
	stored := h.blocks(0, 3)
	require.Empty(t, h.placed(stored))
	h.load(h.blocks(0, 1), nil)
	require.Len(t, h.placed(stored), 3)
	require.Empty(t, h.placed(h.blocks(3, 4)))
}
