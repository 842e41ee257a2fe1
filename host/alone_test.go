package host

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/leaktest"
	"github.com/kvport/kvport/internal/place"
)

// aloneRig is a host whose plugin is gone and stays away. What it had placed lies in an arena.
type aloneRig struct {
	*rig
	placed *placedRig
}

func newAloneRig(t *testing.T, can connector.Capability) *aloneRig {
	t.Helper()
	return newAloneRigWith(t, can, 1, func(*Options) {})
}

// newAloneRigWith is newAloneRig with some ranks and other options.
func newAloneRigWith(t *testing.T, can connector.Capability, ranks int, change func(*Options)) *aloneRig {
	t.Helper()
	o := rigOptions{ranks: ranks, settings: map[string]any{
		"breaker":   map[string]any{"deaths": 1000, "backoff_min": "1h", "backoff_max": "1h"},
		"deadlines": map[string]any{"drain": "100ms", "transfer": "1h", "later": "1h"},
	}}
	cfg, eng, opts := o.build(t)
	change(&opts)
	h := newHost(cfg, eng, opts)
	require.NoError(t, errors.Join(h.identify(), h.openRanks()))
	var err error
	h.metrics, err = newMetrics(opts.Metrics, cfg.Connector, cfg.Settings.Trust)
	require.NoError(t, err)
	h.info = connector.Info{Name: cfg.Connector, Capabilities: connector.CanPlace | can}
	h.place = newPlacement(&h.eng.Layout, h.eng.Shape, len(h.ranks), func(blocks, damaged int) { h.placedFailed(h.info.Name, blocks, damaged) })
	plugin := &thisProcess{done: make(chan struct{})}
	g := h.newGeneration(1, plugin, noScheduler{})
	g.caps |= can
	h.begin(g)
	r := &aloneRig{
		rig:    &rig{Host: h, t: t, ranks: eng.Ranks},
		placed: &placedRig{T: t, p: h.place, ranks: h.ranks, arena: make([]byte, 1<<18)},
	}
	for _, m := range eng.Ranks {
		kv, err := connector.NewKV(eng.Layout, [][]byte{m.Bytes()})
		require.NoError(t, err)
		r.kvs = append(r.kvs, kv)
	}
	r.placed.life()
	plugin.KillFor(errClosing)
	require.Eventually(t, func() bool { return h.Health().State == "restarting" }, time.Minute, time.Millisecond)
	return r
}

// keep makes blocks resident.
func (r *aloneRig) keep(ks []connector.BlockKey) {
	r.t.Helper()
	bs := blocksOf(ks, 0)
	r.digested(bs)
	for n := range r.Host.ranks {
		r.placed.save(n, bs...)
	}
}

// digested fills blocks on all ranks, and makes their digests.
func (r *aloneRig) digested(bs []connector.Block) {
	r.t.Helper()
	r.fill(bs)
	for _, rank := range r.Host.ranks {
		for _, b := range bs {
			require.NoError(r.t, rank.hasher.Make(rank.kv, b))
		}
	}
}

// tried waits until no load of the host's own is under way.
func (r *aloneRig) tried() {
	r.t.Helper()
	require.Eventually(r.t, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.alone) == 0
	}, time.Minute, time.Millisecond)
}

// busyHands keeps all cores of the host's ranks busy until the result is called.
func (r *aloneRig) busyHands() (free func()) {
	hands := r.Host.ranks[0].hands
	for range cap(hands) {
		hands <- struct{}{}
	}
	return func() {
		for range cap(hands) {
			<-hands
		}
	}
}

