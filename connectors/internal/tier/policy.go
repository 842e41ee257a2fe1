package tier

import (
	"fmt"

	"github.com/kvport/kvport/connector"
)

// The eviction policies.
const (
	LRU    = "lru"
	ARC    = "arc"
	S3FIFO = "s3fifo"
	FIFO   = "fifo"
)

// policy decides which entry goes. It knows entries by number; h is the hash of an entry's key, by
// which those that went are remembered.
type policy interface {
	// add takes a new entry, after evict if that made its place.
	add(id uint32, h uint64)
	// touch notes a hit.
	touch(id uint32)
	// evict chooses an entry that is not pinned, to make place for the key with hash h, and takes it
	// out; none if all are pinned. An entry whose block is still being written counts as pinned.
	evict(h uint64, pinned func(uint32) bool) uint32
	// remove takes out an entry that goes for another reason.
	remove(id uint32)
}

// entries is what a policy works on: it is shared with the index, which keeps free entries in a list.
type entries struct {
	links
	flags []uint8             // low three bits are the policy's
	hash  func(uint32) uint64 // of an entry's key
}

// newPolicy makes the named policy for n entries.
func newPolicy(name string, e *entries, n int) (policy, error) {
	switch name {
	case "", LRU:
		return &lru{entries: e, all: newList()}, nil
	case FIFO:
		return &fifo{lru{entries: e, all: newList()}}, nil
	case ARC:
		return newARC(e, n), nil
	case S3FIFO:
		return newS3FIFO(e, n), nil
	}
	return nil, fmt.Errorf("eviction policy %q is none of %s, %s, %s, %s: %w", name, LRU, ARC, S3FIFO, FIFO, connector.ErrIncompatible)
}

// lru evicts what was not used for longest.
type lru struct {
	*entries
	all list
}

func (p *lru) add(id uint32, _ uint64) { p.push(&p.all, id) }

func (p *lru) touch(id uint32) {
	p.cut(&p.all, id)
	p.push(&p.all, id)
}

func (p *lru) remove(id uint32) { p.cut(&p.all, id) }

func (p *lru) evict(_ uint64, pinned func(uint32) bool) uint32 {
	id := p.oldest(&p.all, pinned)
	if id != none {
		p.cut(&p.all, id)
	}
	return id
}

// fifo evicts what came first, used or not.
type fifo struct{ lru }

func (p *fifo) touch(uint32) {}
