package simulated

import "time"

// job is what one engine does of a request: it computes a prompt, generates the answer, or both.
type job struct {
	left     int // tokens of the prompt that are to be computed
	now      int // of these, those of the step that runs
	computed func()
	token    func() (over bool) // a token of the answer has come
}

// engine computes in steps. In each step every answer that runs gets a token, and what is left of the step's budget goes to prompts, in the order in
// which they came.
type engine struct {
	c       *clock
	rates   *rates
	budget  int // tokens of a step
	prompts []*job
	joining []*job // answers whose prompt another engine has computed
	answers []*job
	busy    bool
	held    map[int]int     // tokens in its cache, by conversation
	systems map[*int32]bool // system prompts in its cache; nothing is evicted
}

func newEngine(c *clock, r *rates, budget int) *engine {
	return &engine{c: c, rates: r, budget: budget, held: map[int]int{}, systems: map[*int32]bool{}}
}

// load is how many requests the engine has.
func (e *engine) load() int { return len(e.prompts) + len(e.joining) + len(e.answers) }

// hold notes how many tokens of a conversation the cache has.
func (e *engine) hold(talk, tokens int) { e.held[talk] = max(e.held[talk], tokens) }

// know notes that the cache has a system prompt, if there is one.
func (e *engine) know(system []int32) {
	if len(system) > 0 {
		e.systems[&system[0]] = true
	}
}

// compute queues a prompt.
func (e *engine) compute(j *job) {
	e.prompts = append(e.prompts, j)
	e.step()
}

// join queues an answer whose prompt is there.
func (e *engine) join(j *job) {
	e.joining = append(e.joining, j)
	e.step()
}

// step begins a step, if none runs and there is something to do.
func (e *engine) step() {
	if e.busy {
		return
	}
	for len(e.joining) > 0 && len(e.answers) < most {
		e.answers, e.joining = append(e.answers, e.joining[0]), e.joining[1:]
	}
	running := len(e.answers)
	tokens, room := 0, e.budget-running
	for i, j := range e.prompts {
		if running+i >= most || tokens >= room {
			break
		}
		j.now = min(j.left, room-tokens)
		tokens += j.now
	}
	if tokens == 0 && running == 0 {
		return
	}
	e.busy = true
	e.c.after(e.rates.step(tokens, running), func() {
		e.end()
		e.busy = false
		e.step()
	})
}

// end gives every answer its token, and prompts that are computed to whoever waits for them.
func (e *engine) end() {
	var rest []*job
	for _, j := range e.answers {
		if !j.token() {
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

// clock is virtual time, and what is to happen.
type clock struct {
	now   time.Duration
	queue happenings
	n     int
}

type happening struct {
	at time.Duration
	n  int // breaks ties
	do func()
}

// happenings are a heap.
type happenings []happening

func (h happenings) Len() int { return len(h) }
func (h happenings) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].n < h[j].n
}
func (h happenings) Swap(i, j int) { h[i], h[j] = h[j], h[i] }

// Push implements heap.Interface.
func (h *happenings) Push(x any) {
	one, _ := x.(happening)
	*h = append(*h, one)
}

// Pop implements heap.Interface.
func (h *happenings) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}
