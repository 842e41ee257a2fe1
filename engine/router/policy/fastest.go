package policy

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// fastest is the rule of pd_aware: it expects for each pair, and for each decode instance alone, how long the first byte
// takes, by what was learnt, and takes what is the fastest. Of those that are nearly as fast it takes the one with the
// least to do.
type fastest struct {
	options []option
	costs   [roles][]cost
	order   []int

	explored [2]int // how many measurements there were when the last choice of each kind was made only to learn
	vain     [2]int // how many such choices in a row have taught nothing
}

// option is one way to serve a request.
type option struct {
	prefill, decode int // into the candidates; prefill is None without
	seconds         float64
	spread          float64 // of the instance that computes the prompt
}

// rank is what options are compared by.
func (o *option) rank() float64 { return o.seconds + o.spread }

// cost is what is expected of one candidate.
type cost struct {
	compute float64 // seconds to load what lies in stores and to compute what it lacks of the prompt, after what waits
	wait    float64 // of these, for what waits
	spread  float64 // seconds that it is put back by for what it had to compute lately, so that caches are used alike
}

func (c *cost) rank() float64 { return c.compute + c.spread }

const (
	// rivals is how many prefill instances, the fastest by themselves, are compared for each decode instance.
	rivals = 8
	// short is how many tokens a decode instance computes by itself as long as it is not known how long that takes.
	short = 32
	// nearly is the factor, and a millisecond more, within which the load decides.
	nearly = 1.1
	// curious is after how many answers without a measurement of the other kind of choice, with a prefill instance or
	// without, one is made, so that its rates stay known. At first atFirst is enough. Each such choice in a row that teaches
	// nothing doubles that, up to patient times. The choice must not be expected to take longer than tolerable times the
	// best; as long as nothing is expected, a decode instance has at most trial tokens to compute by itself.
	curious   = 64
	atFirst   = 4
	patient   = 10
	tolerable = 3
	trial     = 4096
)

// pick implements rule.
func (f *fastest) pick(p *Policy, r *Request, c field) picked {
	f.expect(p, r, c)
	decodes := limit(c.decodes)
	f.options = f.options[:0]
	for i := range c.decodes {
		if c.decodes[i].Load() <= decodes {
			f.add(p, r, c, i)
		}
	}
	best := f.options[f.best(c, func(option) bool { return true })]
	if !r.Whole {
		best = f.explore(p, r, c, best)
	}
	got := picked{decode: &c.decodes[best.decode]}
	if best.prefill != None {
		got.prefill = &c.prefills[best.prefill]
	} else if slices.ContainsFunc(f.options, func(o option) bool { return o.prefill != None && o.decode == best.decode }) {
		got.without = Skipped
	}
	got.why = func() string { return f.why(r, &got, best, c.from) }
	return got
}

// expect computes what each candidate takes by itself, and sorts the prefill instances by that.
func (f *fastest) expect(p *Policy, r *Request, c field) {
	for role, list := range [roles][]Candidate{Prefill: c.prefills, Decode: c.decodes} {
		f.costs[role] = f.costs[role][:0]
		least := math.Inf(1)
		for i := range list {
			least = min(least, list[i].Lately)
		}
		for i := range list {
			base, slope := p.learnt.compute(Role(role), list[i].Place)
			wait := slope * list[i].Waiting
			rest := slope * float64(max(1, r.Tokens-list[i].Hit.Tokens()))
			f.costs[role] = append(f.costs[role], cost{
				compute: base + wait + rest + p.learnt.fetch(Role(role), list[i].Place, list[i].Hit), wait: wait, spread: slope * (list[i].Lately - least) / 10,
			})
		}
	}
	f.order = f.order[:0]
	for i := range c.prefills {
		f.order = append(f.order, i)
	}
	slices.SortFunc(f.order, func(a, b int) int {
		if x, y := c.prefills[a].Standing, c.prefills[b].Standing; x != y {
			return cmp.Compare(x, y)
		}
		if x, y := f.costs[Prefill][a].rank(), f.costs[Prefill][b].rank(); x != y {
			return cmp.Compare(x, y)
		}
		return a - b // the order of the round
	})
}

