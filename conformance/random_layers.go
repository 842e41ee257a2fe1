package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvport/kvport/conformance/internal/model"
	"github.com/kvport/kvport/connector"
)

func randomLayers(r *rig) {
	groups := r.info.Groups
	r.playSteps(&stepping{
		id: "random-layers", rule: "LAYER-01", needs: connector.CanLayers, tour: 4, allowed: allowedOfLayers,
		generate: func(seed uint64, n int) []step { return generateLayers(seed, n, groups) },
		open: func(r *rig, stage *stepStage, now func(string)) game {
			return &layerGame{rig: r, stage: stage, looked: time.Now(), now: now, saves: map[int]*layerSave{}, stored: map[connector.BlockKey]bool{}, unsure: map[connector.BlockKey]bool{}}
		},
	})
}

// allowedOfLayers is what would have been right where a history broke a rule.
func allowedOfLayers(rule string) string {
	switch rule {
	case "LAYER-01":
		return "what the layers held when they were final"
	case "LAYER-02":
		return "blocks that match when the last layer of all ranks is stored, and not before"
	case "LAYER-03":
		return "an error, and no block that nobody else has saved"
	case "LAYER-04":
		return "an error, soon"
	case "STORE-05":
		return "the blocks that were there before"
	}
	return "saves that go on whatever others do, and end with their own last layer"
}

// layerDoes is what a step of a history of layers does.
type layerDoes uint8

const (
	layerOpens   layerDoes = iota // an engine opens, with caches of that shape
	layerBegins                   // the engine begins to compute and to save blocks
	layerGoesOn                   // some more layers of a save are final, but not the last
	layerEnds                     // the rest of some saves is final, which end at the same time
	layerGivesUp                  // the engine gives up a save
	layerCancels                  // the context of a save ends
	layerSaves                    // whole blocks are saved beside, which another save may have too
	layerLoads                    // the blocks of a save are asked for, and what there is of them is loaded
	layerCloses                   // the engine gives up all saves, and where others find what it has saved it closes and another opens
)

// layerStep is one step. Saves have numbers from 1 on.
type layerStep struct {
	does    layerDoes
	shape   model.Shape
	saves   []int
	blocks  int
	like    int // layerBegins, layerSaves: a save whose blocks come first; 0: none
	replace bool
	layers  int
}

func (s *layerStep) left() bool { return false }

func (s *layerStep) words() string {
	what := numbered("s", s.saves)
	behind := ""
	if s.like > 0 {
		behind = fmt.Sprintf(" behind those of s%d", s.like)
	}
	switch s.does {
	case layerOpens:
		return fmt.Sprintf("an engine opens, with %s, and layers in groups of %v", counted(s.shape.Ranks, "rank"), segmentsOf(&s.shape))
	case layerBegins:
		if s.replace {
			behind += ", with Replace"
		}
		return fmt.Sprintf("save %s begins, of %s%s", what, counted(s.blocks, "block"), behind)
	case layerGoesOn:
		return fmt.Sprintf("at once %s more of %s become final", counted(s.layers, "layer"), what)
	case layerEnds:
		return fmt.Sprintf("all layers of %s are final", what)
	case layerGivesUp:
		return fmt.Sprintf("the engine gives up %s", what)
	case layerCancels:
		return fmt.Sprintf("%s is cancelled", what)
	case layerSaves:
		return fmt.Sprintf("%s saved whole%s", counted(s.blocks, "block"), behind)
	case layerLoads:
		return fmt.Sprintf("the blocks of %s are asked for and loaded", what)
	case layerCloses:
		return "the engine gives up all saves, and where others find what it has saved it closes and another opens"
	}
	return ""
}

func segmentsOf(s *model.Shape) (out []int) {
	for _, g := range s.Groups {
		out = append(out, g.Segments)
	}
	return out
}

// The slots of a history's caches: the first are saved, the others are loaded into.
const (
	layerSources = 48
	layerSlots   = layerSources + 16
	mostRunning  = 6 // saves at a time
	// A host that copies has room for a third of a cache. Saves that wait for their layers keep their room, which real engines compute in order.
	layerCache = 3 * layerSlots
)

// layerMaker makes one history.
type layerMaker struct {
	*rand.Rand
	steps        []step
	all, running []int
}

