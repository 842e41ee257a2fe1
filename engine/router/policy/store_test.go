package policy_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/policy"
)

// TestStoreThatInstancesShare: beside a store that all instances load from, the mean time to the first token is shorter if
// a policy is told what lies in the store and what in each cache than if it is told one number for both, and what it finds
// out by its own history is nearly as good.
func TestStoreThatInstancesShare(t *testing.T) {
	for _, tt := range []struct {
		name  string
		fetch float64 // seconds for a token; computing one takes 50 us on a prefill instance, and 80 us on a decode instance
	}{{"a fast store", 4e-6}, {"a slow store", 60e-6}} {
		t.Run(tt.name, func(t *testing.T) {
			for _, name := range []string{policy.PrefixAware, policy.PDAware} {
				var scopes, mixed, history float64
				for seed := range uint64(2) {
					trace := mixedTrace(seed, 120, 0.08)
					run := func(told, mixed bool) float64 {
						machines := cluster(2, 4, 2_000)
						w := newWorld(policy.Config{Policy: name}, machines)
						w.told, w.mixed, w.store = told, mixed, newCache(100_000)
						for place, m := range machines {
							m.fetch = tt.fetch
							w.policy.Shares(place, true, true)
						}
						w.run(slices.Clone(trace))
						require.Equal(t, len(trace), w.answered)
						return 1e3 * w.ttft / float64(w.answered)
					}
					s, m, h := run(true, false), run(true, true), run(false, false)
					t.Logf("%s, seed %d: told scopes %.1f ms, told one number %.1f ms, by its own history %.1f ms", name, seed, s, m, h)
					scopes, mixed, history = scopes+s, mixed+m, history+h
				}
				require.Less(t, scopes, mixed, name)
				require.Less(t, history, 1.05*scopes, name)
			}
		})
	}
}
