package model

import (
	"math/rand/v2"
	"slices"
	"time"
)

// Options say what a history may have.
type Options struct {
	Groups  bool  // caches of several groups
	Ranks   bool  // several ranks
	Reset   bool  // the connector can forget
	Peer    bool  // a second engine sees what the first stores
	Restart bool  // the connector ends and starts again, and what was saved stays
	Kill    bool  // the same, by a signal
	Twice   bool  // a key comes twice in one transfer
	Room    int64 // bytes of blocks that the store can keep
	Most    int   // keys of one batch
	Block   int64 // bytes of a block, digests included; 0: up to 4 MiB
}

// The limits of histories.
const (
	MaxCache    = 6 << 20 // bytes of the caches of all ranks of an engine, unless that is less than minSlots blocks
	minSlots    = 4
	MaxRanks    = 8
	maxSlots    = 8 << 10
	maxSegments = 2000
	maxBlock    = 4 << 20
	minBlock    = 64
	maxBatch    = 4096
)

// Tour is how many histories in a row have everything once.
const Tour = 8

// The histories of a tour.
const (
	mixed = iota
	manySegments
	unevenGroups
	manyRanks
	bigBatches
	largeBlocks
	lives
	replaced
)

// Generate makes history n of a seed. The same arguments give the same history.
func Generate(seed uint64, n int, o Options) *History {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, uint64(n)+1)), o: o, class: (n + int(seed%Tour)) % Tour, h: &History{}, latest: map[Key]int{}, stored: map[Key]bool{}} //nolint:gosec // n is small and Tour too
	if g.o.Most == 0 {
		g.o.Most = maxBatch
	}
	g.shape()
	g.prompts()
	for range 6 + g.IntN(18) {
		g.h.Steps = append(g.h.Steps, g.step())
	}
	return g.h
}

// generator makes one history.
type generator struct {
	*rand.Rand
	o       Options
	class   int
	h       *History
	prompt  [][]Key
	latest  map[Key]int // versions
	stored  map[Key]bool
	used    int64
	batch   int // most keys of one transfer
	engines int
}

// log gives a number from least to most, small ones as often as large ones.
func (g *generator) log(least, most int) int {
	if most <= least {
		return least
	}
	top := least
	for top < most && g.IntN(4) > 0 {
		top *= 2
	}
	return least + g.IntN(min(top, most)-least+1)
}

// round makes of a number, now and then, the nearest below it at which connectors begin a page, a batch or a byte, or the one beside that.
func (g *generator) round(n int) int {
	if !g.chance(1, 3) {
		return n
	}
	base := 1
	for base*2 <= n {
		base *= 2
	}
	if ten := 100; n >= ten && g.chance(1, 3) {
		for base = ten; base*10 <= n; base *= 10 {
		}
	}
	return max(1, min(n, base+g.IntN(3)-1))
}

func (g *generator) chance(n, of int) bool { return g.IntN(of) < n }

// shape chooses what the caches are like.
func (g *generator) shape() {
	s := &g.h.Shape
	s.Gaps, s.Ranks = g.chance(3, 4), 1
	if g.chance(1, 3) {
		s.Tokens = []int{16, 48, 128, 256, 272, 528}[g.IntN(6)]
	}
	if g.o.Ranks && (g.class == manyRanks || g.chance(1, 4)) {
		s.Ranks = 2 + g.IntN(MaxRanks-1)
	}
	groups := 1
	if g.o.Groups && (g.class == unevenGroups || g.chance(1, 4)) {
		groups = 2 + g.IntN(5)
	}
	for n := range groups {
		s.Groups = append(s.Groups, g.group(n))
	}
	g.Shuffle(groups, func(a, b int) { s.Groups[a], s.Groups[b] = s.Groups[b], s.Groups[a] })
	if !slices.ContainsFunc(s.Groups, func(g Group) bool { return g.Trailing == 0 }) {
		s.Groups[0].Trailing = 0
	}
	fit := int64(MaxCache) / int64(s.Ranks) / (s.blockBytes() + 64*int64(len(s.Groups)))
	s.Slots = int(max(minSlots, min(fit, maxSlots)))
	g.batch = max(1, min(s.Slots/(2*groups)-1, g.o.Most))
	g.engines = 1
	if g.o.Peer && g.chance(1, 2) {
		g.engines = 2
	}
}