// generateLayers makes history n of a seed.
func generateLayers(seed uint64, n int, groups bool) []step {
	m := &layerMaker{Rand: rand.New(rand.NewPCG(seed, uint64(n)+1))} //nolint:gosec // n is not negative
	shape := model.Shape{Ranks: 1 + m.IntN(2), Slots: layerCache, Gaps: m.IntN(4) > 0}
	for range 1 + m.IntN(2) {
		if groups || len(shape.Groups) == 0 {
			shape.Groups = append(shape.Groups, model.Group{Segments: 2 + m.IntN(6), Bytes: int64(512 + m.IntN(4<<10))})
		}
	}
	m.steps = append(m.steps, &layerStep{does: layerOpens, shape: shape})
	m.begins()
	if n%4 == 1 { // a crowd
		for range 3 {
			m.begins()
		}
	}
	for range 14 + m.IntN(12) {
		m.next(n)
	}
	return m.steps
}

// next adds a step.
func (m *layerMaker) next(n int) {
	roll := m.IntN(20)
	switch {
	case roll < 6 && len(m.running) < mostRunning || len(m.running) == 0:
		m.begins()
	case roll < 11:
		m.add(&layerStep{does: layerGoesOn, layers: 1 + m.IntN(4), saves: m.some(1)})
	case roll < 14:
		m.end(&layerStep{does: layerEnds, saves: m.some(1 + m.IntN(2))})
	case roll < 15:
		m.end(&layerStep{does: layerGivesUp, saves: m.some(1)})
	case roll < 16:
		m.end(&layerStep{does: layerCancels, saves: m.some(1)})
	case roll < 17:
		m.add(&layerStep{does: layerSaves, blocks: 1 + m.IntN(2), like: m.like()})
	case roll == 19 && n%4 == 3 && m.IntN(2) == 0:
		m.running = nil
		m.add(&layerStep{does: layerCloses})
	default:
		m.add(&layerStep{does: layerLoads, saves: []int{m.all[m.IntN(len(m.all))]}})
	}
}

func (m *layerMaker) add(s *layerStep) { m.steps = append(m.steps, s) }

// end adds the end of saves.
func (m *layerMaker) end(s *layerStep) {
	m.running = slices.DeleteFunc(m.running, func(n int) bool { return slices.Contains(s.saves, n) })
	m.add(s)
}

// some are saves that are under way, up to n.
func (m *layerMaker) some(n int) (out []int) {
	for _, i := range m.Perm(len(m.running))[:min(n, len(m.running))] {
		out = append(out, m.running[i])
	}
	return out
}

// like is an earlier save, or none.
func (m *layerMaker) like() int {
	if len(m.all) == 0 || m.IntN(2) == 0 {
		return 0
	}
	return m.all[m.IntN(len(m.all))]
}

func (m *layerMaker) begins() {
	s := &layerStep{does: layerBegins, saves: []int{len(m.all) + 1}, blocks: 1 + m.IntN(2), like: m.like(), replace: m.IntN(8) == 0}
	m.all, m.running = append(m.all, s.saves[0]), append(m.running, s.saves[0])
	m.add(s)
}

// layerSave is a save of a history.
type layerSave struct {
	keys    []connector.BlockKey
	blocks  []connector.Block // where they are computed
	calls   []*layering       // of each rank, while it is under way
	replace bool
	beside  bool // while it was under way another was broken off that had Replace and some of its blocks
}

// layerGame is one history as it is played, and what must be stored by then.
type layerGame struct {
	*rig
	stage          *stepStage
	looked         time.Time // when no save had ended that has nothing to end for
	now            func(rule string)
	engine         *engine
	saves          map[int]*layerSave
	next           int  // slot
	keyed          bool // blocks have been found by their keys; until then it may be that only tickets lead to them
	back           bool // blocks of some save have come back
	stored, unsure map[connector.BlockKey]bool
}

func (g *layerGame) do(next step) {
	s, ok := next.(*layerStep)
	if !ok {
		return
	}
	if s.does == layerOpens && g.engine == nil {
		layout := layoutOf(&s.shape)
		g.now("OPEN-01")
		g.engine = g.rig.engine(setup{world: s.shape.Ranks, layout: &layout})
	}
	if g.engine == nil {
		return // of a history that was shortened
	}
	known := slices.DeleteFunc(slices.Clone(s.saves), func(n int) bool { return g.saves[n] == nil })
	switch {
	case s.does == layerBegins:
		g.begins(s)
	case s.does == layerSaves:
		g.whole(s)
	case s.does == layerCloses:
		g.closes()
	case len(known) == 0:
	case s.does == layerLoads:
		g.now("LAYER-02")
		g.looks(g.saves[known[0]].keys)
	case s.does == layerGoesOn:
		g.goesOn(g.saves[known[0]], s.layers)
	case s.does == layerEnds:
		g.ends(known)
	case s.does == layerGivesUp || s.does == layerCancels:
		g.breaksOff(g.saves[known[0]], s.does == layerCancels)
	}
	g.quiet()
}

