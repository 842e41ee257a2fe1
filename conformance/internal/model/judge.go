package model

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"time"
)

// Violation is a rule that an answer broke.
type Violation struct {
	Rule, Text string
	Call       int    // of the step
	Allowed    string // what would have been right
	Short      bool   // a Match offers less than it must: a connector may be late
	Declined   bool   // a Save takes less than it must: a connector may want to be asked more often
	Kind       string // violations of one kind are of one mistake, whatever rule each breaks; empty: the rule
}

// Like reports whether two violations are probably of one mistake.
func (v *Violation) Like(other *Violation) bool {
	return v.Rule == other.Rule || v.Kind != "" && v.Kind == other.Kind
}

// The kinds of violations that break one rule or another by what happened before.
const (
	lost = "lost" // what is stored is not found
	torn = "torn" // a block is partly right
)

// Judge follows a history and knows what is allowed. The zero value of its state is an empty store.
type Judge struct {
	shape  Shape
	room   int64 // bytes after which a store may forget; below 0: it may forget always
	used   int64
	shards map[place]*shard

	bounded *bounded // nil: room is all that bounds the store
}

// NewJudge begins a history. room is how many bytes of blocks the store must be able to keep.
func NewJudge(s Shape, room int64) *Judge {
	return &Judge{shape: s, room: room, shards: map[place]*shard{}}
}

// place is one rank's part of one group's block.
type place struct {
	key         Key
	group, rank int
}

// shard is what is known of a place.
type shard struct {
	sure     bool   // it must be found
	versions uint64 // those that may be found; 0: it must not be found
	erased   uint64 // those that were there before a Reset
	// Where it came from, for the rule that a violation breaks.
	ever, cleared, seen, torn, expired bool
	age                                time.Duration // for which histories have waited since it was saved
	life                               string        // the rule of what has happened to the connector since
}

func (j *Judge) at(p place) *shard {
	s := j.shards[p]
	if s == nil {
		s = &shard{}
		j.shards[p] = s
	}
	return s
}

// loose reports whether the store may have forgotten.
func (j *Judge) loose() bool { return j.used > j.room }

// during is what the calls of a step may find: what was there, and what the step saves.
type during struct {
	saves   map[place]uint64 // versions that the step saves, whatever came of it
	ok      map[place]uint64 // of those, what was acknowledged
	okR     map[place]uint64 // of those, with Replace
	failedR map[place]bool   // a Replace failed
	replace map[place]bool   // any Replace
	reset   bool             // a Reset runs
	emptied bool             // and has emptied
}

// gather says what a step does to places.
func (j *Judge) gather(step Step, results []Result) during {
	d := during{map[place]uint64{}, map[place]uint64{}, map[place]uint64{}, map[place]bool{}, map[place]bool{}, false, false}
	for i := range step {
		c, res := &step[i], &results[i]
		switch c.Kind {
		case Reset:
			d.reset, d.emptied = true, d.emptied || res.Emptied && res.Err == nil
		case Save:
			for n, ref := range c.Blocks(&j.shape) {
				for rank := range res.Ranks {
					if m := &res.Ranks[rank]; m.Called && !ref.Tail {
						d.saved(place{ref.Key, ref.Group, rank}, c, !m.failed(n))
					}
				}
			}
		case Load, Match, Reopen, Restart, Wait, Kill:
		}
	}
	return d
}

func (d *during) saved(p place, c *Call, ok bool) {
	v := uint64(1) << min(c.Version, 63)
	d.saves[p] |= v
	if ok {
		d.ok[p] |= v
	}
	if c.Replace {
		d.replace[p] = true
		if ok {
			d.okR[p] |= v
		} else {
			d.failedR[p] = true
		}
	}
}

// failed reports whether a block failed.
func (m *Moved) failed(n int) bool { return m.Whole || n < len(m.Failed) && m.Failed[n] }

// odd is the violation of a call whose error names what is not in it.
func (m *Moved) odd(call string) []*Violation {
	if !m.Odd {
		return nil
	}
	return []*Violation{{Rule: "WORK-02", Text: fmt.Sprintf("the error of a %s names a block that is not in it: %v", call, m.Err), Allowed: "blocks of the " + call}}
}

// sure reports whether a call of the step must find a place.
func (j *Judge) sure(p place, d *during) bool {
	if j.bounded != nil {
		return len(d.saves) == 0 && !d.reset && j.bounded.fresh[p]
	}
	return !j.loose() && !d.reset && !d.replace[p] && j.at(p).sure
}

// versions are those that a call of the step may find.
func (j *Judge) versions(p place, d *during) uint64 { return j.at(p).versions | d.saves[p] }

