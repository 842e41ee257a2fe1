package serve

import "math"

// queue is how many requests of a run were under way when the first one that counts left, and when the last one did.
type queue struct {
	first, last, counted int
	warm                 bool // other requests had left before
}

func queueOf(run []Outcome) queue {
	q := queue{warm: len(run) > 0 && run[0].Aside}
	var first, last *Outcome
	for i := range run {
		if run[i].Aside {
			continue
		}
		if first == nil {
			first = &run[i]
		}
		last = &run[i]
		q.counted++
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

// overloadedFrom is how much of what comes may stay in the queue.
const overloadedFrom = 0.05

// Growth is by how many requests the queue grew, for each that came, in all runs together: near 0 where the setup keeps up. It is NaN if a run has no
// warm-up: then the queue was empty at first, and grows under any load.
func (r *Result) Growth() float64 {
	grown, counted := 0, 0
	for _, q := range r.queues {
		if !q.warm {
			return math.NaN()
		}
		grown, counted = grown+q.last-q.first, counted+q.counted
	}
	return float64(grown) / float64(counted)
}

// Overloaded reports that the queue grew by more than 5 % of what came. Then times depend on how long the load lasts, and a ratio of them
// says nothing. Growth that is slower is not noticed.
func (r *Result) Overloaded() bool { return r.Growth() > overloadedFrom }
