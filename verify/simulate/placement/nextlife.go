package placement

import (
	"fmt"

	"github.com/kvport/kvport/internal/place"
)

// startOver frees all slots as if nobody had ever used them.
func (s *shared) startOver() {
	arena, _ := s.views(true)
	for slot := range place.Slot(s.g.Slots) {
		arena.Store(page+headerSize*int64(slot), 0)
	}
}

// betweenLives: a plugin that writes every slot itself (rule PLACE-20) has died with a block in its only slot. The host copies that while
// the next life takes the arena over, keeps the block, and then gives the slot to another one. count is told what became of the copy.
func betweenLives(m Mutant, count func(accepted, discarded bool)) func() (*scene, error) {
	return func() (*scene, error) {
		shared, err := newShared(1, m)
		if err != nil {
			return nil, err
		}
		shared.careful = false // nobody looks at pins
		s := &scene{shared: shared}
		arena, _ := shared.views(false)
		if s.host, err = place.NewReader(arena, s.g); err != nil {
			return nil, err
		}
		shelf, found, err := s.shelf()
		if err != nil || found > 0 {
			return nil, fmt.Errorf("%d blocks in a fresh arena: %w", found, err)
		}
		s.shelve(shelf, 1)
		if err := s.host.Notice(&place.Notice{Slots: []place.Slot{0}}, 0); err != nil {
			return nil, err
		}
		refs, err := s.host.Find(keysOf(small), 0)
		if err != nil {
			return nil, err
		}
		s.host.Died()
		s.actors = []*actor{
			s.spawn("reader", func(*actor) { s.copy(refs[0]) }),
			s.spawn("next life", func(*actor) { s.takeOverShelf() }),
		}
		s.atEnd = func() { count(s.accepted, s.discarded) }
		return s, nil
	}
}

// shelf opens a life of the plugin, and says how many blocks it found.
func (s *scene) shelf() (*place.Shelf, int, error) {
	o, err := s.host.Reopen()
	if err != nil {
		return nil, 0, err
	}
	arena, _ := s.views(true)
	shelf, found, _, err := place.OpenShelf(arena, s.g, place.ShelfOpening{Epoch: o.Epoch, Serial: s.host.Draw(10)}, 0)
	return shelf, len(found), err
}

// shelve writes a block of these tags into the slot.
func (s *scene) shelve(shelf *place.Shelf, tag uint64) {
	arena, _ := s.views(true)
	shelf.Begin(0)
	for half := range 2 {
		arena.writeTag(0, half, tag)
	}
	part := partsOf(small)[0]
	shelf.Publish(0, &place.Header{Key: part.Key, Length: part.Length, Group: part.Group})
}

// takeOverShelf is the next life.
func (s *scene) takeOverShelf() {
	if s.mutant == LifeStartsOver {
		s.startOver()
	}
	shelf, found, err := s.shelf()
	switch {
	case err != nil:
		s.fail("open: %v", err)
		return
	case found != 1 && s.mutant != LifeStartsOver:
		s.fail("the block is lost: %d were found", found)
	}
	s.shelve(shelf, 2)
}
