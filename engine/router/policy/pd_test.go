package policy_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/policy"
)

// mixedTrace is one of short and long prompts and of conversations.
func mixedTrace(seed uint64, seconds, gap float64) []job {
	jobs := conversations(seed, int(seconds/gap/16), 6, gap*2, 5)
	rng := rand.New(rand.NewPCG(seed, 2))
	for at := 0.0; at < seconds; at += rng.ExpFloat64() * gap * 2 {
		tokens := 40 + rng.IntN(400)
		if rng.IntN(4) == 0 {
			tokens = 2000 + rng.IntN(6000)
		}
		jobs = append(jobs, newJob(at, text(rng, tokens), 20+rng.IntN(100), ""))
	}
	return jobs
}

// TestPDAware: on mixed traces the mean time to the first token is not above the better of two fixed ways, always and
// never a prefill instance, whichever of the other policies chooses the instances there.
func TestPDAware(t *testing.T) {
	for _, tt := range []struct {
		name              string
		prefills, decodes int
		gap               float64
		change            func(i int, m *machine)
	}{
		{"two fast prefill instances", 2, 4, 0.08, func(int, *machine) {}},
		{"one prefill instance, too few", 1, 4, 0.05, func(int, *machine) {}},
		{"slow links", 2, 4, 0.08, func(_ int, m *machine) { m.link = 60e-6 }},
		{"one slow instance of each role", 3, 3, 0.08, func(i int, m *machine) {
			if i == 0 || i == 3 {
				m.rate, m.link = 4*m.rate, 20*m.link
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for seed := range uint64(2) {
				trace := mixedTrace(seed, 120, tt.gap)
				mean := func(name string, alone bool) (seconds, skipped float64) {
					machines := cluster(tt.prefills, tt.decodes, 20_000)
					for i, m := range machines {
						tt.change(i, m)
					}
					w := newWorld(policy.Config{Policy: name}, machines)
					w.alone = alone
					w.run(slices.Clone(trace))
					require.Equal(t, len(trace), w.answered)
					return w.ttft / float64(w.answered), float64(w.skipped) / float64(w.answered)
				}
				always, never := math.Inf(1), math.Inf(1)
				for _, name := range []string{policy.RoundRobin, policy.LeastLoaded, policy.PrefixAware} {
					with, _ := mean(name, false)
					without, _ := mean(name, true)
					t.Logf("%s: always %.0f ms, never %.0f ms", name, 1e3*with, 1e3*without)
					always, never = min(always, with), min(never, without)
				}
				own, skipped := mean(policy.PDAware, false)
				t.Logf("seed %d, %d requests: pd_aware %.0f ms (%.0f %% without prefill), best of always %.0f ms, of never %.0f ms",
					seed, len(trace), 1e3*own, 100*skipped, 1e3*always, 1e3*never)
				require.LessOrEqual(t, own, min(always, never))
			}
		})
	}
}

// TestPDAwareWithoutStreams: from answers that are not streamed pd_aware learns nothing about decode instances, so all but
// very short prompts go to prefill instances, and it is within 5 % of the best that always do. One stream in ten is enough to
// learn.
func TestPDAwareWithoutStreams(t *testing.T) {
	for _, streams := range []int{0, 10} {
		for seed := range uint64(2) {
			trace := mixedTrace(seed, 120, 0.08)
			rng := rand.New(rand.NewPCG(seed, 3))
			for i := range trace {
				trace[i].whole = rng.IntN(100) >= streams
			}
			run := func(name string, alone bool) *world {
				w := newWorld(policy.Config{Policy: name}, cluster(2, 4, 20_000))
				w.alone = alone
				w.run(slices.Clone(trace))
				require.Equal(t, len(trace), w.answered)
				return w
			}
			always, never := math.Inf(1), math.Inf(1)
			for _, name := range []string{policy.RoundRobin, policy.LeastLoaded, policy.PrefixAware} {
				always, never = min(always, run(name, false).ttft), min(never, run(name, true).ttft)
			}
			own, n := run(policy.PDAware, false), float64(len(trace))
			t.Logf("%d %% streams, seed %d: pd_aware %.0f ms, %d of %d prompts over 32 tokens without prefill; best of always %.0f ms, of never %.0f ms",
				streams, seed, 1e3*own.ttft/n, own.aside, len(trace), 1e3*always/n, 1e3*never/n)
			if streams == 0 {
				require.Zero(t, own.aside)
				require.LessOrEqual(t, own.ttft, 1.05*always)
				continue
			}
			require.Positive(t, own.aside)
			require.LessOrEqual(t, own.ttft, min(always, never))
		}
	}
}
