package serve

import (
	"math"
	"slices"
	"time"
)

// queue is how many requests of a run were under way when the last one of the warm-up left, and when the last one that counts did. The
// first one that counts would be the wrong moment: it comes after the time at which the warm-up ends, which lies in a longer gap than
// others do, so that fewer are under way then.
type queue struct {
	first, last, counted    int
	warm                    bool            // other requests had left before
	beforeFirst, beforeLast []time.Duration // how long before these moments requests left
}

func queueOf(run []Outcome) queue {
	q := queue{warm: len(run) > 0 && run[0].Aside}
	var first, last *Outcome
	for i := range run {
		switch {
		case !run[i].Aside:
			last = &run[i]
			q.counted++
		case q.counted == 0:
			first = &run[i]
		}
	}
	for i := range run {
		o := &run[i]
		if first != nil && o.At < first.At {
			q.beforeFirst = append(q.beforeFirst, first.At-o.At)
			if o.End > first.At {
				q.first++
			}
		}
		if last != nil && o.At < last.At {
			q.beforeLast = append(q.beforeLast, last.At-o.At)
			if o.End > last.At {
				q.last++
			}
		}
	}
	return q
}

// expected is by how many requests the queue would grow if each took so long. That is not 0 where a schedule has more requests before one moment
// than before the other, which says nothing about a setup. What left before the run is not known, so that no time is longer than the warm-up.
func (q *queue) expected(each time.Duration) int {
	if len(q.beforeFirst) > 0 {
		each = min(each, q.beforeFirst[0])
	}
	under := func(before []time.Duration) (n int) {
		for _, d := range before {
			if d < each {
				n++
			}
		}
		return n
	}
	return under(q.beforeLast) - under(q.beforeFirst)
}

// A queue that grows by more than this share of what comes, and by more than chance explains, is that of a setup that is overloaded.
const (
	overloadedFrom   = 0.02
	overloadedErrors = 2 // standard errors of the seeds' mean
)

// Growth is by how many requests the queue grew, for each that counts, on average over the runs, beyond what it would have grown if each request
// took as long as the median one: near 0 where the setup keeps up. It is NaN if a run has no warm-up: then the queue was empty at first, and grows under any load.
func (r *Result) Growth() float64 {
	mean, _ := r.growth()
	return mean
}

// Overloaded reports that the queue grew by more than 2 % of what came, and by more than two standard errors if there are several runs. Then times depend on
// how long the load lasts, and a ratio of them says nothing. Growth that is slower is not noticed.
func (r *Result) Overloaded() bool {
	mean, deviation := r.growth()
	return mean > overloadedFrom && mean > overloadedErrors*deviation
}

// growth is the mean of the runs and its standard error; that of one run is 0.
func (r *Result) growth() (mean, deviation float64) {
	n := float64(len(r.queues))
	typical := r.typical()
	for _, q := range r.queues {
		if !q.warm {
			return math.NaN(), math.NaN()
		}
		mean += q.growth(typical) / n
	}
	for _, q := range r.queues {
		deviation += (q.growth(typical) - mean) * (q.growth(typical) - mean)
	}
	return mean, math.Sqrt(deviation / n / max(1, n-1))
}

// typical is how long the median request took, from when it was to leave.
func (r *Result) typical() time.Duration {
	var all []time.Duration
	for _, run := range r.Runs {
		for i := range run {
			all = append(all, run[i].End-run[i].At)
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[len(all)/2]
}

func (q *queue) growth(typical time.Duration) float64 {
	return float64(q.last-q.first-q.expected(typical)) / float64(q.counted)
}
