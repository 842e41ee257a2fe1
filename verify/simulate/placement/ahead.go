package placement

import (
	"errors"

	"github.com/kvport/kvport/internal/place"
)

// ahead is a scene of one slot that a plugin with a Shelf has lent ahead of a save, to a host that has no words.
type ahead struct {
	*scene
	shelf *place.Shelf
	loan  place.Loan
	word  place.Word
	over  bool // the host writes nothing any more
	saved bool // and it has acknowledged the save
	empty bool // the slot is lent as it was
}

// serials are those that a life may draw.
const serials = 1000

func newAhead() (*ahead, error) {
	shared, err := newShared(1, Sound)
	if err != nil {
		return nil, err
	}
	s := &ahead{scene: &scene{shared: shared, atEnd: func() {}}}
	host, _ := shared.views(false)
	if s.host, err = place.NewReader(host, s.g); err != nil {
		return nil, err
	}
	o, err := s.host.Reopen()
	if err != nil {
		return nil, err
	}
	if _, err := s.life(o.Epoch, s.host.Draw(serials)); err != nil {
		return nil, err
	}
	s.loan = place.Loan{Serial: s.shelf.Draw(1)}
	s.word = s.shelf.Lend(0)
	return s, nil
}

// life opens a life of the plugin, and says whether it has found the block.
func (s *ahead) life(epoch, serial uint64) (found bool, err error) {
	arena, _ := s.views(true)
	shelf, all, _, err := place.OpenShelf(arena, s.g, place.ShelfOpening{Epoch: epoch, Serial: serial}, 0)
	s.shelf = shelf
	return len(all) > 0, err
}

// write is the host's save: it gives up after some of the halves.
func (s *ahead) write(a *actor, halves int) {
	defer func() { s.owner[0], s.over = nil, true }()
	save, err := s.host.Claim(s.loan, partsOf(small)[0], 0)
	if err != nil {
		if errors.Is(err, place.ErrRefused) {
			s.fail("an honest plugin was refused: %v", err)
		}
		return
	}
	s.owner[0] = a
	host, _ := s.views(false)
	for half := range halves {
		host.writeTag(0, half, 1)
	}
	if halves == 2 {
		s.saved, err = save.Publish(0)
		if err != nil && !errors.Is(err, place.ErrReset) {
			s.fail("publish: %v", err)
		}
	}
	s.empty = save.Lent()
	save.Drop()
}

// fill has the plugin write another block into the slot.
func (s *ahead) fill() {
	arena, _ := s.views(true)
	s.shelf.Begin(0)
	arena.writeTag(0, 0, 2)
	arena.writeTag(0, 1, 2)
	s.shelf.Publish(0, &place.Header{Key: partsOf(0)[0].Key, Length: slotBytes})
}

// whole checks that the slot holds one of the blocks, and which: 0: none.
func (s *ahead) whole() (tag uint64) {
	if s.state(0) != place.Ready {
		return 0
	}
	first, second := s.arena.Load(s.tagAt(0, 0)), s.arena.Load(s.tagAt(0, 1))
	h, ok := s.shelf.Header(0)
	switch {
	case first != second:
		s.fail("wrong bytes: %d and %d", first, second)
	case !ok || first == 1 != (h.Key == partsOf(small)[0].Key):
		s.fail("the bytes of block %d are not those of the header", first)
	}
	return first
}

// found says whether the host finds what it has saved.
func (s *ahead) found() bool {
	_, err := s.host.Find(keysOf(small), 0)
	return err == nil
}

// evicted: the plugin looks for what the host has written, and gives it up soon. That readers meet this is in TestCareless.
func evicted() (*scene, error) {
	s, err := newAhead()
	if err != nil {
		return nil, err
	}
	took := false
	writer := s.spawn("writer", func(a *actor) { s.write(a, 2) })
	plugin := s.spawn("plugin", func(*actor) {
		for range 2 {
			h, over, ok := s.shelf.Written(0, s.word, s.loan.Serial)
			if !over {
				continue
			}
			if took = true; !ok || h.Key != partsOf(small)[0].Key {
				s.fail("the plugin does not find what was written")
			}
			s.shelf.Retire(0)
			s.fill()
			return
		}
	})
	s.actors = []*actor{writer, plugin}
	s.atEnd = func() {
		if tag := s.whole(); !s.saved || took != (tag == 2) || s.found() == took {
			s.fail("saved %t, taken note of %t, and the slot holds block %d", s.saved, took, tag)
		}
	}
	return s.scene, nil
}

// died: the plugin has died, and its next life takes the arena over while the host writes.
func died(halves int, barrier bool) func() (*scene, error) {
	return func() (*scene, error) {
		s, err := newAhead()
		if err != nil {
			return nil, err
		}
		adopted := false
		writer := s.spawn("writer", func(a *actor) { s.write(a, halves) })
		life := s.spawn("next life", func(a *actor) {
			a.before(access{wait: yes})
			s.host.Died()
			if barrier {
				a.until(func() bool { return s.over })
			}
			epoch := uint64(1)
			if o, err := s.host.Reopen(); err == nil {
				epoch = o.Epoch
			} else if barrier {
				s.fail("the writer has ended, and yet: %v", err)
			}
			if adopted, err = s.life(epoch, s.host.Draw(serials)); err != nil {
				s.fail("open: %v", err)
			}
			if !adopted {
				s.fill()
			}
		})
		s.actors = []*actor{writer, life}
		s.atEnd = func() {
			if tag := s.whole(); tag == 0 || s.saved != (tag == 1) || s.saved != adopted || s.saved != s.found() {
				s.fail("saved %t, adopted %t, and the slot holds block %d", s.saved, adopted, tag)
			}
		}
		return s.scene, nil
	}
}

// returned: the host gives up, and the plugin takes the slot back and fills it, when it is told; or when it likes.
func returned(halves int, early bool) func() (*scene, error) {
	return func() (*scene, error) {
		s, err := newAhead()
		if err != nil {
			return nil, err
		}
		writer := s.spawn("writer", func(a *actor) { s.write(a, halves) })
		plugin := s.spawn("plugin", func(a *actor) {
			if !early {
				a.until(func() bool { return s.over })
			}
			if s.shelf.Back(0, s.word); s.state(0) == place.Free {
				s.fill()
			}
		})
		s.actors = []*actor{writer, plugin}
		s.atEnd = func() {
			if tag := s.whole(); tag == 0 || s.saved != (tag == 1) || s.saved != s.found() {
				s.fail("saved %t, and the slot holds block %d", s.saved, tag)
			}
		}
		return s.scene, nil
	}
}

// forgotten: the host forgets everything and has the plugin reset while it writes. The plugin gives up what comes from before.
func forgotten() (*scene, error) {
	s, err := newAhead()
	if err != nil {
		return nil, err
	}
	writer := s.spawn("writer", func(a *actor) { s.write(a, 2) })
	plugin := s.spawn("plugin", func(a *actor) {
		a.before(access{wait: yes})
		s.host.Forget()
		if _, over, _ := s.shelf.Written(0, s.word, s.loan.Serial); over {
			s.shelf.Retire(0)
		}
		a.until(func() bool { return s.over })
		if _, over, _ := s.shelf.Written(0, s.word, s.loan.Serial); over { // the slot is void
			s.shelf.Retire(0)
		} else {
			s.shelf.Back(0, s.word)
		}
	})
	s.actors = []*actor{writer, plugin}
	s.atEnd = func() {
		if s.state(0) != place.Free || s.found() {
			s.fail("after a reset the slot is %v, and found: %t", s.state(0), s.found())
		}
	}
	return s.scene, nil
}
