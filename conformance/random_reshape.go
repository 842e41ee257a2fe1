package conformance

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

func randomReshape(r *rig) {
	r.playSteps(&stepping{
		id: "random-reshape", rule: "RESHAPE-03", needs: connector.CanHold | connector.CanReshape, tour: 3, generate: generateCuts, allowed: allowedOfCuts,
		open: func(r *rig, _ *stepStage, now func(string)) game {
			return &cutGame{rig: r, now: now, prompts: map[int]*cutHanded{}}
		},
	})
}

// allowedOfCuts is what would have been right where a history broke a rule.
func allowedOfCuts(rule string) string {
	switch rule {
	case "RESHAPE-02":
		return "all tokens that are the same"
	case "RESHAPE-05":
		return "an error that names the block with another key"
	case "RESHAPE-06":
		return "one report, after the last call of a load, and nothing of the hold after that"
	}
	return "the blocks at their places of the prompt, whole, as long as no load has ended"
}

// cutDoes is what a step of a history of engines of other shapes does.
type cutDoes uint8

const (
	cutOpens   cutDoes = iota // an engine opens, in the place of the one before if there is one
	cutHands                  // a producer computes a prompt, and its request ends with a consumer announced
	cutReads                  // a consumer reads all of a prompt, in calls of some blocks in any order, and ends the load
	cutPiece                  // it reads some blocks of one rank, and does not end the load
	cutOther                  // the same, and one of them has another key
	cutGivesUp                // the same as cutPiece, and the call is cancelled
	cutAtOnce                 // both consumers read a prompt each at the same time
	cutReuses                 // a producer gives away whatever is free
)

// cutSides are engines of each role.
const cutSides = 2

// cutStep is one step. Prompts have numbers from 1 on, engines from 0 on.
type cutStep struct {
	does     cutDoes
	role     connector.Role
	engine   int // of the role of whoever acts
	cut      cut
	prompts  []int
	tokens   int
	from, to int // of cutPiece, in hundredths of the prompt's blocks
	rank     int // modulo the ranks of the producer
	most     int // blocks of a call
	seed     uint64
	after    time.Duration
}

func (s *cutStep) left() bool { return false }

func (s *cutStep) words() string {
	role := "producer"
	if s.role != connector.RoleProducer {
		role = "consumer"
	}
	who := fmt.Sprintf("%s %d", role, s.engine+1)
	switch s.does {
	case cutOpens:
		return fmt.Sprintf("%s opens, with blocks of %s on %s; if it was open, it has closed", who, counted(s.cut.block, "token"), counted(s.cut.ranks, "rank"))
	case cutHands:
		return fmt.Sprintf("%s: the request of p%d ends, of %s", who, s.prompts[0], counted(s.tokens, "token"))
	case cutReads:
		return fmt.Sprintf("%s reads all of p%d, in calls of up to %s in any order", who, s.prompts[0], counted(s.most, "block"))
	case cutPiece:
		return fmt.Sprintf("%s reads a part of p%d (%d to %d %% of its blocks), and may read more later", who, s.prompts[0], s.from, s.to)
	case cutOther:
		return fmt.Sprintf("%s reads the same places of p%d (%d to %d %% of its blocks), the first of them under another key", who, s.prompts[0], s.from, s.to)
	case cutGivesUp:
		return fmt.Sprintf("%s reads a part of p%d and gives up after %v", who, s.prompts[0], s.after)
	case cutAtOnce:
		return fmt.Sprintf("consumer 1 reads p%d and consumer 2 reads p%d at once, in calls of up to %s", s.prompts[0], s.prompts[1], counted(s.most, "block"))
	case cutReuses:
		return who + " computes in all slots that are free"
	}
	return ""
}

// cutMaker makes one history.
type cutMaker struct {
	*rand.Rand
	steps     []step
	all, open []int
	cuts      map[connector.Role][]cut // of the engines that are open
}

