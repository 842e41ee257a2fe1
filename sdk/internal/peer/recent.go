package peer

// recent is a map of the keys that were added last. A key is dropped when limit more keys have been added,
// however often it was set in between. The caller must hold a lock.
type recent[K comparable, V any] struct {
	limit   int
	entries map[K]recentEntry[V]
	order   []K    // in the order of their addition, including deleted keys
	first   uint64 // sequence number of order[0]
}

type recentEntry[V any] struct {
	value V
	turn  uint64 // sequence number of its addition
}

func newRecent[K comparable, V any](limit int) *recent[K, V] {
	return &recent[K, V]{limit: limit, entries: map[K]recentEntry[V]{}}
}

// get returns a key's value.
func (r *recent[K, V]) get(k K) (value V, known bool) {
	e, known := r.entries[k]
	return e.value, known
}

// has reports whether a key is there.
func (r *recent[K, V]) has(k K) bool {
	_, known := r.entries[k]
	return known
}

// set gives a key a value, and drops the oldest key if there is one too many.
func (r *recent[K, V]) set(k K, value V) {
	e, known := r.entries[k]
	e.value = value
	if !known {
		e.turn = r.first + uint64(len(r.order))
		r.order = append(r.order, k)
	}
	r.entries[k] = e
	if len(r.order) > r.limit {
		if oldest := r.order[0]; r.entries[oldest].turn == r.first { // the key was not deleted and, perhaps, added again
			delete(r.entries, oldest)
		}
		r.order, r.first = r.order[1:], r.first+1
	}
}

// remove deletes a key.
func (r *recent[K, V]) remove(k K) { delete(r.entries, k) }
