package mutants

import (
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

func turnMutants() []Mutant {
	return []Mutant{
		pdMutant("an engine that offers nothing of an answer", "turn-round", pdFaults{noWeak: true}),
		pdMutant("an engine that serves nobody while it loads", "turn-both-ways", pdFaults{busy: true}),
		pdMutant("an engine that loads an answer from its first block on", "turn-suffix", pdFaults{ignoresFrom: true, noKeys: true}),
		pdMutant("an engine that serves its first rank's part of an answer to all", "turn-ranks", pdFaults{firstRank: true}),
		pdMutant("an engine that takes slots of an answer which its own cache does not have for gone", "turn-round", pdFaults{ownBlocks: true}),
		pdMutant("an engine that mixes what an answer was with what lies there now", "turn-reused", pdFaults{mixes: true}),
		pdMutant("an engine that knows answers by their slots", "turn-held-anew", pdFaults{slotNames: true, noSecret: true, noKeys: true}),
		pdMutant("an engine that promises an answer to two and lets one in", "turn-forks", pdFaults{wrongCount: true}),
		pdMutant("an engine that reports an answer twice", "turn-twice", pdFaults{twice: true}),
		pdMutant("an engine that takes an answer for that to another prompt", "turn-diverges", pdFaults{noKeys: true}),
		pdMutant("an engine that serves an answer after it has closed", "turn-gone", pdFaults{servesClosed: true}),
		pdMutant("an engine that forgets holds for answers", "turn-never", pdFaults{few: true}),
	}
}

// snapshot copies the blocks of an answer on every rank, for a fault. The caller holds mu.
func (n *pdNode) snapshot(h *pdHold) {
	if !n.mixes || !h.ended.Weak {
		return
	}
	h.was = map[pdSlot][]byte{}
	for rank, kv := range n.caches {
		for _, b := range h.ended.Blocks {
			if spans, err := kv.Spans(b); err == nil {
				h.was[pdSlot{rank, b.Group, b.ID}] = slices.Concat(spans...)
			}
		}
	}
}

// pdSlot is a block of one rank.
type pdSlot struct {
	rank  int
	group uint16
	id    connector.BlockID
}

// mix puts the first half of what a block was in front of what it is, for a fault.
func (h *pdHold) mix(rank int, b connector.Block, data []byte) {
	was := h.was[pdSlot{rank, b.Group, b.ID}]
	copy(data, was[:len(was)/2])
}

// bySlot is the newest hold that begins in a slot; nil: there is none. The caller holds mu.
func (n *pdNode) bySlot(slot connector.BlockID) *pdHold {
	for id := n.last; id > 0; id-- {
		if h := n.holds[id]; h != nil && h.ended.Blocks[0].ID == slot {
			return h
		}
	}
	return nil
}

// occupy has an engine do nothing else until the function it gives is called, for a fault.
func (n *pdNode) occupy() (release func()) {
	if !n.busy {
		return func() {}
	}
	n.alone.Lock()
	<-time.After(50 * time.Millisecond) // so that the other has begun too
	return n.alone.Unlock
}
