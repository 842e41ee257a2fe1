package connector

import "context"

// A Store is the easy level of the contract: blocks by content address. Package sdk makes a
// Scheduler and a Worker of it, so an author writes these four methods and nothing else.
//
// Calls arrive concurrently. The sdk opens one Store per plugin process and engine; both sides and
// all ranks share it.
type Store interface {
	// Lookup reports for each run how many leading keys are present: the count stops at the first
	// absent key (rule STORE-02). It has no side effects.
	Lookup(ctx context.Context, runs [][]StoreKey) ([]int, error)
	// Get fills the spans of every item. An *ItemError names the items that could not be filled,
	// all others were; any other error means that none can be relied on.
	Get(ctx context.Context, items []Item) error
	// Put stores every item; when it returns nil Lookup finds them. A key that is already there is
	// not an error: equal keys mean equal bytes (rule STORE-05). An *ItemError names the items that
	// were not stored; ErrDeclined in it means that this is as the config wants it.
	Put(ctx context.Context, items []Item) error
	// Close releases what the store holds. No call is running or follows.
	Close() error
}

// Item is one block of a Store call, in place: Spans point into the engine's cache, one for each
// segment in layout order, the last being the host's digest, opaque like the rest. Lengths are
// those of the Layout and equal on every call for the same key. The slices are valid until the
// call returns.
type Item struct {
	Key     StoreKey
	Replace bool   // Put only: what is stored under Key was found damaged, write it anew (rule STORE-06)
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
