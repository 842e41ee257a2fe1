package mutants_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

// A connector that keeps its blocks in a file is never excused from the damage of files, least of all since it goes on in one that was removed.
func TestRemovedFilesAreNoExcuse(t *testing.T) {
	for _, m := range mutants.All() {
		if m.Case != "removed-open" {
			continue
		}
		got := map[string]conformance.Status{}
		for _, r := range conformance.Check(t.Context(), conformance.InProcess(m.Plugin(), configOf(m)), conformance.Options{Only: []string{"removed", "foreign", "removed-open"}}) {
			got[r.ID] = r.Status
			t.Log(r.ID, r.Status, r.Log)
		}
		require.Equal(t, map[string]conformance.Status{"removed": conformance.Pass, "foreign": conformance.Pass, "removed-open": conformance.Fail}, got)
		return
	}
	require.Fail(t, "no such mutant")
}

// A connector whose files need each other may be empty after they were removed, and have others whenever it opens.
func TestRemovedFilesOfADatabase(t *testing.T) {
	o := conformance.Options{Only: []string{"removed", "removed-open"}}
	for _, r := range conformance.Check(t.Context(), conformance.InProcess(mutants.Paired(), filesConfig()), o) {
		require.Equal(t, conformance.Pass, r.Status, "%s: %v", r.ID, r.Log)
	}
}

// A connector that keeps its blocks in one file, which it reads up to what is damaged and ends there, passes what is done to files.
func TestOneFile(t *testing.T) {
	o := conformance.Options{Only: []string{
		"flipped", "truncated", "emptied", "oversized", "removed", "removed-open", "swapped", "foreign", "another-version", "visible", "reopen",
	}}
	for _, r := range conformance.Check(t.Context(), conformance.InProcess(mutants.OneFile(), filesConfig()), o) {
		if decided(t, r) {
			require.Equal(t, conformance.Pass, r.Status, "%s: %v", r.ID, r.Log)
		}
	}
}