// prompt is keys of which the first are those of another save, and slots for them in which nothing is computed.
func (g *layerGame) prompt(s *layerStep) (keys []connector.BlockKey, bs []connector.Block, fits bool) {
	if like := g.saves[s.like]; like != nil {
		keys = slices.Clone(like.keys[:min(2, len(like.keys))])
	}
	keys = append(keys, g.engine.keys(s.blocks)...)
	taken := map[connector.BlockID]bool{}
	for _, other := range g.saves {
		if other.calls != nil {
			for _, b := range other.blocks {
				taken[b.ID] = true
			}
		}
	}
	var ids []connector.BlockID
	for range layerSources {
		id := connector.BlockID(g.next % layerSources)
		g.next++
		if !taken[id] && len(ids) < len(keys) {
			ids = append(ids, id)
		}
		if len(ids) == len(keys) {
			return keys, g.places(keys, ids), true
		}
	}
	return nil, nil, false
}

// places are blocks of all groups.
func (g *layerGame) places(keys []connector.BlockKey, ids []connector.BlockID) (bs []connector.Block) {
	for n := range g.engine.env.Layout.Groups {
		for i, k := range keys {
			bs = append(bs, connector.Block{Key: k, ID: ids[i], Group: uint16(n)}) //nolint:gosec // few groups
		}
	}
	return bs
}

func (g *layerGame) begins(s *layerStep) {
	keys, bs, fits := g.prompt(s)
	if !fits {
		return
	}
	save := &layerSave{keys: keys, blocks: bs, replace: s.replace}
	for rank := range g.engine.workers {
		save.calls = append(save.calls, g.engine.layerBlocksAs(rank, s.replace, bs...))
	}
	g.saves[s.saves[0]] = save
}

// goesOn announces layers, but not the last. Whoever reads too early has a moment for it.
func (g *layerGame) goesOn(s *layerSave, layers int) {
	const moment = 2 * time.Millisecond
	for _, l := range s.calls {
		if n := min(l.done+layers, l.layers()-1); n > l.done {
			l.compute(n)
		}
	}
	g.wait(moment)
}

// quiet checks that no save has ended that has nothing to end for.
func (g *layerGame) quiet() {
	for _, s := range g.saves {
		for rank, l := range s.calls {
			select {
			case err := <-l.ended:
				if errors.Is(err, connector.ErrBusy) {
					g.inconclusive("the connector was too busy to save")
				}
				g.now("LAYER-05")
				if err == nil {
					g.now("LAYER-02")
				}
				g.overdue(g.looked, "a save on rank %d has ended with %d of its %d layers: error %v", rank, l.done, l.layers(), err)
				return
			default:
			}
		}
	}
	g.looked = time.Now()
}

// ends announces the rest of saves, and expects that they end well.
func (g *layerGame) ends(numbers []int) {
	began, limit := time.Now(), patient // no rule says how soon a save ends that may go on
	if g.stage.shortening() {
		limit = 2 * soon
	}
	var calls []*layering
	for _, n := range numbers {
		calls = append(calls, g.saves[n].calls...)
	}
	g.now("LAYER-05")
	for _, l := range calls {
		l.compute(l.layers())
	}
	for _, l := range calls {
		if err := g.result(l, limit); err != nil {
			g.overdue(began, "a save whose layers are all final failed: %v", err)
			return
		}
	}
	for _, n := range numbers {
		s := g.saves[n]
		if s.calls == nil {
			continue
		}
		s.calls = nil
		for _, k := range s.keys {
			g.stored[k] = true
			if !s.beside {
				delete(g.unsure, k)
			}
		}
		g.now("LAYER-01")
		g.cameBack(s)
	}
}

// went is must for a call that began at a moment. A busy connector, or a busy machine, says nothing.
func (g *layerGame) went(began time.Time, err error, what string) {
	if errors.Is(err, connector.ErrBusy) {
		g.inconclusive("%s: %v", what, err)
	}
	if err != nil {
		g.overdue(began, "%s: %v", what, err)
		g.FailNow()
	}
}

// result waits for the end of a call.
func (g *layerGame) result(l *layering, limit time.Duration) error {
	began := time.Now()
	err, came := awaited(g.rig, l.ended, limit)
	if !came {
		g.overdue(began, "a save has not ended %v after there was nothing to wait for", limit)
		g.FailNow()
	}
	if errors.Is(err, connector.ErrBusy) {
		g.inconclusive("the connector was too busy to save")
	}
	return err
}

// byKeys reports whether what is stored must be found by its keys.
func (g *layerGame) byKeys() bool { return g.keyed || g.info.Capabilities&connector.CanHold == 0 }