// Rule PLACE-28: while no plugin is up, the host answers from what is resident, loads it, and counts it; what is not there waits, and a save too.
func TestAlone(t *testing.T) {
	leaks := leaktest.Watch(t)
	r := newAloneRig(t, 0)
	ks := keys(1, 4)
	r.keep(ks[:3])
	require.Equal(t, 3*blockTokens, r.match(query("a", ks[:3]), nil).Tokens)
	require.Equal(t, 3*blockTokens, r.Probe(t.Context(), query("", ks)).Tokens, "what is missing behind it is a miss")
	require.True(t, r.Match(query("part", ks), nil).Later, "the next plugin may have the rest")
	require.Empty(t, r.load("a", ks[:3], 8).Failed)
	require.True(t, r.same(blocksOf(ks[:3], 8)))
	require.InDelta(t, 3, testutil.ToFloat64(r.Host.metrics.alone), 0)
	require.InDelta(t, 3, testutil.ToFloat64(r.Host.metrics.placed), 0)
	require.GreaterOrEqual(t, testutil.ToFloat64(r.Host.metrics.aloneMatches), 2.0)

	other := keys(2, 2)
	require.True(t, r.Match(query("b", other), nil).Later, "the next plugin may have it")
	require.Equal(t, connector.Match{}, r.Probe(t.Context(), query("", other)))
	ticketed := query("c", ks)
	ticketed.Ticket = connector.Ticket("t")
	m, _, sure := r.place.matchAlone(&ticketed)
	require.Equal(t, connector.Match{}, m, "a ticket is a plugin's")
	require.False(t, sure)
	r.place.complete.Store(true)
	require.Equal(t, connector.Match{}, r.match(query("d", other), nil), "it has nothing else, so nobody waits")
	require.Equal(t, 3*blockTokens, r.match(query("e", ks), nil).Tokens)
	r.place.complete.Store(false)

	r.send(&connector.Step{Admitted: []connector.Transfer{transfer("f", other, 16)}, Computed: []connector.Transfer{transfer("g", other, 20)}})
	free := r.busyHands()
	r.send(&connector.Step{Admitted: []connector.Transfer{transfer("h", ks[:2], 24)}})
	require.Equal(t, 3, r.Health().Pending, "they wait: for a plugin, and for a processor")
	require.Zero(t, r.Health().Loading, "no plugin loads")
	r.send(&connector.Step{Preempted: []connector.RequestID{"h"}})
	e := r.next(Loaded)
	require.Equal(t, connector.RequestID("h"), e.Request)
	require.ErrorIs(t, e.Err, context.Canceled)
	require.Len(t, e.Failed, 2)

	r.send(&connector.Step{Admitted: []connector.Transfer{transfer("i", ks[:2], 32)}})
	require.ErrorContains(t, r.closeNow(), "transfers were still running")
	ended := map[connector.RequestID]int{}
	for _, e := range r.seen {
		if e.Kind == Loaded || e.Kind == Saved {
			ended[e.Request]++
		}
	}
	require.Equal(t, map[connector.RequestID]int{"a": 1, "f": 1, "g": 1, "h": 1, "i": 1}, ended)
	free()
	leaks()
}

// Nothing is found from the beginning of a reset to the answer that a plugin which died does not give.
func TestAloneAfterReset(t *testing.T) {
	r := newAloneRig(t, 0)
	ks := keys(1, 2)
	r.keep(ks)
	r.place.pause()
	m, _, sure := r.place.matchAlone(&connector.Query{Tokens: 3 * blockTokens, Keys: ks})
	require.Equal(t, connector.Match{}, m)
	require.False(t, sure)
	r.placed.life()
	require.True(t, r.Match(query("a", ks), nil).Later, "the next life opens with an empty index")
	require.NoError(t, r.closeNow())
}

// What is wrong in a slot is not believed while nobody can be asked: what is before it is the answer, and it is counted.
func TestAloneBesideDamage(t *testing.T) {
	r := newAloneRig(t, 0)
	ks := keys(1, 3)
	r.keep(ks)
	r.place.complete.Store(true)
	slots := r.placed.next
	r.placed.shelf.Bytes(place.Slot(slots-1), 8)[3] ^= 1
	r.send(&connector.Step{Admitted: []connector.Transfer{transfer("a", ks, 8)}})
	r.tried()
	require.True(t, r.place.host.Wrong())
	m, whole, sure := r.place.matchAlone(&connector.Query{Tokens: 4 * blockTokens, Keys: ks})
	require.Equal(t, 2*blockTokens, m.Tokens)
	require.False(t, whole || sure, "a plugin is asked before a damaged block is computed")
	require.NoError(t, r.closeNow())
}

// A connector that divides loads by its plans has none made while it is away: what is resident is loaded whole.
func TestAlonePlanner(t *testing.T) {
	r := newAloneRig(t, connector.CanPlan)
	ks := keys(1, 3)
	r.keep(ks[:2])
	require.Equal(t, 2*blockTokens, r.match(query("a", ks[:2]), nil).Tokens)
	require.Empty(t, r.load("a", ks[:2], 8).Failed)
	require.True(t, r.same(blocksOf(ks[:2], 8)))
	require.Len(t, r.load("b", ks, 8).Failed, 3, "the next life has made no plan for it")
	require.NoError(t, r.closeNow())
}

