package model

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Bounds are what the options of a connector's config limit in a history; 0: nothing does.
type Bounds struct {
	Blocks  int // that the connector can keep in each of its tiers
	Tenant  int // the same, of one tenant
	Seconds int // after which a block must not be found any more
}

// Limits are what follows from Bounds for what a connector may have.
type Limits struct {
	All, Tenant int           // blocks that may be offered at the same time, and of one tenant; 0: any number
	Fits        int           // blocks that may not be declined if there is room for twice as many
	Time        time.Duration // after which a saved block must not be found any more; 0: any
}

// Bounded says which bounds histories may have.
type Bounded struct{ Blocks, Tenant, Seconds bool }

// waitSlack is how much later than its time a block may be found.
const waitSlack = 200 * time.Millisecond

// tenants are those whose blocks a bounded history saves. Those of three are more than all that is kept.
const tenants = 4

// The kinds of bounded histories, which come in turn.
const (
	inTurn  = iota // tenants save in turn, so that each is pushed out by the others
	crowded        // blocks are loaded several times at once, while others push them out
	mingled        // anything
	timed          // the time of blocks ends
	boundedKinds
)

// GenerateBounded makes history n of a seed for a connector whose options bound what it keeps: three times as much is saved, and
// after each save the whole of it is looked for.
func GenerateBounded(seed uint64, n int, b Bounded, o Options) *History {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, uint64(n)+1)), o: o, class: (n + int(seed%boundedKinds)) % boundedKinds, h: &History{Bounds: &Bounds{}}, latest: map[Key]int{}, stored: map[Key]bool{}, engines: 1} //nolint:gosec // n is small and boundedKinds too
	g.o.Room, g.o.Twice, g.batch = 1<<40, false, 16
	g.bound(b)
	g.h.Shape = Shape{Ranks: 1, Slots: 64, Gaps: g.chance(3, 4), Groups: []Group{{Segments: 1 + g.IntN(8), Bytes: int64(2<<10 + g.IntN(6<<10))}}}
	for range 2 * tenants {
		var p []Key
		for range g.promptLength() {
			p = append(p, g.key())
		}
		g.prompt = append(g.prompt, p)
	}
	g.boundedSteps()
	return g.h
}

// bound chooses the bounds of a history.
func (g *generator) bound(b Bounded) {
	bounds := g.h.Bounds
	switch {
	case b.Blocks && g.class == crowded:
		bounds.Blocks = 2 + g.IntN(4)
	case b.Blocks:
		bounds.Blocks = 6 + g.IntN(7)
	}
	if b.Tenant && (g.class == inTurn || g.class == mingled && g.chance(1, 2)) {
		bounds.Tenant = 4 + g.IntN(5)
	}
	if b.Seconds && g.class == timed {
		bounds.Seconds = 1
	}
}

// promptLength is how many blocks a prompt has. In a crowd one prompt pushes out all that is there; among anything, a part of a prompt may
// be long gone when the whole of it is saved.
func (g *generator) promptLength() int {
	switch g.class {
	case crowded:
		return max(1, g.h.Bounds.Blocks-g.IntN(2))
	case mingled:
		return 1 + g.IntN(12)
	}
	return g.log(1, 6)
}

// boundedSteps makes saves and what may go on beside them, each followed by a look for everything.
func (g *generator) boundedSteps() {
	const turn = 3 // saves of a tenant in turn
	waits := 0
	for i := range 12 + g.IntN(14) {
		n := g.IntN(len(g.prompt))
		if g.class == inTurn {
			n = i/turn%tenants + tenants*g.IntN(len(g.prompt)/tenants)
		}
		step := Step{g.tenantSave(n)}
		switch roll := g.IntN(12); {
		case g.class == inTurn:
		case g.o.Reset && (roll == 0 || roll == 1 && g.class == mingled):
			step = Step{{Kind: Reset}}
		case roll < 3 && g.h.Bounds.Seconds > 0 && waits < 3:
			step = Step{{Kind: Wait, Cancel: (time.Duration(g.h.Bounds.Seconds)*time.Second + waitSlack) / 2}}
			waits++
		case g.class == crowded && roll < 9:
			g.h.Steps = append(g.h.Steps, step)
			step = g.crowd(n)
		case roll >= 8:
			step = g.withLoads(step)
		}
		g.h.Steps = append(g.h.Steps, step, Step{g.census()})
	}
}

// withLoads adds loads of anything to a step, some of which are cancelled.
func (g *generator) withLoads(step Step) Step {
	for range 1 + g.IntN(3) {
		var c Call
		g.load(&c)
		if c.Kind == Load {
			g.cancel(&c, 3)
		}
		step = append(step, c)
	}
	return step
}

// crowd loads a prompt two or three times, each a little later than the one before, while others are saved. Some of the loads are cancelled.
func (g *generator) crowd(n int) (step Step) {
	const quarter = time.Millisecond / 4
	at := time.Duration(0)
	for range 2 + g.IntN(2) {
		c := Call{Kind: Load, Keys: slices.Clone(g.prompt[n]), After: at}
		g.cancel(&c, 3)
		step = append(step, c)
		at += time.Duration(1+g.IntN(8)) * quarter
	}
	for range 2 + g.IntN(3) {
		c := g.tenantSave((n + 1 + g.IntN(len(g.prompt)-1)) % len(g.prompt))
		c.After = time.Duration(g.IntN(40)) * quarter
		step = append(step, c)
	}
	return step
}

