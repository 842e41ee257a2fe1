package conformance

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

func holdCases() []Case {
	c := pdCase("random-holds", "PD-01", "Random histories of holds: prompts that begin alike, consumers at the same time, that give up or come again, and leases that end at different times.", PDProducer, randomHolds)
	return []Case{budgeted(c)}
}

func randomHolds(r *rig) {
	const tour = 4
	r.playSteps(&stepping{
		id: "random-holds", rule: "PD-01", needs: connector.CanHold, tour: tour, allowed: allowedOfHolds,
		generate: func(seed uint64, n int) (out []step) {
			steps := generateHolds(seed, n)
			for i := range steps {
				out = append(out, &steps[i])
			}
			return out
		},
		open: func(r *rig, stage *stepStage, now func(string)) game {
			p := r.sender(1)
			return &holdGame{stage: stage, producer: p, consumers: [2]*pd{p.taker(), p.taker()}, prompts: map[int]*handed{}, now: now}
		},
	})
}

// allowedOfHolds is what would have been right where a history broke a rule.
func allowedOfHolds(rule string) string {
	switch rule {
	case "PD-01", "PD-07":
		return "all blocks of a hold whose lease is not over"
	case "PD-14":
		return "all blocks of each hold whose lease is not over, whatever else is fetched"
	case reportedRule:
		return "one report for each consumer that has fetched the hold"
	case "HOLD-02":
		return "numbers that no other open hold has"
	}
	return "the prompt's own blocks, or an error that names them"
}

// reportedRule is the rule of reports of holds.
const reportedRule = "PD-04"

// holdDoes is what a step of a history of holds does.
type holdDoes uint8

const (
	handOver  holdDoes = iota // a prompt is computed, and its request ends with a consumer announced
	abortion                  // the same, and its request is aborted
	takeOne                   // a consumer fetches a prompt
	takeTwice                 // both consumers fetch it at the same time
	takeMany                  // several prompts are fetched at the same time
	askOnly                   // a consumer asks and goes
	breakOff                  // a consumer's load is cancelled
	reuse                     // the producer gives away whatever is free
	halfLease                 // half of a lease passes
)

// holdStep is one step. Prompts have numbers from 1 on.
type holdStep struct {
	does         holdDoes
	prompts      []int
	like         int // handOver, abortion: the prompt with which it begins; 0: none
	blocks, tail int // of a new prompt, behind those
	consumer     int
	after        time.Duration // breakOff
	noTime       bool          // halfLease: it was left out
}

func (s *holdStep) left() bool { return s.noTime }

func (s *holdStep) words() string {
	what := numbered("p", s.prompts)
	size := "1 block"
	if s.blocks > 1 {
		size = fmt.Sprintf("%d blocks", s.blocks)
	}
	if s.tail > 0 {
		size += fmt.Sprintf(" and %d tokens", s.tail)
	}
	if s.like > 0 {
		size += fmt.Sprintf(" behind those of p%d", s.like)
	}
	switch s.does {
	case handOver:
		return fmt.Sprintf("the request of %s ends, of %s", what, size)
	case abortion:
		return fmt.Sprintf("the request of %s is aborted, of %s", what, size)
	case takeOne:
		return fmt.Sprintf("consumer %d fetches %s", s.consumer+1, what)
	case takeTwice:
		return fmt.Sprintf("both consumers fetch %s at once", what)
	case takeMany:
		return fmt.Sprintf("consumer %d fetches %s at once", s.consumer+1, what)
	case askOnly:
		return fmt.Sprintf("consumer %d asks for %s", s.consumer+1, what)
	case breakOff:
		return fmt.Sprintf("consumer %d fetches %s and gives up after %v", s.consumer+1, what, s.after)
	case reuse:
		return "the producer computes in all slots that are free"
	case halfLease:
		return "half of a lease passes"
	}
	return ""
}

// mostAtOnce is how many prompts a consumer fetches at the same time; its cache has room for them.
const mostAtOnce = 6

// holdMaker makes one history.
type holdMaker struct {
	*rand.Rand
	steps     []holdStep
	all, open []int // prompts; open: nobody has fetched them
	waits     int
}

// generateHolds makes history n of a seed.
func generateHolds(seed uint64, n int) []holdStep {
	m := &holdMaker{Rand: rand.New(rand.NewPCG(seed, uint64(n)+1))} //nolint:gosec // n is not negative
	m.prompt(handOver)
	for range 14 + m.IntN(14) {
		switch roll := m.IntN(20); {
		case roll < 6:
			m.prompt(handOver)
		case roll == 6 && n%4 == 1: // many that are open
			for range 5 + m.IntN(4) {
				s := m.prompt(handOver)
				s.blocks, s.like = 1, 0
			}
		case roll < 8:
			m.prompt(abortion)
		case roll < 17:
			m.consume(roll)
		case roll < 19 && n%2 == 0 && m.waits < 4:
			m.steps = append(m.steps, holdStep{does: halfLease})
			m.waits++
		default:
			m.steps = append(m.steps, holdStep{does: reuse})
		}
	}
	return m.steps
}

