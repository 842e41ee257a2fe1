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
	kept := candidates(logits, p.TopK)
	total := 0.0
	for i := range kept {
		kept[i].weight = exp((float64(kept[i].logit) - top) / p.Temperature)
		total += kept[i].weight
	}
	if p.TopP > 0 && p.TopP < 1 {
		kept, total = nucleus(kept, p.TopP, total)
	}
	left := float64(draw(p.Seed, position) * total) // the conversion keeps compilers from fusing
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

// candidates lists the k likeliest tokens, or all if k is 0.
func candidates(logits []float32, k int) []candidate {
	if k == 0 || k > len(logits) {
		k = len(logits)
	}
	kept := make([]candidate, 0, min(2*k, len(logits)))
	floor := float32(math.Inf(-1))
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
	if len(kept) > k {
		slices.SortFunc(kept, byLogit)
		kept = kept[:k]
	}
	return kept
}

// nucleus keeps the shortest run of likeliest tokens that holds share p of the total weight.
func nucleus(kept []candidate, p, total float64) ([]candidate, float64) {
	// Tokens so small that all of them together fit into the rest cannot be part of it: most of a
	// vocabulary need not be sorted.
	small := (1 - p) * total / float64(len(kept))
	kept = slices.DeleteFunc(kept, func(c candidate) bool { return c.weight < small })
	slices.SortFunc(kept, byLogit)
	sum := 0.0
	for i, c := range kept {
		if sum += c.weight; sum >= p*total {
			return kept[:i+1], sum
		}
	}
	return kept, sum
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
	sum := 1.0
	for k := 14.0; k >= 1; k-- { // Taylor by Horner: |r| <= 0.35, so the rest is below 1e-18
		sum = math.FMA(sum, r/k, 1)
	}
	return math.Ldexp(sum, int(n))
}
