package rig

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// wandering is noise that keeps half of what it was for seven samples.
func wandering() func(rng *rand.Rand, i int) float64 {
	last := 0.0
	return func(rng *rand.Rand, _ int) float64 {
		last = 0.9*last + rng.NormFloat64()
		return 30_000 + 500*last
	}
}

// TestTrend: what only varies does not grow, and a leak does that is smaller than the noise of a sample.
func TestTrend(t *testing.T) {
	const samples, minutes = 300, 15.0
	for _, c := range []struct {
		name  string
		value func(rng *rand.Rand, i int) float64
		grows bool
	}{
		{"the same", func(*rand.Rand, int) float64 { return 12 }, false},
		{"noise", func(rng *rand.Rand, _ int) float64 { return 30_000 + 2_000*rng.NormFloat64() }, false},
		{"noise with peaks", func(rng *rand.Rand, _ int) float64 { return 30_000 + 1_000*math.Exp(2*rng.NormFloat64()) }, false},
		{"a garbage collector's saw", func(rng *rand.Rand, i int) float64 { return 30_000 + float64(i*37%4_000) + 100*rng.NormFloat64() }, false},
		{"one step", func(rng *rand.Rand, i int) float64 {
			return 30_000 + 2_048*float64(i/(samples/2)) + 100*rng.NormFloat64()
		}, false},
		{"two steps", func(rng *rand.Rand, i int) float64 {
			return 30_000 + 2_048*float64(i/(samples/3)) + 100*rng.NormFloat64()
		}, false},
		{"windows that hang together", wandering(), false},
		{"a page now and then", func(_ *rand.Rand, i int) float64 { return 30_000 + 4*float64(i/20) }, false},
		{"it falls", func(rng *rand.Rand, i int) float64 { return 30_000 - 10*float64(i) + 100*rng.NormFloat64() }, false},
		{"a slow leak", func(rng *rand.Rand, i int) float64 { return 30_000 + 25*float64(i) + 1_000*rng.NormFloat64() }, true},
		{"a leak under a saw", func(_ *rand.Rand, i int) float64 { return 30_000 + 25*float64(i) + float64(i*1237%4_000) }, true},
		{"six steps", func(rng *rand.Rand, i int) float64 {
			return 30_000 + 2_048*float64(i/(samples/7+1)) + 100*rng.NormFloat64()
		}, true},
		{"many steps", func(rng *rand.Rand, i int) float64 {
			return 30_000 + 2_048*float64(i/(samples/10)) + 100*rng.NormFloat64()
		}, true},
		{"little, and for sure", func(_ *rand.Rand, i int) float64 { return 30_000 + 2*float64(i) }, true},
		{"a descriptor now and then", func(_ *rand.Rand, i int) float64 { return 40 + float64(i/(samples/8)) }, true},
	} {
		for seed := range uint64(200) {
			rng := rand.New(rand.NewPCG(seed, 0))
			values := make([]float64, samples)
			for i := range values {
				values[i] = c.value(rng, i)
			}
			trend, err := TrendOf(values, minutes)
			require.NoError(t, err)
			require.Equal(t, c.grows, trend.Grows(), "%s, seed %d: %+v", c.name, seed, trend)
			require.LessOrEqual(t, trend.Low, trend.Slope)
			require.LessOrEqual(t, trend.Slope, trend.High)
		}
	}
	values := make([]float64, samples)
	for i := range values {
		values[i] = 100 + 3*float64(i)*minutes/samples
	}
	trend, err := TrendOf(values, minutes)
	require.NoError(t, err)
	require.InDelta(t, 3, trend.Slope, 0.01, "in units a minute")
	_, err = TrendOf(values[:20], 1)
	require.Error(t, err)
}
