package host

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/internal/tracker"
	"github.com/kvport/kvport/internal/wire"
	"github.com/kvport/kvport/verify/testkit"
)

// placedRig is an engine with a plugin that places: the plugin's end is a Shelf in this process.
type placedRig struct {
	*testing.T
	p     *placement
	arena []byte
	env   *connector.Placement
	shelf *place.Shelf
	ranks []*rank
	next  uint32 // slot

	complete        bool         // says its plugin when it opens
	failed, damaged atomic.Int64 // blocks that were found in slots and could not be used
}

const placedBlocks = 32

func newPlacedRig(t *testing.T, world int, groups ...connector.Group) *placedRig {
	layout := connector.Layout{Name: "placed", Blocks: placedBlocks, Groups: groups}
	at := int64(0)
	for g := range groups {
		for layer := range 3 {
			n := int64(1000 + 16*g)
			layout.Segments = append(layout.Segments, connector.Segment{Layer: layer, Group: uint16(g), Offset: at, BlockStride: n, Bytes: n})
			at += n * placedBlocks
		}
	}
	layout, size := digest.WithSegments(layout, at)
	r := &placedRig{T: t, p: newPlacement(&layout, connector.NewFingerprint("shape"), world, nil)}
	r.p.failed = func(blocks, damaged int) {
		r.failed.Add(int64(blocks))
		r.damaged.Add(int64(damaged))
	}
	for n := range world {
		kv, err := connector.NewKV(layout, [][]byte{make([]byte, size)})
		require.NoError(t, err)
		r.ranks = append(r.ranks, &rank{
			kv: kv, hands: make(chan struct{}, 2),
			hasher: digest.New(digest.XXH3(), connector.NewFingerprint("model"), r.p.shape, connector.Shard{Rank: n, World: world}),
		})
	}
	r.arena = make([]byte, 1<<18)
	r.life()
	return r
}

// life opens the next life of the plugin.
func (r *placedRig) life() (found int) {
	var err error
	r.env, err = r.p.reopen(r.arena, r.complete)
	require.NoError(r, err)
	require.NotNil(r, r.env)
	g := place.Geometry{Slots: r.env.Slots, SlotBytes: r.env.SlotBytes}
	memory, err := place.Private(r.arena[:g.ArenaBytes()])
	require.NoError(r, err)
	shelf, all, _, err := place.OpenShelf(memory, g, place.ShelfOpening{Epoch: r.env.Epoch, Serial: r.env.Serial}, 0)
	require.NoError(r, err)
	r.shelf = shelf
	return len(all)
}

// fill computes blocks of all groups in the cache of each rank.
func (r *placedRig) fill(keys []connector.BlockKey, group uint16) (bs []connector.Block) {
	for i, k := range keys {
		b := connector.Block{ID: connector.BlockID(int(group)*8 + i), Key: k, Group: group}
		for n, rank := range r.ranks {
			rng := rand.New(rand.NewPCG(binary.LittleEndian.Uint64(k[:]), uint64(n)<<16|uint64(group)))
			for _, s := range rank.kv.Segments(group) {
				for j := range rank.kv.View(s, b.ID) {
					rank.kv.View(s, b.ID)[j] = byte(rng.Uint32())
				}
			}
			require.NoError(r, rank.hasher.Make(rank.kv, b))
		}
		bs = append(bs, b)
	}
	return bs
}

// save has the plugin store blocks of one rank, and the host learn where.
func (r *placedRig) save(n int, bs ...connector.Block) (slots []uint32) {
	for _, b := range bs {
		spans, err := r.ranks[n].kv.Spans(b)
		require.NoError(r, err)
		data := slices.Concat(spans...)
		slot := place.Slot(r.next)
		r.next++
		r.shelf.Begin(slot)
		copy(r.shelf.Bytes(slot, len(data)), data)
		r.shelf.Publish(slot, &place.Header{Key: r.p.key(b.Key, b.Group, n), Length: uint32(len(data)), Group: b.Group})
		slots = append(slots, uint32(slot))
	}
	require.NoError(r, r.p.learn(slots, len(slots)))
	return slots
}

// loaded loads blocks of one rank into other places of the cache, and says whether they came. They are right then.
func (r *placedRig) loaded(n int, bs ...connector.Block) bool {
	to := slices.Clone(bs)
	for i := range to {
		to[i].ID += placedBlocks / 2
	}
	if !r.p.load(r.Context(), r.ranks[n], n, to) {
		return false
	}
	for i := range to {
		want, err := r.ranks[n].kv.Spans(bs[i])
		require.NoError(r, err)
		got, err := r.ranks[n].kv.Spans(to[i])
		require.NoError(r, err)
		require.Equal(r, bytes.Join(want, nil), bytes.Join(got, nil), "block %d of rank %d", i, n)
	}
	return true
}

