package serve

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Range is a whole number that is drawn evenly from Min to Max, both of them included.
type Range struct {
	Min int `json:"min"`
	Max int `json:"max"`
}

func (r Range) draw(rng *rand.Rand) int { return r.Min + rng.IntN(r.Max-r.Min+1) }

func (r Range) mean() float64 { return float64(r.Min+r.Max) / 2 }

func (r Range) check(name string, least int) error {
	if r.Min < least || r.Max < r.Min {
		return fmt.Errorf("%s is %d to %d, want min of at least %d and max of at least min", name, r.Min, r.Max, least)
	}
	return nil
}

// Workload is synthetic traffic: conversations that share system prompts, each with some turns. Lengths are tokens.
type Workload struct {
	Requests      int     `json:"requests"`       // turns of all conversations together
	Rate          float64 `json:"rate"`           // requests a second, a Poisson process
	SystemPrompts int     `json:"system_prompts"` // how many there are; each conversation begins with one of them
	System        Range   `json:"system_tokens"`
	Turns         Range   `json:"turns"`         // of one conversation
	Think         float64 `json:"think_seconds"` // at least so long after one turn left the next one leaves
	LongShare     float64 `json:"long_share"`    // of the messages that are long, 0 to 1
	Long          Range   `json:"long_tokens"`
	Short         Range   `json:"short_tokens"`
	Answer        Range   `json:"answer_tokens"`
	// Requests that leave in the first seconds, and for some seconds after the last one that counts, are load like all others and are not in the numbers:
	// a run begins with empty engines and first turns only, and ends with engines that nothing new reaches. They come on top of Requests.
	WarmUp   float64 `json:"warm_up_seconds"`
	CoolDown float64 `json:"cool_down_seconds"`
}

// DefaultWorkload suits a model of 135 million parameters on two cores.
func DefaultWorkload() Workload {
	return Workload{
		Requests: 60, Rate: 0.4, SystemPrompts: 4, System: Range{128, 256}, Turns: Range{1, 4}, Think: 10,
		LongShare: 0.25, Long: Range{320, 640}, Short: Range{16, 64}, Answer: Range{32, 160},
	}
}

// Check says what is wrong with a workload, naming the field.
func (w *Workload) Check() error {
	var number error
	switch {
	case w.Requests < 1:
		number = fmt.Errorf("requests is %d, want at least 1", w.Requests)
	case !(w.Rate > 0 && w.Rate <= 1e6): // NaN, too
		number = fmt.Errorf("rate is %v, want more than 0 and at most a million requests a second", w.Rate)
	case w.SystemPrompts < 1:
		number = fmt.Errorf("system_prompts is %d, want at least 1", w.SystemPrompts)
	case !(w.Think >= 0 && w.Think <= 1e6):
		number = fmt.Errorf("think_seconds is %v, want 0 to a million", w.Think)
	case !(w.LongShare >= 0 && w.LongShare <= 1):
		number = fmt.Errorf("long_share is %v, want 0 to 1", w.LongShare)
	case !(w.WarmUp >= 0 && w.WarmUp*w.Rate <= 1e6):
		number = fmt.Errorf("warm_up_seconds is %v, want 0 to as many as have a million requests", w.WarmUp)
	case !(w.CoolDown >= 0 && w.CoolDown*w.Rate <= 1e6):
		number = fmt.Errorf("cool_down_seconds is %v, want 0 to as many as have a million requests", w.CoolDown)
	}
	return errors.Join(
		number, w.System.check("system_tokens", 0), w.Turns.check("turns", 1), w.Long.check("long_tokens", 1),
		w.Short.check("short_tokens", 1), w.Answer.check("answer_tokens", 1),
	)
}

