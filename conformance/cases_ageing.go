package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// An index that is walked from end to end, a folder with everything in it, a list that is sorted at each save: such a connector passes
// with a hundred blocks and has next to no answers after a day. So one case stores many, and compares what calls take then with what
// the same calls took at the beginning.

const (
	aged      = 100_000          // blocks that are stored
	agedLeast = 20_000           // on a machine that is too slow for all of them
	ageBatch  = 1000             // blocks of a save
	ageAbsent = 200_000          // keys of none that are asked for
	ageAsking = 10 * time.Second // for them
	agePiece  = 64               // blocks of a call whose time counts
	ageTries  = 24               // of which the quickest counts: the others may have waited for a processor
	ageEnough = 3                // once they have taken ageTrying
	ageTrying = 2 * time.Second
	ageFactor = 6                    // times as long as at the beginning are allowed
	ageBeyond = 24                   // times as long are no matter of a busy machine
	ageFloor  = 2 * time.Millisecond // added to what is allowed: on so little nothing depends
	ageTime   = 30 * time.Second     // to store them all, or half of what the case has left
)

func ageingCases() []Case {
	c := storeCase("ageing", "WORK-11", "A hundred thousand blocks are stored: matches, loads and saves then take no longer than at the beginning, and none is taken for another.", ageing)
	c.Profiles = []Profile{Ageing}
	return []Case{c}
}

// pace is what the quickest call of each kind took.
type pace [paces]time.Duration

// The kinds of calls.
const (
	ageOfMatch = iota
	ageOfLoad
	ageOfSave
	paces
)

func ageing(r *rig) {
	layout := interleaved(2 * ageBatch)
	e := r.engine(setup{layout: &layout})
	first := e.keys(ageBatch)
	young := e.beginning(first)
	began := time.Now()
	keys, stored, err := e.age(ageEnd(r.Context(), began))
	if errors.Is(err, context.DeadlineExceeded) {
		r.overdue(began, "with %d blocks stored, a save of %d more does not return: %v", stored, ageBatch, err)
		return
	}
	if err != nil {
		r.Skipf("it does not take %d blocks: %v", aged, err)
	}
	old, ok := e.pace(keys)
	if !ok {
		r.Errorf("%d blocks are stored, and the last of them cannot be loaded", stored)
		return
	}
	began = time.Now()
	if len(old.slower(&young)) > 0 { // or is it the machine? Then a connector that has just begun is slow, too.
		next := r.stage(1, end(&layout))
		defer func() { _ = next.shut() }()
		fresh := next.engine(setup{layout: &layout})
		now := fresh.beginning(fresh.keys(ageBatch))
		again, _ := e.pace(keys)
		for k := range paces {
			young[k], old[k] = max(young[k], now[k]), min(old[k], again[k])
		}
	}
	slow := old.slower(&young)
	if len(slow) == 0 && stored < agedLeast { // those that become slow with fewer have been found
		r.inconclusive("the time was enough for %d blocks", stored)
	}
	for _, k := range slow {
		said := fmt.Sprintf("%s of %d blocks takes %v with %d blocks stored, and %v with %d: allowed are %d times as long, and %v",
			[paces]string{"a match", "a load", "a save"}[k], agePiece, old[k], stored, young[k], ageBatch, ageFactor, ageFloor)
		if old[k] > ageBeyond*young[k]+ageFloor {
			r.Errorf("%s", said)
			continue
		}
		r.overdue(began, "%s", said)
	}
	if len(slow) == 0 {
		e.keptApart(first, stored)
	}
}

// ageEnd is until when blocks are stored: what the case has left is also for the calls whose time counts.
func ageEnd(ctx context.Context, began time.Time) time.Time {
	end := began.Add(ageTime)
	if by, ok := ctx.Deadline(); ok && by.Sub(began)/2 < ageTime {
		end = began.Add(by.Sub(began) / 2)
	}
	return end
}

// slower are the kinds of calls that take longer than is allowed beside those of another pace.
func (p *pace) slower(young *pace) (kinds []int) {
	for k := range paces {
		if p[k] > ageFactor*young[k]+ageFloor {
			kinds = append(kinds, k)
		}
	}
	return kinds
}

// beginning is the pace of a connector that has stored nothing yet.
func (e *engine) beginning(keys []connector.BlockKey) pace {
	e.Helper()
	e.save(blocks(0, keys...)...)
	p, ok := e.pace(keys)
	if !ok {
		e.Skipf("it does not keep the last %d of %d blocks", agePiece, ageBatch)
	}
	return p
}

