package placement

// buffer is the store buffer of one processor: a plain store is seen by others only when the buffer drains, in order. A
// locked access waits until it is empty.
type buffer struct {
	plainAdd bool // Add is a load and a store
	stores   []buffered
}

type buffered struct {
	v     *view
	at    int64
	value uint64
}

func (b *buffer) push(v *view, at int64, value uint64) {
	b.stores = append(b.stores, buffered{v, at, value})
}

// forward is what the processor itself reads.
func (b *buffer) forward(words bool, at int64, value uint64) uint64 {
	for _, s := range b.stores {
		if s.v.words == words && s.at == at {
			value = s.value
		}
	}
	return value
}

// one makes the oldest store seen by all.
func (b *buffer) one() {
	s := b.stores[0]
	b.stores = b.stores[1:]
	s.v.put(s.at, s.value)
}

// next is what one does.
func (b *buffer) next() access {
	return access{at: b.stores[0].at, words: b.stores[0].v.words, write: true}
}