// prompt adds a request that ends.
func (m *holdMaker) prompt(does holdDoes) *holdStep {
	s := holdStep{does: does, prompts: []int{len(m.all) + 1}, blocks: 1 + m.IntN(4), tail: max(0, m.IntN(6)-2)}
	if len(m.all) > 0 && m.IntN(3) == 0 {
		s.like = m.all[m.IntN(len(m.all))]
	}
	m.all = append(m.all, s.prompts[0])
	if does == handOver {
		m.open = append(m.open, s.prompts[0])
	}
	m.steps = append(m.steps, s)
	return &m.steps[len(m.steps)-1]
}

// some chooses a prompt, mostly one that is open.
func (m *holdMaker) some() []int {
	from := m.all
	if len(m.open) > 0 && m.IntN(4) > 0 {
		from = m.open
	}
	return []int{from[m.IntN(len(from))]}
}

// consume adds something that a consumer does.
func (m *holdMaker) consume(roll int) {
	s := holdStep{consumer: m.IntN(2), prompts: m.some()}
	switch {
	case roll < 12:
		s.does = takeOne
	case roll < 13:
		s.does = takeTwice
	case roll < 15 && len(m.open) > 1:
		s.does, s.prompts = takeMany, slices.Clone(m.open[:2+m.IntN(min(len(m.open), mostAtOnce)-1)])
	case roll < 16:
		s.does = askOnly
	default:
		s.does, s.after = breakOff, time.Duration(m.IntN(1500))*time.Microsecond
	}
	if s.does == takeOne || s.does == takeTwice || s.does == takeMany {
		m.open = slices.DeleteFunc(m.open, func(n int) bool { return slices.Contains(s.prompts, n) })
	}
	m.steps = append(m.steps, s)
}

// holdGame is one history as it is played, and what is known of each prompt.
type holdGame struct {
	producer  *pd
	consumers [2]*pd
	prompts   map[int]*handed
	waited    bool
	stage     *stepStage
	now       func(rule string) // says which rule the next check is about
}

// handed is a prompt of a history.
type handed struct {
	*prompt

	taken    int
	unsure   bool // a consumer gave up in the middle, or the lease may have ended amid a load
	unspoken bool // it was fetched so late in its lease that the report may be left out
	aborted  bool
}

// renumber notes that a new hold has the number of an older one, which is over with that.
func (p *pd) renumber(h, old *handed) {
	h.renumbered, old.renumbered, old.unsure = true, true, true
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reports[h.hold.ID] = 0
}

// fetched notes that a consumer has the prompt.
func (h *handed) fetched() {
	const reportTime = time.Second
	h.taken++
	h.unspoken = h.unspoken || !h.ends.IsZero() && time.Until(h.ends) < reportTime
}

// open reports whether the prompt can be fetched.
func (h *handed) open() bool { return !h.aborted && !h.unsure && !h.over() && h.taken < h.consumers() }

func (g *holdGame) do(next step) {
	s, ok := next.(*holdStep)
	if !ok {
		return
	}
	known := slices.DeleteFunc(slices.Clone(s.prompts), func(n int) bool { return g.prompts[n] == nil })
	d := g.consumers[s.consumer]
	switch {
	case s.does == handOver || s.does == abortion:
		g.hand(s)
	case s.does == reuse:
		g.producer.sweep()
	case s.does == halfLease:
		s.noTime = !g.wait()
	case len(known) == 0: // of a history that was shortened
	case s.does == takeMany:
		g.now("PD-14")
		together(len(known), func(i int) { g.prompts[known[i]].fetchedBy(d) })
	case s.does == takeTwice:
		g.twice(g.prompts[known[0]])
	case s.does == takeOne:
		h := g.prompts[known[0]]
		g.now(g.rule(h))
		h.fetchedBy(d)
	case s.does == askOnly:
		d.offer(g.prompts[known[0]].prompt, 0)
	case s.does == breakOff:
		g.breakOff(d, g.prompts[known[0]], s.after)
	}
}

// rule is the rule that says whether a prompt arrives.
func (g *holdGame) rule(h *handed) string {
	switch {
	case h.aborted:
		return "PD-03"
	case h.over():
		return "PD-06"
	case h.taken >= h.consumers():
		return "PD-04"
	case g.waited:
		return "PD-07"
	}
	return "PD-01"
}