// Rule PLACE-28: the next life opens while a load of the host's own is under way, and lookups go on; another arena is taken only when
// nobody reads the former one, and nobody waits for that to look something up.
func TestReopenBesideALoad(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	ks := keys(1, 3)
	bs := r.fill(ks, 0)
	r.save(0, bs...)
	hands := r.ranks[0].hands
	stuck := func() (came <-chan bool, free func()) {
		for range cap(hands) {
			hands <- struct{}{}
		}
		result := make(chan bool, 1)
		go func() {
			for !r.p.load(r.Context(), r.ranks[0], 0, bs) { // it was turned away by the look at the lock below
				runtime.Gosched()
			}
			result <- true
		}()
		require.Eventually(t, func() bool { // it is at work, so the arena cannot be taken
			if r.p.mu.TryLock() {
				r.p.mu.Unlock()
				return false
			}
			return true
		}, time.Minute, time.Millisecond)
		return result, func() {
			for range cap(hands) {
				<-hands
			}
		}
	}
	came, free := stuck()
	require.Equal(t, 3, r.life(), "it does not wait for the load")
	m, _, _ := r.p.matchAlone(r.query(ks, 0))
	require.Equal(t, 48, m.Tokens)
	free()
	require.True(t, <-came, "its slots have had no other use")

	came, free = stuck()
	old := r.arena
	r.arena = make([]byte, len(old))
	var next sync.WaitGroup
	next.Go(func() { r.life() })
	require.Eventually(t, func() bool { return !r.p.open() }, time.Minute, time.Millisecond, "the arena is about to be taken")
	m, _, sure := r.p.matchAlone(r.query(ks, 0))
	require.Equal(t, connector.Match{}, m)
	require.False(t, sure)
	require.False(t, r.p.load(t.Context(), r.ranks[0], 0, bs))
	free()
	require.True(t, <-came)
	next.Wait()
	require.True(t, r.p.open())
	require.Zero(t, r.p.host.Resident(), "the index is that of the other arena")
}

// Lives that come and go beside lookups and loads: whoever finds something reads what was saved, and every life draws serials of its own.
func TestReopenBesideReaders(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	ks := keys(1, 4)
	bs := r.fill(ks, 0)
	r.save(0, bs...)
	ctx, cancel := context.WithCancel(t.Context())
	var readers sync.WaitGroup
	var loads atomic.Int64
	for i := range 2 {
		readers.Go(func() {
			to := connector.Block{ID: connector.BlockID(placedBlocks/2 + i), Key: bs[i].Key}
			want, err := r.ranks[0].kv.Spans(bs[i])
			got, errs := r.ranks[0].kv.Spans(to)
			for err == nil && errs == nil && ctx.Err() == nil {
				if m, _, _ := r.p.matchAlone(r.query(ks, 0)); m.Tokens != 64 {
					t.Errorf("a match of %d tokens", m.Tokens)
					return
				}
				switch came := r.p.load(ctx, r.ranks[0], 0, []connector.Block{to}); {
				case came && !slices.EqualFunc(want, got, bytes.Equal):
					t.Error("a load brought other bytes")
					return
				case came:
					loads.Add(1)
				case ctx.Err() == nil:
					t.Errorf("a resident block is not loaded, %d could not be used", r.failed.Load())
					return
				}
			}
		})
	}
	serials := map[uint64]bool{}
	for lives := 0; !t.Failed() && (lives < 200 || loads.Load() < 100); lives++ {
		require.Equal(t, len(bs), r.life())
		require.False(t, serials[r.env.Serial], "the first serial of a life that is over")
		serials[r.env.Serial] = true
	}
	cancel()
	readers.Wait()
}

// What a death leaves half written, given up or with a header that is not right is not there between the lives, and the next life does not keep it.
func TestAloneBesideWhatADeathLeaves(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	ks := keys(1, 5)
	bs := r.fill(ks, 0)
	slots := r.save(0, bs...)
	finds := func(blocks int) {
		t.Helper()
		m, _, sure := r.p.matchAlone(r.query(ks, 0))
		require.Equal(t, 16*blocks, m.Tokens)
		require.False(t, sure)
		require.True(t, r.loaded(0, bs[:blocks]...))
	}
	finds(5)
	r.shelf.Begin(place.Slot(slots[4]))
	finds(4)
	r.shelf.Retire(place.Slot(slots[3]))
	finds(3)
	r.arena[4096+128*int(slots[2])+20] ^= 1 // of its key
	finds(2)
	require.Equal(t, 2, r.life())
	finds(2)
}
