package simulated

import "github.com/kvport/kvport/verify/simulate/clock"

// job is what one engine does of a request: it computes a prompt, generates the answer, or both.
type job struct {
	needs    int // tokens that the engine's cache has to hold for it
	left     int // tokens of the prompt that are to be computed
	now      int // of these, those of the step that runs
	computed func()
	token    func() (over bool) // a token of the answer has come
}

// engine computes in steps. In each step every answer that runs gets a token, and what is left of the step's budget goes to prompts, in the order in
// which they came.
type engine struct {
	c       *clock.Clock
	rates   *rates
	budget  int    // tokens of a step
	used    int    // tokens that jobs with room need
	waiting []*job // jobs for which there is no room yet
	prompts []*job
	answers []*job
	busy    bool
	held    map[int]int     // tokens in its cache, by conversation
	systems map[*int32]bool // system prompts in its cache; nothing is evicted
}

func newEngine(c *clock.Clock, r *rates, budget int) *engine {
	return &engine{c: c, rates: r, budget: budget, held: map[int]int{}, systems: map[*int32]bool{}}
}

// load is how many requests the engine has.
func (e *engine) load() int { return len(e.waiting) + len(e.prompts) + len(e.answers) }

// hold notes how many tokens of a conversation the cache has.
func (e *engine) hold(talk, tokens int) { e.held[talk] = max(e.held[talk], tokens) }

// know notes that the cache has a system prompt, if there is one.
func (e *engine) know(system []int32) {
	if len(system) > 0 {
		e.systems[&system[0]] = true
	}
}

// take gives the engine a job: it begins once there is room for it.
func (e *engine) take(j *job) {
	e.waiting = append(e.waiting, j)
	e.step()
}

// free gives back what a job needed.
func (e *engine) free(j *job) {
	e.used -= j.needs
	e.step()
}

// admit lets jobs begin in the order in which they came, as long as there is room. One that needs more than there is begins when it is alone.
func (e *engine) admit() {
	for len(e.waiting) > 0 && (e.used == 0 || e.used+e.waiting[0].needs <= e.rates.room) {
		j := e.waiting[0]
		e.waiting = e.waiting[1:]
		e.used += j.needs
		if j.left > 0 {
			e.prompts = append(e.prompts, j)
		} else {
			e.answers = append(e.answers, j)
		}
	}
}

// step begins a step, if none runs and there is something to do.
func (e *engine) step() {
	if e.busy {
		return
	}
	e.admit()
	tokens, room := 0, e.budget-len(e.answers)
	for _, j := range e.prompts {
		if tokens >= room {
			break
		}
		j.now = min(j.left, room-tokens)
		tokens += j.now
	}
	if tokens == 0 && len(e.answers) == 0 {
		return
	}
	e.busy = true
	e.c.After(e.rates.step(tokens, len(e.answers)), func() {
		e.end()
		e.busy = false
		e.step()
	})
}

// end gives every answer its token, and prompts that are computed to whoever waits for them.
func (e *engine) end() {
	var rest []*job
	for _, j := range e.answers {
		if j.token() {
			e.used -= j.needs
		} else {
			rest = append(rest, j)
		}
	}
	e.answers = rest
	var waiting, done []*job
	for _, j := range e.prompts {
		j.left -= j.now
		j.now = 0
		if j.left > 0 {
			waiting = append(waiting, j)
		} else {
			done = append(done, j)
		}
	}
	e.prompts = waiting
	for _, j := range done {
		j.computed()
	}
}

// generate lets a prompt's job go on with its answer. A job with no answer left is over.
func (e *engine) generate(j *job, over bool) {
	if over {
		e.used -= j.needs
		return
	}
	e.answers = append(e.answers, j)
}
