package conformance

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

func randomTurns(r *rig) {
	r.playSteps(&stepping{
		id: "random-turns", rule: "TURN-04", needs: connector.CanHold, tour: 4, generate: generateTurns, allowed: allowedOfTurns,
		open: func(r *rig, _ *stepStage, now func(string)) game {
			return &turnGame{rig: r, now: now, world: 1, prompts: map[int]*turnPrompt{}}
		},
	})
}

// allowedOfTurns is what would have been right where a history broke a rule.
func allowedOfTurns(rule string) string {
	switch rule {
	case "PD-01":
		return "all blocks of a prompt whose lease is not over"
	case "TURN-04":
		return "all blocks of an answer that no load has brought before, and whose slots nobody has reused"
	case "TURN-05":
		return "the blocks whose slots nobody has reused, and of the others an error of what is gone, or all that lies there now"
	case "TURN-07":
		return "no report of an answer that nobody has fetched"
	}
	return "right blocks or an error, and one report at most for each consumer of an answer"
}

// turnDoes is what a step of a history of turns does.
type turnDoes uint8

const (
	turnOpens   turnDoes = iota // both engines, which have that many ranks; without it they have one
	turnSpeaks                  // the prefill engine computes a prompt, behind an answer if it names one, and hands it over
	turnHears                   // the decode engine fetches a prompt
	turnOffers                  // the decode engine answers a prompt, and offers that to the next turn
	turnTakes                   // the prefill engine fetches an answer
	turnBoth                    // a prompt and an answer go both ways at once
	turnAsks                    // the prefill engine asks for an answer and goes
	turnGivesUp                 // the decode engine's load of a prompt is cancelled
	turnReuses                  // another request of the decode engine computes in some slots of an answer
	turnAnew                    // the slots of an answer are held for another prompt, of the decode engine
	turnSweeps                  // the prefill engine gives away what is free
	turnCloses                  // the decode engine closes, and another takes its place
)

// turnStep is one step. Prompts and answers have numbers from 1 on.
type turnStep struct {
	does         turnDoes
	number       int
	of           int // the answer or prompt that it goes on from; turnBoth, turnAnew: the answer
	blocks, tail int
	have         int // blocks that the prefill engine has of an answer, in hundredths
	slots        []int
	ranks        int
	after        time.Duration
}

func (s *turnStep) left() bool { return false }

func (s *turnStep) words() string {
	size := counted(s.blocks, "block")
	if s.tail > 0 {
		size += " and " + counted(s.tail, "token")
	}
	behind := ""
	if s.of > 0 {
		behind = fmt.Sprintf(" behind those of %d", s.of)
	}
	switch s.does {
	case turnOpens:
		return fmt.Sprintf("both engines open, with %s", counted(s.ranks, "rank"))
	case turnSpeaks:
		return fmt.Sprintf("the prefill engine hands over prompt %d, of %s%s", s.number, size, behind)
	case turnHears:
		return fmt.Sprintf("the other engine fetches prompt %d", s.number)
	case turnOffers:
		return fmt.Sprintf("the decode engine offers answer %d, of %s%s", s.number, size, behind)
	case turnTakes:
		return fmt.Sprintf("the prefill engine, which has the first %d %% of it, fetches answer %d", s.have, s.number)
	case turnBoth:
		return fmt.Sprintf("the decode engine fetches prompt %d and the prefill engine answer %d at once", s.number, s.of)
	case turnAsks:
		return fmt.Sprintf("the prefill engine asks for answer %d", s.number)
	case turnGivesUp:
		return fmt.Sprintf("the other engine fetches prompt %d and gives up after %v", s.number, s.after)
	case turnReuses:
		return fmt.Sprintf("the decode engine computes in the slots of blocks %v of answer %d", s.slots, s.number)
	case turnAnew:
		return fmt.Sprintf("the decode engine hands over prompt %d, of %s, in the slots of answer %d", s.number, counted(s.blocks, "block"), s.of)
	case turnSweeps:
		return "the prefill engine computes in all slots that are free"
	case turnCloses:
		return "the decode engine closes, and another opens"
	}
	return ""
}

// turnMaker makes one history.
type turnMaker struct {
	*rand.Rand
	steps            []step
	last             int   // number
	prompts, answers []int // of the prefill engine, and of the decode engine
	unheard, untaken []int // of those
}

