package mutants

import (
	"slices"

	"github.com/kvport/kvport/connector"
)

// pdFaults are the ways in which a pair can be wrong.
type pdFaults struct {
	// Of the producer.
	shifted, few, byRequest, fromFirst, firstRank, freeAborted bool
	twice, keepsConsumed, wrongCount, firstRankEnds            bool
	noExpiry, noGeneration, reaperStops, shortLease, oneCheck  bool
	noSecret, noMAC, noEpoch, noEngine, foreignHold            bool
	servesClosed, keepsConnections, startedIsTaken             bool
	reportsBoth, guesses, byOrder                              bool
	mixes, slotNames, noWeak                                   bool
	endsAlike, abortsAlike, sixteen, reportsOne                bool
	placeByte, slotByte, renews                                bool
	lastRankEnds, countsReads, shortLength                     bool
	byContent, oneOwner, cutsNames, lastSave, savedTails       bool
	// Of both, with engines of other shapes.
	sameNumbers, sixBits, noDigests, unchecked, fromStart bool
	twoRanks, ownNumber, offersAll, countsCalls           bool
	oneShape, goesOn, endsOnClose, manyCalls, endsCut     bool
	// Of answers.
	firstGone, endsTurn, tailFrom, rankFrom bool
	// Of the consumer.
	tailless, askedIsTaken, doneAnyway, overrun, sameSlots, ignoresFrom bool
	noKeys, hidesMissing, lateWrite, sharedScratch, eofIsEnd, oneRead   bool
	remembersDead, ignoresDeadline, redialsForever, busy                bool
	ownLayout, ownBlocks, joinsRanks, fewParts, oneBit                  bool
	// Of pairs whose producer writes, which push says.
	push, windowStays, sameWindow, earlyDone, toldEarly bool
	frugal                                              bool // no fault: see PDFrugal
}

// pdMutant is one wrong pair.
func pdMutant(name, caseID string, f pdFaults) Mutant {
	return Mutant{Name: name, Case: caseID, Plugin: f.plugin}
}

// longLeases is a mutant of which no lease ends while a busy machine plays the case.
func longLeases(m Mutant) Mutant {
	m.Config = `{"lease_ms":60000}`
	return m
}

// The programs that serve pairs, right and wrong, for cases of processes that die.
const (
	PDProgram        = "kvport-pd"
	pdRedialsProgram = "kvport-pd-redials"
	pdWaitsProgram   = "kvport-pd-waits"
	pdStartedProgram = "kvport-pd-started"
)

// PDPrograms maps the names of the programs to what they serve.
func PDPrograms() map[string]connector.Plugin {
	return map[string]connector.Plugin{
		PDProgram:        PDReference(),
		pdRedialsProgram: (&pdFaults{redialsForever: true}).plugin(),
		pdWaitsProgram:   (&pdFaults{ignoresDeadline: true}).plugin(),
		pdStartedProgram: (&pdFaults{startedIsTaken: true}).plugin(),
	}
}

func pdMutants() []Mutant {
	list := slices.Concat(pdProducerMutants(), pdConsumerMutants(), pushMutants(), turnMutants(), reshapeMutants())
	return append(list,
		Mutant{Name: "a consumer that dials a dead producer for ever", Case: "pd-killed", Program: pdRedialsProgram, Plugin: (&pdFaults{redialsForever: true}).plugin},
		Mutant{Name: "a consumer that waits for a stopped producer for ever", Case: "pd-stopped", Program: pdWaitsProgram, Plugin: (&pdFaults{ignoresDeadline: true}).plugin},
		Mutant{Name: "a producer that ends a hold when its reading begins", Case: "pd-taker-killed", Program: pdStartedProgram, Plugin: (&pdFaults{startedIsTaken: true}).plugin},
	)
}

