package placement

import "iter"

// access is what an actor does next.
type access struct {
	at     int64
	words  bool // in the memory of the host's words
	write  bool
	locked bool        // it waits until the processor's store buffer is empty
	wait   func() bool // not nil: nothing, until this is true
}

// meets says whether the order of two accesses matters.
func (a access) meets(b access) bool {
	if a.wait != nil || b.wait != nil {
		return true
	}
	return a.at == b.at && a.words == b.words && (a.write || b.write)
}

// actor is a coroutine.
type actor struct {
	name  string
	next  access
	alive bool

	s      *shared
	opens  bool     // it takes the slots over
	held   []func() // stores that a mutant holds back
	buffer *buffer  // nil: every store is seen by all before the next access

	resume func() (access, bool)
	stop   func()
	yield  func(access) bool
}

// ended unwinds an actor that was stopped.
type ended struct{}

// spawn starts an actor and runs it up to its first access.
func (s *shared) spawn(name string, body func(a *actor)) *actor {
	a := &actor{name: name, alive: true, s: s}
	a.resume, a.stop = iter.Pull(func(yield func(access) bool) {
		defer func() {
			a.alive = false
			if p := recover(); p != nil && p != (ended{}) {
				panic(p)
			}
		}()
		a.yield = yield
		body(a)
	})
	a.step()
	return a
}

// step runs an actor up to its next access, or to its end.
func (a *actor) step() {
	former := a.s.current
	a.s.current = a
	next, ok := a.resume()
	a.s.current = former
	a.next, a.alive = next, ok
}

// ready says whether the actor can go on.
func (a *actor) ready() bool {
	return a.alive && (a.next.wait == nil || a.next.wait()) && (!a.next.locked || a.buffer == nil || len(a.buffer.stores) == 0)
}

// kill stops an actor where it is.
func (a *actor) kill() {
	a.alive = false
	a.stop()
}

// before stops until it is this actor's turn.
func (a *actor) before(next access) {
	if !a.yield(next) {
		panic(ended{})
	}
}

// until waits for something that other actors do.
func (a *actor) until(cond func() bool) { a.before(access{wait: cond}) }

// release carries out what was held back.
func (a *actor) release() {
	list := a.held
	a.held = nil
	for _, f := range list {
		f()
	}
}
