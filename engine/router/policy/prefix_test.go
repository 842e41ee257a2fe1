package policy_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/policy"
)

// cluster is prefill and decode machines with caches of that number of blocks.
func cluster(prefills, decodes, blocks int) (list []*machine) {
	for i := range prefills + decodes {
		m := &machine{role: policy.Prefill, cache: newCache(blocks), rate: 50e-6, base: 0.005, link: 2e-6}
		if i >= prefills {
			m.role, m.rate = policy.Decode, 80e-6
		}
		list = append(list, m)
	}
	return list
}

// TestPrefixAwareHits: by its own history alone, prefix_aware finds nearly as much in the caches as if it were told
// what each cache holds.
func TestPrefixAwareHits(t *testing.T) {
	for _, tt := range []struct {
		name             string
		prefills, blocks int
	}{
		{"2 prefill instances, ample caches", 2, 60_000},
		{"2 prefill instances, scarce caches", 2, 2_000},
		{"8 prefill instances, ample caches", 8, 60_000},
		{"8 prefill instances, scarce caches", 8, 2_000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for seed := range uint64(2) {
				trace := conversations(seed, 40*tt.prefills, 6, 0.12/float64(tt.prefills), 20)
				ratio := func(name string, told bool) float64 {
					w := newWorld(policy.Config{Policy: name}, cluster(tt.prefills, tt.prefills, tt.blocks))
					w.told = told
					w.run(trace)
					return float64(w.cached) / float64(w.prompt)
				}
				own, oracle := ratio(policy.PrefixAware, false), ratio(policy.PrefixAware, true)
				t.Logf("seed %d: prefix_aware %.3f, oracle %.3f (%.1f %%), round_robin %.3f, least_loaded %.3f, session %.3f, pd_aware %.3f",
					seed, own, oracle, 100*own/oracle, ratio(policy.RoundRobin, false), ratio(policy.LeastLoaded, false), ratio(policy.Session, false), ratio(policy.PDAware, false))
				require.GreaterOrEqual(t, own, 0.95*oracle)
			}
		})
	}
}
