package mutants_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
	"github.com/kvport/kvport/conformance/redistest"
)

// The reference of the profile remote passes it, on a real server.
func TestRemoteReference(t *testing.T) {
	config := json.RawMessage(`{"url": "redis://@SERVER@", "password_file": "@PASSWORD_FILE@"}`)
	conformance.Run(t, conformance.InProcess(mutants.Remote(), config), conformance.Store, conformance.Remote)
	conformance.Run(t, conformance.Wire(mutants.Remote(), config), conformance.Remote)
}

// A connector with a connection for each block passes as few bytes through one as there can be: it is cut all the same, whatever the seed,
// on the way to a server of the suite and to another.
func TestCutsMeetEveryConnector(t *testing.T) {
	other, err := redistest.Start()
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Close()) }()
	for _, address := range []string{"@SERVER@", "@PROXY:" + other.Address + "@"} {
		config := json.RawMessage(`{"url": "redis://` + address + `", "password_file": "/dev/null", "one_use": true}`)
		for seed := range uint64(6) {
			for _, r := range conformance.Check(t.Context(), conformance.InProcess(mutants.Remote(), config), conformance.Options{
				Profiles: []conformance.Profile{conformance.Remote}, Only: []string{"remote-cut-load", "remote-cut-save"}, Seed: seed,
			}) {
				require.Equal(t, conformance.Pass, r.Status, "%s, seed %d: %v", r.ID, seed, r.Log)
			}
		}
	}
}
