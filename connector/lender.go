package connector

import "context"

// Lender is a Placer that lends the host empty slots ahead of saves: the host writes blocks there by itself and tells the connector
// afterwards (rules PLACE-29 and PLACE-31 to PLACE-35). It has no capability of its own.
type Lender interface {
	Placer
	// Lends is how many slots this rank may have at a time; 0: none, and Lend is not called. It does not change.
	Lends() int
	// Lend takes note of what the host says, and lends slots, which may be fewer than it asks for. One call of a rank at a time is made.
	Lend(ctx context.Context, l *Lending) (*Loan, error)
}

// Lending is what a host says about lent slots, and what it would like to have.
type Lending struct {
	Written []Block  // what it has written since the last call; the ID is the slot
	Back    []uint64 // serials of slots that it does not write
	Used    []uint32 // as of SavePlaced
	Want    int      // more slots
}

// Loan answers a Lending.
type Loan struct {
	Slots  []uint32 // that are lent now, empty
	Serial uint64   // of the block that is written into the first of them; that of each other one is the next number
	Placed []uint32 // slots in which the blocks of Written lie
}
