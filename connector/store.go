package connector

import "context"

// A Store is the easy level of the contract: it keeps blocks by content address. Package sdk makes a
// Scheduler and a Worker of it, so an author writes these four methods and nothing else.
//
// Calls arrive concurrently. The sdk opens one Store per plugin process and engine; both sides and
// all ranks share it.
type Store interface {
	// Lookup reports for each run how many of its leading keys are present: the count stops at the first
	// absent key (rule STORE-02). It has no side effects.
	Lookup(ctx context.Context, runs [][]StoreKey) ([]int, error)
	// Get fills the spans of every item. An *ItemError names the items that could not be filled; all others
	// are filled. After any other error none of them is reliable.
	Get(ctx context.Context, items []Item) error
	// Put stores every item; once it has returned nil, Lookup finds them. A key that is already there is
	// not an error: equal keys mean equal bytes (rule STORE-05). An *ItemError names the items that were
	// not stored; ErrDeclined in it means that the connector chose not to store them.
	Put(ctx context.Context, items []Item) error
	// Close releases what the store holds. No other call is running, and none follows.
	Close() error
}

// Item is one block of a Store call, in place: Spans point into the engine's cache, one for each segment in
// layout order. The last span is the host's digest, which is as opaque as the rest. Lengths are those of
// the Layout and are the same on every call for the same key. The slices are valid until the call returns.
type Item struct {
	Key     StoreKey
	Replace bool   // Put only: what is stored under Key is damaged, so it must be written again (rule STORE-06)
	Tenant  uint64 // as in Transfer
	Spans   [][]byte
}

// Size is the total length of the item's spans in bytes.
func (it Item) Size() int {
	n := 0
	for _, s := range it.Spans {
		n += len(s)
	}
	return n
}