func (r *placedRig) query(keys []connector.BlockKey, computed int) *connector.Query {
	return &connector.Query{Request: "r", Tokens: 16*len(keys) + 5, Keys: keys, Computed: computed}
}

func all() connector.Group { return connector.Group{BlockTokens: 16, Policy: connector.PolicyAll} }

// Rule PLACE-23: what is resident on all ranks and in all groups is matched and loaded without the plugin, and nothing else is.
func TestPlacement(t *testing.T) {
	r := newPlacedRig(t, 2, all(), connector.Group{BlockTokens: 16, Policy: connector.PolicyTrailing, Trailing: 2})
	ks := keys(1, 5)
	first, second := r.fill(ks, 0), r.fill(ks, 1)
	_, ok := r.p.match(r.query(ks, 0))
	require.False(t, ok)
	for n := range 2 {
		r.save(n, first...)
		_, ok = r.p.match(r.query(ks, 0))
		require.False(t, ok, "the second group is missing")
		r.save(n, second[3:]...)
		m, ok := r.p.match(r.query(ks, 32))
		require.Equal(t, n == 1, ok)
		if ok {
			require.Equal(t, connector.Match{Tokens: 48, Async: true}, m)
		}
	}
	_, ok = r.p.match(r.query(append(slices.Clone(ks), keys(9, 1)...), 0))
	require.False(t, ok, "the last block is not resident")
	_, ok = r.p.match(r.query(ks[:4], 0))
	require.False(t, ok, "the second group needs a block that is not resident")
	_, ok = r.p.match(r.query(ks, 80))
	require.False(t, ok, "all is computed")
	q := r.query(ks, 0)
	q.Ticket = connector.Ticket("t")
	_, ok = r.p.match(q)
	require.False(t, ok, "a ticket is for the plugin")
	for n := range 2 {
		require.True(t, r.loaded(n, first...))
		require.True(t, r.loaded(n, second[3:]...))
		require.False(t, r.loaded(n, second...))
		require.False(t, r.loaded(n, connector.Block{ID: 1}), "a partial block")
	}
	require.Equal(t, []uint32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}, slices.Sorted(slices.Values(r.p.takeUsed())))
	require.Empty(t, r.p.takeUsed())
}

// Rule PLACE-23: of a plugin that has nothing but what it has placed, a query gets the longest prefix from which every group of
// every rank can go on, and no message is sent for what is nowhere.
func TestPlacementComplete(t *testing.T) {
	r := newPlacedRig(t, 2, all(), connector.Group{BlockTokens: 16, Policy: connector.PolicyTrailing, Trailing: 2})
	ks := keys(1, 5)
	finds := func(tokens, computed int) {
		t.Helper()
		m, ok := r.p.match(r.query(ks, computed))
		require.True(t, ok)
		require.Equal(t, connector.Match{Tokens: tokens, Async: tokens > 0}, m)
	}
	first, second := r.fill(ks, 0), r.fill(ks, 1)
	_, ok := r.p.match(r.query(ks, 0))
	require.False(t, ok, "it has not said so")
	r.complete = true
	r.life()
	finds(0, 0)
	r.save(0, first[:4]...)
	r.save(0, second...)
	finds(0, 0)
	r.save(1, first[:3]...)
	tail := r.save(1, second[1:3]...)
	finds(48, 0)
	finds(28, 20)
	finds(0, 48)
	finds(0, 80)
	q := r.query(ks, 0)
	q.Ticket = connector.Ticket("t")
	_, ok = r.p.match(q)
	require.False(t, ok, "a ticket is for the plugin")
	r.shelf.Retire(place.Slot(tail[1]))
	finds(0, 0) // the first two blocks are no use without the second group's first
	slots := r.save(1, second[0])
	finds(32, 0)
	finds(16, 16)

	r.shelf.Bytes(place.Slot(slots[0]), 8)[3] ^= 1
	require.False(t, r.loaded(1, second[0]))
	_, ok = r.p.match(r.query(ks, 0))
	require.False(t, ok, "a block is wrong, which the plugin's load finds out")
	m, ok := r.p.match(&connector.Query{Request: "r", Tokens: 37, Keys: ks[:2], Computed: 16})
	require.True(t, ok, "all of it is there")
	require.Equal(t, 16, m.Tokens)
	r.next = slots[0]
	r.save(1, second[0])
	finds(32, 0)
	failed, later := errors.New("a block was declined"), error(nil)
	over, beside := r.p.call(r.ranks[1]), r.p.call(r.ranks[1])
	over(&failed)
	beside(&later)
	_, ok = r.p.match(r.query(ks, 0))
	require.False(t, ok, "what it has stored with the answer that failed it names with the next one")
	r.p.call(r.ranks[0])(&later)
	_, ok = r.p.match(r.query(ks, 0))
	require.False(t, ok, "that of the same rank")
	r.p.call(r.ranks[1])(&later)
	finds(32, 0)
	resume := r.p.pause()
	_, ok = r.p.match(r.query(ks, 0))
	require.False(t, ok, "a reset is on its way")
	resume()
	finds(0, 0)
	r.complete = false
	r.life()
	_, ok = r.p.match(r.query(ks, 0))
	require.False(t, ok, "its next life does not say so")
}

