package conformance

import (
	"context"
	"errors"

	"github.com/kvport/kvport/connector"
)

// arenaCase is a case of a connector that keeps blocks in memory of the host.
func arenaCase(id, rule, text string, body func(*rig)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{Power}, Arena: true, Run: rigged(0, false, func(r *rig) {
		if r.info.ArenaBytes == 0 && r.info.ArenaBlocks == 0 {
			r.undeclared("%s", notOffered+"an arena")
		}
		body(r)
	})}
}

func arenaCases() []Case {
	kill := arenaCase("arena-killed", "ARENA-02", "Killed after saves, 3 times: the next plugin finds the blocks in the arena.", arenaKilled)
	torn := arenaCase("arena-torn", "ARENA-03", "Killed during saves, 6 times: what is half written in the arena is not offered.", arenaTorn)
	for _, c := range []*Case{&kill, &torn} {
		c.Optional = true // a connector in this process cannot be killed
	}
	return []Case{
		arenaCase("arena-missing", "ARENA-01", "A side without its arena, or with half of it, is refused.", arenaMissing),
		arenaCase("arena-kept", "ARENA-02", "The next plugin of an engine finds the blocks in the arena, which is at another address now.", arenaKept),
		kill,
		torn,
		arenaCase("arena-damaged", "ARENA-03", "Bytes of the arena are flipped: each block is right, or fails, or has a digest that shows the damage.", arenaDamaged),
		arenaCase("arena-garbage", "ARENA-03", "The arena is full of random bytes: the sides open, and work.", arenaGarbage),
		arenaCase("arena-fresh", "ARENA-04", "The engine's next life has an empty arena, in which the connector looks for no earlier block.", arenaFresh),
	}
}

func arenaMissing(r *rig) {
	e := r.closed(setup{})
	whole := e.env.Arena
	for what, arena := range map[string][]byte{"no arena": nil, "half of its arena": whole[:len(whole)/2]} {
		env := e.env
		env.Arena = arena
		s, err := e.inst.Scheduler(r.Context(), env, r.config)
		e.refuses(what, "scheduler", s, err)
		w, err := e.inst.Worker(r.Context(), env, r.config)
		e.refuses(what, "worker", w, err)
	}
	e.openAll()
}

// refuses fails the case unless a side was refused because something does not fit.
func (e *engine) refuses(what, name string, side interface{ Close() error }, err error) {
	e.Helper()
	switch {
	case err == nil:
		e.Errorf("a %s side with %s opens", name, what)
		e.must(side.Close(), "close")
	case !errors.Is(err, connector.ErrIncompatible):
		e.Errorf("a %s side with %s: error %q does not wrap ErrIncompatible", name, what, err)
	}
}

func arenaKept(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(4)
	e.save(blocks(0, keys...)...)
	for range 2 {
		e.closeAll()
		e = e.again()
		r.equal(len(keys), e.match(keys...), "blocks offered by the next plugin")
		e.whole(keys, 8)
	}
	more := e.keys(3)
	e.save(blocks(4, more...)...)
	e.whole(more, 12)
	e.whole(keys, 8)
}

func arenaKilled(r *rig) {
	e := r.engine(setup{})
	var all []connector.BlockKey
	for range 3 {
		keys := e.keys(4)
		all = append(all, keys...)
		e.save(blocks(0, keys...)...)
		e.kill()
		e = e.again()
		for i := range len(all) / 4 {
			r.equal(4, e.match(all[4*i:4*i+4]...), "blocks of save %d offered after a kill", i+1)
			e.whole(all[4*i:4*i+4], 8)
		}
	}
}

func arenaTorn(r *rig) {
	const callers, each = 4, 4
	for range 6 {
		e := r.engine(setup{})
		e.process()
		sets := make([][]connector.BlockKey, callers)
		for i := range sets {
			sets[i] = e.keys(each)
			e.fill(blocks(each*i, sets[i]...)...)
		}
		worker, kv := e.workers[0], e.kv[0]
		e.killDuring(callers, func(ctx context.Context, i int) error {
			t := transfer(blocks(each*i, sets[i]...))
			t.Replace = true // so that it writes each time
			return worker.Save(ctx, &t, kv)
		})
		e = e.again()
		for _, keys := range sets {
			found := e.match(keys...)
			e.whole(keys[:min(found, each)], callers*each)
			e.save(blocks(0, keys...)...)
			r.equal(each, e.match(keys...), "blocks offered after they were saved again")
			e.whole(keys, callers*each)
		}
		e.closeAll()
	}
}

func arenaDamaged(r *rig) {
	for range 8 {
		e := r.engine(setup{})
		keys := e.keys(6)
		from := blocks(0, keys...)
		e.fill(from...)
		r.must(e.saveOnly(r.Context(), transfer(from)), "save")
		e.closeAll()
		var used []int
		for at, b := range e.inst.Arena {
			if b != 0 {
				used = append(used, at)
			}
		}
		for range min(len(used), 1+r.rand.IntN(40)) {
			e.inst.Arena[used[r.rand.IntN(len(used))]] ^= 1 << r.rand.IntN(8)
		}
		e = e.again()
		e.judged(keys[:min(e.match(keys...), len(keys))])
		e.mended(keys)
		e.closeAll()
	}
}

func arenaGarbage(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(4)
	from := blocks(0, keys...)
	e.fill(from...)
	r.must(e.saveOnly(r.Context(), transfer(from)), "save")
	e.closeAll()
	for at := range e.inst.Arena {
		e.inst.Arena[at] = byte(r.rand.Uint32())
	}
	e = e.again()
	e.judged(keys[:min(e.match(keys...), len(keys))])
	e.mended(keys)
}

func arenaFresh(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(4)
	e.save(blocks(0, keys...)...)
	e.whole(keys, 8)
	e.closeAll()
	n := e.life()
	found := n.match(keys...)
	n.whole(keys[:min(found, len(keys))], 8)
	n.save(blocks(0, keys...)...)
	r.equal(len(keys), n.match(keys...), "blocks offered after they were saved in the next life")
	n.whole(keys, 8)
}
