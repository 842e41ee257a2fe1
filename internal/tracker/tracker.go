// Package tracker keeps account of a host's work: which transfers run on which generation of the plugin, which
// blocks they pin, until when, and what the engine has still to be told.
//
// It is a pure state machine: no goroutine, clock, I/O or randomness. Every method takes the time,
// changes the state and returns the actions that the host has to carry out, in order. So the same
// inputs give the same actions, and a test can drive it through any interleaving of faults.
//
// The promise it keeps (rule HOST-01): one Loaded or Saved for each transfer, one Finished for each
// ended request, whatever the plugin does; and a block is reported free only when no call of a
// living generation can touch it.
package tracker

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// Config is what a Tracker must know. All durations must be positive.
type Config struct {
	Ranks      int // every transfer runs once on each
	Role       connector.Role
	Groups     []connector.Group
	BlockBytes []int64              // of one block, by group, on all ranks
	Can        connector.Capability // of the connector's scheduler side

	Later          time.Duration // how long a match may stay unknown before it is a miss
	Fresh          time.Duration // how long an answer may be used again
	Transfer       time.Duration // a load, in addition to TransferPerGiB
	TransferPerGiB time.Duration
	Save           time.Duration
	Plan           time.Duration
	Finish         time.Duration
	Grace          time.Duration // from a passed deadline until the plugin is killed
	Hold           time.Duration // TTL of a hold that names none
	HoldMax        time.Duration
	BackoffMin     time.Duration // between retries of one call, doubled each time
	BackoffMax     time.Duration
	CorruptKeys    int // damaged keys remembered
	// Quarantine withholds blocks that were found damaged until they are saved again. It is for engines that
	// save them again, and for those where a failed load would fail every request with the same prefix.
	Quarantine bool
	Slots      int // of landing memory on each rank; 0: calls touch the cache itself
	Layers     int // of the cache
	// Overlap says that the connector loads layer by layer, or the host what it has placed, and that the engine begins with the first layers.
	Overlap bool
	// Placed says that the host itself finds and loads what the connector has placed, also while no generation takes calls: then it
	// is asked in place of one.
	Placed bool

	Lossy     bool // the connector may change bytes, so nothing that it loads can be verified
	Reshape   bool // tickets are made for engines of other shapes, too
	Threshold int  // the fewest tokens of an earlier turn that are worth a load
	Windows   int  // parts of the memory for source blocks; needed where tickets of other shapes are accepted
	// Addresses are the content addresses of a request's leading tokens in blocks of some size, block by block, or
	// none where it has fewer tokens. Nil: tickets of other shapes are refused. It must not call the Tracker.
	Addresses func(request connector.RequestID, blockTokens, tokens int) []connector.BlockKey
}

// Counters are what the Tracker has seen, for metrics and tests.
type Counters struct {
	Unknown    int // answers to calls that were given up or answered before, and reports of holds that are over
	Violations int // answers that break the contract
	Retries    int // calls started again
	Lost       int // blocks that will never be free again
	Undecided  int // matches that a plugin which was up left undecided until Later ended
	Kills      int // generations killed for a passed deadline
	Damaged    int // loaded blocks that were not what was saved, on every rank
	Foreign    int // loaded blocks whose digests were made with a key that is not in the ring, on every rank
	Outdated   int // loaded blocks that another version has stored, or whose digests are of another edition, on every rank
	TurnLoaded int // blocks of earlier turns that were loaded, on every rank
	TurnLost   int // ... that were lost to other requests meanwhile
}

// availability of the plugin.
type availability uint8

const (
	down   availability = iota // none runs, one will
	up                         // generation gen takes calls
	broken                     // none runs, and none will for a while
)

