package conformance

import "slices"

// basicCases come first, in a run and in its summary: every other case opens sides, saves blocks, finds and loads them, so that none can be
// judged before these pass.
func basicCases() []Case {
	return []Case{
		storeCase("visible", "WORK-05", "What was saved is offered at once, even if it was absent before, and can be loaded.", visible),
	}
}

// isBasic reports whether the case of a result failed without which hardly another can be judged. A second engine that cannot open, and a
// Close without an answer, leave most of them as they are.
func isBasic(r Result) bool {
	return r.Status == Fail && r.required == "" && r.Rule != "OPEN-03" && r.Rule != "LIFE-04" && slices.ContainsFunc(basicCases(), func(c Case) bool { return c.ID == r.ID })
}

func visible(r *rig) {
	a := r.engine(setup{})
	b := a.peer()
	for range 5 {
		keys := a.keys(2)
		from, to := blocks(0, keys...), blocks(4, keys...)
		r.equal(0, a.match(keys...), "blocks offered before the save")
		r.equal(0, b.match(keys...), "blocks offered to another engine before the save")
		a.fill(from...)
		r.mustAs("WORK-01", a.saveOnly(r.Context(), transfer(from)), "save")
		r.equal(2, a.match(keys...), "blocks offered after the save")
		r.equal(2, b.match(keys...), "blocks offered to another engine after the save")
		b.wipe(0, to...)
		r.mustAs("WORK-01", b.load(to...), "load of what was saved")
	}
}