// Step judges a step and notes what it did. It gives the violation of the most specific rule.
func (j *Judge) Step(step Step, o *Outcome) *Violation {
	d := j.gather(step, o.Results)
	j.account(&d)
	var all []*Violation
	for i := range step {
		found := j.call(&step[i], &o.Results[i], &d)
		for _, v := range found {
			v.Call = i
		}
		all = append(all, found...)
	}
	if j.bounded != nil {
		if v := j.bounded.judge(step, o); v != nil {
			all = append(all, v)
		}
	}
	for _, s := range o.Strays {
		all = append(all, s.violation())
	}
	if len(all) > 0 {
		return slices.MinFunc(all, func(a, b *Violation) int { return specific(a.Rule) - specific(b.Rule) })
	}
	j.note(step, o, &d)
	return nil
}

// specific orders rules: what says most comes first.
func specific(rule string) int {
	order := []string{
		"WORK-04", "WORK-03", "LAYOUT-02", "WORK-06", "SCHED-01", "SCHED-04", "KEY-04", "KEY-07", "KEY-08", "KEY-06", "STORE-06", "RESET-01", "WORK-08",
		"OFF-10", "OFF-02", "OFF-09", "OFF-05", "STORE-03", "GROUP-03", "GROUP-04", "STORE-02", "STORE-04", "LAYOUT-03", "WORK-02", "STORE-05", "SCHED-02", "FAULT-01", "STORE-01", "WORK-07",
	}
	if i := slices.Index(order, rule); i >= 0 {
		return i
	}
	return len(order)
}

// account adds what a step stores for the first time.
func (j *Judge) account(d *during) {
	for p := range d.saves {
		if j.at(p).versions == 0 {
			g := &j.shape.Groups[p.group]
			j.used += g.Bytes + 16*int64(g.Segments+1)
		}
	}
}

func (s *Stray) violation() *Violation {
	v := &Violation{Call: -1, Allowed: "memory that stays as it is"}
	switch s.What {
	case OfNobody:
		v.Rule, v.Text = "LAYOUT-02", "bytes between blocks were written"
	case OfSaved:
		v.Rule, v.Text = "WORK-06", "a save wrote into the block that it saves"
	case Later:
		v.Rule, v.Text = "WORK-04", "a block was written after its call had returned"
	case OfOthers:
		v.Rule, v.Text = "WORK-03", "a block was written that no call names"
	}
	v.Text += ": " + s.Where
	return v
}

// call judges one call.
func (j *Judge) call(c *Call, res *Result, d *during) []*Violation {
	if res.Late != "" {
		return []*Violation{{Rule: "WORK-07", Text: res.Late, Allowed: "an answer soon"}}
	}
	switch c.Kind {
	case Save:
		return j.save(c, res, d)
	case Load:
		return j.load(c, res, d)
	case Match:
		return j.match(c, res, d)
	case Reset:
		if res.Err != nil && !res.Ended {
			return []*Violation{{Rule: "RESET-01", Text: fmt.Sprintf("Reset failed: %v", res.Err), Allowed: "no error"}}
		}
	case Reopen, Restart, Wait, Kill:
		if res.Err != nil {
			return []*Violation{{Rule: "OPEN-01", Text: res.Err.Error(), Allowed: "no error"}}
		}
	}
	return nil
}

func (j *Judge) save(c *Call, res *Result, d *during) (found []*Violation) {
	refs := c.Blocks(&j.shape)
	for rank := range res.Ranks {
		m := &res.Ranks[rank]
		found = append(found, m.odd("save")...)
		if !m.Called || m.Err == nil || res.Ended || j.loose() || d.reset {
			continue
		}
		for n, ref := range refs {
			if ref.Tail || !m.failed(n) {
				continue
			}
			p := place{ref.Key, ref.Group, rank}
			rule := "WORK-01"
			switch {
			case c.Replace:
				rule = "STORE-06"
			case j.at(p).sure:
				rule = "STORE-05"
			case bits.OnesCount64(d.saves[p]) > 1:
				rule = "STORE-04"
			}
			found = append(found, &Violation{Rule: rule, Text: fmt.Sprintf("a save failed on %s: %v", j.name(ref, rank), m.Err), Allowed: "no error"})
			break
		}
	}
	return found
}

func (j *Judge) load(c *Call, res *Result, d *during) (found []*Violation) {
	refs := c.Blocks(&j.shape)
	for rank := range res.Ranks {
		m := &res.Ranks[rank]
		found = append(found, m.odd("load")...)
		if !m.Called {
			continue
		}
		lacks := slices.ContainsFunc(refs, func(r Ref) bool { return r.Tail || !j.sure(place{r.Key, r.Group, rank}, d) })
		for n, ref := range refs {
			p := place{ref.Key, ref.Group, rank}
			switch {
			case m.failed(n) && !ref.Tail && !res.Ended && j.sure(p, d):
				found = append(found, &Violation{
					Rule: j.lostRule(p, lacks), Text: fmt.Sprintf("a load fails for %s, which is stored: %v", j.name(ref, rank), m.Err),
					Allowed: "its bytes", Kind: lost,
				})
			case !m.failed(n):
				if v := j.content(ref, rank, m.Found[n], d); v != nil {
					found = append(found, v)
				}
			}
		}
	}
	return found
}

