package model

import (
	"fmt"
	"slices"
)

// BlockTokens is the tokens of a block in every history.
const BlockTokens = 4

// match judges the answers of a Match.
func (j *Judge) match(c *Call, res *Result, d *during) []*Violation {
	if res.Err != nil && res.Ended {
		return nil
	}
	if res.Err == nil && len(res.Answers) != len(c.Queries) {
		return []*Violation{{Rule: "SCHED-01", Text: fmt.Sprintf("%d answers to %d queries", len(res.Answers), len(c.Queries)), Allowed: "one for each"}}
	}
	var found []*Violation
	for i := range c.Queries {
		tokens := 0
		if res.Err == nil {
			tokens = res.Answers[i]
		}
		if v := j.answer(&c.Queries[i], tokens, res.Ended, d); v != nil {
			if res.Err != nil {
				v.Text += fmt.Sprintf(" (%v)", res.Err)
			}
			v.Text = question(c, i) + v.Text
			found = append(found, v)
		}
	}
	tooFew := func(v *Violation) bool { return v.Short }
	if !slices.ContainsFunc(found, tooFew) || !slices.ContainsFunc(found, func(v *Violation) bool { return !tooFew(v) }) {
		return found // whoever mixes answers up offers too little here and too much there
	}
	if j.swapped(c, res, d) {
		found = append(found, &Violation{Rule: "SCHED-01", Text: "a Match gives right answers in a wrong order", Allowed: "the order of the queries"})
	}
	return found
}

func question(c *Call, i int) string {
	if len(c.Queries) == 1 {
		return ""
	}
	return fmt.Sprintf("query %d of %d: ", i+1, len(c.Queries))
}

// swapped reports whether each answer is right for another query.
func (j *Judge) swapped(c *Call, res *Result, d *during) bool {
	if res.Err != nil {
		return false
	}
	left := slices.Clone(res.Answers)
	for i := range c.Queries {
		n := slices.IndexFunc(left, func(tokens int) bool { return j.answer(&c.Queries[i], tokens, false, d) == nil })
		if n < 0 {
			return false
		}
		left = slices.Delete(left, n, n+1)
	}
	return true
}

// answer judges what a Match offers for one query.
func (j *Judge) answer(q *Query, tokens int, ended bool, d *during) *Violation {
	most := len(q.Keys) - q.Computed
	if tokens < 0 || tokens%BlockTokens != 0 || tokens > most*BlockTokens {
		return &Violation{
			Rule: "SCHED-04", Text: fmt.Sprintf("a Match offers %d tokens beyond the first %d of %d", tokens, q.Computed*BlockTokens, len(q.Keys)*BlockTokens),
			Allowed: "whole blocks of the prompt",
		}
	}
	offer := q.Keys[q.Computed : q.Computed+tokens/BlockTokens]
	maybe := func(p place) bool { return j.versions(p, d) != 0 }
	if v := j.tooMuch(offer, maybe); v != nil {
		v.Text = fmt.Sprintf("a Match offers %s, %s", count(len(offer), "block"), v.Text)
		v.Allowed = fmt.Sprintf("%d at most", j.longest(q, maybe))
		return v
	}
	least := j.longest(q, func(p place) bool { return j.sure(p, d) })
	if len(offer) < least && !ended {
		gone := j.at(j.missing(q.Keys[q.Computed:q.Computed+least], len(offer)))
		return &Violation{Rule: j.shortRule(gone), Short: true, Kind: lost, Text: fmt.Sprintf("a Match offers %d of %s that are stored", len(offer), count(least, "block")), Allowed: fmt.Sprintf("%d or more", least)}
	}
	return nil
}

// shortRule is the rule that a Match breaks that does not find a block.
func (j *Judge) shortRule(s *shard) string {
	switch {
	case j.bounded != nil:
		return "OFF-05"
	case s.life != "":
		return s.life
	case s.seen:
		return "STORE-01"
	}
	return "WORK-05"
}