// hand computes a prompt and ends its request.
func (g *holdGame) hand(s *holdStep) {
	p := g.producer
	var known []connector.BlockKey
	if like := g.prompts[s.like]; like != nil {
		known = like.keys[:min(len(like.keys), 4)]
	}
	if need := len(known) + s.blocks + 1; !p.room(need) {
		p.sweep()
		if !p.room(need) {
			return // what is held fills the cache
		}
	}
	g.now("PD-01")
	h := &handed{prompt: p.computeBehind(known, s.blocks, s.tail), aborted: s.does == abortion}
	reason := connector.ReasonLength
	if h.aborted {
		reason = connector.ReasonAbort
	}
	p.endRequest(h.prompt, reason)
	g.number(h)
	g.prompts[s.prompts[0]] = h
	if h.hold.Ticket == nil && !h.aborted {
		p.Errorf("a finished request whose consumer was announced has no ticket")
		p.FailNow()
	}
	if h.hold.Ticket == nil {
		delete(g.prompts, s.prompts[0])
	}
}

// number notes the number of a new hold, which may be that of a hold that is over.
func (g *holdGame) number(h *handed) {
	p := g.producer
	if h.hold.ID == 0 {
		return
	}
	g.now("HOLD-02")
	for _, other := range g.prompts {
		if other.hold.ID != h.hold.ID {
			continue
		}
		if other.open() {
			p.overdue(other.handed, "two open holds have the number %d", h.hold.ID)
		}
		p.renumber(h, other)
	}
}

// wait lets half of a lease pass, unless that is long or there is no time for it.
func (g *holdGame) wait() bool {
	const most = 2 * time.Second
	for _, h := range g.prompts {
		if half := h.until.Sub(h.handed) / 2; !h.until.IsZero() && half < most {
			if g.stage.late(half) {
				return false
			}
			g.waited, g.stage.waited = true, true
			g.producer.pause(half)
			return true
		}
	}
	return true
}

// fetchedBy has a consumer fetch a prompt: all of it if it is open, and otherwise nothing that is wrong.
func (h *handed) fetchedBy(d *pd) {
	if !h.open() {
		if d.try(h.prompt) > 0 {
			h.fetched()
		}
		return
	}
	began := time.Now()
	n, right := d.offer(h.prompt, 0), 0
	var err error
	if n > 0 {
		right, err = d.fetch(h.prompt, loading{n: min(n, len(h.content())), insists: true})
	}
	switch {
	case err == nil && right >= len(h.keys):
		h.fetched()
	case h.over():
		h.unsure = true
	default:
		d.overdue(began, "%d of %d blocks of hold %d arrive, whose lease is not over: %v", right, len(h.keys), h.hold.ID, err)
	}
}

// twice has both consumers fetch a prompt at the same time.
func (g *holdGame) twice(h *handed) {
	was := h.open()
	g.now("PD-14")
	began := time.Now()
	var right [2]int
	together(2, func(i int) {
		if n := g.consumers[i].offer(h.prompt, 0); n > 0 {
			right[i], _ = g.consumers[i].fetch(h.prompt, loading{n: min(n, len(h.content())), insists: true})
		}
	})
	if was && !h.over() && max(right[0], right[1]) < len(h.keys) {
		g.producer.overdue(began, "neither of two consumers at a time gets the %d blocks of hold %d", len(h.keys), h.hold.ID)
	}
	h.fetched()
	h.unsure = h.unsure || h.consumers() > 1 || !was
}

// breakOff has a consumer give up a load. Whether it had all by then is not known.
func (g *holdGame) breakOff(d *pd, h *handed, after time.Duration) {
	g.now("PD-13")
	if d.breakOff(h.prompt, after) {
		h.unsure = true
	}
}

// settle checks how often each hold was reported.
func (g *holdGame) settle() {
	g.now(reportedRule)
	began := time.Now()
	for _, h := range g.prompts {
		if want := h.reports(); want > 0 {
			for w := g.producer.patience(soon); g.producer.reported(h.prompt) < want && !w.over(); {
				g.producer.pause(askAgain)
			}
		}
	}
	g.producer.pause(aWhile)
	for _, h := range g.prompts {
		got := g.producer.reported(h.prompt)
		switch {
		case !h.renumbered && (got > h.consumers() || !h.unsure && got > h.taken):
			g.producer.Errorf("hold %d of %d consumers was reported %d times, and fetched %d times", h.hold.ID, h.consumers(), got, h.taken)
		case got < h.reports():
			g.producer.overdue(began, "hold %d was reported %d times, and fetched %d times", h.hold.ID, got, h.taken)
		}
	}
}

// reports is how often a hold must be reported.
func (h *handed) reports() int {
	if h.unsure || h.unspoken || h.aborted {
		return 0
	}
	return min(h.taken, h.consumers())
}

// met implements game.
func (g *holdGame) met() bool {
	for _, h := range g.prompts {
		if h.taken > 0 {
			return true
		}
	}
	return false
}
