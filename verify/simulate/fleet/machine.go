package fleet

import (
	"fmt"
	"time"

	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/router/policy"
	"github.com/kvport/kvport/internal/register"
)

// machine is an instance: it computes one prompt after the other, and generates any number of answers at once.
type machine struct {
	w       *world
	number  int
	prefill bool
	address string // where it is reached
	up      bool
	life    int           // how often it has started
	since   time.Duration // when it went down, or came up
	cache   *cache
	queue   []*job
	work    []*flight // requests that it has, of all routers, in the order in which they came
	busy    time.Duration
	served  int

	seq   uint64 // of the next batch of events
	kept  []batch
	links []*link // by router
}

// job is a prompt that waits to be computed, or is being computed.
type job struct {
	f    *flight
	done func(cached int)
}

// batch is the events of one step.
type batch struct {
	seq    uint64
	events []kvevents.Event
}

// keep is how many batches an instance keeps for replays, with a fault that needs them.
const keep = 256

func newMachine(w *world, number int) *machine {
	m := &machine{w: w, number: number, prefill: number%2 == 0, up: true, cache: newCache(w.o.capacity())}
	m.address = fmt.Sprintf("10.0.%d.%d:8000", number/250, number%250)
	for _, f := range w.fronts {
		m.links = append(m.links, &link{front: f, machine: m, place: -1, nonce: register.NoNonce})
	}
	return m
}

// says is what the instance registers as.
func (m *machine) says() register.Message {
	part := "D"
	if m.prefill {
		part = "P"
	}
	return register.Message{Type: part, HTTP: m.address, Engine: fmt.Sprintf("engine-%d", m.number)}
}

// role is the part that the machine plays.
func (m *machine) role() policy.Role {
	if m.prefill {
		return policy.Prefill
	}
	return policy.Decode
}

// rack is where the machine is.
func (m *machine) rack() int { return m.number / 2 % racks }

// during makes something happen later, unless the machine has died by then.
func (m *machine) during(delay time.Duration, do func()) {
	life := m.life
	m.w.After(delay, func() {
		if m.up && m.life == life {
			do()
		}
	})
}

// compute queues a prompt. done gets the number of its tokens that were in the cache.
func (m *machine) compute(f *flight, done func(cached int)) {
	m.queue = append(m.queue, &job{f, done})
	if len(m.queue) == 1 {
		m.start()
	}
}

// start computes the first prompt of the queue.
func (m *machine) start() {
	j := m.queue[0]
	blocks := j.f.turn.prompted()
	cached := min(m.cache.held(blocks, 0)*blockTokens, (j.f.turn.prompt-1)/blockTokens*blockTokens)
	takes := computeBase + time.Duration(j.f.turn.prompt-cached)*computeToken
	m.busy += takes
	m.during(takes, func() {
		m.queue = m.queue[1:]
		m.store(j.f, blocks)
		j.done(cached)
		if len(m.queue) > 0 {
			m.start()
		}
	})
}

// store puts the first blocks of a turn into the cache, and tells the routers.
func (m *machine) store(f *flight, blocks []uint64) {
	held, evicted := m.cache.use(blocks)
	var events []kvevents.Event
	if len(evicted) > 0 {
		events = append(events, kvevents.Event{Kind: kvevents.Removed, Hashes: hashes(evicted), Medium: kvevents.GPU, Group: -1})
	}
	if held < len(blocks) {
		ev := kvevents.Event{Kind: kvevents.Stored, Hashes: hashes(blocks[held:]), BlockSize: blockTokens, Medium: kvevents.GPU, Group: -1}
		ev.Tokens = appendTokens(make([]int32, 0, (len(blocks)-held)*blockTokens), f.turn.pieces, held*blockTokens, len(blocks)*blockTokens)
		if held > 0 {
			ev.Parent = kvevents.NumberHash(blocks[held-1])
		}
		events = append(events, ev)
	}
	if len(events) > 0 && m.w.tells {
		m.publish(events)
	}
}

func hashes(keys []uint64) []kvevents.Hash {
	list := make([]kvevents.Hash, len(keys))
	for i, key := range keys {
		list[i] = kvevents.NumberHash(key)
	}
	return list
}

// publish sends a batch to all routers. Batches are kept for replays where a fault needs them, and until all routers are
// connected.
func (m *machine) publish(events []kvevents.Event) {
	b := batch{m.seq, events}
	m.seq++
	all := true
	for _, l := range m.links {
		all = all && l.order != nil
	}
	switch {
	case !all || m.w.o.Fault.replays():
		m.kept = append(m.kept[max(0, len(m.kept)-keep+1):], b)
	default:
		m.kept = nil
	}
	for _, l := range m.links {
		l.send(b)
	}
}

// take notes that the machine has a request.
func (m *machine) take(f *flight) {
	m.work = append(m.work, f)
	m.served++
}

// drop notes that it does not have a request any more.
func (m *machine) drop(f *flight) {
	for i, other := range m.work {
		if other == f {
			m.work = append(m.work[:i], m.work[i+1:]...)
			return
		}
	}
}

// die ends the machine with all that it has: connections break, and its port refuses others.
func (m *machine) die() {
	m.up, m.since = false, m.w.Now()
	m.cache, m.queue, m.kept, m.seq = newCache(m.w.o.capacity()), nil, nil, 0
	broken := m.work
	m.work = nil
	for _, l := range m.links {
		l.cut()
	}
	for _, f := range broken {
		f.broke(m)
	}
}

// rise starts the machine again, with an empty cache.
func (m *machine) rise() {
	m.up, m.since = true, m.w.Now()
	m.life++
	for _, l := range m.links {
		l.nonce = register.NoNonce
	}
}
