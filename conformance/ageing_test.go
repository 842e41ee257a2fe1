package conformance_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

// A store that finds blocks by a map is as quick with many as with few.
func TestAgeing(t *testing.T) {
	r := conformance.Check(t.Context(), conformance.InProcess(mutants.StoreReference(), nil), conformance.Options{Only: []string{"ageing"}})[0]
	if r.Status == conformance.Inconclusive && os.Getenv(conformance.MayBeInconclusive) != "" {
		t.Skip(r.Log[0])
	}
	require.Equal(t, conformance.Pass, r.Status, "%v", r.Log)
}
