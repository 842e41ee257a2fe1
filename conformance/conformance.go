// Package conformance checks that a connector keeps the contract of package connector.
//
// Every case tests one numbered rule of docs/spec. The same cases run in process, over the wire and
// on a binary:
//
//	func TestConformance(t *testing.T) {
//		conformance.Run(t, conformance.InProcess(plugin, config))
//	}
//
//	results := conformance.Check(ctx, conformance.Binary(path, config), conformance.Options{})
//
// A [Profile] names the cases that a kind of connector must pass. Only the cases of the chosen
// profiles run, and a case that is skipped counts as failed there. The cases of optional powers also run
// wherever the connector offers the power.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvport/kvport/connector"
)

// A Profile is a kind of connector, and with it the cases that it must pass.
type Profile string

// The profiles.
const (
	// Store is a connector that keeps blocks by content address.
	Store Profile = "store"
	// Lifecycle is what every plugin promises about opening, closing, starting and ending.
	Lifecycle Profile = "lifecycle"
	// MultiRank is a Store that serves engines of several ranks.
	MultiRank Profile = "multirank"
	// Groups is a Store that serves caches of several groups.
	Groups Profile = "groups"
	// Fault is a Store that survives faults of its process, its backend and its callers. It needs a
	// harness that runs a binary.
	Fault Profile = "fault"
	// Power is a connector with optional powers: a Planner, Holder, Leaser, Resetter, StatsSource or EventSource, one that serves
	// caches of several groups or keeps blocks in an arena. Of them it requires those that the connector declares.
	Power Profile = "power"
	// MultiChildren is a connector made of others, which its config lists under "connectors".
	MultiChildren Profile = "multi"
	// Remote is a Store on a server that other processes reach too, and that fails by itself. Its config
	// names the server as @SERVER@, a Redis server that the suite runs, or as @PROXY:HOST:PORT@, any other server. Cases that change what
	// lies in the server are skipped there, unless it is Controlled.
	Remote Profile = "remote"
	// Buffer is a connector whose backend gives each block out once, as a lookupbuffer.Buffer does.
	Buffer Profile = "buffer"
	// Pipe is a connector whose consumers get blocks from the producer that a ticket names.
	Pipe Profile = "pipe"
	// PDProducer keeps finished blocks for the consumers that tickets lead to it, and knows when that ends.
	PDProducer Profile = "pd-producer"
	// PDConsumer loads by ticket what a producer holds, over a network that fails.
	PDConsumer Profile = "pd-consumer"
	// Bidirectional is a PDProducer and PDConsumer whose decode instances also offer what an answer leaves to
	// the prefill instance of the conversation's next turn.
	Bidirectional Profile = "bidirectional"
	// Offload is a Store with a bounded tier in memory and one on disk, configured by vLLM's names.
	Offload Profile = "offload"
	// Bounded is a Store of which options of the config limit how much it keeps, how long, or how much of each tenant. Its schema declares
	// what they bound.
	Bounded Profile = "bounded"
	// Ageing is a Store of many blocks, which is then as quick as at the beginning.
	Ageing Profile = "ageing"
	// LayerWise is a connector that saves blocks while their layers are computed.
	LayerWise Profile = "layerwise"
	// Reshape is a connector that loads from producers with other block sizes and ranks.
	Reshape Profile = "reshape"
	// Place is a Store that keeps blocks where the host reads them in the arena.
	Place Profile = "place"
)

// Profiles lists all profiles.
func Profiles() []Profile {
	return []Profile{Store, Lifecycle, MultiRank, Groups, Fault, Power, Remote, Offload, Bounded, Ageing, Buffer, Pipe, PDProducer, PDConsumer, Bidirectional, LayerWise, Reshape, Place, MultiChildren}
}

// ParseProfile reads a profile's name.
func ParseProfile(s string) (Profile, error) {
	if p := Profile(s); slices.Contains(Profiles(), p) {
		return p, nil
	}
	names := make([]string, 0, len(Profiles()))
	for _, p := range Profiles() {
		names = append(names, string(p))
	}
	return "", fmt.Errorf("unknown profile %q, known are %s", s, strings.Join(names, ", "))
}

// A Case checks one rule of docs/spec.
type Case struct {
	ID       string               // never reused
	Rule     string               // the number of the rule, such as STORE-02
	Text     string               // what the case does, one sentence
	Profiles []Profile            // the kinds of connectors for which it is required
	Needs    connector.Capability // the case is skipped without them
	Groups   bool                 // the case is skipped unless Info.Groups
	Arena    bool                 // the case is skipped unless Info.ArenaBytes
	Optional bool                 // it asks for something of the machine or the config: skipped is not failed
	Run      func(T, Harness)

	budgeted bool // it plays random histories for Options.Budget
}

// T is the part of testing.TB that a case needs, so that a command can run cases too.
type T interface {
	// Context ends with the case's deadline.
	Context() context.Context
	// Helper marks the caller as a helper.
	Helper()
	// Errorf reports a failure; the case goes on.
	Errorf(format string, args ...any)
	// FailNow ends the case as failed.
	FailNow()
	// Skipf ends the case as one that does not apply, saying why.
	Skipf(format string, args ...any)
}

// Cases lists every case, in the order in which they run: first those without which no other can be judged.
func Cases() []Case {
	return slices.Concat(basicCases(), openCases(), matchCases(), workCases(), layoutCases(), storeCases(), keyCases(), contentCases(), randomCases(), boundedCases(), ageingCases(), holdCases(), powerCases(), arenaCases(), placeCases(), statCases(), eventCases(), layerCases(), overlapCases(),
		lifeCases(), ringCases(), byHandCases(), rankCases(), groupCases(), hostileCases(), cancelCases(), killCases(), damageCases(), folderCases(),
		remoteCases(), offloadCases(), bufferCases(), pipeCases(), pdProducerCases(), pdAlikeCases(), pdConsumerCases(), pdNetworkCases(), pdLateCases(), reshapeCases(), turnCases(), multiCases())
}

// Status is how a case ended.
type Status string

// The statuses.
const (
	Pass Status = "pass"
	Fail Status = "fail"
	Skip Status = "skip"
	// Inconclusive is a case without a verdict: the machine was too busy for its limits of time, or the run
	// was interrupted. Check repeats it.
	Inconclusive Status = "inconclusive"
)

// Failed lists the results that failed, as one error; nil if none did.
func Failed(results []Result) error {
	var errs []error
	for _, r := range results {
		if r.Status == Fail {
			errs = append(errs, fmt.Errorf("%s (%s): %s", r.ID, r.Rule, strings.Join(r.Log, "; ")))
		}
	}
	return errors.Join(errs...)
}
