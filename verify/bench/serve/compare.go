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
)

// statistic is a number of a result whose requests count as often as weight says.
type statistic func(r *Result, weight func(request int) int) float64

// quantileOf is a quantile of a metric.
func quantileOf(m Metric, q float64) statistic {
	return func(r *Result, weight func(int) int) float64 {
		r.sort()
		return quantile(r.all[m], q, weight)
	}
}

// Quicker is how many times as short as that of base a quantile of r is, with its interval.
func (r *Result) Quicker(base *Result, m Metric, q float64) Interval {
	return compare(base, r, quantileOf(m, q))
}

// Better is how many times as high as that of base the share of good requests of r is, with its interval.
func (r *Result) Better(base *Result, slo SLO) Interval {
	return compare(r, base, func(r *Result, weight func(int) int) float64 { return r.attainment(slo, weight) })
}

// compare is the ratio of a statistic of one result to that of another whose runs have the same schedules, with the interval that holds 95 % of
// the ratios of bootstrap replicates. A replicate draws seeds, and requests of each, with replacement, and the same ones of both results: what a schedule
// does to both of them does not widen the interval. The bounds are NaN if the ratio is that of no numbers.
func compare(above, below *Result, s statistic) Interval {
	out := Interval{Value: ratio(s(above, once), s(below, once)), Low: math.NaN(), High: math.NaN()}
	if math.IsNaN(out.Value) {
		return out
	}
	rng := rand.New(rand.NewPCG(1, 2))
	weights := make([]int, above.requests())
	weight := func(request int) int { return weights[request] }
	var list []float64
	for range replicates {
		above.resample(rng, weights)
		if v := ratio(s(above, weight), s(below, weight)); !math.IsNaN(v) {
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

// resample draws as many seeds as there are, and of each as many requests as it has; weights are how often each was drawn.
func (r *Result) resample(rng *rand.Rand, weights []int) {
	r.sort()
	clear(weights)
	for range r.Runs {
		n := rng.IntN(len(r.Runs))
		size := len(r.Runs[n])
		for range size {
			weights[r.first[n]+rng.IntN(size)]++
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