// generateTurns makes history n of a seed.
func generateTurns(seed uint64, n int) []step {
	m := &turnMaker{Rand: rand.New(rand.NewPCG(seed, uint64(n)+1))} //nolint:gosec // n is not negative
	m.steps = append(m.steps, &turnStep{does: turnOpens, ranks: 1 + m.IntN(2)})
	m.speaks()
	m.offers()
	for range 14 + m.IntN(14) {
		switch roll := m.IntN(24); {
		case roll < 4:
			m.speaks()
		case roll < 7:
			m.add(&turnStep{does: turnHears}, m.prompts, &m.unheard)
		case roll < 12:
			m.offers()
		case roll < 17:
			m.add(&turnStep{does: turnTakes, have: max(0, m.IntN(180)-80)}, m.answers, &m.untaken)
		case roll < 18 && len(m.unheard) > 0:
			m.add(&turnStep{does: turnBoth, of: m.some(m.answers, &m.untaken)}, m.prompts, &m.unheard)
		case roll < 19:
			m.steps = append(m.steps, &turnStep{does: turnAsks, number: m.answers[m.IntN(len(m.answers))]})
		case roll < 20:
			m.steps = append(m.steps, &turnStep{does: turnGivesUp, number: m.prompts[m.IntN(len(m.prompts))], after: time.Duration(m.IntN(1500)) * time.Microsecond})
		case roll < 22:
			m.steps = append(m.steps, &turnStep{does: turnReuses, number: m.answers[m.IntN(len(m.answers))], slots: m.Perm(6)[:1+m.IntN(3)]})
		case roll < 23:
			m.last++
			m.prompts = append(m.prompts, m.last)
			m.steps = append(m.steps, &turnStep{does: turnAnew, number: m.last, of: m.answers[m.IntN(len(m.answers))], blocks: 1 + m.IntN(4)})
		case n%3 == 2 && m.IntN(2) == 0:
			m.steps = append(m.steps, &turnStep{does: turnCloses})
		default:
			m.steps = append(m.steps, &turnStep{does: turnSweeps})
		}
	}
	return m.steps
}

// some chooses one, mostly one that is fresh, which it is not any more.
func (m *turnMaker) some(all []int, fresh *[]int) int {
	from := all
	if len(*fresh) > 0 && m.IntN(4) > 0 {
		from = *fresh
	}
	n := from[m.IntN(len(from))]
	*fresh = slices.DeleteFunc(slices.Clone(*fresh), func(o int) bool { return o == n })
	return n
}

// add adds a step about one of them.
func (m *turnMaker) add(s *turnStep, all []int, fresh *[]int) {
	s.number = m.some(all, fresh)
	m.steps = append(m.steps, s)
}

// speaks adds a prompt, which mostly is the next turn of a conversation.
func (m *turnMaker) speaks() {
	m.last++
	s := &turnStep{does: turnSpeaks, number: m.last, blocks: 1 + m.IntN(3), tail: max(0, m.IntN(6)-2)}
	if len(m.answers) > 0 && m.IntN(3) > 0 {
		s.of = m.answers[m.IntN(len(m.answers))]
	}
	m.prompts, m.unheard = append(m.prompts, m.last), append(m.unheard, m.last)
	m.steps = append(m.steps, s)
}

// offers adds an answer, mostly to a prompt.
func (m *turnMaker) offers() {
	m.last++
	s := &turnStep{does: turnOffers, number: m.last, blocks: 1 + m.IntN(4), tail: max(0, m.IntN(6)-2)}
	if m.IntN(4) > 0 {
		s.of = m.prompts[m.IntN(len(m.prompts))]
	}
	m.answers, m.untaken = append(m.answers, m.last), append(m.untaken, m.last)
	m.steps = append(m.steps, s)
}

// turnPrompt is a prompt or an answer of a history.
type turnPrompt struct {
	*handed

	by    *pd
	weak  bool
	tried int   // loads, also those that brought nothing
	uses  []int // how often each slot had been taken when it was left
}

// turnGame is one history as it is played.
type turnGame struct {
	*rig
	now             func(rule string)
	world           int
	prefill, decode *pd
	prompts         map[int]*turnPrompt
}