// keptApart checks what many blocks bring to light: that what is offered of the first ones is right, and that no other key brings a block. Keys
// are chosen by chance: with 100,000 stored and 200,000 asked for, two that share 32 bits of a sum are there in 99 of 100 runs. It takes what
// time there is, and what does not come in it is no fault.
func (e *engine) keptApart(first []connector.BlockKey, stored int) {
	e.Helper()
	ctx, cancel := context.WithTimeout(e.Context(), min(ageAsking, e.left()/2))
	defer cancel()
	to := blocks(0, first[:min(e.offeredNow(ctx, query(first)), len(first))]...) // it may have given up some
	load := transfer(to)
	e.wipe(0, to...)
	if len(to) > 0 && e.workers[0].Load(ctx, &load, e.kv[0]) == nil {
		for _, b := range to {
			if d := e.differs(b); d != "" {
				e.blame("WORK-01")
				e.Errorf("of the %d blocks that were saved first, one has changed when %d are stored: %s", len(to), stored, d)
				return
			}
		}
	}
	batch := ageBatch
	for n := 0; n < ageAbsent; n += batch {
		began, keys := time.Now(), e.keys(batch)
		found, ok := e.finds(ctx, keys)
		if !ok {
			return
		}
		if slices.ContainsFunc(found, func(k connector.BlockKey) bool { return e.comes(ctx, k) }) {
			e.blame("KEY-06")
			e.Errorf("a block that nobody saved is offered, and its load succeeds: with %d blocks stored, one of %d others", stored, n+batch)
			return
		}
		if time.Since(began) > time.Second {
			batch = ageBatch / 10
		}
	}
}

// left is what the case has of its time.
func (e *engine) left() time.Duration {
	end, bounded := e.Context().Deadline()
	if !bounded {
		return ageAsking
	}
	return time.Until(end)
}

// offeredNow is how many blocks one Match offers. What cannot be answered yet is not offered.
func (e *engine) offeredNow(ctx context.Context, q connector.Query) int {
	ms, err := e.scheduler.Match(ctx, []connector.Query{q})
	if err != nil || len(ms) != 1 || ms[0].Later {
		return 0
	}
	return ms[0].Tokens / blockTokens
}

// finds probes each key, and gives up to 16 of those that are offered: an index may promise some too many. It is not ok if there is no answer.
func (e *engine) finds(ctx context.Context, keys []connector.BlockKey) (found []connector.BlockKey, ok bool) {
	qs := make([]connector.Query, len(keys))
	for n, k := range keys {
		qs[n] = query([]connector.BlockKey{k})
		qs[n].Request = "" // a probe, which leaves no trace
	}
	ms, err := e.scheduler.Match(ctx, qs)
	if errors.Is(err, connector.ErrBusy) {
		return nil, ctx.Err() == nil
	}
	if err != nil || len(ms) != len(qs) || ctx.Err() != nil {
		return nil, false
	}
	for n, m := range ms {
		if m.Tokens > 0 && !m.Later && len(found) < 16 {
			found = append(found, keys[n])
		}
	}
	return found, true
}

// comes reports whether a load of a block succeeds. An index may promise too much, as long as the load says that nothing is there.
func (e *engine) comes(ctx context.Context, key connector.BlockKey) bool {
	load := transfer(blocks(0, key))
	return e.workers[0].Load(ctx, &load, e.kv[0]) == nil
}

// age stores blocks, as many as there is time for; keys are the last of them.
func (e *engine) age(end time.Time) (keys []connector.BlockKey, stored int, err error) {
	for stored = ageBatch; stored < aged && time.Now().Before(end) && e.Context().Err() == nil; stored += ageBatch {
		keys = e.keys(ageBatch)
		bs := blocks(0, keys...)
		e.fill(bs...)
		if err := e.saveOnly(e.Context(), transfer(bs)); err != nil {
			return nil, stored, err
		}
	}
	return keys, stored, nil
}

// ageAgain goes on for as often as calls are measured.
func ageAgain(yield func() bool) {
	for n, first := 0, time.Now(); n < ageEnough || n < ageTries && time.Since(first) < ageTrying; n++ {
		if !yield() {
			return
		}
	}
}

// pace measures calls with the last of some blocks; false: they cannot be loaded.
func (e *engine) pace(keys []connector.BlockKey) (p pace, ok bool) {
	for k := range paces {
		p[k] = time.Hour
	}
	note := func(kind int, began time.Time) { p[kind] = min(p[kind], time.Since(began)) }
	keys = keys[len(keys)-agePiece:]
	to := blocks(ageBatch, keys...)
	for range ageAgain {
		began := time.Now()
		if e.match(keys...) < agePiece {
			return p, false
		}
		note(ageOfMatch, began)
		began = time.Now()
		if e.load(to...) != nil {
			return p, false
		}
		note(ageOfLoad, began)
	}
	e.holds(to...)
	for range ageAgain {
		bs := blocks(ageBatch, e.keys(agePiece)...)
		e.fill(bs...)
		began := time.Now()
		e.must(e.saveOnly(e.Context(), transfer(bs)), "save")
		note(ageOfSave, began)
	}
	return p, true
}