// Tracker is the state. It is not safe for concurrent use.
type Tracker struct {
	cfg    Config
	state  availability
	gen    uint64 // the generation that takes calls while up
	closed bool

	last     uint64 // the last id given to anything
	ops      map[uint64]*op
	calls    map[CallID]*call // running, by the id of the attempt
	plans    map[CallID]*planning
	asks     map[CallID]*request
	finishes map[CallID][]*ending
	resets   map[CallID]*reset
	requests map[connector.RequestID]*request
	endings  map[uint64]*ending
	holds    map[connector.HoldID]*hold
	over     []connector.HoldID            // holds that ended by themselves or were not renewed, for a Leaser
	heard    int                           // the first of them that it is being told
	early    map[connector.HoldID]earlyEnd // of holds that a running Finish may announce
	weak     map[connector.HoldID]int      // consumers that have not reported; they keep no blocks
	killed   map[uint64]bool               // generations told to die and not reaped yet
	corrupt  corruptKeys
	wakes    wakes
	landing  *Landing // nil without landing memory
	windows  *Landing // of memory for source blocks, as slots of a single rank
	spent    int      // windows that never come back
	lines    []line   // calls that wait for slots; the last ones wait for windows
	out      []Action
	lost     map[connector.BlockID]struct{}
	counters Counters
}

// request is what the Tracker knows of one request between its first Match and its end.
type request struct {
	id      connector.RequestID
	match   match
	keys    []connector.BlockKey // of its queries: our own copy
	brought                      // the ticket that its loads carry
	queried bool
	arrived bool
	bare    bool // the engine's last offer is without the ticket: so is its load
	denied  bool // nothing is offered to it: a load left nothing valid, or its ticket is used up
	saves   int  // saves under way
	unsaved map[int]struct{}
	ending  *ending
	tainted bool // it has loaded what nobody has verified
	clean   int  // if so: its tokens before the first of that
}

// New makes an empty Tracker with no plugin up.
func New(cfg Config) *Tracker {
	b := &Tracker{
		cfg:      cfg,
		ops:      map[uint64]*op{},
		calls:    map[CallID]*call{},
		plans:    map[CallID]*planning{},
		asks:     map[CallID]*request{},
		finishes: map[CallID][]*ending{},
		resets:   map[CallID]*reset{},
		requests: map[connector.RequestID]*request{},
		endings:  map[uint64]*ending{},
		holds:    map[connector.HoldID]*hold{},
		early:    map[connector.HoldID]earlyEnd{},
		weak:     map[connector.HoldID]int{},
		killed:   map[uint64]bool{},
		lost:     map[connector.BlockID]struct{}{},
		corrupt:  corruptKeys{limit: cfg.CorruptKeys, keys: map[connector.BlockKey]struct{}{}},
	}
	b.windows, b.lines = NewLanding(1, cfg.Windows), make([]line, 2*cfg.Ranks+2)
	b.windows.reserve = 0 // only loads use windows
	if cfg.Slots > 0 {
		b.landing = NewLanding(cfg.Ranks, cfg.Slots)
	}
	return b
}

// Up says that generation gen is ready for calls. Generations grow.
func (b *Tracker) Up(now time.Time, gen uint64) []Action {
	b.state, b.gen = up, gen
	b.over, b.heard = nil, 0 // holds of another life: the new one numbers its own from the start
	for _, o := range sorted(b.ops) {
		b.startReady(o)
	}
	for _, r := range sorted(b.requests) {
		b.askAgain(now, r)
	}
	return b.take()
}

// Down says that generation gen takes no more calls. Its process may still live: blocks stay pinned
// until Reaped.
func (b *Tracker) Down(now time.Time, gen uint64) []Action {
	if b.state != up || b.gen != gen {
		return nil
	}
	b.state = down
	for _, id := range slices.Sorted(maps.Keys(b.asks)) {
		b.asks[id].match.ask = 0 // asked again when the next generation is up
		delete(b.asks, id)
	}
	for _, id := range slices.Sorted(maps.Keys(b.plans)) {
		b.planLost(now, id, connector.ErrGone)
	}
	for _, id := range slices.Sorted(maps.Keys(b.finishes)) {
		b.answerFinish(now, id, nil)
	}
	b.failResets(now, func(r *reset) bool { return r.started }, errNotUp)
	b.goOnAlone(now)
	return b.take()
}

