package main

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
)

func TestBinary(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and kills processes; make test runs it")
	}
	path := filepath.Join(t.TempDir(), "kvport-p2p")
	output, err := exec.Command("go", "build", "-buildvcs=false", "-o", path, ".").CombinedOutput()
	require.NoError(t, err, "%s", output)
	conformance.Run(t, conformance.Binary(path, nil), conformance.Pipe, conformance.LayerWise, conformance.Lifecycle)
	o := conformance.Options{Only: []string{"pd-killed", "pd-stopped", "pd-taker-killed"}}
	for _, r := range conformance.Check(t.Context(), conformance.Binary(path, nil), o) {
		require.Equal(t, conformance.Pass, r.Status, "%s (%s): %v", r.ID, r.Rule, r.Log)
	}
}
