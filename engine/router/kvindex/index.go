// Package kvindex knows which instance has which KV blocks, as far as their events say.
//
// Engines name blocks by hashes of their own, which differ between makers, versions and settings. The index names
// them by what all have in common: a hash of all tokens up to the end of the block, and of whatever else decides what
// is in it. That hash does not depend on the size of blocks, so that engines of different sizes agree, and it is keyed
// with a random secret, so that no client can make prompts that collide.
package kvindex

import (
	"crypto/rand"
	"encoding/binary"
	"hash/maphash"
	"math/bits"
	"slices"
	"strings"
	"sync"

	"github.com/kvport/kvport/engine/kvevents"
)

// Instances is how many instances an index can tell apart: they are numbered from 0.
const Instances = 1 << 10

// The limits of what one instance can make the index remember.
const (
	maxSizes    = 8       // of blocks
	maxAdapters = 1 << 10 // names of LoRA adapters
	groups      = 8       // KV cache groups; blocks of others are left out
)

// Config bounds an index. Zero values mean the defaults named.
type Config struct {
	MaxBlocks int // of one instance; 4 Mi, which are about 200 MB. More are left out
	Total     int // of all instances together, each block counted for each that has it; 16 Mi, which are about 800 MB
	secret    *[2]uint64
}

// Index is safe for concurrent use. All events of one instance must come from one goroutine.
type Index struct {
	max    int // blocks of one instance
	total  int // of all
	secret [2]uint64
	seed   maphash.Seed

	mu        sync.RWMutex
	planes    [Instances / 64]*plane
	instances [Instances]*instance
	blocks    int
}

// plane has what 64 instances have: by the hash of a prefix, a bit for each instance that has its last block.
type plane struct {
	media    [media]table[uint64]
	sizes    map[int]uint64    // of blocks: the instances that have such
	adapters map[uint64]uint64 // LoRA adapters by the hashes of their names: the instances that have named them
}

// instance is what is known of one instance's blocks, by the engine's own hash.
type instance struct {
	blocks   table[held]
	leaving  bool // it is being forgotten
	sizes    map[int]bool
	adapters map[uint64]bool
}

// held is a block that an instance has. It has no padding.
type held struct {
	prefix [2]uint32 // the hash of all tokens up to its end
	where  uint32    // a bit for each medium and group
}

func (h *held) hash() uint64     { return uint64(h.prefix[0])<<32 | uint64(h.prefix[1]) }
func (h *held) setHash(n uint64) { h.prefix = [2]uint32{uint32(n >> 32), uint32(n)} }

// Where blocks are: in the engine's own cache, in memory beside it, anywhere else of which nobody says that others reach it,
// such as a disk of the node, or in a store that others reach as well.
const (
	own = iota
	memory
	local
	remote
	media // how many there are
)

// in reports whether the block is in a medium, in any group.
func (h *held) in(medium int) bool { return h.where>>(medium*groups)&(1<<groups-1) != 0 }

// New makes an index of nothing.
func New(c Config) *Index {
	x := &Index{max: c.MaxBlocks, total: c.Total, seed: maphash.MakeSeed()}
	if x.max <= 0 {
		x.max = 4 << 20
	}
	if x.total <= 0 {
		x.total = 16 << 20
	}
	if c.secret != nil {
		x.secret = *c.secret
		return x
	}
	var random [16]byte
	_, _ = rand.Read(random[:]) // never fails, says its documentation
	x.secret = [2]uint64{binary.LittleEndian.Uint64(random[:]), binary.LittleEndian.Uint64(random[8:])}
	return x
}

// Result says what became of the blocks of some events.
type Result struct {
	Stored   int // that the index knows now, or knew before
	Removed  int // that an instance no longer has
	Unplaced int // left out: what they depend on is not known, or the instance has too many groups, sizes or adapters
	Full     int // left out: the instance has too many, or there are too many of all instances and it has its share

	Evicted   int   // blocks of other instances that were forgotten to make room
	Forgotten []int // the instances of which all was forgotten for that
}

// Apply takes events of an instance, in order.
func (x *Index) Apply(number int, events []kvevents.Event) (r Result) {
	if number < 0 || number >= Instances {
		return r
	}
	for i := range events {
		ev := &events[i]
		switch ev.Kind {
		case kvevents.Stored:
			got := x.store(number, ev)
			if got.Full > 0 && x.makeRoom(number, got.Full, &r) {
				got = x.store(number, ev)
			}
			r.Stored, r.Unplaced, r.Full = r.Stored+got.Stored, r.Unplaced+got.Unplaced, r.Full+got.Full
		case kvevents.Removed:
			x.remove(number, ev, &r)
		case kvevents.Cleared:
			r.Removed += x.Forget(number)
		}
	}
	return r
}