// Reaped says that nothing of generation gen can touch a block any more. Its transfers go on with
// the next generation if they may, and fail otherwise.
func (b *Tracker) Reaped(now time.Time, gen uint64) []Action {
	b.out = append(b.out, b.Down(now, gen)...)
	delete(b.killed, gen)
	for _, o := range sorted(b.ops) {
		b.opReaped(now, o, gen)
	}
	for _, h := range sorted(b.holds) {
		if h.gen == gen {
			b.died(h, false)
		}
	}
	return b.take()
}

// Abandoned says that generation gen is gone, but that somebody may use the blocks for ever that it had. Those of
// its transfers and holds are lost: they stay pinned, as their events say. Windows come back, because the next
// generation has other memory for source blocks.
func (b *Tracker) Abandoned(now time.Time, gen uint64) []Action {
	b.out = append(b.out, b.Down(now, gen)...)
	delete(b.killed, gen)
	for _, o := range sorted(b.ops) {
		if slices.ContainsFunc(o.calls, func(c *call) bool { return c.stuck(gen) }) {
			b.lose(now, o, true)
		}
	}
	for _, h := range sorted(b.holds) {
		if h.gen == gen {
			b.died(h, true)
		}
	}
	return b.take()
}

// Lose says the same of one call, of a part of the connector that is gone. The other parts keep the memory for source
// blocks, so its window is lost as well.
func (b *Tracker) Lose(now time.Time, id CallID) []Action {
	if c := b.calls[id]; c != nil {
		b.lose(now, c.op, false)
		b.failWindowless(now)
	}
	return b.take()
}

// lose ends a transfer without giving its blocks back, nor its slots of landing memory. renewed says that its window is
// of memory that is replaced.
func (b *Tracker) lose(now time.Time, o *op, renewed bool) {
	for _, c := range o.calls {
		switch {
		case o.source == nil || c.slots == nil:
		case renewed:
			b.vacate(c)
		default:
			b.spent++
		}
		if c.state == running {
			b.emit(CancelCall{ID: c.id})
		}
		delete(b.calls, c.id)
		c.state = over
	}
	o.lost = true
	b.forfeit(ids(o.t.Blocks))
	o.fail(o.t.Blocks, errAbandoned)
	b.endOp(now, o)
}

// Windowless says that no load from an engine of another shape can start any more.
func (b *Tracker) Windowless() bool { return b.spent > 0 && b.spent >= b.cfg.Windows }

// failWindowless fails the loads that wait for a window if none can come back.
func (b *Tracker) failWindowless(now time.Time) {
	if !b.Windowless() {
		return
	}
	for _, o := range sorted(b.ops) {
		if o.source != nil {
			b.failReady(now, o, errWindows)
		}
	}
}

func (b *Tracker) forfeit(blocks []connector.BlockID) {
	for _, id := range blocks {
		b.lost[id] = struct{}{}
	}
	b.counters.Lost = len(b.lost)
}

// Broken says that no generation will come up for a while: nothing is worth waiting for.
func (b *Tracker) Broken(now time.Time) []Action {
	b.state = broken
	b.forgetAnswers(now)
	b.failIdle(now)
	return b.take()
}

// Close takes no new work and gives up what waits. Running calls go on until they return or their
// generation is reaped. Holds are released: nobody will be there to serve them.
func (b *Tracker) Close(now time.Time) []Action {
	b.closed = true
	b.failIdle(now)
	for _, h := range sorted(b.holds) {
		b.release(h, ReleasedShutdown)
	}
	return b.take()
}

