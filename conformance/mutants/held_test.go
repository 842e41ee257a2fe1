package mutants_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

// Where one process holds what a connector keeps, no case opens it in two at a time.
func TestHeldReference(t *testing.T) {
	conformance.Run(t, conformance.InProcess(mutants.Held(), filesConfig()), conformance.Store, conformance.MultiRank, conformance.Groups)
}

// As processes of their own the engines of a case end before the next one opens, lives go on with what the last one kept, and what a case
// cannot do it skips, saying why.
func TestHeldAsBinary(t *testing.T) {
	if testing.Short() {
		t.Skip("some 40 processes, each with the race detector in make race; make test runs them")
	}
	held := conformance.Binary(plugin(t, "kvport-held"), filesConfig())
	if os.Getenv("KVPORT_SOAK") != "" {
		conformance.Run(t, held, conformance.Store, conformance.MultiRank, conformance.Groups, conformance.Lifecycle, conformance.Fault)
		return
	}
	for _, r := range conformance.Check(t.Context(), held, conformance.Options{
		Profiles: []conformance.Profile{conformance.Store, conformance.MultiRank, conformance.Groups, conformance.Lifecycle, conformance.Fault},
		Only: []string{
			"engines-at-once", "strided-bytes", "guard-bytes", "other-shape", "other-key", "other-world", "group-strides",
			"many-sides", "replace", "shapes", "plain-bytes", "kill-idle", "kill-save", "kill-open", "kill-two", "random-kills", "read-only-disk",
		},
	}) {
		if r.ID == "read-only-disk" {
			require.Equal(t, conformance.Skip, r.Status, "%v", r.Log)
			require.Regexp(t, "keeps files open for writing|this machine permits no file system of our own", r.Log[0])
			continue
		}
		if decided(t, r) {
			require.Equal(t, conformance.Pass, r.Status, "%s: %v", r.ID, r.Log)
		}
	}
}

// A connector that says that engines share what one of them holds is told so, and which engine holds it, in whatever case a second engine opens.
func TestHeldBySomebody(t *testing.T) {
	for _, m := range mutants.All() {
		if m.Case != "engines-at-once" {
			continue
		}
		results := conformance.Check(t.Context(), conformance.InProcess(m.Plugin(), configOf(m)), conformance.Options{Only: []string{"visible", "other-shape", "engines-at-once"}})
		require.Len(t, results, 3)
		for _, r := range results {
			require.Equal(t, conformance.Fail, r.Status, r.ID)
			require.Equal(t, "OPEN-03", r.Rule, r.ID)
			require.Regexp(t, `engine conformance-\d holds .* engine conformance-\d of the case has its sides open, in process \d+$`, r.Log[0])
		}
		return
	}
	require.Fail(t, "no such mutant")
}
