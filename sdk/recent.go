package sdk

// recent is a map that holds what was added last: when limit more keys have been added, a key goes, however
// often it was set meanwhile. It wants a lock of its user's.
type recent[K comparable, V any] struct {
	limit   int
	entries map[K]recentEntry[V]
	order   []K    // as they were added; those that were deleted too
	first   uint64 // turn of order[0]
}

type recentEntry[V any] struct {
	value V
	turn  uint64 // when it was added
}

func newRecent[K comparable, V any](limit int) *recent[K, V] {
	return &recent[K, V]{limit: limit, entries: map[K]recentEntry[V]{}}
}

// get gives a key's value.
func (r *recent[K, V]) get(k K) (value V, known bool) {
	e, known := r.entries[k]
	return e.value, known
}

// has reports whether a key is there.
func (r *recent[K, V]) has(k K) bool {
	_, known := r.entries[k]
	return known
}

// set gives a key a value, and forgets the oldest key where it is one too many.
func (r *recent[K, V]) set(k K, value V) {
	e, known := r.entries[k]
	e.value = value
	if !known {
		e.turn = r.first + uint64(len(r.order))
		r.order = append(r.order, k)
	}
	r.entries[k] = e
	if len(r.order) > r.limit {
		if oldest := r.order[0]; r.entries[oldest].turn == r.first { // it was not deleted, and perhaps added again
			delete(r.entries, oldest)
		}
		r.order, r.first = r.order[1:], r.first+1
	}
}

// remove forgets a key.
func (r *recent[K, V]) remove(k K) { delete(r.entries, k) }