// generateCuts makes history n of a seed.
func generateCuts(seed uint64, n int) []step {
	cuts := map[connector.Role][]cut{connector.RoleProducer: make([]cut, cutSides), connector.RoleConsumer: make([]cut, cutSides)}
	m := &cutMaker{Rand: rand.New(rand.NewPCG(seed, uint64(n)+1)), cuts: cuts} //nolint:gosec // n is not negative
	producers := 1 + m.IntN(cutSides)
	for k := range producers {
		m.opens(connector.RoleProducer, k)
	}
	for k := range cutSides {
		m.opens(connector.RoleConsumer, k)
	}
	m.hands(m.IntN(producers))
	for range 10 + m.IntN(8) {
		switch roll := m.IntN(20); {
		case roll < 6:
			m.hands(m.IntN(producers))
		case roll < 7:
			m.steps = append(m.steps, &cutStep{does: cutReuses, role: connector.RoleProducer, engine: m.IntN(producers)})
		case roll < 8:
			m.opens(connector.RoleConsumer, m.IntN(cutSides))
		case roll == 8 && m.IntN(3) == 0:
			m.opens(connector.RoleProducer, m.IntN(producers))
		default:
			m.reads()
		}
	}
	return m.steps
}

// opens adds an engine. All block sizes are multiples of one another, and all numbers of ranks divide the heads. No producer is cut as a
// consumer is: tickets of the same shape are no matter of this power.
func (m *cutMaker) opens(role connector.Role, engine int) {
	sizes, ranks := []int{1, 2, 4, 8, 16}, []int{1, 1, 2, 2, 3, 4, 8}
	others := m.cuts[connector.RoleProducer]
	if role == connector.RoleProducer {
		others = m.cuts[connector.RoleConsumer]
	}
	var c cut
	for again := true; again; again = slices.Contains(others, c) {
		c = cut{block: sizes[m.IntN(len(sizes))], ranks: ranks[m.IntN(len(ranks))]}
	}
	m.cuts[role][engine] = c
	m.steps = append(m.steps, &cutStep{does: cutOpens, role: role, engine: engine, cut: c})
}

// hands adds a prompt, of up to a dozen blocks.
func (m *cutMaker) hands(producer int) {
	number := len(m.all) + 1
	m.all, m.open = append(m.all, number), append(m.open, number)
	m.steps = append(m.steps, &cutStep{does: cutHands, role: connector.RoleProducer, engine: producer, prompts: []int{number}, tokens: 1 + m.IntN(12*m.cuts[connector.RoleProducer][producer].block)})
}

// reads adds something that a consumer does.
func (m *cutMaker) reads() {
	from := m.all
	if len(m.open) > 0 && m.IntN(5) > 0 {
		from = m.open
	}
	s := &cutStep{does: cutReads, role: connector.RoleConsumer, engine: m.IntN(cutSides), prompts: []int{from[m.IntN(len(from))]}, rank: m.IntN(8), most: 1 + m.IntN(12), seed: m.Uint64()}
	s.from = m.IntN(100)
	s.to = s.from + 1 + m.IntN(100-s.from)
	switch roll := m.IntN(12); {
	case roll < 5:
	case roll < 6 && len(m.open) > 1:
		s.does, s.prompts = cutAtOnce, slices.Clone(m.open[:2])
	case roll < 10:
		s.does = cutPiece
	case roll < 11:
		s.does = cutOther
	default:
		s.does, s.after = cutGivesUp, time.Duration(m.IntN(1500))*time.Microsecond
	}
	if s.does == cutReads || s.does == cutAtOnce {
		m.open = slices.DeleteFunc(m.open, func(n int) bool { return slices.Contains(s.prompts, n) })
	}
	m.steps = append(m.steps, s)
}

// cutHanded is a prompt of a history.
type cutHanded struct {
	handed

	seed uint64
	by   *cutEngine
	back bool // some of its blocks have come
}

// cut is the prompt as consumers read it.
func (h *cutHanded) cut() cutPrompt { return cutPrompt{h.prompt, h.seed} }

// cutGame is one history as it is played.
type cutGame struct {
	*rig
	now                  func(rule string)
	producers, consumers [cutSides]*cutEngine
	prompts              map[int]*cutHanded
}

