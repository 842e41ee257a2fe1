package vllmtrace

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// vLLM keeps its side. The recorded connector breaks one rule: it offers blocks again that it has
// just failed to load (fail_every of the serve trace), which is why a host must deny them.
func TestTracesKeepTheInvariants(t *testing.T) {
	for _, name := range traces() {
		broken := map[int]int{}
		for _, v := range Check(readTrace(t, name)) {
			broken[v.Number]++
			t.Log(v)
		}
		want := map[string]map[int]int{"async": {}, "serve": {45: 4}}[name]
		require.Equal(t, want, broken, name)
		t.Logf("%s: %d invariants checked", name, len(Rules()))
	}
}

func TestRulesAreInOrder(t *testing.T) {
	require.True(t, slices.IsSortedFunc(Rules(), func(a, b Rule) int { return a.Number - b.Number }))
}
