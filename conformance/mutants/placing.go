package mutants

import (
	"bytes"
	"context"
	"math"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/sdk"
)

// placingStore is a Store in slots of the arena that the host may read. What finds no slot it keeps elsewhere, if it does not
// evict.
type placingStore struct {
	mu    sync.Mutex
	arena place.Memory
	shelf *place.Shelf
	g     place.Geometry
	at    map[connector.StoreKey]place.Slot
	rest  map[connector.StoreKey][]byte // what has no slot
	free  []place.Slot
	evict bool // the oldest block makes room for the next
	bad   placingFault
	lost  bool // of a mutant
}

// placingFault is what is wrong with it.
type placingFault struct {
	next    bool // it names the slot behind the right one
	knows   bool // it names no slot of what was there
	inPlace bool // it replaces a block where the block lies
	again   bool // what it writes next into a slot that it has given up has the generation of what was there
	stays   bool // a reset leaves the slots as they are
	strict  bool // it names nothing any more once it has heard of a slot that it does not have
	alone   bool // what is placed it has no longer itself
	mute    bool // it names no slot of what it has loaded
	once    bool // it gives up what it has loaded
	below   bool // it keeps what it evicts elsewhere
	over    bool // its next life forgets how often slots were used
}

// PlacingReference is a correct connector that places its blocks.
func PlacingReference() connector.Plugin { return placingPlugin(placingFault{}) }

// CompleteReference is a correct connector that has nothing but what it has placed.
func CompleteReference() connector.Plugin { return completePlugin(placingFault{}) }

func placingPlugin(bad placingFault) connector.Plugin {
	return sdk.FromStore(placingDefinition(), func(_ context.Context, env connector.Env, _ arenaConfig) (connector.Store, error) {
		return openPlacing(&env, &placingStore{bad: bad})
	})
}

func completePlugin(bad placingFault) connector.Plugin {
	return sdk.FromStore(placingDefinition(), func(_ context.Context, env connector.Env, _ completeConfig) (connector.Store, error) {
		return openPlacing(&env, &placingStore{bad: bad, evict: true})
	})
}

func placingDefinition() sdk.Definition {
	return sdk.Definition{Name: "PlacingConnector", Version: "1", Scope: connector.ScopeEngine, Capabilities: connector.CanReset | connector.CanPlace}
}

// completeConfig is the config of a Store in an arena that has room for few blocks.
type completeConfig struct{}

// ArenaBytes says what the Store asks the host for.
func (completeConfig) ArenaBytes() int64 { return arenaSize / 64 }

// Complete says that the Store has nothing but what it has placed.
func (completeConfig) Complete() bool { return true }

func openPlacing(env *connector.Env, s *placingStore) (connector.Store, error) {
	s.at, s.rest = map[connector.StoreKey]place.Slot{}, map[connector.StoreKey][]byte{}
	s.g = place.Fit(int64(len(env.Arena)), env.Layout.BlockBytes(0), len(env.Arena))
	o := place.ShelfOpening{}
	if p := env.Placement; p != nil {
		s.g, o = place.Geometry{Slots: p.Slots, SlotBytes: p.SlotBytes}, place.ShelfOpening{Epoch: p.Epoch, Serial: p.Serial}
	}
	var err error
	if s.arena, err = place.Private(env.Arena[:s.g.ArenaBytes()]); err != nil {
		return nil, err
	}
	if s.bad.over {
		for slot := range place.Slot(s.g.Slots) {
			s.arena.Store(wordOf(slot), 0)
		}
	}
	var found []place.Found
	if s.shelf, found, _, err = place.OpenShelf(s.arena, s.g, o, 0); err != nil {
		return nil, err
	}
	used := map[place.Slot]bool{}
	for _, f := range found {
		s.at[f.Key], used[f.Slot] = f.Slot, true
	}
	for slot := range place.Slot(s.g.Slots) {
		if !used[slot] {
			s.free = append(s.free, slot)
		}
	}
	return s, nil
}

// Lookup implements connector.Store.
func (s *placingStore) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := make([]int, len(runs))
	for i, keys := range runs {
		for _, k := range keys {
			_, placed := s.at[k]
			if _, kept := s.rest[k]; !kept && !placed || s.bad.alone {
				break
			}
			found[i]++
		}
	}
	return found, nil
}

// Get implements connector.Store.
func (s *placingStore) Get(_ context.Context, items []connector.Item) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var failed []int
	var cause error
	for i, it := range items {
		from, err := s.get(it)
		if err != nil {
			failed, cause = append(failed, i), err
			continue
		}
		for _, span := range it.Spans {
			from = from[copy(span, from):]
		}
		if slot, placed := s.at[it.Key]; placed && s.bad.once {
			s.shelf.Retire(slot)
		}
	}
	s.lost = s.lost || s.bad.mute
	if cause != nil {
		return &connector.ItemError{Items: failed, Err: cause}
	}
	return nil
}

