package tier

// none is no entry.
const none = ^uint32(0)

// links are the neighbours of entries, of which each is in at most one list.
type links struct{ next, prev []uint32 }

func newLinks(n int) links { return links{make([]uint32, n), make([]uint32, n)} }

// list is a queue of entries: the head is the youngest, the tail the oldest.
type list struct {
	head, tail uint32
	n          int
}

func newList() list { return list{head: none, tail: none} }

// push makes id the youngest entry of l.
func (k *links) push(l *list, id uint32) {
	k.next[id], k.prev[id] = l.head, none
	if l.head != none {
		k.prev[l.head] = id
	} else {
		l.tail = id
	}
	l.head = id
	l.n++
}

// cut takes id out of l.
func (k *links) cut(l *list, id uint32) {
	next, prev := k.next[id], k.prev[id]
	if prev != none {
		k.next[prev] = next
	} else {
		l.head = next
	}
	if next != none {
		k.prev[next] = prev
	} else {
		l.tail = prev
	}
	l.n--
}

// oldest is the oldest entry of l that is not pinned, or none.
func (k *links) oldest(l *list, pinned func(uint32) bool) uint32 {
	id := l.tail
	for id != none && pinned(id) {
		id = k.prev[id]
	}
	return id
}