// place is the medium of an event, and the bit of it and a group; ok is false for a group that is not indexed.
func place(ev *kvevents.Event) (medium int, bit uint32, ok bool) {
	group := max(ev.Group, 0) // not said: there is only one
	medium = local
	switch {
	case ev.Medium == kvevents.GPU || ev.Medium == "":
		medium = own
	case ev.Locality == kvevents.Remote:
		medium = remote
	case strings.EqualFold(ev.Medium, kvevents.CPU):
		medium = memory
	}
	return medium, 1 << (medium*groups + group), group < groups
}

// makeRoom forgets all of the instance that has most, if the index is full and this one has no more than its share of it
// with the blocks that it lacks. A part of the other one's blocks is not worth keeping: a hit ends at the first that is gone.
func (x *Index) makeRoom(number, more int, r *Result) bool {
	x.mu.RLock()
	own, sharing, most, victim := more, 1, 0, -1
	for i, in := range x.instances {
		switch {
		case in == nil:
		case i == number && in.leaving:
			own = x.total + 1 // it is the one that makes room
		case i == number:
			own += in.blocks.size
		case in.blocks.size > 0:
			sharing++
			if in.blocks.size > most && !in.leaving {
				most, victim = in.blocks.size, i
			}
		}
	}
	share := x.total / sharing
	lacking := x.blocks+more > x.total && own <= min(share, x.max) && most >= share
	x.mu.RUnlock()
	if !lacking || victim < 0 {
		return false
	}
	r.Evicted += x.Forget(victim)
	r.Forgotten = append(r.Forgotten, victim)
	return true
}

