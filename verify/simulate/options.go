package simulate

import (
	"io"
	"math/rand/v2"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// Medium is what the modelled connector moves KV through.
type Medium uint8

// The media.
const (
	NoConnector Medium = iota
	ThroughStore
	ThroughHolds // the producer keeps blocks until a consumer with its ticket has fetched them
)

// String names the medium.
func (m Medium) String() string { return [...]string{"none", "store", "holds"}[m] }

// Options are what a world is made of.
type Options struct {
	Seed     uint64
	Prefills int // 0: clients go straight to the engines
	Decodes  int // at least 1
	Medium   Medium
	Planner  bool
	Slots    int  // of landing memory on each rank: trust level staged; 0: in place
	AllBoth  bool // every engine loads and saves

	Turns     bool // decode engines give tickets for the next turn, which prefill engines load by; with ThroughHolds and AllBoth
	Threshold int  // the fewest tokens of an earlier turn that are worth a load
	Layers    bool // what is saved is handed over before it is computed; not with Planner
	Orphans   bool // what a dead plugin leaves behind may write its blocks for ever; not with Slots, whose memory is replaced
	Queries   bool // engines are asked what they have of every prompt that they get; with Turns the answers have tickets
	Stale     bool // prefill engines start again more often, and routers hand out tickets of their former lives
	Overlap   bool // what is loaded comes layer by layer, and the engine computes with the first ones; not with Lossy and Children, and with Slots only what is Placed
	Placed    bool // the host finds and loads by itself what the store has, while no plugin is up; with ThroughStore, not with Children
	Tells     bool // saves say that they are stored before they are over, as those of a MultiConnector do

	BlockTokens, Blocks, Groups, Ranks int
	Children                           bool // the plugin is a MultiConnector: with ThroughHolds of a holder and a store, with ThroughStore of two stores. Not with Layers, Tells and OtherTokens, nor with Slots and ThroughHolds, which no host takes
	Fetches                            bool // the Match of one child fetches, so it is asked last
	OtherTokens                        int  // of a block of every second engine; 0: all have BlockTokens. With ThroughHolds, not with Slots, Planner or Lossy
	Relays                             bool // some prompts go through two prefill engines, the second of which loads what the first holds. With Lossy
	Lossy                              bool // nothing that is loaded can be verified. With ThroughHolds, not with Slots, Planner, Children or OtherTokens
	MaxBatchedTokens, MaxSeqs          int
	Window                             int // blocks that groups after the first need to go on; 0: all
	PrefixCaching, FailLoads           bool

	FaultRate int       // of 1000 pieces of work
	Faults    uint32    // which faults may happen, a bit for each
	Rough     int       // how often what is outside the plugins fails: 0 never to 3
	Mutant    Mutant    // 0: everything as it should be
	Trace     io.Writer // every step is written here, nil: none
}

// draw makes the options of a seed. Every seed has its own mix of faults: too many kinds at once hide
// each other.
func draw(seed uint64) Options {
	r := rand.New(rand.NewPCG(seed, 11))
	o := Options{
		Seed: seed, Medium: Medium(min(r.IntN(8), 2)), Planner: r.IntN(4) == 0, AllBoth: r.IntN(4) == 0,
		BlockTokens: 1 + r.IntN(5), Groups: 1 + r.IntN(3)/2, Ranks: 1 + r.IntN(3)/2,
		MaxBatchedTokens: 1 + r.IntN(24), MaxSeqs: 1 + r.IntN(5),
		PrefixCaching: r.IntN(4) > 0, FailLoads: r.IntN(12) == 0,
		FaultRate: []int{0, 20, 60, 200}[r.IntN(4)], Faults: r.Uint32() | r.Uint32(), Rough: r.IntN(4),
	}
	if o.Medium != NoConnector {
		o.Medium = Medium(1 + r.IntN(2))
	}
	o.Window = max(0, r.IntN(6)-2)
	if r.IntN(3) == 0 {
		o.Slots = 1 + r.IntN(12)
		if o.Medium == ThroughHolds { // whose loads are not divided: more than fit in are computed
			o.Slots *= 4
		}
	}
	o.Blocks = o.Groups * (3 + r.IntN(22))
	o.Prefills, o.Decodes = r.IntN(3), 1+r.IntN(2)
	if o.Medium == ThroughHolds {
		o.Prefills = max(o.Prefills, 1)
	}
	if o.Medium == NoConnector {
		o.Prefills = 0
	}
	o.drawPowers(r)
	o.Queries = r.IntN(3) == 0
	o.Stale = o.Prefills > 0 && o.Rough > 0 && r.IntN(3) == 0
	overlap, placed := r.IntN(5) > 0, r.IntN(3) > 0
	o.Placed = placed && o.Medium == ThroughStore && !o.Children
	o.Overlap = overlap && o.Medium != NoConnector && (o.Slots == 0 || o.Placed) && !o.Lossy && !o.Children
	return o
}

// drawPowers chooses the powers of a world's connector.
func (o *Options) drawPowers(r *rand.Rand) {
	if o.Medium == ThroughHolds && r.IntN(2) == 0 {
		o.Turns, o.AllBoth, o.Threshold = true, true, 1+r.IntN(4)
	}
	o.Layers = o.Medium != NoConnector && !o.Planner && r.IntN(3) == 0
	o.Tells = o.Medium != NoConnector && r.IntN(3) == 0
	o.Orphans = o.Medium != NoConnector && o.Slots == 0 && o.Rough > 0 && r.IntN(6) > 0
	o.drawComposition(r)
}

// drawComposition chooses whether plugins are composites, and whether engines differ.
func (o *Options) drawComposition(r *rand.Rand) {
	if staged := o.Slots > 0 && o.Medium == ThroughHolds; o.Medium != NoConnector && !staged && r.IntN(5) < 2 {
		o.Children, o.Fetches, o.Layers, o.Tells = true, r.IntN(2) == 0, false, false
	}
	if o.Medium != ThroughHolds || o.Slots > 0 || o.Planner || o.Children {
		return
	}
	switch r.IntN(8) {
	case 0:
	case 1, 2, 3:
		o.Lossy = true
		if o.Relays = r.IntN(2) == 0; o.Relays {
			o.Prefills, o.AllBoth = 2, true
		}
	default:
		o.OtherTokens = o.BlockTokens * (2 + r.IntN(2))
		if r.IntN(2) == 0 {
			o.BlockTokens, o.OtherTokens = o.OtherTokens, o.BlockTokens
		}
	}
}

// shows reports whether a world of these options has what a mutant has wrong.
func (o *Options) shows(m Mutant) bool {
	switch m {
	case CheckThenCopy, DigestOfCopy, SlotsShared:
		return o.Slots > 0
	case DigestWithoutPlace:
		return o.Groups*o.Ranks > 1
	case ResetUnheard:
		return o.Medium == ThroughStore && o.Faults > 0
	case ReshapeOffByOne, ReshapePart, CutBeforeCheck:
		return o.OtherTokens > 0
	case ChildGoneEarly, ChildFreedOnCancel, ChildTicketsMixed, ChildHoldConsumed:
		return o.Children
	case TaintSigned, TaintUntold, TaintPart, TaintForgotten, TaintHeld:
		return o.Lossy
	case TurnKept, TurnLeased, TurnUnchecked, TurnNotWorth:
		return o.Turns
	case LayerEarly:
		return o.Layers
	case OverlapOneRank:
		return o.Overlap && o.Ranks > 1
	case AloneUnchecked, AloneAgain:
		return o.Placed
	case OverlapUnchecked, OverlapRetried, OverlapEndUnchecked, OverlapLayerEarly:
		return o.Overlap
	default:
		return true
	}
}

// trackerConfig has the deadlines that hosts have by default.
func (h *host) trackerConfig() tracker.Config {
	o := &h.w.opt
	c := tracker.Config{
		Ranks: o.Ranks, Role: h.role, Overlap: o.Overlap && h.role.Loads(), Placed: o.Placed, Can: h.can, Slots: o.Slots, Layers: layers, Reshape: o.OtherTokens > 0, Windows: windows, Addresses: h.e.sched.Addresses, Lossy: o.Lossy,
		Later: 2 * time.Second, Fresh: 250 * time.Millisecond, Transfer: 5 * time.Second, TransferPerGiB: time.Second,
		Save: 30 * time.Second, Plan: 2 * time.Second, Finish: 5 * time.Second, Grace: 500 * time.Millisecond,
		Hold: 30 * time.Second, HoldMax: holdMax,
		BackoffMin: 5 * time.Millisecond, BackoffMax: 200 * time.Millisecond, CorruptKeys: 64, Quarantine: h.role.Saves(), Threshold: o.Threshold,
	}
	o.stretch(&c)
	if o.Mutant == TurnNotWorth {
		c.Threshold = 0
	}
	for g, window := range o.windows() {
		c.Groups = append(c.Groups, connector.Group{BlockTokens: h.e.size, Policy: connector.PolicyAll})
		if window > 0 {
			c.Groups[g].Policy, c.Groups[g].Trailing = connector.PolicyTrailing, window
		}
		c.BlockBytes = append(c.BlockBytes, 1<<20)
	}
	return c
}

// windows are how many blocks each group needs, 0 for all.
func (o *Options) windows() []int {
	list := make([]int, o.Groups)
	for g := 1; g < o.Groups; g++ {
		list[g] = o.Window
	}
	return list
}

// first is the first block of a size that a group needs to go on after some tokens.
func (o *Options) first(group, tokens, size int) int {
	if group == 0 || o.Window == 0 {
		return 0
	}
	return max(0, tokens/size-o.Window)
}

// mostLost is how many blocks of an engine may be lost.
func (o *Options) mostLost() int {
	if !o.Orphans {
		return 0
	}
	return o.Blocks / 2
}

func (o *Options) role(engine int) connector.Role {
	switch {
	case o.Medium == NoConnector:
		return 0
	case o.AllBoth || o.Prefills == 0:
		return connector.RoleBoth
	case engine < o.Prefills:
		return connector.RoleProducer
	}
	return connector.RoleConsumer
}

// holdMax is the longest that a hold may stay, however often it is renewed.
const holdMax = 10 * time.Minute

func (o *Options) capabilities() connector.Capability {
	can := connector.CanReset
	if o.Medium == ThroughHolds {
		can = connector.CanHold | connector.CanLease // holds are not reset, so nothing can promise to be empty
	}
	if o.Children {
		can |= connector.CanReset
	}
	if o.Planner {
		can |= connector.CanPlan
	}
	return can
}
