package fleet

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvport/kvport/engine/router/policy"
)

// Knowledge is how a router knows what instances hold.
type Knowledge uint8

// The kinds of knowledge.
const (
	ByEvents  Knowledge = iota // by KV events, and by its history where they say nothing
	ByHistory                  // by its own history alone
	ByOracle                   // it is told what each cache holds at this moment
)

// Options are what a fleet is made of.
type Options struct {
	Seed      uint64
	Instances int     // half of them prefill and half decode instances; 2 to 1,000
	Blocks    int     // that all caches hold together
	Requests  int     // turns of all conversations together
	Rate      float64 // requests a second for each instance; 2
	Policy    string  // a name of policy.Names
	Knowledge Knowledge
	Fault     Fault
	Mutant    Mutant               // 0: everything as it should be
	Clock     func() time.Duration // of the process, by which decisions are measured; nil: nothing is measured
}

// MaxInstances is how many instances a fleet has at most.
const MaxInstances = 1000

// Check says what is wrong with options.
func (o *Options) Check() error {
	var problem error
	switch {
	case !slices.Contains(policy.Names(), o.Policy):
		problem = fmt.Errorf("policy is %q, want one of %v", o.Policy, policy.Names())
	case !(o.Rate > 0 && o.Rate <= 1000): // NaN, too
		problem = fmt.Errorf("rate is %v, want more than 0 and at most 1,000", o.Rate)
	case o.Requests < 1:
		problem = fmt.Errorf("requests is %d, want at least 1", o.Requests)
	}
	if o.Instances < 2 || o.Instances > MaxInstances {
		problem = errors.Join(problem, fmt.Errorf("instances is %d, want 2 to %d", o.Instances, MaxInstances))
	} else if o.capacity() < minBlocks {
		problem = errors.Join(problem, fmt.Errorf("blocks is %d for %d instances, want at least %d for each", o.Blocks, o.Instances, minBlocks))
	}
	return problem
}

// capacity is how many blocks the cache of one instance holds.
func (o *Options) capacity() int { return o.Blocks / o.Instances }

// length is how long the trace is in virtual time, about.
func (o *Options) length() time.Duration {
	return time.Duration(float64(o.Requests) / (o.Rate * float64(o.Instances)) * float64(time.Second))
}

// What instances take and do, in virtual time. They are those of a model of a few billion parameters on one accelerator.
const (
	blockTokens = 16
	minBlocks   = 1 << 9 // of a cache: the longest prompt and its answer

	computeBase  = 5 * time.Millisecond   // of a prompt
	computeToken = 100 * time.Microsecond // of each token that is computed
	loadBase     = 4 * time.Millisecond   // of what a decode instance loads by ticket
	loadToken    = 5 * time.Microsecond
	decodeStep   = 20 * time.Millisecond // of each token of an answer

	registerEvery = 3 * time.Second // as engines do
	leaseTime     = 15 * time.Second
	probeEvery    = time.Second
	eventDelay    = 5 * time.Millisecond
	lateBy        = 5 * time.Second // of events, with the fault LateEvents
	maxInFlight   = 256             // requests on one instance
	attempts      = 3               // at decode instances
	patience      = 30 * time.Second
	longest       = attempts * (patience + answerMax*decodeStep) // between the ends of two requests, once no more come
	begin         = 2 * time.Second                              // of the trace: all instances have registered by then
	settled       = 40 * time.Second                             // after the last answer: every event has come, and every lease of who is gone has ended
	noticed       = 5 * time.Second                              // after that a router must know that an instance is down
	racks         = 10
	racksFail     = 3
)