func (g *turnGame) do(next step) {
	s, ok := next.(*turnStep)
	if !ok {
		return
	}
	if s.does == turnOpens && g.prefill == nil {
		g.world = s.ranks
	}
	if g.prefill == nil {
		g.now("OPEN-01")
		g.prefill, g.decode = g.talkers(g.world)
	}
	g.now("TURN-04")
	switch s.does {
	case turnSpeaks:
		g.speaks(s)
	case turnOffers:
		g.offers(s)
	case turnAnew:
		g.holdsAgain(s)
	case turnSweeps:
		g.prefill.sweep()
	case turnCloses:
		g.now("LIFE-04")
		g.decode.leave()
		for _, h := range g.prompts {
			h.unsure = h.unsure || h.by == g.decode
		}
		g.decode = g.prefill.talker()
	case turnOpens:
	case turnHears, turnTakes, turnBoth, turnAsks, turnGivesUp, turnReuses:
		if h := g.prompts[s.number]; h != nil {
			g.about(h, s)
		}
	}
}

// about plays a step about a prompt or an answer that is there.
func (g *turnGame) about(h *turnPrompt, s *turnStep) {
	taker := g.decode
	if h.by != g.prefill {
		taker = g.prefill
	}
	switch s.does {
	case turnAsks:
		if h.weak {
			taker.offer(h.prompt, 0)
		}
	case turnReuses:
		g.reuses(h, s)
	case turnGivesUp:
		g.givesUp(taker, h, s.after)
	case turnBoth:
		if other := g.prompts[s.of]; other != nil && other.by != h.by && g.apart(h, other) && g.apart(other, h) {
			together(2, func(i int) {
				if i == 0 {
					g.takes(g.decode, h, 0)
				} else {
					g.takes(g.prefill, other, 0)
				}
			})
		}
	default:
		g.now(g.rule(h))
		g.takes(taker, h, s.have)
	}
}

// apart reports whether a load of one leaves the slots of the other alone: they are the last that are taken.
func (g *turnGame) apart(one, other *turnPrompt) bool {
	p := other.by
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(one.content())
	return len(p.free) >= n && !slices.ContainsFunc(p.free[len(p.free)-n:], func(id connector.BlockID) bool { return slices.Contains(idsOf(other.blocks), id) })
}

// rule is the rule that says what arrives.
func (g *turnGame) rule(h *turnPrompt) string {
	switch {
	case !h.weak:
		return "PD-01"
	case h.tried >= h.consumers() || h.unsure:
		return "TURN-06"
	case h.there(0) < len(h.keys):
		return "TURN-05"
	}
	return "TURN-04"
}

// there is how many full blocks from one on lie in slots that nobody has reused, be it for the same block.
func (h *turnPrompt) there(from int) (n int) {
	uses := h.by.usesOf(h.blocks[:len(h.keys)])
	for i := from; i < len(uses); i++ {
		if uses[i] == h.uses[i] {
			n++
		}
	}
	return n
}

// open reports whether what nobody has reused of it must arrive.
func (h *turnPrompt) open() bool {
	if !h.weak {
		return h.handed.open()
	}
	return !h.unsure && h.tried < h.consumers() && !h.over()
}

// begins is the keys that a new prompt begins with, of which a conversation has a dozen at most.
func (g *turnGame) begins(of int) []connector.BlockKey {
	const most = 12
	if h := g.prompts[of]; h != nil {
		return h.keys[:min(most, len(h.keys))]
	}
	return nil
}

// fits reports whether an engine has slots for a new prompt.
func (g *turnGame) fits(p *pd, s *turnStep) bool {
	return p.room(len(g.begins(s.of)) + s.blocks + 1)
}

// speaks hands a prompt over to the decode engine.
func (g *turnGame) speaks(s *turnStep) {
	if !g.fits(g.prefill, s) {
		g.prefill.sweep()
	}
	if g.fits(g.prefill, s) {
		g.hands(g.prefill, s, g.begins(s.of))
	}
}

// hands has an engine end a request whose consumer is announced.
func (g *turnGame) hands(p *pd, s *turnStep, known []connector.BlockKey) {
	g.now("PD-01")
	pr := p.computeBehind(known, s.blocks, s.tail)
	if p.endRequest(pr, connector.ReasonLength); pr.hold.Ticket == nil {
		p.Errorf("a finished request whose consumer was announced has no ticket")
		return
	}
	g.add(p, s.number, pr, false)
}

// offers has the decode engine offer an answer to the next turn.
func (g *turnGame) offers(s *turnStep) {
	if !g.fits(g.decode, s) {
		return
	}
	to := &prompt{keys: g.begins(s.of)}
	g.add(g.decode, s.number, g.decode.answer(to, s.blocks, s.tail), true)
}

