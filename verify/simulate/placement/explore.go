package placement

import (
	"fmt"
	"maps"
	"slices"

	"github.com/kvport/kvport/internal/place"
)

// scene is a small world whose interleavings are all played.
type scene struct {
	*shared
	host   *place.Host
	plugin *place.Plugin
	actors []*actor
	atEnd  func()

	accepted, discarded bool // what was copied
}

// choice is what happens next: an actor goes on, or the oldest store in its buffer is seen by all.
type choice struct {
	actor int
	drain bool
}

// enabled are the choices that there are, each with what it accesses.
func (s *scene) enabled() map[choice]access {
	list := map[choice]access{}
	for i, a := range s.actors {
		if a.ready() {
			list[choice{actor: i}] = a.next
		}
		if a.buffer != nil && len(a.buffer.stores) > 0 {
			list[choice{actor: i, drain: true}] = a.buffer.next()
		}
	}
	return list
}

func (s *scene) take(c choice) {
	if c.drain {
		s.actors[c.actor].buffer.one()
	} else {
		s.actors[c.actor].step()
	}
}

func (s *scene) close() {
	for _, a := range s.actors {
		a.kill()
	}
}

// explorer plays every order of accesses that makes a difference: orders that differ only in accesses of different words,
// or in loads, are played once (sleep sets).
type explorer struct {
	build  func() (*scene, error)
	orders int
}

// explore plays them all, up to the first violation.
func explore(build func() (*scene, error)) (orders int, err error) {
	x := &explorer{build: build}
	err = x.from(nil, nil)
	return x.orders, err
}

// from plays what may follow a prefix, except what is asleep: it was played in another order already.
func (x *explorer) from(prefix []choice, asleep map[choice]access) error {
	s, err := x.build()
	if err != nil {
		return err
	}
	defer s.close()
	for _, c := range prefix {
		s.take(c)
	}
	if s.violation != nil {
		return fmt.Errorf("after %v: %w", prefix, s.violation)
	}
	enabled := s.enabled()
	if len(enabled) == 0 {
		return x.end(s, prefix)
	}
	done := maps.Clone(asleep)
	if done == nil {
		done = map[choice]access{}
	}
	for _, c := range slices.SortedFunc(maps.Keys(enabled), func(a, b choice) int { return a.order() - b.order() }) {
		if _, ok := done[c]; ok {
			continue
		}
		next := map[choice]access{}
		for other, what := range done {
			if !what.meets(enabled[c]) && other.actor != c.actor {
				next[other] = what
			}
		}
		if err := x.from(append(slices.Clip(prefix), c), next); err != nil {
			return err
		}
		done[c] = enabled[c]
	}
	return nil
}

func (c choice) order() int {
	if c.drain {
		return 2*c.actor + 1
	}
	return 2 * c.actor
}

// end checks a world in which nobody can go on.
func (x *explorer) end(s *scene, prefix []choice) error {
	x.orders++
	for _, a := range s.actors {
		if a.alive {
			return fmt.Errorf("%s waits for ever after %v", a.name, prefix)
		}
	}
	s.atEnd()
	if s.violation != nil {
		return fmt.Errorf("at the end of %v: %w", prefix, s.violation)
	}
	return nil
}

// newScene is an arena of one slot with both ends, and a save to which the slot is lent.
func newScene(m Mutant) (*scene, *place.Save, error) {
	shared, err := newShared(1, m)
	if err != nil {
		return nil, nil, err
	}
	s := &scene{shared: shared, atEnd: func() {}}
	arena, words := shared.views(false)
	if s.host, err = place.NewHost(arena, words, s.g); err != nil {
		return nil, nil, err
	}
	if err := s.open(); err != nil {
		return nil, nil, err
	}
	save, err := s.grant()
	return s, save, err
}

// open starts a life of the plugin.
func (s *scene) open() error {
	o, err := s.host.Reopen()
	if err != nil {
		return err
	}
	arena, words := s.views(true)
	s.plugin, err = place.Open(arena, words, s.g, o, 0)
	return err
}

// small is the block of one part.
const small = blocks - 1

// grant is a save of the small block whose slot is lent.
func (s *scene) grant() (*place.Save, error) {
	save, err := s.host.Reserve(partsOf(small), 0, false)
	if err != nil {
		return nil, err
	}
	answer := s.plugin.Lend(save.Request(), 0)
	_, err = save.Accept(&answer, 0)
	return save, err
}

