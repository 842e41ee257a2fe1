package simulate

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestMutants: a simulation that does not notice a wrong host is worth nothing. Each mutant is an
// incident of a serving system; its row says how many of the seeds notice it, and how.
func TestMutants(t *testing.T) {
	list, least := Mutants(), 3
	if soaking() {
		least = 100
	}
	require.Len(t, list, int(mutants)-1)
	require.GreaterOrEqual(t, len(list), 45)
	for i, m := range list {
		require.Equal(t, Mutant(i+1), m.Mutant, m.Name)
		t.Run(m.Name, func(t *testing.T) {
			k := Hunt(m, least, 2000, steps)
			if assert.NotNil(t, k.First, "%s survives %d seeds: %s (%s)", m.Name, k.Seeds, m.Does, m.Incident) {
				t.Logf("%-18s %3d of %4d seeds, seed %4d %v", m.Name, k.Killed, k.Seeds, k.Seed, k.First)
			}
		})
	}
}
