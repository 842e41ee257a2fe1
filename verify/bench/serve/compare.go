package serve

import (
	"math"
	"math/rand/v2"
	"slices"
)

// Interval is a ratio and between what it is said to be.
type Interval struct{ Low, Value, High float64 }

// How intervals are made.
const (
	replicates   = 1000
	intervalPart = 0.95
	// wholeSeeds is from how many seeds on replicates draw whole seeds, whose requests wait for each other. Fewer seeds have too few combinations, so that
	// requests of each seed are drawn, too.
	wholeSeeds = 10
)

// draw is how often a replicate counts what was measured.
type draw struct {
	runs     []int // each run
	requests []int // each request, by its number; nil: as often as its run
}

// statistic is a number of a result, of everything that was drawn. A nil draw is what was measured.
type statistic func(r *Result, d *draw) float64

// Quicker is how many times as short as that of base a quantile of r is, with its interval.
func (r *Result) Quicker(base *Result, m Metric, q float64) Interval {
	return compare(base, r, func(r *Result, d *draw) float64 { return r.quantile(m, q, d) })
}

// Better is how many times as high as that of base the share of good requests of r is, with its interval.
func (r *Result) Better(base *Result, slo SLO) Interval {
	return compare(r, base, func(r *Result, d *draw) float64 { return r.attainment(slo, d) })
}

// compare is the ratio of a statistic of one result to that of another whose runs have the same schedules, with the interval that holds 95 % of
// the ratios of bootstrap replicates. A replicate draws seeds, and if they are few requests of each, with replacement, and the same ones of both results: what a
// schedule does to both of them does not widen the interval. The bounds are NaN if the ratio is that of no numbers.
func compare(above, below *Result, s statistic) Interval {
	out := Interval{Value: ratio(s(above, nil), s(below, nil)), Low: math.NaN(), High: math.NaN()}
	if math.IsNaN(out.Value) {
		return out
	}
	rng := rand.New(rand.NewPCG(1, 2))
	d := &draw{runs: make([]int, len(above.Runs))}
	if len(above.Runs) < wholeSeeds {
		d.requests = make([]int, above.requests())
	}
	var list []float64
	for range replicates {
		above.resample(rng, d)
		if v := ratio(s(above, d), s(below, d)); !math.IsNaN(v) {
			list = append(list, v)
		}
	}
	if len(list) == 0 {
		return out
	}
	slices.Sort(list)
	cut := int((1 - intervalPart) / 2 * float64(len(list)))
	out.Low, out.High = list[cut], list[len(list)-1-cut]
	return out
}

// resample draws as many seeds as there are, and of each, if requests are drawn, as many as it has.
func (r *Result) resample(rng *rand.Rand, d *draw) {
	r.sort()
	clear(d.runs)
	clear(d.requests)
	for range r.Runs {
		n := rng.IntN(len(r.Runs))
		d.runs[n]++
		if d.requests == nil {
			continue
		}
		size := len(r.Runs[n])
		for range size {
			d.requests[r.first[n]+rng.IntN(size)]++
		}
	}
}

// ratio of two numbers; NaN if it says nothing: both are infinite, or 0.
func ratio(a, b float64) float64 {
	if b == 0 && a > 0 {
		return math.Inf(1)
	}
	return a / b
}