// add notes what an engine has left.
func (g *turnGame) add(p *pd, number int, pr *prompt, weak bool) {
	if !weak && pr.hold.Weak {
		return // nothing keeps it
	}
	h := &turnPrompt{handed: &handed{prompt: pr}, by: p, weak: weak, uses: p.usesOf(pr.blocks)}
	g.now("HOLD-02")
	for _, other := range g.prompts {
		if other.by != p || pr.hold.ID == 0 || other.hold.ID != pr.hold.ID {
			continue
		}
		if other.open() && (!other.weak || other.there(0) == len(other.keys)) { // a connector may drop an answer when a slot is reused
			p.overdue(other.handed.handed, "two open holds have the number %d", pr.hold.ID)
		}
		p.renumber(h.handed, other.handed)
	}
	g.prompts[number] = h
}

// reuses has another request compute in slots of an answer that are free.
func (g *turnGame) reuses(h *turnPrompt, s *turnStep) {
	if !h.weak || h.by != g.decode {
		return
	}
	for _, at := range s.slots {
		if at < len(h.blocks) && g.decode.isFree(h.blocks[at].ID) {
			g.decode.uses(h.blocks[at].ID)
			g.decode.fill(connector.Block{ID: h.blocks[at].ID, Key: g.decode.keys(1)[0]})
		}
	}
}

// isFree reports whether nobody has a slot.
func (p *pd) isFree(id connector.BlockID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Contains(p.free, id)
}

// holdsAgain has the decode engine hold the slots of an answer for another prompt.
func (g *turnGame) holdsAgain(s *turnStep) {
	old := g.prompts[s.of]
	if old == nil || old.by != g.decode || !g.decode.room(s.blocks+1) {
		return
	}
	free := slices.DeleteFunc(slices.Clone(old.blocks), func(b connector.Block) bool { return !g.decode.isFree(b.ID) })
	g.decode.prefer(free)
	g.hands(g.decode, s, nil)
}

// takes has an engine fetch a prompt or an answer, of which it has some blocks.
func (g *turnGame) takes(d *pd, h *turnPrompt, have int) {
	have = have * len(h.keys) / 101
	if !d.room(len(h.content())) {
		return
	}
	began, open, want := time.Now(), h.open(), len(h.keys)-have
	if h.weak {
		want = h.there(have)
	}
	n := min(d.offer(h.prompt, have), len(h.content())-have)
	right := 0
	var err error
	if n > 0 {
		h.tried++
		right, err = d.fetch(h.prompt, loading{first: have, n: n, now: h.now(), insists: true, keyed: true})
	}
	if right > 0 && err == nil {
		h.fetched()
	}
	g.undamaged(h, open, err)
	switch {
	case !open || right >= want && (h.weak || err == nil):
	case h.over():
		h.unsure = true // its time ended meanwhile
	default:
		d.overdue(began, "%d of %d blocks of hold %d arrive that are there, from block %d on: %v", right, want, h.hold.ID, have, err)
	}
}

// undamaged checks that no error of a load calls an answer damaged that was open and is: its slots may have been reused, which is no damage.
func (g *turnGame) undamaged(h *turnPrompt, open bool, err error) {
	if h.weak && open && !h.over() && errors.Is(err, connector.ErrCorrupt) {
		g.Errorf("blocks of an answer are called damaged, where at most their slots were reused: %v", err)
	}
}

// now is who may have other blocks in an answer's slots.
func (h *turnPrompt) now() *pd {
	if h.weak {
		return h.by
	}
	return nil
}

// givesUp has an engine give up a load of what is held.
func (g *turnGame) givesUp(d *pd, h *turnPrompt, after time.Duration) {
	if h.weak || !d.room(len(h.content())) {
		return // nobody says when the slots of an answer are not read any more
	}
	g.now("PD-13")
	if d.breakOff(h.prompt, after) {
		h.unsure = true
	}
}

// settle checks that nothing was reported too often.
func (g *turnGame) settle() {
	g.wait(aWhile)
	for _, h := range g.prompts {
		switch got := h.by.reported(h.prompt); {
		case h.renumbered: // whose report it is nobody knows
		case h.weak && got > 0 && h.tried == 0:
			g.now("TURN-07")
			g.Errorf("an answer that nobody has fetched is reported %d times", got)
		case got > h.consumers():
			g.now("TURN-06")
			g.Errorf("hold %d of %d consumers is reported %d times", h.hold.ID, h.consumers(), got)
		}
	}
}

// met implements game.
func (g *turnGame) met() bool {
	for _, h := range g.prompts {
		if h.taken > 0 {
			return true
		}
	}
	return false
}
