package tier

import "github.com/kvport/kvport/connector"

// Near is the memory tier of a Store that has one or not, for that Store to embed: it implements sdk.Placing and sdk.Lending. Without a
// tier nothing is placed and nothing is lent.
type Near struct{ Memory *Store } // nil: there is none

// Placed implements sdk.Placing.
func (n Near) Placed(keys []connector.StoreKey) []uint32 {
	if n.Memory == nil {
		return nil
	}
	return n.Memory.Placed(keys)
}

// Used implements sdk.Placing.
func (n Near) Used(slots []uint32) {
	if n.Memory != nil {
		n.Memory.Used(slots)
	}
}

// Lends implements sdk.Lending.
func (n Near) Lends() int {
	if n.Memory == nil {
		return 0
	}
	return n.Memory.Lends()
}

// Lend implements sdk.Lending.
func (n Near) Lend(most int) (slots []uint32, serial uint64) {
	if n.Memory == nil {
		return nil, 0
	}
	return n.Memory.Lend(most)
}

// Back implements sdk.Lending.
func (n Near) Back(serials []uint64) {
	if n.Memory != nil {
		n.Memory.Back(serials)
	}
}
