// Package kvcache keeps account of the slots of a paged KV cache: who owns each block, and which
// content can be found again by its key. It never touches the bytes.
//
// Three things keep a block: references of requests, pins of running transfers and holds for
// consumers. A block is reusable only when it has none of them. A reusable block keeps its content,
// and its key in the prefix cache, until it is the least recently used one and is allocated again.
package kvcache

import (
	"fmt"

	"github.com/kvport/kvport/connector"
)

// State is what a block counts as; see [Pool.Counts].
type State uint8

// The states. A block with several claims on it counts as the last that applies.
const (
	Free   State = iota // reusable
	Used                // requests refer to it
	Pinned              // a running transfer reads or writes it
	Held                // kept for consumers
	states
)

// Pool is the block pool of one cache. All groups share the slots: a slot belongs to one group at a
// time. Every operation is O(1). It is for one goroutine.
type Pool struct {
	blocks   []block // the last one is the sentinel of the free list
	index    map[content]connector.BlockID
	counts   [states]int
	settling int
	lost     int
	Gone     func(group uint16, key connector.BlockKey) // is told about content that is no longer found; set before use
}

// content is what a published block holds.
type content struct {
	group uint16
	key   connector.BlockKey
}

type block struct {
	refs, pins, holds int32
	prev, next        connector.BlockID // in the free list, while reusable
	published, lost   bool
	content           content
}

// New makes a pool of blocks 0..n-1, all free.
func New(n int) *Pool {
	p := &Pool{blocks: make([]block, n+1), index: make(map[content]connector.BlockID), Gone: func(uint16, connector.BlockKey) {}}
	end := p.end()
	p.blocks[end].prev, p.blocks[end].next = end, end
	for id := range end {
		p.link(id, p.blocks[end].prev)
	}
	p.counts[Free] = n
	return p
}

// Size is the number of blocks.
func (p *Pool) Size() int { return len(p.blocks) - 1 }

// Available is the number of blocks that Alloc could give, cached content included.
func (p *Pool) Available() int { return p.counts[Free] }

// Settling is the number of blocks that become reusable as soon as the running transfers end: no
// request refers to them, nothing holds them, and they are not lost.
func (p *Pool) Settling() int { return p.settling }

// Lost is the number of blocks that are lost.
func (p *Pool) Lost() int { return p.lost }

// Counts is the number of blocks in each state, indexed by State. It adds up to Size.
func (p *Pool) Counts() [4]int { return p.counts }

// Alloc gives the least recently used reusable block, with one reference and without content, or
// false if there is none.
func (p *Pool) Alloc() (connector.BlockID, bool) {
	id := p.blocks[p.end()].next
	if id == p.end() {
		return 0, false
	}
	p.unpublish(id)
	p.Ref(id)
	return id, true
}

// Lookup finds the block with the given content. It takes no reference.
func (p *Pool) Lookup(group uint16, key connector.BlockKey) (connector.BlockID, bool) {
	id, ok := p.index[content{group, key}]
	return id, ok
}

// Publish makes a block's content findable: its KV is complete, and final while anyone keeps it. If
// another block has the same content already, that one stays the one to be found. It reports whether this block is now.
func (p *Pool) Publish(id connector.BlockID, group uint16, key connector.BlockKey) bool {
	c := content{group, key}
	if _, taken := p.index[c]; taken || p.blocks[id].published {
		return false
	}
	p.index[c] = id
	p.blocks[id].published, p.blocks[id].content = true, c
	return true
}

// Forget drops all content: nothing published so far is found again.
func (p *Pool) Forget() {
	for id := range p.end() {
		p.unpublish(id)
	}
}

// Ref adds a request's reference.
func (p *Pool) Ref(id connector.BlockID) { p.change(id, func(b *block) { b.refs++ }) }

// Unref drops a reference.
func (p *Pool) Unref(id connector.BlockID) { p.change(id, func(b *block) { b.refs-- }) }

// Pin keeps a block for a running transfer. Pins are counted.
func (p *Pool) Pin(id connector.BlockID) { p.change(id, func(b *block) { b.pins++ }) }

