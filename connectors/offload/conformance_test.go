package offload_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/offload"
	"github.com/kvport/kvport/sdk"
)

func plugin() connector.Plugin {
	d := sdk.Definition{Name: "offloading in a test", Version: "test", Scope: offload.Scope, Groups: true, Capabilities: offload.Capabilities, Stats: offload.StatInfos(), Medium: offload.Medium}
	return sdk.FromStore(d, offload.Open)
}

func config(t *testing.T) json.RawMessage {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "plugins", "offload", "conform.json"))
	require.NoError(t, err)
	return b
}

func profiles() []conformance.Profile {
	return []conformance.Profile{conformance.Store, conformance.MultiRank, conformance.Groups, conformance.Offload}
}

func TestInProcess(t *testing.T) {
	conformance.Run(t, conformance.InProcess(plugin(), config(t)), profiles()...)
}

func TestOverTheWire(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: TestInProcess runs the same cases")
	}
	conformance.Run(t, conformance.Wire(plugin(), config(t)), profiles()...)
}

// What is saved after the file of the disk tier was removed outlives the engine, also what memory had (rule FAULT-11).
func TestRemovedFile(t *testing.T) {
	config := json.RawMessage(`{"num_cpu_blocks": 64, "disk_path": "@TMP@/tier", "disk_bytes": 1048576, "disk_admit_after": 1}`)
	for _, r := range conformance.Check(t.Context(), conformance.InProcess(plugin(), config), conformance.Options{Only: []string{"removed", "removed-open"}}) {
		require.Equal(t, conformance.Pass, r.Status, "%s: %v", r.ID, r.Log)
	}
}

func TestStaged(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: TestInProcess runs the same cases")
	}
	conformance.Run(t, conformance.Staged(conformance.Wire(plugin(), config(t))), profiles()...)
}

// Rules PLACE-29, PLACE-32 and PLACE-33: the memory tier lends slots, at each trust level and over the wire.
func TestLent(t *testing.T) {
	config := json.RawMessage(`{"num_cpu_blocks": 512}`)
	for _, h := range []conformance.Maker{
		conformance.InProcess(plugin(), config), conformance.Wire(plugin(), config), conformance.Staged(conformance.Wire(plugin(), config)),
	} {
		for _, r := range conformance.Check(t.Context(), h, conformance.Options{Only: []string{"lent", "lent-found", "lent-back"}}) {
			require.Equal(t, conformance.Pass, r.Status, "%s: %v", r.ID, r.Log)
		}
	}
}

// Rule PLACE-27: what is in memory is all there is without a disk tier, whatever is evicted or declined, and in pieces too.
func TestComplete(t *testing.T) {
	for _, config := range []string{
		`{"num_cpu_blocks": 16}`, `{"num_cpu_blocks": 16, "eviction_policy": "arc"}`, `{"num_cpu_blocks": 16, "block_size": 8}`,
		`{"num_cpu_blocks": 40, "tenant_bytes": 4096}`, `{"num_cpu_blocks": 16, "store_threshold": 2}`, `{"cpu_bytes_to_use": 1048576}`,
	} {
		info, err := plugin().Describe(t.Context(), json.RawMessage(config))
		require.NoError(t, err)
		require.True(t, info.Complete, config)
		for seed := range uint64(3) {
			o := conformance.Options{Only: []string{"place-complete"}, Seed: seed}
			r := conformance.Check(t.Context(), conformance.InProcess(plugin(), json.RawMessage(config)), o)[0]
			require.Equal(t, conformance.Pass, r.Status, "%s: %v", config, r.Log)
		}
	}
	info, err := plugin().Describe(t.Context(), json.RawMessage(`{"disk_path": "/x", "disk_bytes": 65536}`))
	require.NoError(t, err)
	require.False(t, info.Complete)
}
