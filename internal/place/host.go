package place

import (
	"fmt"
	"sync"

	"github.com/kvport/kvport/connector"
)

// Host is the host's end: it writes the words of slots that are LENT to it, and the host's words. It is safe for concurrent
// use, and holds no lock while it accesses shared memory.
type Host struct {
	arena, words Memory // words: nil where the plugin writes every slot itself, and nobody looks at pins (rule PLACE-20)
	g            Geometry

	mu      sync.Mutex
	alive   bool   // a life of the plugin is open
	again   bool   // it was open before
	life    uint64 // of the plugin, counted by this host
	epoch   uint64
	serial  uint64 // the last one that was drawn
	former  uint64 // the last one that was drawn when this life of the plugin opened
	forgets uint64 // how often Forget was called
	saving  map[connector.StoreKey]*Save
	writing map[Slot]*Save  // slots that are lent to a save
	turns   []uint64        // of each slot: how often it was lent, or came into the index
	wrong   map[Slot]uint64 // slots that do not hold what their headers say, and the generation in which they do not
	index   index
}

// NewHost is the host's end of two memories that nobody uses yet; the arena is zeroed. No life of the plugin is open: the
// host calls Reopen before each one. Errors wrap ErrGeometry.
func NewHost(arena, words Memory, g Geometry) (*Host, error) {
	if err := g.fits(arena, words); err != nil {
		return nil, err
	}
	for s := range Slot(g.Slots) {
		words.Store(g.pinAt(s), 0)
		words.Store(g.useAt(s), 0)
	}
	return newHost(arena, words, g), nil
}

// NewReader is NewHost for a plugin that has a Shelf. There are no words, which would take 64 bytes a slot, and Reserve is
// always ErrVoid: what is saved goes into slots that were lent ahead (see Claim), or by message.
func NewReader(arena Memory, g Geometry) (*Host, error) {
	if err := g.fitsArena(arena); err != nil {
		return nil, err
	}
	return newHost(arena, nil, g), nil
}

func newHost(arena, words Memory, g Geometry) *Host {
	return &Host{
		arena: arena, words: words, g: g, epoch: 1,
		saving: map[connector.StoreKey]*Save{}, writing: map[Slot]*Save{}, wrong: map[Slot]uint64{}, turns: make([]uint64, g.Slots), index: newIndex(g.Slots),
	}
}

// Died says that the plugin's process is gone and that nothing can write on its behalf any more. Requests without an answer
// are void. Saves whose slots were lent end as if it lived: what becomes READY stays.
func (h *Host) Died() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.alive = false
	h.life++
}

// Reopen must succeed before the next life of the plugin opens the memories, with what Reopen returns. ErrWriting: slots
// that were lent are still being written; try again when their saves are over (rule PLACE-06). What is resident stays
// so meanwhile.
func (h *Host) Reopen() (Opening, error) {
	h.mu.Lock()
	alive, writing, again := h.alive, len(h.writing), h.again
	h.mu.Unlock()
	if alive || writing > 0 {
		return Opening{}, fmt.Errorf("a life is open: %t, slots that are written: %d: %w", alive, writing, ErrWriting)
	}
	if h.words != nil || again { // else a Shelf finds an arena that nobody has written, and touches one page of it
		h.g.markOne(h.arena, arenaMagic)
	}
	if h.words != nil {
		h.g.markOne(h.words, wordsMagic)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.alive, h.again, h.former = true, true, h.serial
	for s := range h.turns {
		h.turns[s]++ // notices of the life before come too late
	}
	return Opening{Epoch: h.epoch, Serial: h.serial}, nil
}

// Reset drops everything that was saved before it, and saves that are under way. The epoch is for Plugin.Reset; the host has
// the plugin told, and does not tell anybody that the reset is over until it has answered.
func (h *Host) Reset() (epoch uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.epoch++
	h.index.clear()
	return h.epoch
}

// Draw draws serials, n of them, for blocks that the plugin writes itself, and gives the first.
func (h *Host) Draw(n uint64) (first uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	first = h.serial + 1
	h.serial += n
	return first
}

// Forget empties the index. Notices of what the plugin has said before come too late, and so do saves into slots that were lent
// ahead, if they are under way.
func (h *Host) Forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forgets++
	h.index.clear()
	for s := range h.turns {
		h.turns[s]++
	}
}

// Resident is the number of blocks in the index.
func (h *Host) Resident() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.index.len()
}