// group chooses what the blocks of a group consist of.
func (g *generator) group(n int) Group {
	s := &g.h.Shape
	group := Group{Segments: g.log(1, 16), Bytes: int64(g.log(minBlock, 4<<10))}
	switch g.class {
	case manySegments:
		group.Segments = 64 + g.IntN(maxSegments-64+1)
		group.Bytes = int64(g.log(16*group.Segments, 64*group.Segments))
	case largeBlocks:
		group.Bytes = 64<<10 + int64(g.IntN(g.log(64<<10, maxBlock-64<<10)))
		s.Ranks = min(s.Ranks, 2)
	case unevenGroups:
		group.Bytes <<= 2 * n // the small one first, or last
	case bigBatches:
		group.Segments, group.Bytes = 1+g.IntN(2), int64(minBlock+g.IntN(64))
		s.Ranks = min(s.Ranks, 2)
	}
	if n > 0 && g.chance(2, 3) {
		group.Trailing = 1 + g.IntN(4)
	}
	if g.o.Block > 0 { // half of it is for digests
		group.Bytes = min(group.Bytes, g.o.Block/2)
		group.Segments = min(group.Segments, int(g.o.Block/64))
	}
	group.Segments = min(group.Segments, max(1, int(group.Bytes/16)))
	g.cut(&group)
	return group
}

// cut chooses how the bytes of a block are distributed over its segments.
func (g *generator) cut(group *Group) {
	switch g.IntN(4) {
	case 0:
		group.Cut = CutEqual
		each := 16
		for int64(each*group.Segments) < minBlock || int64(2*each*group.Segments) <= group.Bytes {
			each *= 2
		}
		group.Bytes = int64(each * group.Segments)
	case 1:
		group.Cut = CutTiny
	}
}

// prompts chooses keys, in prompts.
func (g *generator) prompts() {
	for range 1 + g.IntN(4) {
		n := g.log(1, min(g.batch, 24))
		if g.class == bigBatches {
			n = g.log(min(100, g.batch), g.batch)
			if g.chance(1, 2) {
				n = g.batch/2 + 1 + g.IntN((g.batch+1)/2)
			}
			n = g.round(n)
		}
		var p []Key
		for range n {
			p = append(p, g.key())
		}
		g.prompt = append(g.prompt, p)
	}
}

// key makes a key, which may look like an earlier one.
func (g *generator) key() Key {
	near := Near{}
	if n := len(g.h.Keys); n > 0 && g.chance(1, 4) {
		near = Near{Of: Key(g.IntN(n)), Share: 4 + g.IntN(28), Last: g.chance(1, 2)}
	}
	g.h.Keys = append(g.h.Keys, near)
	return Key(len(g.h.Keys) - 1)
}

// step chooses calls that run at the same time and fit into the cache together.
func (g *generator) step() Step {
	if c, alone := g.lifeCall(); alone {
		return Step{c}
	}
	width := 1
	if g.chance(2, 5) {
		width = 2 + g.IntN(5)
	}
	left := g.h.Shape.Slots
	var step Step
	for range width {
		c := g.call()
		if need := len(c.Blocks(&g.h.Shape)); need <= left {
			left -= need
			step = append(step, c)
		}
	}
	if g.o.Kill && g.chance(1, 6) {
		step = append(step, Call{Kind: Kill, Engine: g.IntN(g.engines), Cancel: time.Duration(g.IntN(2000)) * time.Microsecond})
	}
	return step
}

// lifeCall is a call that runs alone.
func (g *generator) lifeCall() (Call, bool) {
	often := 12
	if g.class == lives {
		often = 4
	}
	if !g.chance(1, often) {
		return Call{}, false
	}
	c := Call{Kind: Reopen, Engine: g.IntN(g.engines)}
	if g.o.Restart && g.chance(1, 3) {
		c.Kind = Restart
	}
	return c, true
}

func (g *generator) call() Call {
	c := Call{Engine: g.IntN(g.engines)}
	g.cancel(&c, 6)
	switch n := g.IntN(10); {
	case g.o.Reset && g.chance(1, 16):
		c.Kind, c.Cancel = Reset, 0
	case n < 4:
		g.save(&c)
	case n < 7:
		g.load(&c)
	default:
		g.match(&c)
	}
	return c
}

