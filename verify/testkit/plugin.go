package testkit

import (
	"fmt"
	"os/exec"
	"testing"
)

// Starts says why this machine cannot run a plugin that needs no build, such as a script: it is asked for its manifest with
// nothing in the environment, as a host does.
func Starts(t testing.TB, program string) error {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, "--manifest")
	cmd.Env = []string{}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}
