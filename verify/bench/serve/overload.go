package serve

import "math"

// queue is how many requests of a run were under way when the last one of the warm-up left, and when the last one that counts did. The
// first one that counts would be the wrong moment: it comes after the time at which the warm-up ends, which lies in a longer gap than
// others do, so that fewer are under way then.
type queue struct {
	first, last, counted int
	warm                 bool // other requests had left before
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
		if first != nil && o.At < first.At && o.End > first.At {
			q.first++
		}
		if last != nil && o.At < last.At && o.End > last.At {
			q.last++
		}
	}
	return q
}

// A queue that grows by more than this share of what comes, and by more than chance explains, is that of a setup that is overloaded.
const (
	overloadedFrom   = 0.02
	overloadedErrors = 2 // standard errors of the seeds' mean
)

// Growth is by how many requests the queue grew, for each that counts, on average over the runs: near 0 where the setup keeps up. It is NaN if a run has no
// warm-up: then the queue was empty at first, and grows under any load.
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
	for _, q := range r.queues {
		if !q.warm {
			return math.NaN(), math.NaN()
		}
		mean += q.growth() / n
	}
	for _, q := range r.queues {
		deviation += (q.growth() - mean) * (q.growth() - mean)
	}
	return mean, math.Sqrt(deviation / n / max(1, n-1))
}

func (q *queue) growth() float64 { return float64(q.last-q.first) / float64(q.counted) }
