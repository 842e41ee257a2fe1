package host

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/tracker"
)

// rank is one rank's paged cache as the host uses it: to make and check digests.
type rank struct {
	kv      *connector.KV
	landing *landing // nil: the plugin maps the cache
	hasher  *digest.Hasher
	hands   chan struct{} // as many digests are computed at once as there are cores; shared by all ranks
}

// openRanks checks the layout and wraps the regions.
func (h *Host) openRanks() error {
	layout := &h.eng.Layout
	if len(h.eng.Ranks) == 0 {
		return fmt.Errorf("engine has no ranks: %w", connector.ErrIncompatible)
	}
	digests := make([]bool, len(layout.Groups))
	for _, s := range layout.Segments {
		if s.Layer == connector.DigestLayer && int(s.Group) < len(digests) {
			digests[s.Group] = true
		}
	}
	for g, has := range digests {
		if !has {
			return fmt.Errorf("layout: group %d has no digest segment, see WithDigests: %w", g, connector.ErrIncompatible)
		}
	}
	if err := h.openDigests(); err != nil {
		return err
	}
	hands := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i, r := range h.eng.Ranks {
		kv, err := connector.NewKV(*layout, [][]byte{r.Bytes()})
		if err != nil {
			return fmt.Errorf("rank %d: %w", i, err)
		}
		shard := connector.Shard{Rank: i, World: len(h.eng.Ranks)}
		h.ranks = append(h.ranks, &rank{
			kv: kv, hasher: h.hasher(h.eng.Shape, shard), hands: hands,
		})
	}
	return h.openLanding()
}

// hasher makes and checks the digests of one rank of an engine with our model: of ours, or of one with another shape.
func (h *Host) hasher(shape connector.Fingerprint, shard connector.Shard) *digest.Hasher {
	return digest.New(h.digests, h.eng.Model, shape, shard)
}

