package sample

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestGreedy(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for _, c := range []struct {
		logits []float32
		want   int32
	}{
		{[]float32{1, 3, 2}, 1},
		{[]float32{1, 3, 3}, 1}, // ties by lowest id
		{[]float32{nan, -5, nan}, 1},
		{[]float32{nan, nan}, 0},
		{[]float32{1, inf, inf}, 1},
		{[]float32{-inf, -inf}, 0},
		{nil, 0},
	} {
		require.Equal(t, c.want, Sample(c.logits, Params{}, 0), "%v", c.logits)
		require.Equal(t, c.want, Sample(c.logits, Params{Temperature: 1, TopK: 1}, 7), "%v", c.logits)
	}
	require.Equal(t, int32(1), Sample([]float32{1, inf, 2}, Params{Temperature: 1}, 0))
	require.Equal(t, int32(0), Sample([]float32{nan, nan}, Params{Temperature: 1}, 0))
}

// shares samples often and counts how often each token comes.
func shares(logits []float32, p Params, n int) []float64 {
	counts := make([]float64, len(logits))
	for i := range n {
		counts[Sample(logits, p, i)] += 1 / float64(n)
	}
	return counts
}

// TestShares compares frequencies with probabilities.
func TestShares(t *testing.T) {
	logs := func(p ...float64) (out []float32) {
		for _, v := range p {
			out = append(out, float32(math.Log(v)))
		}
		return out
	}
	nan := float32(math.NaN())
	for name, c := range map[string]struct {
		logits []float32
		params Params
		want   []float64
	}{
		"plain":             {logs(0.1, 0.6, 0.3), Params{Temperature: 1}, []float64{0.1, 0.6, 0.3}},
		"hot":               {logs(0.1, 0.6, 0.3), Params{Temperature: 1e6}, []float64{0.333, 0.333, 0.333}},
		"cold":              {logs(0.1, 0.6, 0.3), Params{Temperature: 0.05}, []float64{0, 1, 0}},
		"square":            {logs(0.2, 0.4, 0.4), Params{Temperature: 0.5}, []float64{1. / 9, 4. / 9, 4. / 9}},
		"top 2":             {logs(0.1, 0.6, 0.3), Params{Temperature: 1, TopK: 2}, []float64{0, 2. / 3, 1. / 3}},
		"top 2 of ties":     {logs(0.2, 0.2, 0.4, 0.2), Params{Temperature: 1, TopK: 2}, []float64{1. / 3, 0, 2. / 3, 0}},
		"more than all":     {logs(0.5, 0.5), Params{Temperature: 1, TopK: 10}, []float64{0.5, 0.5}},
		"half":              {logs(0.1, 0.6, 0.3), Params{Temperature: 1, TopP: 0.5}, []float64{0, 1, 0}},
		"most":              {logs(0.1, 0.6, 0.3), Params{Temperature: 1, TopP: 0.8}, []float64{0, 2. / 3, 1. / 3}},
		"all but nothing":   {logs(0.1, 0.6, 0.3), Params{Temperature: 1, TopP: 0.95}, []float64{0.1, 0.6, 0.3}},
		"top k, then top p": {logs(0.3, 0.3, 0.2, 0.2), Params{Temperature: 1, TopK: 3, TopP: 0.7}, []float64{0.5, 0.5, 0, 0}},
		"nan and never":     {[]float32{nan, 0, float32(math.Inf(-1)), 0}, Params{Temperature: 1}, []float64{0, 0.5, 0, 0.5}},
	} {
		got := shares(c.logits, c.params, 20_000)
		for i, want := range c.want {
			require.InDelta(t, want, got[i], 0.015, "%s: token %d of %v", name, i, got)
			if want == 0 {
				require.Zero(t, got[i], name)
			}
		}
	}
}

// TestFunctionOfSeedAndPosition: the same at any time, different at another seed or position.
func TestFunctionOfSeedAndPosition(t *testing.T) {
	logits := make([]float32, 1000)
	a, b, again := []int32{}, []int32{}, []int32{}
	for i := range 100 {
		a = append(a, Sample(logits, Params{Temperature: 1, Seed: 1}, i))
		b = append(b, Sample(logits, Params{Temperature: 1, Seed: 2}, i))
	}
	for i := 99; i >= 0; i-- {
		again = append([]int32{Sample(logits, Params{Temperature: 1, Seed: 1}, i)}, again...)
	}
	require.Equal(t, a, again)
	same := 0
	for i := range a {
		if a[i] == b[i] {
			same++
		}
	}
	require.Less(t, same, 5)
	// What must never change between releases, or a request moved to a newer engine changes its text.
	require.Equal(t, []int32{597, 596, 112, 28}, pinned(logits))
}

func pinned(logits []float32) (out []int32) {
	for i := range 4 {
		out = append(out, Sample(logits, Params{Temperature: 0.7, TopP: 0.9, TopK: 900, Seed: 3}, i))
	}
	return out
}

// TestAgainstFullSort compares the pruned search with the obvious one.
func TestAgainstFullSort(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		logits := make([]float32, 1+r.IntN(500))
		for i := range logits {
			logits[i] = float32(r.IntN(20)) / 3 // many ties
		}
		k := r.IntN(len(logits) + 1)
		k = max(k, 1)
		floor := float32(math.Inf(-1))
		all := candidates(logits, len(logits), floor)
		got := candidates(logits, k, floor)
		for _, list := range [][]candidate{all, got} {
			sortCandidates(list)
		}
		require.Equal(t, all[:k], got)
	}
}

func sortCandidates(list []candidate) {
	for i := range list { // insertion sort: not the code under test
		for j := i; j > 0 && byLogit(list[j], list[j-1]) < 0; j-- {
			list[j], list[j-1] = list[j-1], list[j]
		}
	}
}

func TestValidate(t *testing.T) {
	require.NoError(t, Params{}.Validate())
	require.NoError(t, Params{Temperature: 2, TopP: 1, TopK: 5}.Validate())
	for field, p := range map[string]Params{
		"temperature": {Temperature: -1},
		"top_p":       {TopP: 1.1},
		"top_k":       {TopK: -1},
	} {
		require.ErrorContains(t, p.Validate(), field)
	}
	require.Error(t, Params{Temperature: math.NaN()}.Validate())
	require.Error(t, Params{Temperature: math.Inf(1)}.Validate())
	require.Error(t, Params{TopP: math.NaN()}.Validate())
}

func TestExp(t *testing.T) {
	for x := -690.0; x <= 0; x += 0.0173 {
		require.InEpsilon(t, math.Exp(x), exp(x), 4e-16, "exp(%v)", x)
	}
	require.Zero(t, exp(-800))
	require.Zero(t, exp(math.Inf(-1)))
	require.InDelta(t, 1, exp(0), 0)
}

func BenchmarkSample(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	logits := make([]float32, 49152)
	for i := range logits {
		logits[i] = float32(r.NormFloat64() * 3)
	}
	for name, p := range map[string]Params{
		"greedy": {}, "temperature": {Temperature: 0.8},
		"top_p": {Temperature: 0.8, TopP: 0.95}, "top_k": {Temperature: 0.8, TopK: 50},
	} {
		b.Run(name, func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				Sample(logits, p, i)
			}
		})
	}
}