// cameBack checks that the blocks of a save are there and right.
func (g *layerGame) cameBack(s *layerSave) {
	e := g.engine
	if !g.byKeys() && e.match(s.keys...) == 0 {
		if slices.ContainsFunc(s.keys, g.doubtful) {
			return // another save writes them again
		}
		e.comesByTicket(s.blocks, g.places(s.keys, g.landing(len(s.keys))))
		g.back = true
		return
	}
	g.keyed = true
	e.wipe(0x6B, s.blocks...) // they are given to other requests
	g.looks(s.keys)
}

// landing are slots to load into.
func (g *layerGame) landing(n int) (ids []connector.BlockID) {
	for _, i := range g.rand.Perm(layerSlots - layerSources)[:n] {
		ids = append(ids, connector.BlockID(layerSources+i))
	}
	return ids
}

// looks asks for blocks and loads what there is.
func (g *layerGame) looks(keys []connector.BlockKey) {
	e := g.engine
	least, most := 0, 0
	for g.byKeys() && least < len(keys) && g.stored[keys[least]] && !g.doubtful(keys[least]) {
		least++
	}
	for most < len(keys) && (g.stored[keys[most]] || g.unsure[keys[most]]) {
		most++
	}
	began := time.Now()
	n := e.match(keys...)
	switch {
	case n > most:
		e.Errorf("%d blocks are offered, want %d", n, most)
		return
	case n < least: // it may be that the answer came too late
		e.overdue(began, "%d blocks are offered, want %d", n, least)
		return
	case n == 0:
		return
	}
	to := g.places(keys[:n], g.landing(n))
	e.wipe(0, to...)
	began = time.Now()
	err := e.load(to...)
	if err != nil && slices.ContainsFunc(keys[:n], g.doubtful) {
		return // it has gone since it was offered
	}
	g.went(began, err, "load of what was saved layer by layer")
	e.holds(to...)
	g.keyed, g.back = true, true
}

// doubtful reports whether a block may be gone: the engine has called it damaged with Replace, in a save that goes on or was broken off.
func (g *layerGame) doubtful(k connector.BlockKey) bool {
	for _, s := range g.saves {
		if s.replace && s.calls != nil && slices.Contains(s.keys, k) {
			return true
		}
	}
	return g.unsure[k]
}

// breaksOff ends a save before its last layer.
func (g *layerGame) breaksOff(s *layerSave, cancelled bool) {
	g.now("LAYER-03")
	if cancelled {
		g.now("LAYER-04")
	}
	for _, l := range s.calls {
		if cancelled {
			l.stop() // its layers may still come
		} else {
			l.count.GiveUp()
		}
	}
	for _, l := range s.calls {
		if g.result(l, soon) == nil {
			g.Errorf("a save ended well of which %d of %d layers were final", l.done, l.layers())
			return
		}
	}
	if s.calls == nil {
		return
	}
	s.calls = nil
	for _, other := range g.saves {
		other.beside = other.beside || s.replace && slices.ContainsFunc(s.keys, func(k connector.BlockKey) bool { return slices.Contains(other.keys, k) })
	}
	for _, k := range s.keys {
		g.unsure[k] = g.unsure[k] || s.replace && g.stored[k]
		if g.stored[k] {
			g.now("STORE-05")
		}
	}
	g.looks(s.keys)
}

// whole saves blocks as Save does.
func (g *layerGame) whole(s *layerStep) {
	keys, bs, fits := g.prompt(s)
	if !fits {
		return
	}
	g.now("LAYER-05")
	e := g.engine
	e.fill(bs...)
	t := transfer(bs)
	began := time.Now()
	g.went(began, e.returns("Save", patient, func(ctx context.Context) error { return e.saveOnly(ctx, t) }), "save of whole blocks beside saves of layers")
	for _, k := range keys {
		g.stored[k] = true
		delete(g.unsure, k)
	}
	g.cameBack(&layerSave{keys: keys, blocks: bs})
}

// closes gives up all saves, closes the engine and opens another. What one engine keeps may be gone with it.
func (g *layerGame) closes() {
	for _, n := range slices.Sorted(maps.Keys(g.saves)) {
		if s := g.saves[n]; s.calls != nil {
			g.breaksOff(s, false)
		}
	}
	if g.info.Scope == connector.ScopeEngine || !g.byKeys() {
		return // nobody else finds what it keeps
	}
	g.now("LIFE-04")
	old := g.engine
	old.closeAll()
	g.engine = old.peer()
}

// settle looks for everything, when all saves are over.
func (g *layerGame) settle() {
	for _, n := range slices.Sorted(maps.Keys(g.saves)) {
		s := g.saves[n]
		if s.calls != nil {
			g.breaksOff(s, false)
		}
		g.now("LAYER-02")
		g.looks(s.keys)
	}
}

// met implements game.
func (g *layerGame) met() bool { return g.back }