// failIdle gives up all that waits for a plugin. What the host is looking for by itself goes on.
func (b *Tracker) failIdle(now time.Time) {
	for _, o := range sorted(b.ops) {
		b.failReady(now, o, connector.ErrGone)
	}
	for _, r := range sorted(b.requests) {
		if b.closed || r.match.ask == 0 {
			b.giveUpMatch(r)
		}
	}
}

// Tick lets time pass. The host calls it no later than Next.
func (b *Tracker) Tick(now time.Time) []Action {
	b.wakes.drop(now)
	for _, o := range sorted(b.ops) {
		b.tickOp(now, o)
	}
	for _, id := range slices.Sorted(maps.Keys(b.plans)) {
		if !now.Before(b.plans[id].deadline) {
			b.emit(CancelCall{ID: id})
			b.planLost(now, id, errPlanLate)
		}
	}
	for _, r := range sorted(b.requests) {
		b.tickMatch(now, r)
	}
	for _, e := range sorted(b.endings) {
		if !now.Before(e.deadline) {
			b.finishEnding(now, e)
		}
	}
	for _, h := range sorted(b.holds) {
		if !now.Before(h.deadline) {
			b.release(h, ReleasedExpired)
		}
	}
	b.failResets(now, func(r *reset) bool { return !now.Before(r.deadline) }, context.DeadlineExceeded)
	return b.take()
}

// Next is when Tick has to be called, if at all.
func (b *Tracker) Next() (time.Time, bool) { return b.wakes.first() }

// Idle reports whether nothing runs, waits or is held.
func (b *Tracker) Idle() bool {
	return len(b.ops) == 0 && len(b.plans) == 0 && len(b.endings) == 0 && len(b.holds) == 0
}

// Pending counts transfers that are not over.
func (b *Tracker) Pending() int { return len(b.ops) }

// Loading counts loads that a plugin works for.
func (b *Tracker) Loading() (n int) {
	for _, o := range b.ops {
		if o.kind == Load && slices.ContainsFunc(o.calls, func(c *call) bool { return c.state == running && c.gen != 0 }) {
			n++
		}
	}
	return n
}

// Saving reports whether a save is under way.
func (b *Tracker) Saving() bool {
	for _, o := range b.ops {
		if o.kind == Save {
			return true
		}
	}
	return false
}

// Held counts open holds.
func (b *Tracker) Held() int { return len(b.holds) }

// Counters reports what the Tracker has seen so far.
func (b *Tracker) Counters() Counters { return b.counters }

// Pins counts how many transfers, ended requests and holds pin each block.
func (b *Tracker) Pins() map[connector.BlockID]int {
	pins := map[connector.BlockID]int{}
	add := func(blocks []connector.Block) {
		for _, k := range blocks {
			pins[k.ID]++
		}
	}
	for _, o := range b.ops {
		add(o.t.Blocks)
	}
	for _, e := range b.endings {
		add(e.ended.Blocks)
	}
	for _, h := range b.holds {
		for _, id := range h.blocks {
			pins[id]++
		}
	}
	return pins
}

func (b *Tracker) request(id connector.RequestID) *request {
	r := b.requests[id]
	if r == nil {
		r = &request{id: id}
		b.requests[id] = r
	}
	return r
}

func (b *Tracker) id() uint64 {
	b.last++
	return b.last
}

func (b *Tracker) emit(a Action) { b.out = append(b.out, a) }

// take gives the actions that follow from an input, including those of resets that waited for a save to end.
func (b *Tracker) take() []Action {
	b.startResets()
	out := b.out
	b.out = nil
	return out
}

// sorted gives the values of m in the order of its keys, so that equal inputs give equal actions.
func sorted[K cmp.Ordered, V any](m map[K]V) []V {
	out := make([]V, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, m[k])
	}
	return out
}

func ids(blocks []connector.Block) []connector.BlockID {
	out := make([]connector.BlockID, len(blocks))
	for i, k := range blocks {
		out[i] = k.ID
	}
	return out
}
