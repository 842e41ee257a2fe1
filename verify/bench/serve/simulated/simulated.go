// Package simulated asks in virtual time what kvport bench serve measures: what clients see of one engine, of several, and of prefill and decode apart. The
// engines are models whose steps take as long as was measured on GPUs; the traffic, the percentiles and the intervals are those of kvport bench serve.
package simulated

import (
	"context"
	"fmt"
	"time"

	"github.com/kvport/kvport/verify/bench"
	"github.com/kvport/kvport/verify/bench/serve"
	"github.com/kvport/kvport/verify/simulate/clock"
)

// Setup is a way to serve on eight GPUs.
type Setup struct {
	Name    string
	Short   string // what it is
	rates   *rates
	engines int
	budget  int  // tokens of a step
	apart   bool // the first engine computes prompts, the second one generates
	turns   bool // the first one loads the last answer from the second
}

// Setups are all that are simulated. The first is what the others are compared with.
func Setups() []Setup {
	four, eight := fourGPUs(), eightGPUs()
	return []Setup{
		{Name: "two-512", Short: "two whole engines of 4 GPUs each, prompts in chunks: at most 512 tokens a step; each conversation stays where it began", rates: four, engines: 2, budget: 512},
		{Name: "two-256", Short: "the same with 256 tokens a step", rates: four, engines: 2, budget: 256},
		{Name: "two-2048", Short: "the same with 2,048 tokens a step", rates: four, engines: 2, budget: 2048},
		{Name: "one-512", Short: "one engine of 8 GPUs, 512 tokens a step", rates: eight, engines: 1, budget: 512},
		{Name: "one-2048", Short: "the same with 2,048 tokens a step", rates: eight, engines: 1, budget: 2048},
		{Name: "pd", Short: "a prefill and a decode engine of 4 GPUs each", rates: four, engines: 2, budget: 2048, apart: true},
		{Name: "pd-turns", Short: "the same, and the prefill engine loads the last answer from the decode engine", rates: four, engines: 2, budget: 2048, apart: true, turns: true},
	}
}

// DefaultWorkload suits the GPUs: prompts of a few hundred to a few thousand tokens, of which most are cached. The warm-up is so long that conversations go on
// as often as they do later.
func DefaultWorkload() serve.Workload {
	return serve.Workload{
		Requests: 600, WarmUp: 60, CoolDown: 30, Rate: 4, SystemPrompts: 8, System: serve.Range{Min: 256, Max: 1024}, Turns: serve.Range{Min: 1, Max: 4}, Think: 10,
		LongShare: 0.25, Long: serve.Range{Min: 1024, Max: 3072}, Short: serve.Range{Min: 32, Max: 256}, Answer: serve.Range{Min: 64, Max: 256},
	}
}

// Options say what is simulated.
type Options struct {
	Workload serve.Workload
	Seed     uint64 // of the first round
	Rounds   int    // schedules, one for each seed from Seed on
	// Flat lets steps with up to 512 tokens of prompts take as long as prompts of 128 to 512 tokens were measured to take, instead of a time on a line from a
	// step that only generates.
	Flat bool
	SLOs []serve.SLO
	Emit bench.Emit
}

// Run plays the schedules with every setup and emits the rows of kvport bench serve. The results are in the order of the setups.
func Run(ctx context.Context, o Options) ([]*serve.Result, error) {
	var results []*serve.Result
	for _, s := range Setups() {
		s.rates.flat = o.Flat
		r := &serve.Result{Setup: s.Name, SLOs: o.SLOs}
		for round := range o.Rounds {
			if err := ctx.Err(); err != nil {
				return nil, fmt.Errorf("%s: %w", s.Name, err)
			}
			r.Add(s.play(o.Workload.Draw(o.Seed + uint64(round))))
		}
		results = append(results, r)
	}
	return results, serve.Rows(results, o.Emit)
}

// world is a setup while it runs.
type world struct {
	clock.Clock
	*Setup
	engines []*engine
	list    []serve.Request
	lengths []int // of prompts
	home    map[int]*engine
	out     []serve.Outcome
	last    []time.Duration // when the last token of each request came
}

