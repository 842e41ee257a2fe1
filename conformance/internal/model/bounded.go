package model

import (
	"fmt"
	"math/rand/v2"
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

// tenants are those whose blocks a bounded history saves.
const tenants = 2

// GenerateBounded makes history n of a seed for a connector whose options bound what it keeps: three times as much is saved, and
// after each save the whole of it is looked for.
func GenerateBounded(seed uint64, n int, b Bounded, o Options) *History {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, uint64(n)+1)), o: o, h: &History{}, latest: map[Key]int{}, stored: map[Key]bool{}, engines: 1} //nolint:gosec // n is not negative
	g.o.Room, g.o.Twice = 1<<40, false
	bounds := &Bounds{}
	if b.Blocks {
		bounds.Blocks = 6 + g.IntN(7)
	}
	if b.Tenant && n%2 == 0 {
		bounds.Tenant = 4 + g.IntN(5)
	}
	if b.Seconds && n%4 == 3 {
		bounds.Seconds = 1
	}
	segments := 1 + g.IntN(8)
	g.h.Bounds = bounds
	g.h.Shape = Shape{Ranks: 1, Slots: 64, Gaps: g.chance(3, 4), Groups: []Group{{Segments: segments, Bytes: int64(2<<10 + g.IntN(6<<10))}}}
	g.batch = 16
	for range 8 {
		var p []Key
		for range g.log(1, 6) {
			p = append(p, g.key())
		}
		g.prompt = append(g.prompt, p)
	}
	g.boundedSteps()
	return g.h
}

// boundedSteps makes saves and what may go on beside them, each followed by a look for everything.
func (g *generator) boundedSteps() {
	bounds, waits := g.h.Bounds, 0
	for range 10 + g.IntN(14) {
		var step Step
		switch n := g.IntN(12); {
		case n == 0 && g.o.Reset:
			step = Step{{Kind: Reset}}
		case n < 3 && bounds.Seconds > 0 && waits < 3:
			step = Step{{Kind: Wait, Cancel: (time.Duration(bounds.Seconds)*time.Second + waitSlack) / 2}}
			waits++
		case n < 8:
			step = Step{g.tenantSave()}
		default:
			step = Step{g.tenantSave()}
			for range 1 + g.IntN(3) {
				var c Call
				g.load(&c)
				step = append(step, c)
			}
		}
		g.h.Steps = append(g.h.Steps, step, Step{g.census()})
	}
}

// tenantSave saves a prompt, or a part of one, for the tenant to which it belongs.
func (g *generator) tenantSave() Call {
	n := g.IntN(len(g.prompt))
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

// Bound has the judge judge a connector that may forget whatever it likes, except what it has just acknowledged, and that must not have more
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
		Allowed: "no error",
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