// lostRule is the rule that a load breaks that fails for a block which is stored.
func (j *Judge) lostRule(p place, lacksOthers bool) string {
	switch s := j.at(p); {
	case j.bounded != nil:
		return "OFF-05"
	case lacksOthers:
		return "WORK-02"
	case s.life != "":
		return s.life
	case s.seen:
		return "STORE-01"
	}
	return "WORK-01"
}

// content judges what lies in a block of which a load says that it has arrived.
func (j *Judge) content(ref Ref, rank int, f Found, d *during) *Violation {
	p := place{ref.Key, ref.Group, rank}
	allowed := j.versions(p, d)
	if ref.Tail {
		return &Violation{Rule: "KEY-04", Text: "a load of a partial block succeeds", Allowed: "an error that names it"}
	}
	if f.What == Exact && f.Ref.Key == ref.Key && f.Ref.Group == ref.Group && f.Rank == rank && allowed&(1<<f.Version) != 0 {
		return nil
	}
	s := j.at(p)
	v := &Violation{Rule: "WORK-01", Allowed: j.allowed(ref, allowed)}
	if allowed == 0 {
		v.Rule = "KEY-06"
		if s.cleared {
			v.Rule = "RESET-01"
		}
		if s.expired {
			v.Rule = "OFF-10"
		}
	}
	j.describe(v, ref, rank, f)
	if f.What == Torn && (s.torn || d.failedR[p]) {
		v.Rule = "WORK-08"
	} else if f.What == Torn && d.saves[p] != 0 {
		v.Rule = "STORE-04"
	}
	return v
}

// describe says what lies in a block that should have other bytes, and which rule that breaks.
func (j *Judge) describe(v *Violation, ref Ref, rank int, f Found) {
	s, name := j.at(place{ref.Key, ref.Group, rank}), j.name(ref, rank)
	switch f.What {
	case Untouched:
		v.Rule, v.Text = "WORK-02", fmt.Sprintf("a load says that %s has arrived, and has written nothing", name)
	case Exact:
		v.Rule, v.Text = other(ref, rank, f, v.Rule), fmt.Sprintf("a load gives %s the bytes of %s", name, version(j.name(f.Ref, f.Rank), f.Version))
		if f.Ref == ref && f.Rank == rank {
			if s.erased&(1<<f.Version) != 0 {
				v.Rule = "RESET-01"
				if s.expired {
					v.Rule = "OFF-10"
				}
			}
			v.Text = fmt.Sprintf("a load gives %s bytes that are not stored any more", name)
		}
	case Digest:
		v.Rule, v.Text = "LAYOUT-03", fmt.Sprintf("a load gives %s other digests than were saved", name)
	case Torn:
		v.Kind, v.Text = torn, fmt.Sprintf("a load gives %s bytes that are partly right", name)
	default:
		v.Text = fmt.Sprintf("a load gives %s bytes that nobody saved", name)
	}
}

// other is the rule that the bytes of another block break.
func other(ref Ref, rank int, f Found, otherwise string) string {
	switch {
	case f.Ref.Key != ref.Key:
		return "KEY-06"
	case f.Ref.Group != ref.Group:
		return "KEY-08"
	case f.Rank != rank:
		return "KEY-07"
	case otherwise == "WORK-01":
		return "STORE-06"
	}
	return otherwise
}

// allowed says what a load may find.
func (j *Judge) allowed(ref Ref, versions uint64) string {
	if versions == 0 {
		return "an error that names it"
	}
	var names []string
	for v := range 64 {
		if versions&(1<<v) != 0 {
			names = append(names, version(fmt.Sprintf("b%d", ref.Key+1), v))
		}
	}
	return "the bytes of " + strings.Join(names, " or ")
}

// name is how a violation calls a block.
func (j *Judge) name(ref Ref, rank int) string {
	s := fmt.Sprintf("b%d", ref.Key+1)
	if ref.Tail {
		s = "the partial block"
	}
	if len(j.shape.Groups) > 1 {
		s += fmt.Sprintf(" of group %d", ref.Group)
	}
	if j.shape.Ranks > 1 {
		s += fmt.Sprintf(" on rank %d", rank)
	}
	return s
}

// version marks later bytes of a block.
func version(name string, v int) string {
	first, rest, _ := strings.Cut(name, " ")
	if rest != "" {
		rest = " " + rest
	}
	return first + strings.Repeat("'", v) + rest
}