// play is how each request of a schedule goes.
func (s *Setup) play(list []serve.Request) []serve.Outcome {
	w := newWorld(s, list)
	for w.Next() {
	}
	return w.out
}

// newWorld is a setup before anything happens.
func newWorld(s *Setup, list []serve.Request) *world {
	w := &world{Setup: s, list: list, home: map[int]*engine{}, out: make([]serve.Outcome, len(list)), last: make([]time.Duration, len(list))}
	for range s.engines {
		w.engines = append(w.engines, newEngine(&w.Clock, s.rates, s.budget))
	}
	for i := range list {
		r := &list[i]
		length := len(r.System) + len(r.Message)
		if r.After >= 0 {
			length = w.lengths[r.After] + list[r.After].MaxTokens + len(r.Message)
		}
		w.lengths = append(w.lengths, length)
		w.out[i] = serve.Outcome{At: r.At, Aside: r.Aside, Sent: r.At, Later: r.After >= 0, Answer: serve.Answer{Prompt: length}}
		w.After(r.At, func() { w.arrive(i) })
	}
	return w
}

// arrive sends a request to the engine that computes its prompt.
func (w *world) arrive(i int) {
	r := &w.list[i]
	e := w.engines[0]
	if !w.apart {
		e = w.choose(r.Conversation)
	}
	cached := w.cached(e, i)
	wait := time.Duration(0)
	if w.turns && r.After >= 0 {
		if had := min(w.engines[1].held[r.Conversation], w.lengths[i]-1); had > cached {
			wait, cached = transfer(had-cached), had
		}
	}
	j := &job{needs: w.lengths[i], left: w.lengths[i] - cached}
	j.token = func() bool { return w.token(i, e) }
	if !w.apart {
		j.needs += r.MaxTokens
	}
	j.computed = func() {
		e.hold(r.Conversation, w.lengths[i])
		if w.apart {
			w.handOver(i, e, j)
			return
		}
		e.generate(j, w.token(i, e)) // the first token comes with the prompt
	}
	e.know(r.System) // from now on: the prompts after this one are computed after it
	w.After(wait, func() { e.take(j) })
}

// choose is the engine of a conversation: where it began, or the one with the fewest requests.
func (w *world) choose(talk int) *engine {
	e, known := w.home[talk]
	if !known {
		e = w.engines[0]
		for _, other := range w.engines[1:] {
			if other.load() < e.load() {
				e = other
			}
		}
		w.home[talk] = e
	}
	return e
}

// cached is how many tokens of a prompt an engine need not compute. The last one is always computed.
func (w *world) cached(e *engine, i int) int {
	r := &w.list[i]
	n := e.held[r.Conversation]
	if len(r.System) > 0 && e.systems[&r.System[0]] {
		n = max(n, len(r.System))
	}
	return min(n, w.lengths[i]-1)
}

// handOver moves what the decode engine lacks of a prompt, and lets it generate. Until then the prefill engine holds it.
func (w *world) handOver(i int, p *engine, computed *job) {
	r, d := &w.list[i], w.engines[1]
	lacks := w.lengths[i] - w.cached(d, i)
	w.After(transfer(lacks), func() {
		p.free(computed)
		d.know(r.System)
		d.hold(r.Conversation, w.lengths[i])
		d.take(&job{needs: w.lengths[i] + r.MaxTokens, token: func() bool { return w.token(i, d) }})
	})
}

// token is a token of an answer that the client sees. It reports whether it was the last one.
func (w *world) token(i int, e *engine) bool {
	o := &w.out[i]
	if o.Pieces == 0 {
		o.First = w.Now()
	} else {
		o.Gaps = append(o.Gaps, w.Now()-w.last[i])
	}
	o.Pieces++
	o.Answer.Completed++
	o.End, w.last[i] = w.Now(), w.Now()
	e.hold(w.list[i].Conversation, w.lengths[i]+o.Pieces)
	return o.Pieces == w.list[i].MaxTokens
}