// tenantSave saves a prompt, or a part of one, for the tenant to which it belongs.
func (g *generator) tenantSave(n int) Call {
	all := g.prompt
	g.prompt = all[n : n+1]
	c := Call{}
	g.save(&c)
	g.prompt = all
	if c.Kind == Save {
		c.Tenant, c.Tail = 1+n%tenants, false
	}
	return c
}

// census asks for each block by itself.
func (g *generator) census() Call {
	c := Call{Kind: Match}
	for _, p := range g.prompt {
		for _, k := range p {
			c.Queries = append(c.Queries, Query{Keys: []Key{k}})
		}
	}
	return c
}

// bounded is what a judge knows of a connector whose options bound what it keeps.
type bounded struct {
	Limits
	fresh  map[place]bool // what the last save has stored: it must be found until something else is done
	tenant map[Key]int
	held   map[Key]bool // keys that may be there
}

// Bound says that the connector may forget whatever it likes, except what it has just acknowledged, and must not have more
// than the limits.
func (j *Judge) Bound(l Limits) {
	j.room = -1
	j.bounded = &bounded{Limits: l, fresh: map[place]bool{}, tenant: map[Key]int{}, held: map[Key]bool{}}
}

// declined judges a save of a bounded connector that failed for some blocks.
func (b *bounded) declined(c *Call, res *Result, alone bool) *Violation {
	m := &res.Ranks[0]
	if !alone || m.Err == nil || res.Ended || c.Replace || b.Fits == 0 {
		return nil
	}
	blocks := map[Key]bool{}
	for _, k := range c.Keys {
		blocks[k] = true
	}
	for k := range b.held {
		if b.tenant[k] == c.Tenant {
			blocks[k] = true
		}
	}
	if 2*len(blocks) > b.Fits {
		return nil
	}
	return &Violation{
		Rule: "OFF-05", Text: fmt.Sprintf("a save of %s failed, although the tenant would have %d of %d then: %v", count(len(unique(append([]Key{}, c.Keys...))), "block"), len(blocks), b.Fits, m.Err),
		Allowed: "no error", Declined: true,
	}
}

// census judges how much a Match offers in all.
func (b *bounded) census(c *Call, res *Result) *Violation {
	all, of := 0, map[int]int{}
	seen := map[Key]bool{}
	for i, q := range c.Queries {
		for _, k := range q.Keys[:min(len(q.Keys), q.Computed+res.Answers[i]/BlockTokens)][q.Computed:] {
			if !seen[k] {
				seen[k] = true
				all++
				of[b.tenant[k]]++
			}
		}
	}
	if b.All > 0 && all > b.All {
		return &Violation{Rule: "OFF-02", Text: fmt.Sprintf("%s are offered at the same time, which is more than the options allow", count(all, "block")), Allowed: fmt.Sprintf("%d at most", b.All)}
	}
	for tenant := 1; tenant <= tenants; tenant++ {
		if b.Tenant > 0 && of[tenant] > b.Tenant {
			return &Violation{Rule: "OFF-09", Text: fmt.Sprintf("%s of one tenant are offered at the same time, which is more than its quota", count(of[tenant], "block")), Allowed: fmt.Sprintf("%d at most", b.Tenant)}
		}
	}
	return nil
}

// judge judges a step of one call.
func (b *bounded) judge(step Step, o *Outcome) *Violation {
	if len(step) != 1 || o.Results[0].Late != "" {
		return nil
	}
	switch c, res := &step[0], &o.Results[0]; {
	case c.Kind == Save:
		return b.declined(c, res, true)
	case c.Kind == Match && res.Err == nil && len(res.Answers) == len(c.Queries):
		return b.census(c, res)
	}
	return nil
}

// note remembers what a step did.
func (b *bounded) note(step Step, o *Outcome, shape *Shape) {
	if len(step) == 1 && step[0].Kind == Match {
		b.noteCensus(&step[0], &o.Results[0])
		return
	}
	clear(b.fresh)
	for i := range step {
		c, res := &step[i], &o.Results[i]
		if c.Kind == Reset && res.Emptied && res.Err == nil {
			clear(b.held)
		}
		if c.Kind != Save {
			continue
		}
		for n, ref := range c.Blocks(shape) {
			b.held[ref.Key], b.tenant[ref.Key] = true, c.Tenant
			if len(step) == 1 && b.Time == 0 && !res.Ended && res.Ranks[0].Called && !res.Ranks[0].failed(n) {
				b.fresh[place{ref.Key, ref.Group, 0}] = true
			}
		}
	}
}

// noteCensus notes which blocks are gone.
func (b *bounded) noteCensus(c *Call, res *Result) {
	if res.Err != nil || res.Ended || len(res.Answers) != len(c.Queries) {
		return
	}
	for i, q := range c.Queries {
		if len(q.Keys) == 1 && q.Computed == 0 && res.Answers[i] == 0 {
			delete(b.held, q.Keys[0])
		}
	}
}
