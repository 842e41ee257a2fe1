package mutants

import (
	"context"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/sdk"
)

// lendingStore is a placingStore that lends the host slots ahead of saves.
type lendingStore struct {
	*placingStore
	wrong lendingFault
	lent  []lentSlot
}

// lentSlot is a slot that the host may write.
type lentSlot struct {
	slot   place.Slot
	word   place.Word
	serial uint64
	void   bool // a reset came since
}

// lendingFault is what is wrong with it.
type lendingFault struct {
	full   bool // it lends a slot that holds a block
	twice  bool // it lends a slot again
	deaf   bool // it takes note of what was written only when it is asked for slots
	revive bool // it keeps what came after a reset into a slot that was lent before
	leak   bool // it takes nothing back
}

// lentAtATime is how many slots it lends.
const lentAtATime = 5

// LendingReference is a correct connector that lends slots.
func LendingReference() connector.Plugin { return lendingPlugin(lendingFault{}) }

func lendingPlugin(wrong lendingFault) connector.Plugin {
	return sdk.FromStore(placingDefinition(), func(_ context.Context, env connector.Env, _ arenaConfig) (connector.Store, error) {
		s := &lendingStore{placingStore: &placingStore{}, wrong: wrong}
		_, err := openPlacing(&env, s.placingStore)
		return s, err
	})
}

// settle takes note of what the host has written.
func (s *lendingStore) settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lent = slices.DeleteFunc(s.lent, func(l lentSlot) bool {
		h, over, ok := s.shelf.Written(l.slot, l.word, l.serial)
		if !over {
			return false
		}
		if !ok || l.void && !s.wrong.revive {
			s.giveUp(l.slot)
			return true
		}
		if old, known := s.at[h.Key]; known {
			s.giveUp(old)
		}
		s.at[h.Key] = l.slot
		delete(s.rest, h.Key)
		return true
	})
}

func (s *lendingStore) giveUp(slot place.Slot) {
	s.shelf.Retire(slot)
	s.free = append(s.free, slot)
}

// Lends implements sdk.Lending.
func (s *lendingStore) Lends() int { return lentAtATime }

// Lend implements sdk.Lending.
func (s *lendingStore) Lend(n int) (slots []uint32, serial uint64) {
	s.settle()
	s.mu.Lock()
	defer s.mu.Unlock()
	n = min(n, lentAtATime-len(s.lent))
	if n <= 0 {
		return nil, 0
	}
	if s.wrong.full {
		for _, slot := range s.at {
			return []uint32{uint32(slot)}, s.shelf.Draw(1)
		}
	}
	if s.wrong.twice && len(s.lent) > 0 {
		return []uint32{uint32(s.lent[0].slot)}, s.shelf.Draw(1)
	}
	n = min(n, len(s.free)) // what is full evicts nothing
	serial = s.shelf.Draw(n)
	for i := range n {
		slot := s.free[0]
		s.free = s.free[1:]
		s.lent = append(s.lent, lentSlot{slot: slot, word: s.shelf.Lend(slot), serial: serial + uint64(i)})
		slots = append(slots, uint32(slot))
	}
	return slots, serial
}

// Back implements sdk.Lending.
func (s *lendingStore) Back(serials []uint64) {
	s.settle()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lent = slices.DeleteFunc(s.lent, func(l lentSlot) bool {
		if s.wrong.leak || !slices.Contains(serials, l.serial) {
			return false
		}
		s.shelf.Back(l.slot, l.word)
		s.free = append(s.free, l.slot)
		return true
	})
}

// hear is settle of a Store that is not deaf.
func (s *lendingStore) hear() {
	if !s.wrong.deaf {
		s.settle()
	}
}

// Lookup implements connector.Store.
func (s *lendingStore) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	s.hear()
	return s.placingStore.Lookup(ctx, runs)
}

// Get implements connector.Store.
func (s *lendingStore) Get(ctx context.Context, items []connector.Item) error {
	s.hear()
	return s.placingStore.Get(ctx, items)
}

// Put implements connector.Store.
func (s *lendingStore) Put(ctx context.Context, items []connector.Item) error {
	s.hear()
	return s.placingStore.Put(ctx, items)
}

// Placed implements sdk.Placing.
func (s *lendingStore) Placed(keys []connector.StoreKey) []uint32 {
	s.hear()
	return s.placingStore.Placed(keys)
}

// Reset implements connector.Resetter.
func (s *lendingStore) Reset(ctx context.Context) (bool, error) {
	s.settle()
	emptied, err := s.placingStore.Reset(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.lent {
		s.lent[i].void = true
	}
	return emptied, err
}

// lendingMutants are wrong in what they lend.
func lendingMutants() []Mutant {
	mutant := func(name, id string, wrong lendingFault) Mutant {
		return Mutant{Name: name, Case: id, Plugin: func() connector.Plugin { return lendingPlugin(wrong) }}
	}
	return []Mutant{
		mutant("lends a slot that holds a block", "lent", lendingFault{full: true}),
		mutant("lends a slot twice", "lent", lendingFault{twice: true}),
		mutant("does not find what was written into a lent slot before it lends again", "lent-found", lendingFault{deaf: true}),
		mutant("keeps what came after a reset into a slot that was lent before", "lent-found", lendingFault{revive: true}),
		mutant("takes no slot back", "lent-back", lendingFault{leak: true}),
	}
}