func (g *cutGame) do(next step) {
	s, ok := next.(*cutStep)
	if !ok {
		return
	}
	p, d := g.producers[s.engine], g.consumers[s.engine]
	switch s.does {
	case cutOpens:
		g.opens(s)
		return
	case cutHands:
		g.hands(p, s)
		return
	case cutReuses:
		if p != nil {
			p.sweep()
		}
		return
	case cutAtOnce:
		g.atOnce(s)
		return
	case cutReads, cutPiece, cutOther, cutGivesUp:
	}
	h := g.prompts[s.prompts[0]]
	if !d.other(h) {
		return // of a history that was shortened
	}
	switch s.does {
	case cutReads:
		g.reads(d, h, s)
	case cutOther:
		g.anotherKey(d, h, s)
	default:
		g.piece(d, h, s)
	}
}

// other reports whether both are there, and the prompt's producer has another shape.
func (e *cutEngine) other(h *cutHanded) bool { return e != nil && h != nil && h.by.cut != e.cut }

// opens has an engine close and another take its place. What a producer held is gone then.
func (g *cutGame) opens(s *cutStep) {
	at := &g.consumers[s.engine]
	if s.role == connector.RoleProducer {
		at = &g.producers[s.engine]
	}
	if old := *at; old != nil {
		g.now("LIFE-04")
		old.leave()
		for _, h := range g.prompts {
			if h.by == old {
				h.unsure = true
			}
		}
	}
	g.now("OPEN-01")
	*at = g.cutEngine(s.cut, s.role)
}

func (g *cutGame) hands(p *cutEngine, s *cutStep) {
	if p == nil {
		return
	}
	if need := (s.tokens + p.cut.block - 1) / p.cut.block; !p.room(need) {
		p.sweep()
		if !p.room(need) {
			return // what is held fills the cache
		}
	}
	g.now("PD-01")
	pr := p.hand(s.tokens)
	if pr.hold.ID == 0 || pr.hold.Weak {
		return // nothing keeps it
	}
	h := &cutHanded{handed: handed{prompt: pr.prompt}, seed: pr.seed, by: p}
	g.now("HOLD-02")
	for _, other := range g.prompts {
		if other.by == p && other.hold.ID == pr.hold.ID { // that of a hold which is over
			if other.open() {
				p.overdue(other.handed.handed, "two open holds have the number %d", pr.hold.ID)
			}
			p.renumber(&h.handed, &other.handed)
		}
	}
	g.prompts[s.prompts[0]] = h
}

// reads has a consumer read all of a prompt and end the load.
func (g *cutGame) reads(d *cutEngine, h *cutHanded, s *cutStep) {
	rng := rand.New(rand.NewPCG(s.seed, 0))
	g.now("RESHAPE-02")
	tokens := h.tokens
	began, open := time.Now(), h.open()
	switch n := d.asked(d.query(h.cut(), tokens, 0)); {
	case n > tokens:
		d.Errorf("%d tokens of %d are offered", n, tokens)
	case n == tokens || !open:
	case h.over():
		h.unsure = true // its time ended meanwhile
	default:
		d.overdue(began, "%d tokens of %d are offered", n, tokens)
	}
	g.now(g.rule(h))
	g.load(d, h, s.most, rng)
}

// rule is the rule that says whether a prompt arrives.
func (g *cutGame) rule(h *cutHanded) string {
	if h.taken >= h.consumers() {
		return "RESHAPE-06"
	}
	return "RESHAPE-03"
}

// told reports whether all consumers have the prompt and were reported.
func (h *cutHanded) told() bool {
	return !h.renumbered && h.taken >= h.consumers() && h.by.reported(h.prompt) >= h.consumers()
}

// load reads all blocks of all ranks in any order, and says so with the last call.
func (g *cutGame) load(d *cutEngine, h *cutHanded, most int, rng *rand.Rand) {
	var calls []cutLoad
	n := len(h.blocks)
	for from := 0; from < n; from += most {
		for rank := range h.by.cut.ranks {
			calls = append(calls, cutLoad{from: from, to: min(from+most, n), rank: rank, rand: rng})
		}
	}
	rng.Shuffle(len(calls), func(i, j int) { calls[i], calls[j] = calls[j], calls[i] })
	calls[len(calls)-1].last = true
	open, over, fresh := h.open(), h.told(), h.taken < h.consumers() // if it is not fresh its reports are due, whatever comes of this load
	defer d.untouched(d.memory())
	for _, l := range calls {
		began := time.Now()
		l.insists, l.unlooked = true, true
		named, err := d.load(h.by, h.cut(), l)
		switch {
		case over && named < l.to-l.from:
			d.Errorf("a hold that was fetched is served: %d of %d blocks are named, error %v", named, l.to-l.from, err)
			return
		case err != nil && (!open || h.over()):
			h.unsure = h.unsure || fresh
			return // all further calls would wait for the same
		case err != nil:
			d.overdue(began, "blocks %d to %d of rank %d of hold %d do not arrive, whose lease is not over and of which no load has ended: %v", l.from, l.to, l.rank, h.hold.ID, err)
			return
		}
		open = h.open()
	}
	if over {
		return
	}
	h.fetched()
	h.unsure = h.unsure || fresh && !open
}