// The prefix is the longest one, whatever is resident.
func TestPlacementPrefix(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 0))
	groups := []connector.Group{{BlockTokens: 16, Policy: connector.PolicyTrailing, Trailing: 1}, all(), {BlockTokens: 16, Policy: connector.PolicyTrailing, Trailing: 3}}
	ks, hits := keys(1, 8), 0
	for range 200 {
		r := newPlacedRig(t, 2, groups...)
		r.complete = true
		r.life()
		have := map[[3]int]bool{} // by group, rank and block
		for g := range groups {
			bs := r.fill(ks, uint16(g))
			for n := range 2 {
				for i := range bs {
					if have[[3]int{g, n, i}] = rng.IntN(10) > 0; have[[3]int{g, n, i}] {
						r.save(n, bs[i])
					}
				}
			}
		}
		computed := rng.IntN(16 * len(ks))
		first := computed / 16
		fits := func(end int) bool {
			for g, group := range groups {
				from := first
				if group.Policy == connector.PolicyTrailing {
					from = max(first, end-group.Trailing)
				}
				for i := from; i < end; i++ {
					if !have[[3]int{g, 0, i}] || !have[[3]int{g, 1, i}] {
						return false
					}
				}
			}
			return true
		}
		want := len(ks)
		for !fits(want) {
			want--
		}
		m, ok := r.p.match(r.query(ks, computed))
		require.True(t, ok)
		require.Equal(t, max(0, 16*want-computed), m.Tokens)
		hits += m.Tokens
	}
	require.Positive(t, hits)
}

// A block whose slot is not what it was is copied once, and then asked of the plugin.
func TestPlacementForgetsWhatIsWrong(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	ks := keys(1, 2)
	bs := r.fill(ks, 0)
	slots := r.save(0, bs...)
	require.True(t, r.loaded(0, bs...))
	r.shelf.Bytes(place.Slot(slots[1]), 8)[3] ^= 1
	_, ok := r.p.match(r.query(ks, 0))
	require.True(t, ok, "nobody has looked")
	require.False(t, r.loaded(0, bs...))
	require.EqualValues(t, 1, r.failed.Load())
	require.EqualValues(t, 1, r.damaged.Load(), "rule HOST-04: it is counted, whatever the plugin brings then")
	_, ok = r.p.match(r.query(ks, 0))
	require.False(t, ok)
	_, ok = r.p.match(r.query(ks[:1], 0))
	require.True(t, ok)
	require.NoError(t, r.p.learn(slots, len(slots)))
	_, ok = r.p.match(r.query(ks, 0))
	require.False(t, ok, "the plugin may name it as often as it likes")
	r.next = slots[1]
	r.save(0, bs[1])
	require.True(t, r.loaded(0, bs...), "it was written again")
	require.EqualValues(t, 1, r.failed.Load())
}

// What is wrong in a slot is counted and logged as what a plugin loads wrongly, and what was given up meanwhile is counted apart.
func TestPlacedFailuresAreCounted(t *testing.T) {
	var log testkit.Log
	h := &Host{log: slog.New(slog.NewTextHandler(&log, nil))}
	var err error
	h.metrics, err = newMetrics(nil, "X", TrustInPlace)
	require.NoError(t, err)
	h.placedFailed("x", 3, 0)
	require.Empty(t, log.String())
	h.placedFailed("x", 2, 1)
	require.Contains(t, log.String(), "damaged blocks in the connector's memory")
	require.InDelta(t, 5, testutil.ToFloat64(h.metrics.placedFailed), 0)
	require.InDelta(t, 1, testutil.ToFloat64(h.metrics.integrity), 0)
}

