package placement

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/place"
)

// Options say what happens in a world.
type Options struct {
	Seed     uint64
	Steps    int
	Mutant   Mutant
	Careless bool // the plugin ignores pins; readers are safe all the same
	Liar     bool // the first life of the plugin writes and says anything; reads are verified by a digest
	Damage   bool // a life that dies damages a header
}

const (
	blocks = 3 // that there are to save
	ranks  = 2 // parts of each, but of the last, which has one
)

// Stats count what happened.
type Stats struct {
	Accesses, Reads, Discarded, Misses, Saves, Known, Replaced, Returned, Refused, Pinned int
	Evicted, Promoted, Deaths, Resets, Adopted, Lies, Digest                              int

	Alone int // reads while no life of the plugin was open
}

// acked is what was acknowledged of a block, and not taken back since.
type acked struct {
	stamp, serial uint64
	expires       int64
}

// world is one host with its plugin.
type world struct {
	*shared
	o     Options
	rng   *rand.Rand
	stats Stats
	now   int64

	host    *place.Host
	opening place.Opening
	actors  []*actor
	lane    *lane
	life    int
	ending  bool
	liars   bool // the life that runs lies
	rest    int  // more than a reader rests between two lookups
	epoch   uint64

	stamp    uint64
	acks     [blocks]acked
	evicted  [blocks]int     // how often, and twice while it is under way
	signed   map[uint64]bool // tags that a digest covers
	disk     map[int]stored
	requests []message
	answers  map[uint64]place.Answer
	told     uint64 // the epoch that the plugin has answered
}

// stored is a block in the tier below.
type stored struct {
	serial uint64
	tags   [ranks]uint64
}

// message is one from the host to the plugin.
type message struct {
	request *place.Request
	block   int
	back    *place.Return
	reset   uint64
}

func partsOf(block int) []place.Part {
	n := ranks
	if block == blocks-1 {
		n = 1
	}
	parts := make([]place.Part, n)
	for i := range parts {
		parts[i] = place.Part{Key: connector.StoreKey{byte(block), byte(i)}, Length: slotBytes, Group: uint16(i)}
	}
	return parts
}

func keysOf(block int) (keys []connector.StoreKey) {
	for _, p := range partsOf(block) {
		keys = append(keys, p.Key)
	}
	return keys
}

// tagOf says what bytes are: a part of a block, in an epoch, of a save.
func tagOf(block, part int, epoch, serial uint64) uint64 {
	return uint64(block+1)<<56 | uint64(part)<<48 | epoch<<32 | serial
}

func newWorld(o Options) (*world, error) {
	rng := rand.New(rand.NewPCG(o.Seed, 148))
	s, err := newShared(3+rng.IntN(4), o.Mutant)
	if err != nil {
		return nil, err
	}
	s.careless, s.liar = o.Careless, o.Liar
	s.careful = !o.Careless && !o.Liar
	w := &world{
		shared: s, o: o, rng: rng, now: 1000, epoch: 1, liars: o.Liar, rest: 1 + 100*int(o.Seed%4/3),
		signed: map[uint64]bool{}, disk: map[int]stored{}, answers: map[uint64]place.Answer{},
	}
	arena, words := s.views(false)
	if w.host, err = place.NewHost(arena, words, s.g); err != nil {
		return nil, err
	}
	if w.opening, err = w.host.Reopen(); err != nil {
		return nil, err
	}
	w.openLane()
	for i := range 2 {
		w.worker(fmt.Sprint("reader ", i), w.reads)
		w.worker(fmt.Sprint("writer ", i), w.writes)
	}
	w.worker("supervisor", w.supervises)
	return w, nil
}

// worker starts one of the host's goroutines.
func (w *world) worker(name string, body func()) {
	w.actors = append(w.actors, w.spawn(name, func(*actor) { body() }))
}

// source is whose word something is.
type source struct {
	life int
	lies bool
}

func (w *world) source() source { return source{life: w.life, lies: w.liars} }

// check fails the world if an honest plugin was refused, and says whether err is nil.
func (w *world) check(what string, err error, from source) bool {
	if r, ok := errors.AsType[*place.RefusalError](err); ok {
		w.stats.Refused++
		damaged := w.o.Damage && from.life != w.life // since it was said
		if r.Reason == place.Pinned {
			w.stats.Pinned++
		} else if !from.lies && !damaged {
			w.fail("%s: an honest plugin was refused: %v", what, r)
		}
	}
	return err == nil
}
