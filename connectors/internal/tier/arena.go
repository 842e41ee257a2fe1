package tier

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// arena is slots in memory that may outlive this process.
type arena struct {
	shape
	mem        []byte
	generation uint64 // of the last write; under the memory's lock
}

// ArenaHead is how much an arena takes beyond its slots and 256 bytes for each, at most.
const ArenaHead = 2 * superSize

// ArenaBytes is the size of an arena with n slots of slotBytes.
func ArenaBytes(n int, slotBytes int64) int64 { return need(n, slotBytes) }

// found is a slot that a former process left.
type found struct {
	header
	id uint32
}

// openArena takes memory into use, whatever is in it. found are the blocks that are whole, in the
// order in which they were written; torn is the number of slots that are not. Everything else is free.
func openArena(mem []byte, slotBytes int64) (a *arena, whole []found, torn int, err error) {
	a = &arena{shape: fit(int64(len(mem)), slotBytes), mem: mem}
	if a.slots < 1 {
		return nil, nil, 0, fmt.Errorf("an arena of %d bytes has no room for a block of %d: %w", len(mem), slotBytes, connector.ErrIncompatible)
	}
	if super := a.super(); !bytes.Equal(mem[:len(super)], super) {
		if fresh := make([]byte, superSize); !bytes.Equal(mem[:superSize], fresh) { // else nobody has written, and every slot is free: none is touched
			for id := range uint32(a.slots) {
				a.clear(id)
			}
		}
		copy(mem, super)
		return a, nil, 0, nil
	}
	now := time.Now().UnixMilli()
	seen := map[connector.StoreKey]uint64{}
	for id := range uint32(a.slots) {
		b := a.head(id)
		var h header
		switch state := word(b).Load(); {
		case state == stateFree:
			continue
		case state != stateReady || !h.decode(b) || int64(h.length) > slotBytes:
			torn++
		case h.expires == 0 || h.expires > now:
			whole = append(whole, found{h, id})
			seen[h.key] = max(seen[h.key], h.generation)
			a.generation = max(a.generation, h.generation)
			continue
		}
		a.clear(id)
	}
	whole = slices.DeleteFunc(whole, func(f found) bool { // of a block that was written again, keep the later one
		old := f.generation < seen[f.key]
		if old {
			a.clear(f.id)
		}
		return old
	})
	slices.SortFunc(whole, func(a, b found) int { return cmp.Compare(a.generation, b.generation) })
	return a, whole, torn, nil
}

func (a *arena) head(id uint32) []byte {
	at := a.headerAt(id)
	return a.mem[at : at+headerSize : at+headerSize]
}

// block is the bytes of a slot.
func (a *arena) block(id uint32, length int) []byte {
	at := a.slotAt(id)
	return a.mem[at : at+int64(length) : at+int64(length)]
}

// begin takes a slot out of use: from here to publish it holds no block.
func (a *arena) begin(id uint32) { word(a.head(id)).Store(stateWriting) }

// publish says that the slot holds all of a block.
func (a *arena) publish(id uint32, h *header) {
	b := a.head(id)
	h.encode(b)
	word(b).Store(stateReady)
}

// clear says that the slot holds nothing.
func (a *arena) clear(id uint32) { word(a.head(id)).Store(stateFree) }

// header reads back what publish wrote.
func (a *arena) header(id uint32) (h header, ok bool) {
	b := a.head(id)
	ok = word(b).Load() == stateReady && h.decode(b)
	return h, ok
}
