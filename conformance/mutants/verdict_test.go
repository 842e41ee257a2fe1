package mutants_test

import (
	"os"
	"testing"

	"github.com/kvport/kvport/conformance"
)

// decided reports whether a result is a verdict. One that a busy machine has kept back, three times, is none: it proves nothing of a right
// connector and catches no wrong one. Where conformance.MayBeInconclusive permits that the test says so and goes on without it; elsewhere, and
// so in make soak, it has failed.
func decided(t *testing.T, r conformance.Result) bool {
	t.Helper()
	if r.Status != conformance.Inconclusive {
		return true
	}
	say := t.Logf
	if os.Getenv(conformance.MayBeInconclusive) == "" {
		say = t.Errorf
	}
	say("%s (%s): there is no verdict: %v", r.ID, r.Rule, r.Log)
	return false
}
