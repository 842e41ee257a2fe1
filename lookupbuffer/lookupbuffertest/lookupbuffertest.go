// Package lookupbuffertest checks that a buffer keeps the promises of package lookupbuffer. Authors of
// buffers run it:
//
//	func TestBuffer(t *testing.T) {
//		lookupbuffertest.Run(t, lookupbuffertest.Harness{Open: func(t lookupbuffertest.T) lookupbuffertest.Ends { ... }})
//	}
package lookupbuffertest

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/lookupbuffer"
)

// T is the part of testing.TB that a case needs.
type T interface {
	require.TestingT // Errorf reports a failure, FailNow ends the case
	// Context ends with the case's deadline.
	Context() context.Context
	// Skipf ends a case that does not apply and says why.
	Skipf(format string, args ...any)
	// Cleanup runs a function at the end of the case.
	Cleanup(func())
}

// Ends are the two ends of one new, empty buffer. They are the same value unless the ends are in two
// processes.
type Ends struct {
	Insert lookupbuffer.Buffer // where blocks are put in
	Select lookupbuffer.Buffer // where they are looked up and taken out
}

// Harness makes buffers for the suite.
type Harness struct {
	// Open makes a new buffer. The suite closes both ends.
	Open func(t T) Ends
	// Capacity is how many bytes the buffer holds, at least 1 MiB.
	Capacity int
	// Keep says that blocks stay after they are selected.
	Keep bool
	// Shared says that others may change what is stored, as in a database: a block of another size is
	// connector.ErrOutdated then instead of connector.ErrIncompatible.
	Shared bool
}

// The time limits.
const (
	soon   = 5 * time.Second
	moment = 50 * time.Millisecond
)

// A Case checks one promise.
type Case struct {
	Name string
	Text string // what the case checks, in one sentence
	Run  func(t T, h Harness)
}

// Run runs every case as a subtest.
func Run(t *testing.T, h Harness) {
	t.Helper()
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) { c.Run(t, h) })
	}
}

// Cases lists the suite.
func Cases() []Case {
	return []Case{
		{"select", "An inserted block is selected, byte for byte, and is gone afterwards.", selects},
		{"lookup", "Lookup counts leading keys, for each run of a batch.", lookup},
		{"select-waits", "A selection that comes first waits for its block.", selectWaits},
		{"not-there", "A selection whose context ends names the blocks that did not come; the others are filled.", notThere},
		{"cancelled-select", "A cancelled selection removes nothing.", cancelled},
		{"failed-placement", "A block that does not fit the spans of a selection stays.", failedPlacement},
		{"two-selections", "Two selections that wait for one block both get it.", twoSelections},
		{"full", "At capacity Insert does not wait, and every block that is found is complete.", full},
		{"room-again", "When blocks have been taken out, there is room again.", roomAgain},
		{"insert-twice", "A key that is already there keeps its bytes, unless it is replaced.", insertTwice},
		{"spans-returned", "What a caller does to its memory after Insert does not change a block.", spansReturned},
		{"close", "Close ends selections that wait.", closeWaiting},
		{"at-once", "Concurrent inserts and selections do not mix blocks up.", atOnce},
	}
}