func (x *Index) store(number int, ev *kvevents.Event) (r Result) {
	medium, bit, ok := place(ev)
	if !ok || len(ev.Hashes) == 0 || ev.BlockSize == 0 || len(ev.Tokens) != len(ev.Hashes)*ev.BlockSize {
		return Result{Unplaced: len(ev.Hashes)}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	in, p := x.enter(number)
	prefix, ok := x.parent(in, ev)
	if !ok || !in.addSize(p, number, ev.BlockSize) || !in.addAdapter(p, number, x.adapter(ev.LoRAName)) {
		return Result{Unplaced: len(ev.Hashes)}
	}
	for i, h := range ev.Hashes {
		var extra []string
		if ev.Extra != nil {
			extra = withoutAdapter(ev.Extra[i], ev.LoRAName)
		}
		if slices.Contains(extra, "") { // not told, and nothing behind it can be placed either
			r.Unplaced += len(ev.Hashes) - i
			return r
		}
		prefix = x.extend(x.depend(prefix, extra), ev.Tokens[i*ev.BlockSize:(i+1)*ev.BlockSize])
		key := x.key(h)
		b := in.blocks.get(key)
		if b == nil {
			if x.isFull(in) {
				r.Full += len(ev.Hashes) - i
				return r
			}
			b = in.blocks.put(key)
			b.setHash(prefix)
			x.blocks++
		}
		if b.hash() != prefix { // the engine uses the hash for something else now
			p.clear(b.hash(), number)
			b.setHash(prefix)
			b.where = 0
		}
		b.where |= bit
		*p.media[medium].put(prefix) |= 1 << (number % 64)
		r.Stored++
	}
	return r
}

// isFull reports whether no further block of an instance is taken. The caller holds mu.
func (x *Index) isFull(in *instance) bool {
	return in.leaving || in.blocks.size >= x.max || x.blocks >= x.total
}

// enter finds what is known of an instance, and makes it if there is nothing yet. The caller holds mu.
func (x *Index) enter(number int) (*instance, *plane) {
	p, in := x.planes[number/64], x.instances[number]
	if p == nil {
		p = &plane{sizes: map[int]uint64{}, adapters: map[uint64]uint64{}}
		x.planes[number/64] = p
	}
	if in == nil {
		in = &instance{sizes: map[int]bool{}, adapters: map[uint64]bool{}}
		x.instances[number] = in
	}
	return in, p
}

// addSize notes that an instance has blocks of a size. It reports whether that is not one size too many.
func (in *instance) addSize(p *plane, number, size int) bool {
	if in.sizes[size] {
		return true
	}
	if len(in.sizes) == maxSizes {
		return false
	}
	in.sizes[size] = true
	p.sizes[size] |= 1 << (number % 64)
	return true
}

// adapter is the hash of an adapter's name; 0: none.
func (x *Index) adapter(name string) uint64 {
	if name == "" {
		return 0
	}
	return nonzero(maphash.String(x.seed, name))
}

// addAdapter notes that an instance has blocks of an adapter. It reports whether that is not one adapter too many.
func (in *instance) addAdapter(p *plane, number int, adapter uint64) bool {
	if adapter == 0 || in.adapters[adapter] {
		return true
	}
	if len(in.adapters) == maxAdapters {
		return false
	}
	in.adapters[adapter] = true
	p.adapters[adapter] |= 1 << (number % 64)
	return true
}

// parent is the hash of what comes before an event's blocks; ok is false if that is not known. The caller holds mu.
func (x *Index) parent(in *instance, ev *kvevents.Event) (prefix uint64, ok bool) {
	if ev.Parent.IsZero() {
		return x.root(ev.LoRAName), true
	}
	b := in.blocks.get(x.key(ev.Parent))
	if b == nil {
		return 0, false
	}
	return b.hash(), true
}

func (x *Index) remove(number int, ev *kvevents.Event, r *Result) {
	medium, bit, ok := place(ev)
	x.mu.Lock()
	defer x.mu.Unlock()
	in, p := x.instances[number], x.planes[number/64]
	if !ok || in == nil {
		return
	}
	for _, h := range ev.Hashes {
		key := x.key(h)
		b := in.blocks.get(key)
		if b == nil || b.where&bit == 0 {
			continue
		}
		b.where &^= bit
		if !b.in(medium) {
			clearBit(&p.media[medium], b.hash(), number)
		}
		if b.where == 0 {
			in.blocks.remove(key)
			x.blocks--
		}
		r.Removed++
	}
}

// clear notes that an instance does not have a block any more, wherever it was.
func (p *plane) clear(prefix uint64, number int) {
	for i := range p.media {
		clearBit(&p.media[i], prefix, number)
	}
}

func clearBit(t *table[uint64], prefix uint64, number int) {
	v := t.get(prefix)
	if v == nil {
		return
	}
	if *v &^= 1 << (number % 64); *v == 0 {
		t.remove(prefix)
	}
}

// Forget drops all that is known of an instance, and says how many blocks that were. What is stored meanwhile is left out.
func (x *Index) Forget(number int) (blocks int) {
	if number < 0 || number >= Instances {
		return 0
	}
	for s := range shards { // others take their turn in between
		x.mu.Lock()
		in, p := x.instances[number], x.planes[number/64]
		if in == nil || s == 0 && in.leaving { // somebody else forgets it
			x.mu.Unlock()
			return blocks
		}
		in.leaving = true
		part := &in.blocks.shards[s]
		for i, key := range part.keys {
			if key != 0 {
				p.clear(part.values[i].hash(), number)
			}
		}
		blocks += part.size
		x.blocks -= part.size
		in.blocks.size -= part.size
		*part = shard[held]{}
		if s == shards-1 {
			leave(p.sizes, in.sizes, number)
			leave(p.adapters, in.adapters, number)
			x.instances[number] = nil
		}
		x.mu.Unlock()
	}
	return blocks
}

// leave takes an instance out of those that have something.
func leave[K comparable](all map[K]uint64, its map[K]bool, number int) {
	for k := range its {
		if all[k] &^= 1 << (number % 64); all[k] == 0 {
			delete(all, k)
		}
	}
}

// Blocks is how many blocks the index knows, each counted for each instance that has it.
func (x *Index) Blocks() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.blocks
}

// BlocksOf is how many blocks of an instance the index knows.
func (x *Index) BlocksOf(number int) int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if in := x.instances[number]; in != nil {
		return in.blocks.size
	}
	return 0
}

// Bytes is how much memory all blocks take, with the empty places between them. What the allocator adds to that is about a
// tenth.
func (x *Index) Bytes() (sum int) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for _, in := range x.instances {
		if in != nil {
			sum += in.blocks.bytes()
		}
	}
	for _, p := range x.planes {
		if p == nil {
			continue
		}
		for i := range p.media {
			sum += p.media[i].bytes()
		}
	}
	return sum
}

// Prompt is what a request asks about.
type Prompt struct {
	Tokens []int32
	Salt   string // its cache_salt; empty: none
	Model  string // the model it names, which may be a LoRA adapter
}