// Rule HOST-03: what the host copies by itself is given up at its deadline, and ends no plugin, which knows nothing of it.
func TestPlacedLoadEndsAtItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newPlacedRig(t, 1, all())
		bs := r.fill(keys(1, 3), 0)
		r.save(0, bs...)
		h := &Host{place: r.p, ranks: r.ranks}
		var err error
		h.metrics, err = newMetrics(nil, "X", TrustInPlace)
		require.NoError(t, err)
		load := func(ctx context.Context) tracker.Outcome {
			g := &generation{workers: []connector.Worker{nil}} // whoever calls the plugin ends the test
			return h.move(ctx, g, &tracker.Move{Kind: tracker.Load, Transfer: &connector.Transfer{Blocks: bs}, Check: bs}, nil)
		}
		hands := r.ranks[0].hands
		for range cap(hands) { // others keep all cores busy
			hands <- struct{}{}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, load(ctx).Err, context.DeadlineExceeded)
		for range cap(hands) {
			<-hands
		}
		require.ErrorIs(t, load(ctx).Err, context.DeadlineExceeded, "nothing is begun after the deadline")
		require.Empty(t, hands)
		require.Empty(t, r.p.takeUsed())
		require.Equal(t, tracker.Outcome{Placed: 3}, load(t.Context()))
		require.InDelta(t, 3, testutil.ToFloat64(h.metrics.placed), 0)
	})
}

// A load that brought a wrong block teaches nothing: the slots that it names may hold what was wrong.
func TestPlacementOfCorruptLoads(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	bs := r.fill(keys(1, 2), 0)
	slots := r.save(0, bs...)
	r.p.forget()
	h := &Host{place: r.p}
	h.learnArrived(slots, len(bs), &unreadable{corrupt: []connector.BlockID{bs[0].ID}})
	require.Zero(t, r.p.host.Resident())
	h.learnArrived(slots, len(bs), &unreadable{})
	require.Equal(t, 2, r.p.host.Resident())
}

// A block of another length is found once, and then asked of the plugin.
func TestPlacementForgetsOtherLengths(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	ks := keys(1, 1)
	bs := r.fill(ks, 0)
	r.shelf.Begin(0)
	r.shelf.Publish(0, &place.Header{Key: r.p.key(ks[0], 0, 0), Length: 8})
	require.NoError(t, r.p.learn([]uint32{0}, 1))
	_, ok := r.p.match(r.query(ks, 0))
	require.True(t, ok)
	require.False(t, r.loaded(0, bs...))
	require.EqualValues(t, 1, r.failed.Load())
	require.Zero(t, r.damaged.Load())
	_, ok = r.p.match(r.query(ks, 0))
	require.False(t, ok)
}

// placingWorker names slots with each call.
type placingWorker struct {
	connector.Worker
	used, slots []uint32
}

func (w *placingWorker) SavePlaced(_ context.Context, _ *connector.Transfer, _ *connector.KV, used []uint32) ([]uint32, error) {
	w.used = used
	return w.slots, nil
}

func (w *placingWorker) LoadPlaced(_ context.Context, _ *connector.Transfer, _ *connector.KV, used []uint32) ([]uint32, error) {
	w.used = used
	return w.slots, nil
}

// Rule PLACE-23: the plugin hears with a load which slots were read, and what it has brought into slots is loaded without it from then on.
func TestPlacementOfLoads(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	bs := r.fill(keys(1, 3), 0)
	w := &placingWorker{slots: r.save(0, bs...)}
	require.True(t, r.loaded(0, bs...))
	r.p.forget()
	require.False(t, r.loaded(0, bs...))
	h := &Host{place: r.p}
	load := func() {
		named, err := r.p.loadBy(t.Context(), w, &connector.Transfer{Blocks: bs}, r.ranks[0].kv)
		require.NoError(t, err)
		h.learn(named, len(bs))
	}
	silent := &placingWorker{} // it knows nothing of loads
	_, err := r.p.loadBy(t.Context(), silent, &connector.Transfer{Blocks: bs}, r.ranks[0].kv)
	require.NoError(t, err)
	load()
	require.Empty(t, silent.used)
	require.Empty(t, w.used, "until the first load that names slots, uses wait for a save")
	require.True(t, r.loaded(0, bs...))
	load()
	require.Len(t, w.used, 2*len(w.slots))
	require.Equal(t, w.slots, slices.Compact(w.used), "in the order in which they were read, each as often as it was read")
	load()
	require.Empty(t, w.used, "each read is told once")
	resume := r.p.pause()
	load()
	require.Zero(t, r.p.host.Resident(), "named during a reset")
	resume()
	require.False(t, r.loaded(0, bs...))
}

