package mutants_test

import (
	"encoding/json"
	"testing"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

// The reference of the profile remote passes it, on a real server.
func TestRemoteReference(t *testing.T) {
	config := json.RawMessage(`{"url": "redis://@SERVER@", "password_file": "@PASSWORD_FILE@"}`)
	conformance.Run(t, conformance.InProcess(mutants.Remote(), config), conformance.Store, conformance.Remote)
	conformance.Run(t, conformance.Wire(mutants.Remote(), config), conformance.Remote)
}