// Request is one request of a schedule. Schedules are drawn before anything is sent.
type Request struct {
	At           time.Duration // when it leaves, from the beginning of the run
	Aside        bool          // it is load, and is not in the numbers
	Conversation int
	After        int       // the request whose prompt and answer it goes on from; -1: none
	System       []int32   // the system prompt; nil: that of After, or none
	Message      []int32   // what the user says; a prompt is the system prompt and then messages and answers in turn
	Text         string    // instead of System and Message: the prompt of a trace
	MaxTokens    int       // of its answer
	Parts        [][]int32 // the whole prompt, once Join has made it: system prompt, message, answer, message ...
	Want         []int32   // the answer's tokens; nil: not known
}

// Prompt is the tokens of all parts.
func (r *Request) Prompt() []int32 { return slices.Concat(r.Parts...) }

// vocabulary is how many token ids prompts use: every model has these.
const vocabulary = 256

func drawTokens(rng *rand.Rand, n int) []int32 {
	list := make([]int32, n)
	for i := range list {
		list[i] = rng.Int32N(vocabulary)
	}
	return list
}

// talk is a conversation while a schedule is drawn.
type talk struct {
	number, left int // turns that are to come
	last         int // its last request
	free         time.Duration
}

// Draw makes the schedule of a seed. All requests together are a Poisson process of the workload's rate: at each of its times an
// open conversation goes on, or a new one begins. The same workload and seed give the same schedule.
func (w *Workload) Draw(seed uint64) []Request {
	rng := rand.New(rand.NewPCG(seed, 0x7365727665))
	systems := make([][]int32, w.SystemPrompts)
	for i := range systems {
		systems[i] = drawTokens(rng, w.System.draw(rng))
	}
	think := time.Duration(w.Think * float64(time.Second))
	var list []Request
	var open []talk
	conversations, counted, seconds, end := 0, 0, 0.0, 0.0
	for i := 0; ; i++ {
		seconds += rng.ExpFloat64() / w.Rate
		if counted == w.Requests && seconds > end {
			return list
		}
		aside := seconds < w.WarmUp || counted == w.Requests
		if !aside {
			counted, end = counted+1, seconds+w.CoolDown
		}
		r := Request{At: time.Duration(seconds * float64(time.Second)), Aside: aside, After: -1, MaxTokens: w.Answer.draw(rng)}
		length := w.Short
		if rng.Float64() < w.LongShare {
			length = w.Long
		}
		r.Message = drawTokens(rng, length.draw(rng))
		begins := rng.Float64()*w.Turns.mean() < 1 // so that on average conversations end as often as they begin
		system, turns, which := systems[rng.IntN(len(systems))], w.Turns.draw(rng), rng.Uint32()
		var ready []int
		for n := range open {
			if open[n].free <= r.At {
				ready = append(ready, n)
			}
		}
		if begins || len(ready) == 0 {
			r.System = system
			open = append(open, talk{number: conversations, left: turns, last: -1})
			ready = []int{len(open) - 1}
			conversations++
		}
		n := ready[int(which)%len(ready)]
		t := &open[n]
		r.Conversation, r.After = t.number, t.last
		t.left, t.last, t.free = t.left-1, i, r.At+think
		if t.left == 0 {
			open = slices.Delete(open, n, n+1)
		}
		list = append(list, r)
	}
}

// Join makes the whole prompts of a schedule; answer is what each request was answered, by its place. With this the prompts are known
// before the first request leaves, so that no request waits for another one.
func Join(list []Request, answer func(i int) []int32) {
	for i := range list {
		list[i].join(list, answer)
	}
}

// join makes one prompt, once that of the request before it has been made.
func (r *Request) join(list []Request, answer func(i int) []int32) {
	switch {
	case r.Text != "":
		r.Parts = nil
	case r.After >= 0:
		r.Parts = append(slices.Clone(list[r.After].Parts), answer(r.After), r.Message)
	default:
		r.Parts = [][]int32{r.System, r.Message}
	}
}

// Drawn are answers as a server might give them, for servers whose answers are not known beforehand: drawn from the seed.
func Drawn(list []Request, seed uint64) func(i int) []int32 {
	return func(i int) []int32 {
		return drawTokens(rand.New(rand.NewPCG(seed, uint64(i)+1<<40)), list[i].MaxTokens)
	}
}