// pinAndRetire: a reader copies a block while the plugin gives it up and fills its slot with another. The buffers of
// both are nil where each store of the protocol is seen at once.
func pinAndRetire(m Mutant, reader, plugin func() *buffer) func() (*scene, error) {
	return func() (*scene, error) {
		s, save, err := newScene(m)
		if err != nil {
			return nil, err
		}
		host, _ := s.views(false)
		for half := range 2 {
			host.put(s.tagAt(0, half), 1)
		}
		if _, err := save.Publish(0); err != nil {
			return nil, err
		}
		s.plugin.Settle()
		refs, err := s.host.Find(keysOf(small), 0)
		if err != nil {
			return nil, err
		}
		s.actors = []*actor{
			s.spawn("reader", func(a *actor) {
				a.buffer = reader()
				s.copy(refs[0])
			}),
			s.spawn("plugin", func(a *actor) {
				a.buffer = plugin()
				s.refill()
			}),
		}
		return s, nil
	}
}

// copy reads the slot, as the host does.
func (s *scene) copy(ref place.Ref) {
	pin, err := s.host.Pin(ref)
	if err != nil {
		return
	}
	s.copying[ref.Slot]++
	first, second := s.readTag(ref.Slot, 0), s.readTag(ref.Slot, 1)
	s.copying[ref.Slot]--
	if gone := pin.Release(0); gone != nil && s.mutant != NoSecondLook {
		s.discarded = true
		return
	}
	s.accepted = true
	if first != 1 || second != 1 {
		s.fail("wrong bytes: %d and %d", first, second)
	}
}

// refill gives the block up and puts another into its slot, if it is free.
func (s *scene) refill() {
	s.plugin.Retire(s.plugin.Find(partsOf(small)))
	f, err := s.plugin.Fill(place.Set{Parts: partsOf(small)})
	if err != nil {
		return
	}
	arena, _ := s.views(true)
	arena.writeTag(0, 0, 2)
	arena.writeTag(0, 1, 2)
	if _, err := f.Publish(); err != nil {
		s.fail("publish: %v", err)
	}
}

// lendAndSweep: the plugin has died after it lent a slot, and its next life takes the arena over while the host writes.
// The host gives up after some of the halves.
func lendAndSweep(m Mutant, halves int) func() (*scene, error) {
	return func() (*scene, error) {
		s, save, err := newScene(m)
		if err != nil {
			return nil, err
		}
		s.host.Died()
		over, saved := false, false
		writer := s.spawn("writer", func(a *actor) {
			s.owner[0] = a
			saved = s.write(save, halves)
			s.owner[0] = nil
			over = true
		})
		life := s.spawn("next life", func(a *actor) {
			if m != NoBarrier {
				a.until(func() bool { return over })
			}
			s.takeOver(m)
		})
		s.actors = []*actor{writer, life}
		s.atEnd = func() { s.checkTakenOver(saved) }
		return s, nil
	}
}

func (s *scene) write(save *place.Save, halves int) bool {
	host, _ := s.views(false)
	for half := range halves {
		host.writeTag(0, half, 1)
	}
	if halves < 2 {
		save.Drop()
		return false
	}
	done, err := save.Publish(0)
	if err != nil {
		s.fail("publish: %v", err)
	}
	return done
}

// takeOver opens the next life and has it fill the slot, if that is free.
func (s *scene) takeOver(m Mutant) {
	o, err := s.host.Reopen()
	switch {
	case err != nil && m == NoBarrier:
		o = place.Opening{Epoch: 1, Serial: 1}
	case err != nil:
		s.fail("the writer has ended, and yet: %v", err)
		return
	}
	arena, words := s.views(true)
	if s.plugin, err = place.Open(arena, words, s.g, o, 0); err != nil {
		s.fail("open: %v", err)
		return
	}
	f, err := s.plugin.Fill(place.Set{Parts: partsOf(small)})
	if err != nil {
		return
	}
	arena.writeTag(0, 0, 2)
	arena.writeTag(0, 1, 2)
	_, _ = f.Publish()
}

// checkTakenOver checks that what was saved is there, and that the bytes are those of one block.
func (s *scene) checkTakenOver(saved bool) {
	first, second := s.arena.Load(s.tagAt(0, 0)), s.arena.Load(s.tagAt(0, 1))
	switch c := s.plugin.Counts(); {
	case first != second:
		s.fail("wrong bytes: %d and %d", first, second)
	case c.Free+c.Resident != 1 || c.Resident != 1:
		s.fail("the slot is lost: %+v", c)
	case saved && first != 1:
		s.fail("what was saved is not there")
	}
	if _, err := s.host.Find(keysOf(small), 0); saved && err != nil {
		s.fail("what was saved is not found: %v", err)
	}
}