// cancel ends a call early, or before it begins, with a chance of one in oneIn.
func (g *generator) cancel(c *Call, oneIn int) {
	if !g.chance(1, oneIn) {
		return
	}
	c.Cancel = time.Duration(g.IntN(1500)) * time.Microsecond
	if g.chance(1, 3) {
		c.Cancel = -1
	}
}

// some chooses blocks of a prompt, in prefix order.
func (g *generator) some() []Key {
	p := g.prompt[g.IntN(len(g.prompt))]
	switch g.IntN(4) {
	case 0:
		return p[:g.round(1+g.IntN(len(p)))]
	case 1: // with holes
		var keys []Key
		for _, k := range p {
			if g.chance(3, 4) {
				keys = append(keys, k)
			}
		}
		if len(keys) > 0 {
			return keys
		}
	}
	return p
}

func (g *generator) save(c *Call) {
	c.Kind, c.Keys, c.Tail = Save, slices.Clone(g.some()), g.chance(1, 6)
	often := 5
	if g.class == replaced {
		often = 2
	}
	c.Replace = g.chance(1, often)
	for _, k := range c.Keys {
		c.Version = max(c.Version, g.latest[k])
	}
	if c.Replace && g.chance(2, 3) {
		c.Version++
	}
	if !c.Replace { // equal keys mean equal bytes
		c.Keys = slices.DeleteFunc(c.Keys, func(k Key) bool { return g.stored[k] && g.latest[k] != c.Version })
	}
	size := g.h.Shape.blockBytes() * int64(g.h.Shape.Ranks)
	c.Keys = slices.DeleteFunc(c.Keys, func(k Key) bool {
		if g.stored[k] {
			return false
		}
		if g.used+size > g.o.Room {
			return true
		}
		g.used += size
		g.stored[k] = true
		return false
	})
	for _, k := range c.Keys {
		g.latest[k] = c.Version
	}
	g.twice(c)
	if len(c.Keys) == 0 {
		g.match(c)
		return
	}
	g.parts(c)
}

// parts leaves out what a window does not keep, and now and then all ranks but one.
func (g *generator) parts(c *Call) {
	for _, group := range g.h.Shape.Groups {
		skip := 0
		if group.Trailing > 0 && g.chance(2, 3) {
			skip = g.IntN(len(c.Keys))
		}
		c.Skip = append(c.Skip, skip)
	}
	if g.h.Shape.Ranks > 1 && g.chance(1, 8) {
		c.Only = 1 + g.IntN(g.h.Shape.Ranks)
	}
}

func (g *generator) load(c *Call) {
	c.Kind, c.Keys, c.Tail = Load, slices.Clone(g.some()), g.chance(1, 6)
	if g.chance(1, 4) { // from several prompts
		c.Keys = append(c.Keys, g.some()...)
	}
	if g.chance(1, 4) { // of nobody's
		c.Keys = slices.Insert(c.Keys, g.IntN(len(c.Keys)+1), g.key())
	}
	if !g.o.Twice {
		c.Keys = unique(c.Keys)
	}
	g.twice(c)
	c.Keys = c.Keys[:min(len(c.Keys), g.batch)]
}

// twice has a key come twice.
func (g *generator) twice(c *Call) {
	if g.o.Twice && len(c.Keys) > 0 && len(c.Keys) < g.batch && g.chance(1, 6) {
		c.Keys = slices.Insert(c.Keys, g.IntN(len(c.Keys)+1), c.Keys[g.IntN(len(c.Keys))])
	}
}

func unique(keys []Key) []Key {
	seen := map[Key]bool{}
	return slices.DeleteFunc(keys, func(k Key) bool {
		was := seen[k]
		seen[k] = true
		return was
	})
}

func (g *generator) match(c *Call) {
	*c = Call{Kind: Match, Engine: c.Engine, Cancel: c.Cancel}
	for range g.log(1, 12) {
		q := Query{Keys: slices.Clone(g.some()), Probe: g.chance(1, 5)}
		if g.chance(1, 5) {
			q.Keys = slices.Insert(q.Keys, g.IntN(len(q.Keys)+1), g.key())
		}
		if g.chance(1, 4) {
			q.Computed = g.IntN(len(q.Keys) + 1)
		}
		c.Queries = append(c.Queries, q)
	}
}
