// Package sample chooses the next token from logits and turns tokens into text.
//
// A choice is a pure function of the logits, the parameters and the position: a request that was
// preempted, moved or recomputed goes on with the tokens it would have had.
package sample

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Params are the sampling parameters of one request. The zero value is greedy.
type Params struct {
	Temperature float64 // 0 is greedy: the highest logit, ties by lowest id
	TopP        float64 // keep the likeliest tokens that hold this share of probability; 0 and 1 keep all
	TopK        int     // keep the K likeliest tokens; 0 keeps all
	Seed        uint64  // with the position, the only source of randomness
}

// Validate refuses parameters out of range and names the field.
func (p Params) Validate() error {
	switch {
	case !(p.Temperature >= 0) || math.IsInf(p.Temperature, 0):
		return fmt.Errorf("temperature is %v, want a number >= 0", p.Temperature)
	case !(p.TopP >= 0 && p.TopP <= 1):
		return fmt.Errorf("top_p is %v, want 0 to 1", p.TopP)
	case p.TopK < 0:
		return fmt.Errorf("top_k is %d, want >= 0", p.TopK)
	}
	return nil
}

// minTemperature is where sampling becomes greedy: below it exp underflows for any real difference.
const minTemperature = 1e-5

// Sample returns the token that follows the given logits; position is the index of the new token in
// its sequence. NaN logits are never chosen; it returns 0 when nothing else is left. The logits are
// only read.
func Sample(logits []float32, p Params, position int) int32 {
	best := Greedy(logits)
	if p.Temperature < minTemperature || p.TopK == 1 || len(logits) == 0 {
		return best
	}
	top := float64(logits[best])
	if math.IsInf(top, 0) || math.IsNaN(top) {
		return best
	}
	d := distribution{logits: logits, top: top, temperature: p.Temperature}
	u := draw(p.Seed, position)
	if p.TopK == 0 && (p.TopP == 0 || p.TopP == 1) {
		return d.pick(u)
	}
	kept, total := d.restrict(p)
	left := float64(u * total) // the conversion keeps compilers from fusing
	for _, c := range kept {
		if left -= c.weight; left < 0 {
			return c.id
		}
	}
	return best // rounding left a remainder
}

// Greedy is the index of the highest logit, the lowest of equals.
func Greedy(logits []float32) int32 {
	best, high := 0, float32(math.Inf(-1))
	for i, v := range logits {
		if v > high {
			best, high = i, v
		}
	}
	return int32(best)
}

// distribution gives each token the weight exp((logit-top)/temperature); top is the highest logit.
type distribution struct {
	logits           []float32
	top, temperature float64
}

func (d *distribution) weight(logit float32) float64 {
	if logit != logit { // NaN
		return 0
	}
	return exp((float64(logit) - d.top) / d.temperature)
}

// run is how many tokens are summed at a time.
const run = 256

func (d *distribution) sum(first int) (sum float64) {
	for _, v := range d.logits[first:min(first+run, len(d.logits))] {
		sum += d.weight(v)
	}
	return sum
}

// pick finds the token at share u of all weight, in the order of ids. It sums once, by runs, and looks
// into only one of them.
func (d *distribution) pick(u float64) int32 {
	sums := make([]float64, 0, 1024)
	total := 0.0
	for first := 0; first < len(d.logits); first += run {
		sums = append(sums, d.sum(first))
		total += sums[len(sums)-1]
	}
	left, first := float64(u*total), 0
	for first/run < len(sums)-1 && left >= sums[first/run] {
		left -= sums[first/run]
		first += run
	}
	last := int32(0)
	for i, v := range d.logits[first:min(first+run, len(d.logits))] {
		w := d.weight(v)
		if w > 0 {
			last = int32(first + i)
		}
		if left -= w; left < 0 {
			return last
		}
	}
	return last // rounding left a remainder
}

// candidate is a token that may be chosen.
type candidate struct {
	id     int32
	logit  float32
	weight float64
}

// byLogit orders the likeliest first, equals by id.
func byLogit(a, b candidate) int {
	if c := cmp.Compare(b.logit, a.logit); c != 0 {
		return c
	}
	return cmp.Compare(a.id, b.id)
}

// restrict gives the tokens that top-k and then top-p leave, likeliest first, and their weight.
func (d *distribution) restrict(p Params) (kept []candidate, total float64) {
	if p.TopK > 0 {
		kept = candidates(d.logits, p.TopK, float32(math.Inf(-1)))
	} else {
		for first := 0; first < len(d.logits); first += run {
			total += d.sum(first)
		}
		// Tokens so unlikely that all of them together fit into the rest are not among the likeliest: most
		// of a vocabulary need not be sorted. Taking a few too many changes nothing.
		small := (1 - p.TopP) * total / float64(len(d.logits))
		kept = candidates(d.logits, len(d.logits), float32(d.top+d.temperature*math.Log(small)-0.01))
	}
	sum := 0.0
	for i := range kept {
		kept[i].weight = d.weight(kept[i].logit)
		sum += kept[i].weight
	}
	if p.TopK > 0 {
		total = sum
	}
	if p.TopP == 0 || p.TopP == 1 {
		return kept, total
	}
	sum = 0
	for i, c := range kept {
		if sum += c.weight; sum >= p.TopP*total {
			return kept[:i+1], sum
		}
	}
	return kept, sum
}

// candidates lists the k likeliest tokens above floor, likeliest first.
func candidates(logits []float32, k int, floor float32) (kept []candidate) {
	for id, v := range logits {
		if !(v > floor) { // NaN, impossible, or an equal with a higher id
			continue
		}
		kept = append(kept, candidate{id: int32(id), logit: v})
		if len(kept) == 2*k {
			slices.SortFunc(kept, byLogit)
			kept = kept[:k]
			floor = kept[k-1].logit
		}
	}
	slices.SortFunc(kept, byLogit)
	return kept[:min(k, len(kept))]
}

// draw is uniform in [0,1): two rounds of the splitmix64 finaliser over seed and position.
func draw(seed uint64, position int) float64 {
	return float64(mix(mix(seed)+uint64(position))>>11) / (1 << 53)
}

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// exp is e**x for x <= 0. math.Exp may differ in the last bit between architectures, and two engines
// must not draw different tokens; FMA is exact everywhere.
func exp(x float64) float64 {
	if x < -700 {
		return 0
	}
	const ln2hi, ln2lo = 6.93147180369123816490e-01, 1.90821492927058770002e-10
	n := math.RoundToEven(x * math.Log2E)
	r := math.FMA(-n, ln2lo, math.FMA(-n, ln2hi, x))
	sum := 1.0 / 479001600 // 1/12!
	for _, c := range [...]float64{1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040, 1. / 720, 1. / 120, 1. / 24, 1. / 6, 0.5, 1, 1} {
		sum = math.FMA(sum, r, c) // Taylor by Horner: |r| <= 0.35, so the rest is below 2e-16
	}
	return sum * math.Float64frombits(uint64(int64(n)+1023)<<52)
}
