package serve

import (
	"maps"
	"math"
	"slices"
	"time"
)

// SLO is what a request has to keep to, to count as good. 0 is no limit.
type SLO struct {
	TTFT time.Duration
	ITL  time.Duration // from the first token to the end, for each token after the first
}

// String names what a good request keeps to, such as "1s and 50ms".
func (s SLO) String() string {
	text := func(d time.Duration) string {
		if d == 0 {
			return "any"
		}
		return d.String()
	}
	return text(s.TTFT) + " and " + text(s.ITL)
}

// good reports that a request was answered as it should be, in time. A request that failed is never good.
func (s SLO) good(o *Outcome) bool {
	if o.Kind != "" || s.TTFT > 0 && o.First-o.At > s.TTFT {
		return false
	}
	rest := time.Duration(o.Answer.Completed - 1)
	return s.ITL == 0 || rest < 1 || (o.End-o.First)/rest <= s.ITL
}

// failed is the time of what never came: it is longer than every other.
var failed = math.Inf(1)

// Metric is a time that is measured.
type Metric string

// The metrics. All begin at the time at which a request was to leave, apart from the gaps.
const (
	TTFT      Metric = "TTFT"                // to the first token
	LaterTTFT Metric = "TTFT of later turns" // the same, of requests that go on from an answer
	ITL       Metric = "ITL"                 // from tokens to the next ones, each gap
	E2E       Metric = "E2E"                 // to the end of the answer
)

// Metrics lists all metrics.
func Metrics() []Metric { return []Metric{TTFT, LaterTTFT, ITL, E2E} }

// Quantiles are those that are reported.
func Quantiles() []float64 { return []float64{0.5, 0.9, 0.99} }

// Result is what was measured of one setup: a run for each seed.
type Result struct {
	Setup string
	SLOs  []SLO
	Runs  [][]Outcome
	// Sources are the prompt tokens of all engines by where their KV came from, as the engines count them: local_compute, local_cache or external. With
	// prefill and decode apart each prompt counts on both. nil: the engines are not ours.
	Sources map[string]float64

	queues []queue
	first  []int // of each run, the number of its first request among all
	sorted map[Metric]*sorted
}

// Add takes the outcomes of the next seed. Those that are aside are not kept in Runs.
func (r *Result) Add(run []Outcome) {
	r.queues = append(r.queues, queueOf(run))
	r.Runs = append(r.Runs, slices.DeleteFunc(slices.Clone(run), func(o Outcome) bool { return o.Aside }))
	r.sorted = nil
}

// requests is how many there are, of all runs.
func (r *Result) requests() (n int) {
	for _, run := range r.Runs {
		n += len(run)
	}
	return n
}

// later is how many of them are no first turns.
func (r *Result) later() (n int) {
	for _, run := range r.Runs {
		for i := range run {
			if run[i].Later {
				n++
			}
		}
	}
	return n
}

func msOf(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Quantile of a metric in milliseconds: infinite if it is among the requests that failed, NaN if nothing was measured.
func (r *Result) Quantile(m Metric, q float64) float64 {
	return r.quantile(m, q, nil)
}

// Attainment is the share of all requests that were good by an SLO.
func (r *Result) Attainment(slo SLO) float64 { return r.attainment(slo, nil) }

// attainment is that of what was drawn.
func (r *Result) attainment(slo SLO, d *draw) float64 {
	good, all, number := 0, 0, 0
	for n, run := range r.Runs {
		for i := range run {
			times := 1
			if d != nil && d.requests != nil {
				times = d.requests[number]
			} else if d != nil {
				times = d.runs[n]
			}
			all += times
			if slo.good(&run[i]) {
				good += times
			}
			number++
		}
	}
	return float64(good) / float64(all)
}

// seconds is how long all runs took, each from its first request to its last answer.
func (r *Result) seconds() (sum float64) {
	for _, run := range r.Runs {
		if len(run) == 0 {
			continue
		}
		var end time.Duration
		for i := range run {
			end = max(end, run[i].End)
		}
		sum += (end - run[0].At).Seconds()
	}
	return sum
}

// Goodput is good requests a second.
func (r *Result) Goodput(slo SLO) float64 {
	return r.Attainment(slo) * float64(r.requests()) / r.seconds()
}

// Throughput is tokens of answers a second, those of failed requests left out.
func (r *Result) Throughput() float64 {
	tokens := 0
	for _, run := range r.Runs {
		for i := range run {
			if run[i].Kind == "" {
				tokens += run[i].Answer.Completed
			}
		}
	}
	return float64(tokens) / r.seconds()
}

// Counts are how requests ended.
type Counts struct {
	Requests, Answered, Late, Tokens int
	MostLate                         time.Duration
	Failed                           map[string]int // by kind
}

// Kinds are those of Failed, in order.
func (c *Counts) Kinds() []string { return slices.Sorted(maps.Keys(c.Failed)) }

// Counts counts the requests of all runs. Requests is Answered and all of Failed.
func (r *Result) Counts() Counts {
	c := Counts{Failed: map[string]int{}}
	for _, run := range r.Runs {
		for i := range run {
			o := &run[i]
			c.Requests++
			c.Tokens += o.Answer.Completed
			if o.Kind == "" {
				c.Answered++
			} else {
				c.Failed[o.Kind]++
			}
			if o.Late() {
				c.Late++
			}
			c.MostLate = max(c.MostLate, o.Sent-o.At)
		}
	}
	return c
}
