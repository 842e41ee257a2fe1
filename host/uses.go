package host

import (
	"slices"
	"sync"

	"github.com/kvport/kvport/internal/place"
)

const (
	mostUsed  = 1 << 16 // slots that are remembered until somebody tells them
	mostTimes = 3       // uses of one slot that are: the policies of package sdk/tier count no more
	mostTold  = 1 << 12 // uses that one save or load tells
)

// uses are slots that were read and of which the plugin's policy has not heard yet, in the order of their last reads. Whoever reads
// the same slots again and again takes no more room than by reading them a few times, so the uses of others stay. It is ready
// for use as it is, and safe for concurrent use.
type uses struct {
	mu    sync.Mutex
	of    map[place.Slot]use
	order []read // by turn; those that are not the last of their slot count for nothing
	turn  uint64 // of the last read
}

// use is how often a slot was read, and when last.
type use struct {
	times int
	turn  uint64
}

// read is one read of a slot.
type read struct {
	slot place.Slot
	turn uint64
}

// note adds reads. The slots that were not read for longest are forgotten if the plugin is not called for long.
func (u *uses) note(refs []place.Ref) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.of == nil {
		u.of = map[place.Slot]use{}
	}
	for _, r := range refs {
		u.turn++
		u.of[r.Slot] = use{times: min(u.of[r.Slot].times+1, mostTimes), turn: u.turn}
		u.order = append(u.order, read{slot: r.Slot, turn: u.turn})
		if oldest, ok := u.oldest(); ok && len(u.of) > mostUsed {
			delete(u.of, oldest)
		}
		if len(u.order) > 2*len(u.of)+mostTold {
			u.order = slices.DeleteFunc(u.order, func(r read) bool { return u.of[r.slot].turn != r.turn })
		}
	}
}

// oldest is the slot that was not read for longest; false: there is none.
func (u *uses) oldest() (place.Slot, bool) {
	for ; len(u.order) > 0; u.order = u.order[1:] {
		if first := u.order[0]; u.of[first.slot].turn == first.turn {
			return first.slot, true
		}
	}
	return 0, false
}

// take gives what the next call tells the plugin: slots, each as often as it was read.
func (u *uses) take() (slots []uint32) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for len(slots) < mostTold {
		slot, ok := u.oldest()
		if !ok {
			break
		}
		at := u.of[slot]
		for ; at.times > 0 && len(slots) < mostTold; at.times-- {
			slots = append(slots, uint32(slot))
		}
		u.of[slot] = at
		if at.times == 0 {
			delete(u.of, slot)
		}
	}
	return slots
}
