// Package fairlru is a table of keys that forgets the least recently used, and shares its room fairly between
// clients: when it is full, the client that has most loses a key. So one client alone may fill the table, and none pushes
// out what is the fair share of another.
package fairlru

import "iter"

// Clients is how many clients are told apart: those whose numbers are the same modulo Clients share what they have, as in
// stochastic fair queueing.
const Clients = 1024

// Table gives keys slots, which are numbered from 0, for what its user remembers of them. It is not safe for concurrent use.
type Table struct {
	most    int
	slots   map[uint64]int32
	entries []entry
	free    []int32
	lists   [Clients]list

	largest int // the client that has most, as of the last look
	looks   int // how many keys it may lose until the next look
}

// entry is a slot. Its neighbours are in the list of its client; -1: none.
type entry struct {
	key          uint64
	older, newer int32
	client       int16 // -1: no key is here
}

// list is the keys of one client; -1: none.
type list struct {
	oldest, newest int32
	size           int
}

// New makes a table of that many keys, at least one.
func New(most int) *Table {
	t := &Table{most: max(1, most), slots: map[uint64]int32{}}
	for i := range t.lists {
		t.lists[i] = list{oldest: -1, newest: -1}
	}
	return t
}

// Len is how many keys there are.
func (t *Table) Len() int { return len(t.slots) }

// Find is the slot of a key.
func (t *Table) Find(key uint64) (slot int, known bool) {
	at, known := t.slots[key]
	return int(at), known
}

// All are the keys with their slots, in no order. The key that was given last may be removed.
func (t *Table) All() iter.Seq2[uint64, int] {
	return func(yield func(uint64, int) bool) {
		for key, slot := range t.slots {
			if !yield(key, int(slot)) {
				return
			}
		}
	}
}

// Use finds the slot of a key or gives it one, which may have been another's, and makes the key the newest of its client.
// A key counts to the client that used it first, and in a full table no longer to the one that has most if another uses it.
func (t *Table) Use(key, client uint64) (slot int, known bool) {
	if at, known := t.slots[key]; known {
		t.renew(at, int16(client%Clients))
		return int(at), true
	}
	c := int16(client % Clients)
	at := t.room(c)
	t.slots[key], t.entries[at].key = at, key
	t.link(at, c)
	return int(at), false
}

// UseAt is Use for a key that Find has found in a slot, or found nowhere (a negative slot). It saves looking for a key that
// is still there.
func (t *Table) UseAt(slot int, key, client uint64) (at int, known bool) {
	if slot >= 0 && slot < len(t.entries) && t.entries[slot].key == key && t.entries[slot].client >= 0 {
		t.renew(int32(slot), int16(client%Clients))
		return slot, true
	}
	return t.Use(key, client)
}

// renew makes the key of a slot the newest of its client.
func (t *Table) renew(at int32, client int16) {
	own := t.entries[at].client
	size := t.lists[own].size
	if loses := len(t.slots) == t.most && size >= t.lists[t.largest].size; !loses || t.lists[client].size >= size {
		client = own
	}
	t.unlink(at)
	t.link(at, client)
}

// Remove takes a key out, if it is there.
func (t *Table) Remove(key uint64) {
	if at, known := t.slots[key]; known {
		t.unlink(at)
		delete(t.slots, key)
		t.entries[at].client = -1
		t.free = append(t.free, at)
	}
}

// room is a slot that no key has, for another key of a client.
func (t *Table) room(client int16) (at int32) {
	if n := len(t.free); n > 0 {
		at, t.free = t.free[n-1], t.free[:n-1]
		return at
	}
	if n := len(t.entries); n < t.most {
		t.entries = append(t.entries, entry{})
		return int32(n)
	}
	loser := &t.lists[t.loser()]
	if own := &t.lists[client]; own.size >= loser.size {
		loser = own
	}
	at = loser.oldest
	t.unlink(at)
	delete(t.slots, t.entries[at].key)
	return at
}

// precision is the part of the table by which shares may differ, so that clients need not be compared for every key.
const precision = 4096

// loser is the client that has most.
func (t *Table) loser() int {
	if t.looks == 0 || t.lists[t.largest].size == 0 {
		for c := range t.lists {
			if t.lists[c].size > t.lists[t.largest].size {
				t.largest = c
			}
		}
		t.looks = 1 + t.most/precision
	}
	t.looks--
	return t.largest
}

// link makes a slot the newest of a client.
func (t *Table) link(at int32, client int16) {
	e, l := &t.entries[at], &t.lists[client]
	e.client, e.older, e.newer = client, l.newest, -1
	if l.newest >= 0 {
		t.entries[l.newest].newer = at
	} else {
		l.oldest = at
	}
	l.newest = at
	l.size++
}

// unlink takes a slot out of the list of its client.
func (t *Table) unlink(at int32) {
	e := t.entries[at]
	l := &t.lists[e.client]
	if e.older >= 0 {
		t.entries[e.older].newer = e.newer
	} else {
		l.oldest = e.newer
	}
	if e.newer >= 0 {
		t.entries[e.newer].older = e.older
	} else {
		l.newest = e.older
	}
	l.size--
}