// Unpin drops a pin.
func (p *Pool) Unpin(id connector.BlockID) { p.change(id, func(b *block) { b.pins-- }) }

// Hold keeps a block for consumers. Holds are counted.
func (p *Pool) Hold(id connector.BlockID) { p.change(id, func(b *block) { b.holds++ }) }

// Unhold drops a hold.
func (p *Pool) Unhold(id connector.BlockID) { p.change(id, func(b *block) { b.holds-- }) }

// Lose says that a pin of a block never ends, or a hold.
func (p *Pool) Lose(id connector.BlockID) {
	if !p.blocks[id].lost {
		p.lost++
	}
	p.change(id, func(b *block) { b.lost = true })
}

// change applies one change to a block's claims and keeps counts and free list right.
func (p *Pool) change(id connector.BlockID, f func(*block)) {
	b := &p.blocks[id]
	before, settled := b.state(), b.settling()
	f(b)
	after := b.state()
	p.counts[before]--
	p.counts[after]++
	p.settling += b.settling() - settled
	switch {
	case before == Free && after != Free:
		p.unlink(id)
	case before != Free && after == Free && b.published:
		p.link(id, p.blocks[p.end()].prev) // reused last
	case before != Free && after == Free:
		p.link(id, p.end()) // nothing worth keeping: reused first
	}
}

func (b *block) state() State {
	switch {
	case b.holds > 0:
		return Held
	case b.pins > 0:
		return Pinned
	case b.refs > 0:
		return Used
	}
	return Free
}

func (b *block) settling() int {
	if b.pins > 0 && b.refs == 0 && b.holds == 0 && !b.lost {
		return 1
	}
	return 0
}

func (p *Pool) unpublish(id connector.BlockID) {
	if b := &p.blocks[id]; b.published {
		delete(p.index, b.content)
		b.published = false
		p.Gone(b.content.group, b.content.key)
	}
}

// end is the sentinel: the free list runs from its next (reused first) to its prev (reused last).
func (p *Pool) end() connector.BlockID { return connector.BlockID(len(p.blocks) - 1) }

func (p *Pool) link(id, after connector.BlockID) {
	next := p.blocks[after].next
	p.blocks[id].prev, p.blocks[id].next = after, next
	p.blocks[after].next, p.blocks[next].prev = id, id
}

func (p *Pool) unlink(id connector.BlockID) {
	b := &p.blocks[id]
	p.blocks[b.prev].next, p.blocks[b.next].prev = b.next, b.prev
}

// Check verifies the account of every block, in O(blocks): counts, free list and prefix cache agree
// with the claims. It is for tests and simulations.
func (p *Pool) Check() error {
	var counts [states]int
	settling, published := 0, 0
	for id := range p.end() {
		b := &p.blocks[id]
		if b.refs < 0 || b.pins < 0 || b.holds < 0 {
			return fmt.Errorf("block %d has %d refs, %d pins, %d holds", id, b.refs, b.pins, b.holds)
		}
		counts[b.state()]++
		settling += b.settling()
		if b.published {
			published++
			if found, ok := p.index[b.content]; !ok || found != id {
				return fmt.Errorf("block %d is published but its key leads to block %d", id, found)
			}
		}
	}
	if counts != p.counts || settling != p.settling {
		return fmt.Errorf("counts are %v and %d settling, want %v and %d", p.counts, p.settling, counts, settling)
	}
	if published != len(p.index) {
		return fmt.Errorf("%d blocks published, %d keys", published, len(p.index))
	}
	listed := 0
	for id := p.blocks[p.end()].next; id != p.end(); id = p.blocks[id].next {
		if listed++; p.blocks[id].state() != Free || listed > counts[Free] {
			return fmt.Errorf("free list has block %d, which is kept or listed twice", id)
		}
	}
	if listed != counts[Free] {
		return fmt.Errorf("free list has %d blocks, %d are free", listed, counts[Free])
	}
	return nil
}