// get gives the bytes of a block.
func (s *placingStore) get(it connector.Item) ([]byte, error) {
	data, kept := s.rest[it.Key]
	if slot, placed := s.at[it.Key]; placed {
		h, whole := s.shelf.Header(slot)
		if !whole {
			return nil, connector.ErrCorrupt
		}
		data, kept = s.shelf.Bytes(slot, int(h.Length)), true
	}
	switch {
	case !kept:
		return nil, connector.ErrGone
	case len(data) != it.Size():
		return nil, connector.ErrIncompatible
	}
	return data, nil
}

// Put implements connector.Store.
func (s *placingStore) Put(_ context.Context, items []connector.Item) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lost = s.lost && !s.bad.mute
	for _, it := range items {
		data := bytes.Join(it.Spans, nil)
		old, known := s.at[it.Key]
		if have, err := s.get(it); err == nil && !it.Replace && bytes.Equal(have, data) {
			continue
		}
		if known && s.bad.inPlace {
			copy(s.shelf.Bytes(old, len(data)), data)
			continue
		}
		s.put(it, data)
		if known {
			s.giveUp(old)
		}
	}
	return nil
}

// giveUp frees the slot of a block that was replaced.
func (s *placingStore) giveUp(slot place.Slot) {
	if s.bad.again {
		generation := s.arena.Load(wordOf(slot)) >> 8
		s.arena.Store(wordOf(slot), (generation-1)<<8)
		s.free = slices.Insert(s.free, 0, slot)
		return
	}
	s.shelf.Retire(slot)
	s.free = append(s.free, slot)
}

// wordOf is where the word of a slot lies (rule PLACE-01).
func wordOf(slot place.Slot) int64 { return 4096 + 128*int64(slot) }

// put writes a block where there is room.
func (s *placingStore) put(it connector.Item, data []byte) {
	delete(s.at, it.Key)
	if len(s.free) == 0 && s.evict {
		s.makeRoom()
	}
	if len(s.free) == 0 {
		s.rest[it.Key] = data
		return
	}
	slot := s.free[0]
	s.free = s.free[1:]
	s.shelf.Begin(slot)
	copy(s.shelf.Bytes(slot, len(data)), data)
	s.shelf.Publish(slot, &place.Header{Key: it.Key, Length: uint32(len(data)), Tenant: it.Tenant})
	s.at[it.Key] = slot
	delete(s.rest, it.Key)
}

// makeRoom evicts the oldest block.
func (s *placingStore) makeRoom() {
	var oldest connector.StoreKey
	serial := uint64(math.MaxUint64)
	for k, slot := range s.at {
		if h, _ := s.shelf.Header(slot); h.Serial < serial {
			oldest, serial = k, h.Serial
		}
	}
	slot, ok := s.at[oldest]
	if !ok {
		return
	}
	if h, whole := s.shelf.Header(slot); whole && s.bad.below {
		s.rest[oldest] = bytes.Clone(s.shelf.Bytes(slot, int(h.Length)))
	}
	delete(s.at, oldest)
	s.shelf.Retire(slot)
	s.free = append(s.free, slot)
}

// Reset implements connector.Resetter.
func (s *placingStore) Reset(context.Context) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slot := range s.at {
		if !s.bad.stays {
			s.shelf.Retire(slot)
			s.free = append(s.free, slot)
		}
	}
	clear(s.at)
	clear(s.rest)
	return true, nil
}

// Placed implements sdk.Placing.
func (s *placingStore) Placed(keys []connector.StoreKey) (slots []uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range keys {
		slot, ok := s.at[k]
		switch {
		case !ok || s.lost:
		case s.bad.next:
			slots = append(slots, uint32(slot)+1)
		default:
			slots = append(slots, uint32(slot))
		}
		if s.bad.knows {
			return slots
		}
	}
	return slots
}

// Used implements sdk.Placing.
func (s *placingStore) Used(slots []uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slot := range slots {
		s.lost = s.lost || s.bad.strict && int(slot) >= s.g.Slots
	}
}

// Close implements connector.Store.
func (s *placingStore) Close() error { return nil }

// placingMutants are wrong in what they do with slots.
func placingMutants() []Mutant {
	mutant := func(name, id string, bad placingFault) Mutant {
		return Mutant{Name: name, Case: id, Plugin: func() connector.Plugin { return placingPlugin(bad) }}
	}
	return []Mutant{
		mutant("names the slot behind the right one", "place-named", placingFault{next: true}),
		mutant("names one slot of a save", "place-named", placingFault{knows: true}),
		mutant("replaces a block where it lies", "place-replaced", placingFault{inPlace: true}),
		mutant("uses a slot again in the generation that it had", "place-layers", placingFault{again: true}),
		mutant("leaves its slots as they are after a reset", "place-reset", placingFault{stays: true}),
		mutant("names no slot after it has heard of one that it does not have", "place-used", placingFault{strict: true}),
		mutant("names no slot of what it has loaded", "place-loaded", placingFault{mute: true}),
		mutant("names slots that it has given up with the load", "place-loaded", placingFault{once: true}),
		mutant("forgets in its next life how often slots were used", "place-next-life", placingFault{over: true}),
		mutant("has what is placed only there", "place-message", placingFault{alone: true}),
		{Name: "has what it evicts elsewhere, and says that what is placed is all that it has", Case: "place-complete", Plugin: func() connector.Plugin { return completePlugin(placingFault{below: true}) }},
	}
}
