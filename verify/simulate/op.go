package simulate

import "math/rand/v2"

// Kind says what an Op does.
type Kind uint8

// The kinds of steps.
const (
	opTurn    Kind = iota // an engine's loop goes round once
	opWork                // a plugin does a piece of work
	opAnswer              // an answer of a plugin reaches its host
	opTick                // time passes
	opSubmit              // a client comes
	opRoute               // the router carries a message
	opAbort               // a client goes away
	opConsume             // a plugin reports what consumers have fetched
	opGhost               // an answer that nobody waits for reaches a host
	opCrash               // a plugin dies
	opStore               // the store loses or damages something
	opReset               // the caches of an engine are emptied
	opRestart             // an engine dies and comes back with a new epoch
	kinds
)

// weights are how often each kind is drawn, and which need a rough world.
func weights(o *Options) [kinds]int {
	rough, restarts := o.Rough, o.Rough
	if o.Stale {
		restarts += 12
	}
	return [kinds]int{
		opTurn: 300, opWork: 220, opAnswer: 200, opTick: 90, opSubmit: 45, opRoute: 80, opAbort: 5 + 8*rough, opConsume: 15,
		opGhost: 4 * rough, opCrash: 3 * rough, opStore: 8 * rough, opReset: 8, opRestart: restarts,
	}
}

// Fault is what goes wrong with a piece of work or a message.
type Fault uint8

// The faults. Each applies to what it makes sense for and is nothing for the rest.
const (
	faultNone     Fault = iota
	faultCrash          // the process dies in the middle
	faultHang           // the process stops
	faultStuck          // this call alone never answers
	faultBusy           // ErrBusy
	faultError          // some other error
	faultNothing        // says done and wrote or stored nothing
	faultHalf           // says done with half of a block written
	faultWrong          // says done and wrote other bytes
	faultPartial        // names a block that did not arrive
	faultForeign        // names blocks that were not its business, or answers for more or fewer than asked
	faultWild           // claims what cannot be; loads: ErrCorrupt
	faultLater          // does not know yet
	faultScribble       // the plugin writes where it has no business: anywhere in landing memory
	faultTwice          // the answer comes again
	faultLost           // the message is lost
	faults
)

var faultNames = [faults]string{
	"", "crash", "hang", "stuck", "busy", "error", "nothing", "half", "wrong", "partial", "foreign", "wild", "later", "scribble", "twice", "lost",
}

// String names the fault; none is empty.
func (f Fault) String() string { return faultNames[f] }

// Op is one step of a script. Seed decides what the kind leaves open: which engine, which message.
type Op struct {
	Kind  Kind
	Fault Fault
	Seed  uint32
}

// script draws the steps of a seed.
func script(o *Options, steps int) []Op {
	r := rand.New(rand.NewPCG(o.Seed, 12))
	w := weights(o)
	total := 0
	for _, n := range w {
		total += n
	}
	ops := make([]Op, steps)
	for i := range ops {
		at, kind := r.IntN(total), Kind(0)
		for at >= w[kind] {
			at -= w[kind]
			kind++
		}
		ops[i] = Op{Kind: kind, Seed: r.Uint32()}
		if f := Fault(1 + r.IntN(int(faults)-1)); r.IntN(1000) < o.FaultRate && o.Faults>>f&1 == 1 {
			ops[i].Fault = f
		}
	}
	return ops
}

// rng is a small random generator whose whole state begins as one Op's Seed.
type rng uint64

func (d *rng) next() uint64 {
	*d += 0x9e3779b97f4a7c15
	z := uint64(*d)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// n is a number below k, 0 if there is none.
func (d *rng) n(k int) int {
	if k <= 1 {
		return 0
	}
	return int(d.next() % uint64(k))
}