// startMove runs a load or save on one rank. The caller holds mu.
func (h *Host) startMove(a *tracker.Move) {
	if a.Gen == 0 {
		h.loadAlone(a)
		return
	}
	g := h.gen
	ctx, cancel := context.WithDeadline(context.Background(), a.Deadline)
	g.cancels[a.ID] = cancel
	ctx = h.losing(ctx, a.ID)
	count := g.follow(a)
	g.work.Go(func() {
		defer cancel()
		out := h.move(ctx, g, a, count)
		if out.Lost {
			g.down(errors.New("worker side: the connection is gone"))
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(g.cancels, a.ID)
		delete(g.layers, a.ID)
		h.do(h.tracker.Moved(time.Now(), a.ID, out))
	})
}

// move makes the digests of what is saved and checks those of what was loaded, while the bytes are
// hot.
func (h *Host) move(ctx context.Context, g *generation, a *tracker.Move, count *connector.LayerCount) tracker.Outcome {
	r, w, t := h.ranks[a.Rank], g.workers[a.Rank], a.Transfer
	if a.Computing {
		p := &sealedProgress{inner: count, rank: r, move: a}
		err := a.Back(h.saveLayers(ctx, w, p))
		return tracker.Outcome{Err: err, Lost: errors.Is(err, plugin.ErrLost), Layers: p.told()}
	}
	if a.Kind == tracker.Save {
		return h.saveBlocks(ctx, r, w, a)
	}
	if err := fault.Point("host.load"); err != nil {
		return tracker.Outcome{Err: err}
	}
	if a.Source != nil {
		return h.reshape(ctx, g, a)
	}
	if out, over := h.loadPlaced(ctx, r, a); over {
		return out
	}
	placed, announced, err := h.loadOrOverlap(ctx, r, w, a)
	if errors.Is(err, plugin.ErrLost) {
		return tracker.Outcome{Err: err, Lost: true}
	}
	if err == nil && !announced {
		h.landed(r, a)
	}
	if a.Check == nil { // they get no digests: that would say that they are right (rule TAINT-01)
		h.metrics.unchecked.WithLabelValues(h.metrics.name, "lossy").Add(float64(len(tracker.Arrived(t.Blocks, err))))
	}
	found := h.arrive(r, a, announced, err)
	fault.Crash("host.load.checked")
	h.learnArrived(placed, len(t.Blocks), &found)
	h.unread(&found, len(t.Blocks), err)
	return tracker.Outcome{Err: err, Corrupt: found.corrupt, Foreign: found.foreign, Outdated: found.outdated}
}

// saveBlocks saves blocks that are computed: into slots that were lent ahead, or by a call of the plugin.
func (h *Host) saveBlocks(ctx context.Context, r *rank, w connector.Worker, a *tracker.Move) tracker.Outcome {
	if err := fault.Point("host.save"); err != nil {
		return tracker.Outcome{Err: err}
	}
	if h.saveLent(ctx, r, a) {
		return tracker.Outcome{}
	}
	if err := ctx.Err(); err != nil { // a plugin that knows nothing of it need not die for it (rule HOST-03)
		return tracker.Outcome{Err: err}
	}
	if err := r.makeDigests(a.Transfer.Blocks, a.Slots); err != nil {
		return tracker.Outcome{Err: err}
	}
	fault.Crash("host.save.digested")
	err := h.save(ctx, r, w, a)
	fault.Crash("host.saved")
	return tracker.Outcome{Err: err, Lost: errors.Is(err, plugin.ErrLost)}
}

// loadPlaced loads all blocks of a move without the plugin; over is false if it has to be asked for them. Blocks that are not verified,
// and those of a ticket, are always the plugin's. A load that is not over at its deadline fails without a call: a plugin that
// knows nothing of it need not die for it (rule HOST-03). Nor is it asked once the engine has learned of a layer.
func (h *Host) loadPlaced(ctx context.Context, r *rank, a *tracker.Move) (out tracker.Outcome, over bool) {
	blocks := a.Transfer.Blocks
	if len(a.Check) != len(blocks) || len(a.Transfer.Ticket) > 0 {
		return out, false
	}
	arrived, told := h.layersOf(a)
	did := h.place.loadLayers(ctx, r, a.Rank, a.Check, arrived)
	told() // before anything is taken back: what is told later would count again
	late := ctx.Err()
	if did.whole {
		late = nil
	} else if late == nil && (!did.announced || h.retract(a.ID)) {
		h.place.tally(&did)
		return out, false
	}
	if n := did.failed(); n > 0 {
		h.place.fail(n, 0) // the end of the load counts what is damaged
		h.unread(&did.found, 0, nil)
	}
	out = did.outcome(len(blocks), late)
	h.metrics.placed.Add(float64(out.Placed))
	return out, true
}

// placedFailed counts blocks that the host found in slots and could not use: most often the plugin is asked for them. Those that are not what was saved
// count as what a plugin loads so (rule HOST-04), although the load by message may bring them right.
func (h *Host) placedFailed(name string, blocks, damaged int) {
	h.metrics.placedFailed.Add(float64(blocks))
	if damaged > 0 {
		h.metrics.integrity.Add(float64(damaged))
		h.log.Warn("damaged blocks in the connector's memory, they are not used", "connector", name, "blocks", damaged)
	}
}

// save lets a worker read the blocks of a move: in the cache, or a copy of them.
func (h *Host) save(ctx context.Context, r *rank, w connector.Worker, a *tracker.Move) (err error) {
	defer h.place.call(r)(&err)
	if r.landing == nil {
		return h.saveTo(ctx, w, a.ID, a.Transfer, r.kv)
	}
	h.metrics.copied.WithLabelValues(h.metrics.name, "save").Add(r.size(a.Transfer.Blocks))
	return a.Back(h.saveTo(ctx, w, a.ID, a.Seen(), r.landing.kv))
}

// tellingSaver is a worker that knows before its Save is over that what a ticket promises is stored: that of
// a MultiConnector.
type tellingSaver interface {
	SaveTelling(ctx context.Context, t *connector.Transfer, kv *connector.KV, promised func()) error
}

func (h *Host) saveTo(ctx context.Context, w connector.Worker, id tracker.CallID, t *connector.Transfer, kv *connector.KV) error {
	if s, tells := w.(tellingSaver); tells {
		return s.SaveTelling(ctx, t, kv, func() { h.stored(id) })
	}
	slots, err := h.place.saveBy(ctx, w, t, kv)
	h.learn(slots, len(t.Blocks))
	return err
}

// stored says that all that a ticket promises of a save is stored.
func (h *Host) stored(id tracker.CallID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.do(h.tracker.Stored(time.Now(), id))
}

// load lets a worker fill the blocks of a move: in the cache, or in landing memory. placed are slots that it names.
func (h *Host) load(ctx context.Context, r *rank, w connector.Worker, a *tracker.Move) (placed []uint32, err error) {
	defer h.place.call(r)(&err)
	if r.landing == nil {
		return h.place.loadBy(ctx, w, a.Transfer, r.kv)
	}
	placed, err = h.place.loadBy(ctx, w, a.Seen(), r.landing.kv)
	return placed, a.Back(err)
}

// learnArrived takes note of slots that a load of that many blocks has named, unless they may be those of what was wrong.
func (h *Host) learnArrived(slots []uint32, moved int, found *unreadable) {
	if len(found.corrupt) == 0 {
		h.learn(slots, moved)
	}
}

// learn takes note of slots that a save or a load of that many blocks has named.
func (h *Host) learn(slots []uint32, moved int) {
	if h.place == nil {
		return
	}
	if wrong := h.place.learn(slots, moved); wrong != nil {
		h.violation("placement: " + wrong.Error())
	}
}

// landed says to the engine that the bytes of a load are in a rank's cache and about to be checked. A Planner divides loads,
// so what has come of one may be a part of it.
func (h *Host) landed(r *rank, a *tracker.Move) {
	if h.opts.Landed != nil && a.Check != nil && r.landing == nil && h.caps&connector.CanPlan == 0 {
		h.opts.Landed(a.Transfer.Request, a.Rank)
	}
}

// arrive takes what a worker has loaded, as its error says, into the cache, and checks what must be verified. announced
// says that the engine may be using layers of it.
func (h *Host) arrive(r *rank, a *tracker.Move, announced bool, err error) (found unreadable) {
	check := tracker.Arrived(a.Check, err)
	if announced {
		return h.checkOverlapped(r, a, check)
	}
	if r.landing == nil {
		return r.checkDigests(check)
	}
	fault.Crash("host.load.answered")
	if a.Check == nil {
		r.busy(func() { r.copyIn(a.In(err)) })
	} else {
		found = r.verifyIn(a.In(err), check)
	}
	h.metrics.copied.WithLabelValues(h.metrics.name, "load").Add(r.size(a.Transfer.Blocks))
	return found
}

// busy runs what keeps a core busy.
func (r *rank) busy(f func()) {
	r.hands <- struct{}{}
	defer func() { <-r.hands }()
	f()
}

// size is the length of some blocks in bytes.
func (r *rank) size(blocks []connector.Block) float64 {
	n := int64(0)
	for _, b := range blocks {
		n += r.kv.Layout().BlockBytes(b.Group)
	}
	return float64(n)
}

// makeDigests makes the digests of the blocks that are full. If they have landing slots, all blocks are copied there in the same pass.
func (r *rank) makeDigests(blocks []connector.Block, slots []connector.BlockID) error {
	maker, err := r.hasher.Maker()
	if err != nil {
		return err
	}
	errs := make([]error, len(blocks))
	r.share(len(blocks), func(i int) {
		b := blocks[i]
		var err error
		if slots != nil {
			err = r.copyOut(&maker, b, slots[i], r.kv.Segments(b.Group))
			fault.Crash("host.save.copied")
		} else if b.Key != (connector.BlockKey{}) { // or it is partial: nothing can be stored under a key
			err = maker.Make(r.kv, b)
		}
		if err != nil {
			errs[i] = fmt.Errorf("digest of block %d: %w", b.ID, err)
		}
	})
	return errors.Join(errs...)
}

// share runs f for 0 to n-1 on the cores that are free; on one it waits.
func (r *rank) share(n int, f func(int)) { r.shareUntil(context.Background(), n, f) }

// shareUntil is share until ctx ends: then it begins nothing more. false: f did not run for all.
func (r *rank) shareUntil(ctx context.Context, n int, f func(int)) bool {
	return r.shareWith(ctx, n, f, func(work func()) {
		if r.hold(ctx) {
			defer r.let()
			work()
		}
	})
}

// hold waits for a core, until ctx ends; let gives it back if it is true.
func (r *rank) hold(ctx context.Context) bool {
	select {
	case r.hands <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (r *rank) let() { <-r.hands }

// shareWith is shareUntil where own runs the work of the core that is waited for.
func (r *rank) shareWith(ctx context.Context, n int, f func(int), own func(work func())) bool {
	var next, done atomic.Int64
	work := func() {
		for ctx.Err() == nil {
			i := next.Add(1)
			if i > int64(n) {
				return
			}
			f(int(i - 1))
			done.Add(1)
		}
	}
	var others sync.WaitGroup
	for range min(cap(r.hands), n) - 1 {
		select {
		case r.hands <- struct{}{}:
			others.Go(func() {
				defer r.let()
				work()
			})
		default:
		}
	}
	own(work)
	others.Wait()
	return done.Load() == int64(n)
}

// checkDigests gives the blocks that cannot be used, by reason.
func (r *rank) checkDigests(blocks []connector.Block) unreadable {
	return r.judge(blocks, func(i int) error { return r.hasher.Check(r.kv, blocks[i]) })
}

// judge gives the blocks that cannot be used, by reason, as a check of each says.
func (r *rank) judge(blocks []connector.Block, check func(i int) error) (found unreadable) {
	errs := make([]error, len(blocks))
	r.share(len(blocks), func(i int) { errs[i] = check(i) })
	for i, b := range blocks {
		found.add(b.ID, errs[i])
	}
	return found
}
