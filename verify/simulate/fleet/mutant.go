package fleet

import "github.com/kvport/kvport/engine/router/policy"

// Mutant is a way in which something between a router and its instances is wrong.
type Mutant uint8

// The mutants.
const (
	Sound              Mutant = iota // no mutant
	RemovalsForgotten                // the index is not told which blocks are removed
	EpochIgnored                     // it is not told that an instance has started again
	GapsUnnoticed                    // nobody looks at the numbers of batches
	ReplayedTwice                    // a replay begins with batches that were applied long ago
	MemoryUnbounded                  // each batch leaves a block in the index that nobody has
	SecondDeaf                       // the second router gets no events
	NeverSpreads                     // one instance is preferred, whatever it has to do
	StickyToDead                     // instances count as healthy although they are down
	LoadCountedTwice                 // a request counts at two instances of a role and runs at one
	LoadNeverEnds                    // a request that failed counts as one that runs
	RequestLost                      // a request is answered, and nobody learns of it
	LeaseForever                     // nobody looks for registrations that are too old
	LeaseTooShort                    // a registration is good for less than the time between two
	RegistrationsFlood               // with each registration all other instances register, too
	TimeInTrace                      // equal seeds are not equal runs
	mutants
)

// Mutants are all of them.
func Mutants() (list []Mutant) {
	for m := Sound + 1; m < mutants; m++ {
		list = append(list, m)
	}
	return list
}

// String is the mutant as tests name it.
func (m Mutant) String() string {
	return [mutants]string{
		"sound", "removals-forgotten", "epoch-ignored", "gaps-unnoticed", "replayed-twice", "memory-unbounded", "second-deaf", "never-spreads",
		"sticky-to-dead", "load-counted-twice", "load-never-ends", "request-lost", "lease-forever", "lease-too-short", "registrations-flood", "time-in-trace",
	}[m]
}

// Fault is the fault with which the mutant shows.
func (m Mutant) Fault() Fault {
	switch m {
	case EpochIgnored, StickyToDead, LoadNeverEnds, LeaseForever:
		return RacksFail
	case GapsUnnoticed, ReplayedTwice:
		return MissedEvents
	case SecondDeaf:
		return TwoRouters
	default:
		return NoFault
	}
}

// policy is the config of a router's policy.
func (o *Options) policy() policy.Config {
	c := policy.Config{Policy: o.Policy}
	if o.Mutant == NeverSpreads {
		c.Scorers, c.Weights = map[string]policy.Scorer{"first": firstScorer{}}, map[string]float64{"first": 1000}
	}
	return c
}

// firstScorer prefers the first instance of a role.
type firstScorer struct{}

// Score implements policy.Scorer.
func (firstScorer) Score(_ *policy.Request, candidates []policy.Candidate, scores []float64) {
	clear(scores)
	first := 0
	for i := range candidates {
		if candidates[i].Place < candidates[first].Place {
			first = i
		}
	}
	scores[first] = 1
}

// Why implements policy.Scorer.
func (firstScorer) Why(*policy.Request, *policy.Candidate) string { return "first" }