// piece has a consumer read a part of one rank's blocks. It may give up.
func (g *cutGame) piece(d *cutEngine, h *cutHanded, s *cutStep) {
	g.now(g.rule(h))
	open, over := h.open(), h.told()
	l := h.part(s)
	if l.insists = true; s.does == cutGivesUp {
		l.limit = max(s.after, time.Microsecond)
	}
	began := time.Now()
	named, err := d.load(h.by, h.cut(), l)
	h.back = h.back || err == nil
	switch {
	case over && named < l.to-l.from:
		d.Errorf("a hold that was fetched is served: %d of %d blocks are named, error %v", named, l.to-l.from, err)
	case err == nil || !open || l.limit > 0:
	case h.over():
		h.unsure = true
	default:
		d.overdue(began, "blocks %d to %d of rank %d of hold %d do not arrive, whose lease is not over and of which no load has ended: %v", l.from, l.to, l.rank, h.hold.ID, err)
	}
}

// part is the call of a step.
func (h *cutHanded) part(s *cutStep) cutLoad {
	n := len(h.blocks)
	from := s.from * n / 100
	return cutLoad{from: from, to: max(from+1, s.to*n/100), rank: s.rank % h.by.cut.ranks, rand: rand.New(rand.NewPCG(s.seed, 0))}
}

// anotherKey has a consumer ask for a block by another prompt's key.
func (g *cutGame) anotherKey(d *cutEngine, h *cutHanded, s *cutStep) {
	l := h.part(s)
	l.insists = true
	if l.from >= len(h.keys) {
		return // a partial block has no key
	}
	g.now("RESHAPE-05")
	pr := *h.prompt
	pr.keys = slices.Clone(pr.keys)
	pr.keys[l.from] = d.keys(1)[0]
	if named, err := d.load(h.by, cutPrompt{&pr, h.seed}, l); named == 0 {
		d.Errorf("a block that the hold has under another key is not named: %v", err)
	}
}

// atOnce has both consumers read a prompt each.
func (g *cutGame) atOnce(s *cutStep) {
	var hs [cutSides]*cutHanded
	for i, n := range s.prompts {
		if hs[i] = g.prompts[n]; !g.consumers[i].other(hs[i]) {
			return
		}
	}
	g.now("RESHAPE-03")
	together(cutSides, func(i int) { g.load(g.consumers[i], hs[i], s.most, rand.New(rand.NewPCG(s.seed, uint64(i)))) }) //nolint:gosec // i is 0 or 1
}

// settle checks how often each hold was reported.
func (g *cutGame) settle() {
	g.now("RESHAPE-06")
	began := time.Now()
	for _, h := range g.prompts {
		for w := g.patience(soon); h.by.reported(h.prompt) < h.reports() && !w.over(); {
			h.by.pause(askAgain)
		}
	}
	g.wait(aWhile)
	for _, h := range g.prompts {
		got := h.by.reported(h.prompt)
		switch {
		case !h.renumbered && (got > h.consumers() || !h.unsure && got > h.taken):
			g.Errorf("hold %d of %d consumers was reported %d times, and %d loads of it have ended", h.hold.ID, h.consumers(), got, h.taken)
		case got < h.reports():
			g.overdue(began, "hold %d was reported %d times, and %d loads of it have ended", h.hold.ID, got, h.taken)
		}
	}
}

// met implements game.
func (g *cutGame) met() bool {
	for _, h := range g.prompts {
		if h.back || h.taken > 0 {
			return true
		}
	}
	return false
}
