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
}