func pdProducerMutants() []Mutant {
	return []Mutant{
		pdMutant("a producer that serves the slot behind each", "pd-handoff", pdFaults{shifted: true}),
		pdMutant("a producer that remembers four holds", "pd-many", pdFaults{few: true}),
		pdMutant("a producer that knows one hold of each request id", "pd-same-request", pdFaults{byRequest: true}),
		longLeases(pdMutant("a producer that knows holds by the last key of their prompts", "pd-alike", pdFaults{byContent: true})),
		longLeases(pdMutant("a producer whose slots belong to one hold each", "pd-alike", pdFaults{oneOwner: true})),
		longLeases(pdMutant("a producer that takes a request's name to end at a colon", "pd-alike", pdFaults{cutsNames: true})),
		pdMutant("a consumer that leaves a partial block as it was", "pd-tail", pdFaults{tailless: true}),
		pdMutant("a producer that takes the last Save of a request for all of it", "pd-tail", pdFaults{lastSave: true}),
		pdMutant("a producer that sends partial blocks as they were saved, and zeros for others", "pd-tail", pdFaults{savedTails: true}),
		pdMutant("a producer that counts a trailing group's blocks from the prompt's first", "pd-groups", pdFaults{fromFirst: true}),
		pdMutant("a producer that serves its first rank's part to all", "pd-ranks", pdFaults{firstRank: true}),
		pdMutant("a producer that frees on abort and serves", "pd-aborted", pdFaults{freeAborted: true}),
		pdMutant("a producer that reports a hold twice", "pd-once", pdFaults{twice: true}),
		pdMutant("a producer that serves a hold after it was consumed", "pd-consumed-reused", pdFaults{keepsConsumed: true}),
		pdMutant("a producer that waits for two consumers and lets one in", "pd-count", pdFaults{wrongCount: true}),
		pdMutant("a producer that reports a hold after its first rank", "pd-all-ranks", pdFaults{firstRankEnds: true}),
		pdMutant("a consumer that ends a hold by asking", "pd-asked", pdFaults{askedIsTaken: true}),
		pdMutant("a consumer that notifies after a load that was cancelled", "pd-unread", pdFaults{doneAnyway: true}),
		pdMutant("a producer whose leases do not end", "pd-expired", pdFaults{noExpiry: true}),
		pdMutant("a producer that knows slots but no generations", "pd-generation", pdFaults{noGeneration: true, noSecret: true, noKeys: true}),
		pdMutant("a lease reaper that stops at a hold that was fetched", "pd-reaper", pdFaults{reaperStops: true}),
		pdMutant("a producer whose leases are shorter than it says", "pd-lease", pdFaults{shortLease: true}),
		pdMutant("a producer that looks at the lease when a reading begins", "pd-expired-reading", pdFaults{oneCheck: true}),
		pdMutant("a producer that believes tickets of its former life", "pd-epoch", pdFaults{noEpoch: true, noSecret: true, noKeys: true}),
		pdMutant("a producer that serves another engine's ticket", "pd-wrong-engine", pdFaults{noEngine: true, noEpoch: true, noSecret: true, noKeys: true}),
		pdMutant("producers that share one table of holds", "pd-two-engines", pdFaults{foreignHold: true, noEngine: true, noEpoch: true, noSecret: true, noKeys: true}),
		pdMutant("a producer that asks for no secret", "pd-forged", pdFaults{noSecret: true, noMAC: true, noKeys: true}),
		pdMutant("a producer that serves after it has closed", "pd-closed", pdFaults{servesClosed: true}),
		pdMutant("a producer whose connections outlive it", "pd-closed-reading", pdFaults{keepsConnections: true}),
		pdMutant("a producer that counts the blocks of a prompt in 8 bits", "pd-long", pdFaults{placeByte: true}),
		pdMutant("a producer that counts slots in 8 bits", "pd-long", pdFaults{slotByte: true}),
		pdMutant("a producer whose lease begins again with each question", "pd-expired-part", pdFaults{renews: true}),
		pdMutant("a producer that reports a hold when the rank with the last number has fetched", "pd-all-ranks", pdFaults{lastRankEnds: true}),
		pdMutant("a producer that takes a rank that fetches twice for two", "pd-all-ranks", pdFaults{countsReads: true}),
		pdMutant("a producer that writes the length of a block's part in 16 bits", "pd-large", pdFaults{shortLength: true}),
	}
}

func pdConsumerMutants() []Mutant {
	return []Mutant{
		pdMutant("a consumer that writes into the next slot too", "pd-exact", pdFaults{overrun: true}),
		pdMutant("a consumer that looks for blocks where its own cache would have them", "pd-handoff", pdFaults{ownLayout: true}),
		pdMutant("a consumer that takes slots which its own cache does not have for gone", "pd-long", pdFaults{ownBlocks: true}),
		pdMutant("a consumer that fetches the first 1,024 parts of blocks", "pd-long", pdFaults{fewParts: true}),
		pdMutant("a consumer whose numbers of ranks have one bit", "pd-ranks", pdFaults{oneBit: true}),
		pdMutant("ranks that wait for the load of another and take it for their own", "pd-ranks", pdFaults{joinsRanks: true}),
		pdMutant("a consumer that takes slots to be in a row", "pd-slots", pdFaults{sameSlots: true}),
		pdMutant("a consumer that forgets what it has computed", "pd-part", pdFaults{ignoresFrom: true, noKeys: true}),
		pdMutant("a consumer that forgets what it has computed where the last block is partial", "pd-part", pdFaults{tailFrom: true, noKeys: true}),
		pdMutant("a consumer that takes any block at the right place", "pd-other-prompt", pdFaults{noKeys: true}),
		pdMutant("a consumer that says nothing of blocks that are missing", "pd-named", pdFaults{hidesMissing: true}),
		pdMutant("a consumer that goes on after it was cancelled", "pd-cancel", pdFaults{lateWrite: true}),
		pdMutant("a time-out without a fence", "pd-deadline", pdFaults{lateWrite: true, noMAC: true}),
		pdMutant("a consumer that writes answers that come late", "pd-late", pdFaults{lateWrite: true, noKeys: true}),
		pdMutant("a hold that finishes twice", "pd-at-once", pdFaults{reportsBoth: true}),
		pdMutant("loads that share a buffer", "pd-crowd", pdFaults{sharedScratch: true}),
		pdMutant("a consumer that takes the end of a connection for that of the blocks", "pd-cut", pdFaults{eofIsEnd: true}),
		pdMutant("a consumer that believes every byte", "pd-corrupt", pdFaults{noMAC: true}),
		pdMutant("a producer that guesses what it was asked", "pd-corrupt-asked", pdFaults{guesses: true, noMAC: true, noEngine: true, noEpoch: true, noKeys: true}),
		pdMutant("a consumer that takes one read for one message", "pd-drip", pdFaults{oneRead: true}),
		pdMutant("a producer that knows consumers by the order in which they come", "pd-reordered", pdFaults{byOrder: true, noMAC: true, noKeys: true}),
		pdMutant("a consumer that never forgives", "pd-refused", pdFaults{remembersDead: true}),
		pdMutant("a consumer that waits for an answer to what was lost", "pd-one-way", pdFaults{ignoresDeadline: true}),
	}
}