// missing is the place after which an offer ends too early: that with the longest past.
func (j *Judge) missing(keys []Key, from int) place {
	best := place{key: keys[from]}
	for g := range j.shape.Groups {
		for rank := range j.shape.Ranks {
			if p := (place{keys[from], g, rank}); j.at(p).life != "" || j.at(p).seen {
				best = p
			}
		}
	}
	return best
}

// longest is how many blocks of a prompt can be offered if has says what is there: all groups can go on from there.
func (j *Judge) longest(q *Query, has func(place) bool) int {
	keys := q.Keys[q.Computed:]
	n := 0
	for n < len(keys) && j.all(keys[n], has) {
		n++
	}
	for n > 0 && j.trailing(keys[:n], has) != nil {
		n--
	}
	return n
}

// all reports whether all groups of policy all have a block on all ranks.
func (j *Judge) all(k Key, has func(place) bool) bool {
	for g := range j.shape.Groups {
		if j.shape.Groups[g].Trailing == 0 && !j.onRanks(k, g, has) {
			return false
		}
	}
	return true
}

func (j *Judge) onRanks(k Key, group int, has func(place) bool) bool {
	for rank := range j.shape.Ranks {
		if !has(place{k, group, rank}) {
			return false
		}
	}
	return true
}

// trailing is a block that a trailing group needs for an offer and does not have.
func (j *Judge) trailing(offer []Key, has func(place) bool) *place {
	for g, group := range j.shape.Groups {
		if group.Trailing == 0 {
			continue
		}
		for _, k := range offer[max(0, len(offer)-group.Trailing):] {
			if !j.onRanks(k, g, has) {
				return &place{key: k, group: g}
			}
		}
	}
	return nil
}

// tooMuch says why an offer cannot be kept; nil if it can.
func (j *Judge) tooMuch(offer []Key, maybe func(place) bool) *Violation {
	for n, k := range offer {
		if j.all(k, maybe) {
			continue
		}
		return j.absent(k, offer[n+1:], maybe)
	}
	if p := j.trailing(offer, maybe); p != nil {
		return &Violation{Rule: "GROUP-04", Text: fmt.Sprintf("but group %d, which needs the last %d, lacks b%d", p.group, j.shape.Groups[p.group].Trailing, p.key+1)}
	}
	return nil
}

// absent says which rule an offer of a block breaks that is not there.
func (j *Judge) absent(k Key, after []Key, maybe func(place) bool) *Violation {
	some, groups := false, 0
	var past shard // what happened to any part of the block
	for g := range j.shape.Groups {
		for rank := range j.shape.Ranks {
			p := place{k, g, rank}
			s := j.at(p)
			some = some || maybe(p)
			past.cleared, past.ever, past.expired = past.cleared || s.cleared, past.ever || s.ever, past.expired || s.expired
		}
		if j.onRanks(k, g, maybe) {
			groups++
		}
	}
	if !some {
		if v := past.gone(k); v != nil {
			return v
		}
	}
	switch {
	case groups > 0:
		return &Violation{Rule: "GROUP-03", Text: fmt.Sprintf("but b%d is not stored in every group", k+1)}
	case some:
		return &Violation{Rule: "STORE-03", Text: fmt.Sprintf("but not every rank has stored b%d", k+1)}
	case slices.ContainsFunc(after, func(k Key) bool { return j.all(k, maybe) }):
		return &Violation{Rule: "STORE-02", Text: fmt.Sprintf("but b%d is absent, and what is behind it does not count", k+1)}
	case past.ever:
		return &Violation{Rule: "WORK-08", Text: fmt.Sprintf("but b%d is not whole", k+1)}
	}
	return &Violation{Rule: "KEY-06", Text: fmt.Sprintf("but nobody has saved b%d", k+1)}
}

// gone says why a block cannot be there any more; nil if nothing has taken it.
func (s *shard) gone(k Key) *Violation {
	switch {
	case s.expired:
		return &Violation{Rule: "OFF-10", Text: fmt.Sprintf("but the time of b%d is over", k+1)}
	case s.cleared:
		return &Violation{Rule: "RESET-01", Text: fmt.Sprintf("but b%d was saved before a Reset", k+1)}
	}
	return nil
}