// add lists the ways to serve a request with one decode instance.
func (f *fastest) add(p *Policy, r *Request, c field, i int) {
	d := &c.decodes[i]
	lacks := float64(max(0, r.Tokens-d.Hit.Engine)) // what a ticket is for
	if c.from != None {
		base, slope := p.learnt.load(c.from, d.Place)
		f.options = append(f.options, option{None, i, base + slope*lacks + f.costs[Decode][i].wait, 0})
		return
	}
	alone := option{None, i, f.costs[Decode][i].compute, f.costs[Decode][i].spread}
	if !p.learnt.all[Decode].known() && r.Tokens-d.Hit.Tokens() > short {
		alone.seconds = math.Inf(1)
	}
	f.options = append(f.options, alone)
	left, standing := rivals, Out
	for _, j := range f.order {
		if !p.pairs(r, c.prefills[j].Place, d.Place) {
			continue
		}
		if standing = min(standing, c.prefills[j].Standing); c.prefills[j].Standing > standing {
			break // a suspect is only for where no other can be had
		}
		base, slope := p.learnt.load(c.prefills[j].Place, d.Place)
		f.options = append(f.options, option{j, i, f.costs[Prefill][j].compute + base + slope*lacks + f.costs[Decode][i].wait, f.costs[Prefill][j].spread})
		if left--; left == 0 {
			break
		}
	}
}

// best is the fastest of the options that may be had, or nearly, with the least load; -1 if there is none.
func (f *fastest) best(c field, may func(option) bool) int {
	least := math.Inf(1)
	for _, o := range f.options {
		if may(o) {
			least = min(least, o.rank())
		}
	}
	index, load := -1, 0.0
	for i, o := range f.options {
		if !may(o) || o.rank() > nearly*least+1e-3 {
			continue
		}
		its := c.decodes[o.decode].Load()
		if o.prefill != None {
			its += c.prefills[o.prefill].Load()
		}
		if index < 0 || its < load || its == load && o.rank() < f.options[index].rank() {
			index, load = i, its
		}
	}
	return index
}

// explore gives the best option of the other kind, with a prefill instance or without, if that was not measured for a
// while and is not far too slow.
func (f *fastest) explore(p *Policy, r *Request, c field, best option) option {
	kind, last := 0, &p.learnt.all[Decode]
	if best.prefill == None {
		kind, last = 1, &p.learnt.loads
	}
	pause := curious
	if !last.known() {
		pause = atFirst
	}
	if last.at > f.explored[kind] {
		f.vain[kind] = 0
	}
	if c.from != None || p.learnt.count-max(last.at, f.explored[kind]) < pause<<min(f.vain[kind], patient) {
		return best
	}
	i := f.best(c, func(o option) bool {
		other := (o.prefill == None) != (best.prefill == None)
		return other && (!math.IsInf(o.seconds, 1) || r.Tokens-c.decodes[o.decode].Hit.Tokens() <= trial)
	})
	if i < 0 || !math.IsInf(f.options[i].seconds, 1) && f.options[i].seconds > tolerable*best.seconds {
		return best
	}
	f.explored[kind] = p.learnt.count
	f.vain[kind]++
	return f.options[i]
}

// why says what was expected.
func (f *fastest) why(r *Request, got *picked, of option, from int) string {
	text := fmt.Sprintf("%.0f ms expected, decode holds %s, %d running", 1e3*of.seconds, got.decode.Hit.of(r.Tokens), got.decode.Running)
	switch {
	case got.prefill != nil:
		text += fmt.Sprintf("; prefill holds %s, %.0f tokens waiting", got.prefill.Hit.of(r.Tokens), got.prefill.Waiting)
	case from != None:
		text += "; the prompt is computed already"
	case got.without != "":
		text += "; prefill would take longer"
	}
	return text
}