// Held is how many tokens at the beginning of a prompt an instance has.
type Held struct {
	Instance int
	Own      int // in the engine's own cache
	Node     int // there and in what is beside it: whatever its events do not call remote
	Shared   int // there and in what they call remote: a store that others reach as well
	Store    int // in that store alone, which is what others can load
}

// Prefix finds the instances that have the beginning of a prompt, in the order of their numbers.
func (x *Index) Prefix(prompt *Prompt) []Held {
	x.mu.RLock()
	defer x.mu.RUnlock()
	step := x.step()
	if step == 0 || len(prompt.Tokens) < step {
		return nil
	}
	base, adapter := x.marks(prompt, "", step), x.adapter(prompt.Model)
	var adapted []uint64 // where the model is an adapter, as far as instances say
	var list []Held
	for n, p := range x.planes {
		if p == nil || len(p.sizes) == 0 {
			continue
		}
		named := uint64(0)
		if adapter != 0 {
			named = p.adapters[adapter]
		}
		if named != 0 && adapted == nil {
			adapted = x.marks(prompt, prompt.Model, step)
		}
		list = p.prefix(list, n*64, [2][]uint64{base, adapted}, named, step)
	}
	return list
}

// step is the number of tokens of which the sizes of all blocks are multiples; 0 if there are no blocks.
func (x *Index) step() (step int) {
	for _, p := range x.planes {
		if p == nil {
			continue
		}
		for size := range p.sizes {
			for a := size; a != 0; {
				step, a = a, step%a
			}
		}
	}
	return step
}

// marks are the hashes of a prompt's beginnings, each a step longer, under an adapter if there is one.
func (x *Index) marks(prompt *Prompt, adapter string, step int) []uint64 {
	prefix := x.root(adapter)
	if prompt.Salt != "" {
		prefix = x.depend(prefix, []string{kvevents.Text(prompt.Salt)})
	}
	marks := make([]uint64, 0, len(prompt.Tokens)/step)
	for i := step; i <= len(prompt.Tokens); i += step {
		prefix = x.extend(prefix, prompt.Tokens[i-step:i])
		marks = append(marks, prefix)
	}
	return marks
}

// prefix adds those of the plane's instances that have the beginning of a prompt. first is the number of the first. Those
// that have named the prompt's model as an adapter are asked by the second marks, the others by the first.
func (p *plane) prefix(list []Held, first int, marks [2][]uint64, named uint64, step int) []Held {
	var f found
	for size, members := range p.sizes {
		p.walk(&f, size, size/step, members&^named, marks[0])
		p.walk(&f, size, size/step, members&named, marks[1])
	}
	for some := f.some; some != 0; some &= some - 1 {
		i := bits.TrailingZeros64(some)
		list = append(list, Held{first + i, f.own[i], f.node[i], f.all[i], f.store[i]})
	}
	return list
}

// found is what was found of a prompt in a plane, in tokens by instance.
type found struct {
	own, node, all [64]int // in the engine's own cache, there and beside it, anywhere
	store          [64]int // in the store that others reach alone
	some           uint64  // instances that have any
}

// walk finds how far the blocks of one size reach, each of which is every marks long.
func (p *plane) walk(f *found, size, every int, members uint64, marks []uint64) {
	lists := [...]*[64]int{&f.own, &f.node, &f.all, &f.store}
	in := [...]uint64{members, members, members, members}
	tokens := 0
	for at := every - 1; at < len(marks) && in[2] != 0; at += every { // all has what any of the others has
		has := p.lookup(marks[at])
		near := has[own] | has[memory] | has[local]
		for i, now := range [...]uint64{has[own], near, near | has[remote], has[remote]} {
			note(lists[i], in[i]&^now, tokens)
			in[i] &= now
		}
		f.some |= in[2]
		tokens += size
	}
	for i := range in {
		note(lists[i], in[i], tokens)
	}
}

// note writes down how much some instances have, unless more was found with blocks of another size.
func note(list *[64]int, members uint64, tokens int) {
	for ; members != 0; members &= members - 1 {
		i := bits.TrailingZeros64(members)
		list[i] = max(list[i], tokens)
	}
}

// lookup is the instances that have a block, by where.
func (p *plane) lookup(prefix uint64) (has [media]uint64) {
	for i := range p.media {
		if v := p.media[i].get(prefix); v != nil {
			has[i] = *v
		}
	}
	return has
}