// Rule PLACE-26: what a plugin names is bounded by what it was asked for, and what is known already is not looked at again.
func TestPlacementIsToldMuch(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	bs := r.fill(keys(1, 3), 0)
	slots := r.save(0, bs...)
	many := slices.Repeat(slots[:1], 1+wire.MaxUnnamed)
	require.NoError(t, r.p.learn(many, 1))
	require.ErrorContains(t, r.p.learn(append(many, slots[1]), 1), "slots are named for 1 blocks")
	require.True(t, r.loaded(0, bs...))
	allocated := testing.AllocsPerRun(1, func() { require.NoError(t, r.p.learn(many, 1)) })
	require.Less(t, allocated, 2*float64(len(many)), "nothing is read of a slot that is known")
	for _, s := range slots {
		require.True(t, r.p.host.Knows(place.Slot(s)))
	}
	require.False(t, r.p.host.Knows(place.Slot(r.env.Slots)))
	require.False(t, r.p.host.Knows(place.Slot(slots[2]+1)))
	r.shelf.Retire(place.Slot(slots[1]))
	require.False(t, r.p.host.Knows(place.Slot(slots[1])), "it is in use no more")
	r.next = slots[1]
	r.save(0, bs[1])
	require.True(t, r.loaded(0, bs...), "it has another use, of which the host has learned")
}

// Rule PLACE-23: the blocks of a plugin that died stay known, if its next life keeps them; other memory has none.
func TestPlacementOverLives(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	bs := r.fill(keys(1, 3), 0)
	slots := r.save(0, bs...)
	r.shelf.Begin(place.Slot(slots[2])) // it dies while it gives that one's slot to another block
	require.Equal(t, 2, r.life())
	require.True(t, r.loaded(0, bs[:2]...))
	require.False(t, r.loaded(0, bs...))
	r.arena = make([]byte, len(r.arena))
	require.Zero(t, r.life())
	require.False(t, r.loaded(0, bs[0]))
	r.next = 0
	r.save(0, bs...)
	require.True(t, r.loaded(0, bs...))
	r.p.close()
	require.False(t, r.loaded(0, bs...))
	_, ok := r.p.match(r.query(keys(1, 3), 0))
	require.False(t, ok)
	require.NoError(t, r.p.learn(slots, len(slots)))
}

// Rule PLACE-24: from the beginning of a reset until its answer nothing is placed, and what was said before counts for nothing.
func TestPlacementReset(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	bs := r.fill(keys(1, 3), 0)
	slots := r.save(0, bs...)
	resume := r.p.pause()
	require.False(t, r.loaded(0, bs...))
	require.NoError(t, r.p.learn(slots, len(slots)), "of a save before the reset")
	for _, s := range slots[:2] {
		r.shelf.Retire(place.Slot(s))
	}
	resume()
	require.False(t, r.loaded(0, bs[2]), "the host has forgotten what the plugin has not")
	require.NoError(t, r.p.learn(slots, len(slots)))
	require.False(t, r.loaded(0, bs[0]))
	require.True(t, r.loaded(0, bs[2]))
}

// Rule PLACE-23: whatever a plugin writes into slots and headers, or names, no wrong byte counts as a block.
func TestPlacementLies(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 0))
	came, refused, faults := 0, 0, 0
	for range 300 {
		r := newPlacedRig(t, 1, all())
		bs := r.fill(keys(1, 4), 0)
		r.save(0, bs...)
		for range 1 + rng.IntN(3) {
			switch rng.IntN(3) {
			case 0: // a byte of a block
				at := int(r.p.kv.Layout().Segments[0].Offset) + rng.IntN(4*int(r.p.kv.Layout().Segments[0].BlockStride))
				r.arena[at] ^= 1 << rng.IntN(8)
			case 1: // a byte of a header
				r.arena[4096+rng.IntN(4*128)] ^= 1 << rng.IntN(8)
			case 2: // a name
				if r.p.learn([]uint32{rng.Uint32N(uint32(2 * r.env.Slots))}, 1) != nil {
					faults++
				}
			}
		}
		for _, b := range bs {
			if r.loaded(0, b) {
				came++
			} else {
				refused++
			}
		}
	}
	t.Logf("%d loads came and were right, %d went to the plugin; %d answers were refused", came, refused, faults)
	require.Positive(t, came)
	require.Positive(t, refused)
	require.Positive(t, faults)
}
