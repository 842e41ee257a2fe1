package simulate

import (
	"fmt"
	"io"
	"slices"
)

// Minimal is a failing run made as small as it gets.
type Minimal struct {
	Options   Options
	Ops       []Op
	Violation *Violation
	Tries     int
}

// maxTries bounds how many runs Minimise makes.
const maxTries = 4000

// Minimise looks for the shortest script and the simplest options that break the same rule as the given
// seed does: it leaves out steps, then faults, then ranks, groups and engines. It returns nil for a
// seed that breaks none.
func Minimise(o Options, steps int) *Minimal {
	m := &Minimal{Options: o, Ops: script(&o, steps)}
	if m.Violation = m.play(m.Options, m.Ops); m.Violation == nil {
		return nil
	}
	if n := m.Violation.Step + 1; n < len(m.Ops) {
		m.keep(m.Options, slices.Clone(m.Ops[:n]))
	}
	for before := -1; before != len(m.Ops); {
		before = len(m.Ops)
		m.dropOps()
		m.simplify()
	}
	m.dropFaults()
	return m
}

func (m *Minimal) play(o Options, ops []Op) *Violation {
	m.Tries++
	return play(o, ops).Violation
}

// keep takes a candidate if it breaks the same rule.
func (m *Minimal) keep(o Options, ops []Op) bool {
	if m.Tries >= maxTries {
		return false
	}
	v := m.play(o, ops)
	if v == nil || v.Rule != m.Violation.Rule {
		return false
	}
	m.Options, m.Ops, m.Violation = o, ops, v
	return true
}

// dropOps leaves out runs of steps, long ones first.
func (m *Minimal) dropOps() {
	for size := (len(m.Ops) + 1) / 2; size > 0; size /= 2 {
		for at := 0; at < len(m.Ops); {
			end := min(at+size, len(m.Ops))
			if !m.keep(m.Options, slices.Concat(m.Ops[:at], m.Ops[end:])) {
				at = end
			}
		}
	}
}

func (m *Minimal) dropFaults() {
	for i := range m.Ops {
		if m.Ops[i].Fault != faultNone {
			ops := slices.Clone(m.Ops)
			ops[i].Fault = faultNone
			m.keep(m.Options, ops)
		}
	}
}

// simplify tries smaller worlds.
func (m *Minimal) simplify() {
	for _, change := range []func(*Options){
		func(o *Options) { o.Ranks = 1 },
		func(o *Options) { o.Blocks, o.Groups = o.Blocks/o.Groups, 1 },
		func(o *Options) { o.Prefills = min(o.Prefills, 1) },
		func(o *Options) { o.Decodes = 1 },
		func(o *Options) { o.Planner = false },
		func(o *Options) { o.Slots = 0 },
		func(o *Options) { o.FailLoads = false },
		func(o *Options) { o.Queries = false },
		func(o *Options) { o.Turns = false },
		func(o *Options) { o.OtherTokens = 0 },
		func(o *Options) { o.Lossy = false },
		func(o *Options) { o.Layers = false },
		func(o *Options) { o.Overlap = false },
		func(o *Options) { o.Placed = false },
		func(o *Options) { o.Children = false },
		func(o *Options) { o.Tells = false },
		func(o *Options) { o.Fetches = false },
		func(o *Options) { o.Stale = false },
		func(o *Options) { o.MaxSeqs = 1 },
		func(o *Options) { o.Rough = min(o.Rough, 1) },
	} {
		o := m.Options
		if change(&o); o != m.Options {
			m.keep(o, m.Ops)
		}
	}
}

// Transcript plays the run again and writes what happens, step by step.
func (m *Minimal) Transcript(w io.Writer) {
	o := m.Options
	_, _ = fmt.Fprintf(w, "seed %d, %d steps: %d prefill and %d decode engines, medium %v, planner %v, turns %v, queries %v, children %v (fetching %v), layers %v, overlap %v, told %v, %d landing slots, %d blocks of %d tokens (others %d, lossy %v), %d groups, %d ranks, batch %d tokens and %d requests\n",
		o.Seed, len(m.Ops), o.Prefills, o.Decodes, o.Medium, o.Planner, o.Turns, o.Queries, o.Children, o.Fetches, o.Layers, o.Overlap, o.Tells, o.Slots, o.Blocks, o.BlockTokens, o.OtherTokens, o.Lossy, o.Groups, o.Ranks, o.MaxBatchedTokens, o.MaxSeqs)
	o.Trace = w
	play(o, m.Ops)
}
