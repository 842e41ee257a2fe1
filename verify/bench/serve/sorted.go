package serve

import (
	"cmp"
	"math"
	"slices"
	"sort"
)

// observation is one measured time in milliseconds, of a request with a number.
type observation struct {
	ms      float64
	request int
}

// sorted are the observations of a metric, the shortest first.
type sorted struct {
	all   []observation
	runs  [][]float64 // the same, run by run
	count []int       // of each request
}

// sort makes the observations of each metric. A request that failed has one that is infinite in each, beside what it had until then.
func (r *Result) sort() {
	if r.sorted != nil {
		return
	}
	r.sorted, r.first = map[Metric]*sorted{}, nil
	for _, m := range Metrics() {
		r.sorted[m] = &sorted{runs: make([][]float64, len(r.Runs)), count: make([]int, r.requests())}
	}
	var runOf []int
	for n, run := range r.Runs {
		r.first = append(r.first, len(runOf))
		for i := range run {
			r.observe(&run[i], len(runOf))
			runOf = append(runOf, n)
		}
	}
	for _, s := range r.sorted {
		slices.SortStableFunc(s.all, func(a, b observation) int { return cmp.Compare(a.ms, b.ms) })
		for _, o := range s.all {
			run := runOf[o.request]
			s.runs[run] = append(s.runs[run], o.ms)
			s.count[o.request]++
		}
	}
}

func (r *Result) observe(o *Outcome, number int) {
	add := func(m Metric, ms float64) { r.sorted[m].all = append(r.sorted[m].all, observation{ms, number}) }
	ttft, e2e := failed, failed
	if o.Pieces > 0 {
		ttft = msOf(o.First - o.At)
	}
	if o.Kind == "" {
		e2e = msOf(o.End - o.At)
	} else {
		ttft = failed
		add(ITL, failed)
	}
	add(TTFT, ttft)
	if o.Later {
		add(LaterTTFT, ttft)
	}
	add(E2E, e2e)
	for _, gap := range o.Gaps {
		add(ITL, msOf(gap))
	}
}

// quantile of what was drawn: the smallest time that has at least a share of q at or below it. NaN if there is none.
func (r *Result) quantile(m Metric, q float64, d *draw) float64 {
	r.sort()
	s := r.sorted[m]
	total := s.total(d)
	if total == 0 {
		return math.NaN()
	}
	rank := max(int(math.Ceil(q*float64(total))), 1)
	switch {
	case d == nil:
		return s.all[rank-1].ms
	case d.requests == nil:
		return s.all[sort.Search(len(s.all), func(i int) bool { return s.upTo(s.all[i].ms, d) >= rank })].ms
	}
	seen := total
	for _, o := range slices.Backward(s.all) { // from above, since the quantiles that are asked for are not below p50
		if seen -= d.requests[o.request]; seen < rank {
			return o.ms
		}
	}
	return math.NaN()
}

// total is how many observations were drawn.
func (s *sorted) total(d *draw) (n int) {
	switch {
	case d == nil:
		return len(s.all)
	case d.requests == nil:
		for run, times := range d.runs {
			n += times * len(s.runs[run])
		}
		return n
	}
	for request, times := range d.requests {
		n += times * s.count[request]
	}
	return n
}

// upTo is how many of the observations of the runs that were drawn are no longer than a time.
func (s *sorted) upTo(ms float64, d *draw) (n int) {
	for run, times := range d.runs {
		if times > 0 {
			list := s.runs[run]
			n += times * sort.Search(len(list), func(i int) bool { return list[i] > ms })
		}
	}
	return n
}
