package model

import "time"

// note remembers what a step did.
func (j *Judge) note(step Step, o *Outcome, d *during) {
	if j.bounded != nil {
		j.bounded.note(step, o, &j.shape)
	}
	if d.reset {
		j.reset(d)
	}
	for p, versions := range d.saves {
		j.noteSave(p, versions, d)
	}
	for i := range step {
		c, res := &step[i], &o.Results[i]
		switch c.Kind {
		case Wait:
			j.expire(c.Cancel)
		case Restart, Reopen:
			j.happened("STORE-01")
		case Kill:
			j.happened("FAULT-01")
		case Match:
			if res.Err == nil {
				j.noteMatch(c, res, d)
			}
		case Load:
			j.noteLoad(c, res, d)
		case Save, Reset:
		}
	}
}

// reset forgets what was there before a Reset. Unless it has emptied, nothing is known.
func (j *Judge) reset(d *during) {
	for _, s := range j.shards {
		s.sure = false
		if d.emptied {
			*s = shard{ever: s.ever, erased: s.erased | s.versions, cleared: s.versions != 0 || s.cleared}
		}
	}
}

// expire ends the time of what was saved long ago.
func (j *Judge) expire(waited time.Duration) {
	if j.bounded == nil || j.bounded.Time == 0 {
		return
	}
	for _, s := range j.shards {
		if s.age += waited; s.age < j.bounded.Time+waitSlack {
			continue
		}
		*s = shard{ever: s.ever, erased: s.erased | s.versions, cleared: s.cleared, expired: s.versions != 0 || s.expired}
	}
}

func (j *Judge) noteSave(p place, versions uint64, d *during) {
	s := j.at(p)
	was, acked := s.sure, d.ok[p] != 0
	s.age = 0 // a save of what is stored may begin its time again
	switch {
	case d.okR[p] != 0 && !d.reset:
		s.versions = versions
	default:
		s.versions |= versions
	}
	s.sure = !d.reset && !d.failedR[p] && (was || acked)
	s.ever = s.ever || acked
	s.torn = !acked && (s.torn || d.ok[p] != versions)
	if !was && s.sure {
		s.life, s.seen = "", false
	}
	if acked {
		s.cleared, s.expired = false, false
	}
}

// happened notes what has happened to a connector.
func (j *Judge) happened(rule string) {
	for _, s := range j.shards {
		if s.life != "FAULT-01" {
			s.life = rule
		}
	}
}

// noteMatch notes what was offered while nothing else was done to it: it stays.
func (j *Judge) noteMatch(c *Call, res *Result, d *during) {
	for i, q := range c.Queries {
		offer := q.Keys[q.Computed : q.Computed+res.Answers[i]/BlockTokens]
		for g, group := range j.shape.Groups {
			first := 0
			if group.Trailing > 0 {
				first = max(0, len(offer)-group.Trailing)
			}
			for _, k := range offer[first:] {
				for rank := range j.shape.Ranks {
					j.seen(place{k, g, rank}, d)
				}
			}
		}
	}
}

func (j *Judge) noteLoad(c *Call, res *Result, d *during) {
	for rank := range res.Ranks {
		m := &res.Ranks[rank]
		for n, ref := range c.Blocks(&j.shape) {
			if m.Called && !ref.Tail && !m.failed(n) {
				j.seen(place{ref.Key, ref.Group, rank}, d)
			}
		}
	}
}

// seen notes that a place was found.
func (j *Judge) seen(p place, d *during) {
	if d.reset || d.saves[p] != 0 {
		return
	}
	s := j.at(p)
	s.sure, s.seen = true, true
}
