package fleet

import (
	"runtime"
	"slices"
)

// Result is what became of one fleet. For equal options it is equal, apart from Measured.
type Result struct {
	Requests int
	Answered int
	Failed   int     // before the first token on all instances that were tried, or after it on the one that died
	Retries  int     // attempts that failed and were made again elsewhere
	Seconds  float64 // of virtual time, until the last request had ended

	PromptTokens int // of prompts, at the instances that computed them
	CachedTokens int // of these, those that were in the instance's cache
	OverTokens   int // tokens that a router expected to be there and that were not
	BestTokens   int // tokens in the cache that had most, of instances of the same role, at the time of the choice
	BestOf       int // tokens of the prompts for which that was looked up

	Prefill, Decode float64 // what the busiest instance of the role has computed, by time, as a multiple of the mean
	MeanTTFT        float64 // milliseconds
	P99TTFT         float64
	Traffic         Traffic // of all routers
	UntilRest       Traffic // that of the first Seconds, until the last request had ended
	IndexBlocks     int     // of all routers, at rest
	CacheBlocks     int     // of all instances, at rest
	Violations      []string

	Measured *Measured // nil: without a clock
}

// Traffic is what goes to routers, in messages unless it says otherwise.
type Traffic struct {
	Decisions     int
	Registrations int // each renews a lease
	Refused       int // first ones, which have no nonce yet
	Expired       int // leases that ended
	Probes        int // health checks
	Batches       int // of KV events
	Stored        int // blocks
	Removed       int // blocks
	Gaps          int // in the numbers of batches
	Replayed      int // batches
	Lost          int // times when a router forgot what it knew of an instance
}

func (t *Traffic) add(o *Traffic) {
	t.Decisions += o.Decisions
	t.Registrations += o.Registrations
	t.Refused += o.Refused
	t.Expired += o.Expired
	t.Probes += o.Probes
	t.Batches += o.Batches
	t.Stored += o.Stored
	t.Removed += o.Removed
	t.Gaps += o.Gaps
	t.Replayed += o.Replayed
	t.Lost += o.Lost
}

// Measured is what depends on the machine on which the simulation runs.
type Measured struct {
	DecisionsPerSecond float64 // of one core: preparing a request, and choosing
	BytesPerBlock      float64 // of the index; 0: it has none
	HeapBytes          uint64  // of everything, instances too, in use at rest
}

// HitRate is the part of all prompts that was in the cache of the instance that computed them.
func (r *Result) HitRate() float64 { return ratio(r.CachedTokens, r.PromptTokens) }

// BestRate is the part that was in the cache that had most.
func (r *Result) BestRate() float64 { return ratio(r.BestTokens, r.BestOf) }

// OverRate is the part that a router expected to be there and that was not.
func (r *Result) OverRate() float64 { return ratio(r.OverTokens, r.PromptTokens) }

func ratio(a, b int) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

// finish sums up and checks.
func (w *world) finish() {
	r := &w.result
	r.Requests = w.o.Requests
	r.Prefill, r.Decode = w.balance(true), w.balance(false)
	slices.Sort(w.ttft)
	if n := len(w.ttft); n > 0 {
		sum := 0.0
		for _, ms := range w.ttft {
			sum += float64(ms)
		}
		r.MeanTTFT, r.P99TTFT = sum/float64(n), float64(w.ttft[(n-1)*99/100])
	}
	for _, m := range w.machines {
		r.CacheBlocks += m.cache.size()
	}
	bytes := 0
	for _, f := range w.fronts {
		r.Traffic.add(&f.count)
		blocks, size := f.core.Index()
		r.IndexBlocks += blocks
		bytes += size
	}
	w.check()
	if w.o.Clock != nil {
		w.measure(bytes)
	}
}

func (w *world) measure(bytes int) {
	m := &Measured{}
	if w.result.IndexBlocks > 0 {
		m.BytesPerBlock = float64(bytes) / float64(w.result.IndexBlocks)
	}
	var spent float64
	for _, f := range w.fronts {
		spent += f.spent.Seconds()
	}
	if spent > 0 {
		m.DecisionsPerSecond = float64(w.result.Traffic.Decisions) / spent
	}
	runtime.GC()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	m.HeapBytes = memory.HeapInuse
	w.result.Measured = m
}

// balance is what the busiest instance of a role has computed, as a multiple of the mean; 0: none has computed anything.
func (w *world) balance(prefill bool) float64 {
	most, sum, n := 0.0, 0.0, 0
	for _, m := range w.machines {
		if m.prefill == prefill {
			most = max(most, m.busy.Seconds())
			sum += m.busy.Seconds()
			n++
		}
	}
	if sum == 0 {
		return 0
	}
	return most * float64(n) / sum
}
