package p2p

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

func plugin() connector.Plugin {
	return sdk.FromPipe(sdk.Definition{Name: "PipeConnector", Version: "1", Groups: true, LayerWise: true, Stats: append(sdk.PeerStats(), sdk.LayerStats()...)}, Open)
}

func TestConformance(t *testing.T) {
	conformance.Run(t, conformance.Wire(plugin(), json.RawMessage(`{}`)), conformance.Pipe, conformance.Store, conformance.MultiRank, conformance.Groups, conformance.LayerWise)
}

func TestConformanceOverSharedMemory(t *testing.T) {
	conformance.Run(t, conformance.Wire(plugin(), json.RawMessage(`{"transport":"shm"}`)), conformance.Pipe, conformance.Store, conformance.MultiRank, conformance.Groups, conformance.LayerWise)
}

func TestConfig(t *testing.T) {
	for field, config := range map[string]string{
		"transport": `{"transport":"rdma"}`, "socket_dir": `{"socket_dir":"/tmp/x"}`, "listen": `{"transport":"shm","listen":"0.0.0.0:1"}`, "key_file": `{"transport":"shm","key_file":"x"}`,
	} {
		_, err := sdk.DecodeConfig[Config](json.RawMessage(config))
		require.ErrorContains(t, err, field)
	}
	for _, config := range []string{`{}`, `{"transport":"tcp","listen":"127.0.0.1:0"}`, `{"transport":"shm","socket_dir":"/tmp/x"}`, `{"transport":"shm"}`} {
		_, err := sdk.DecodeConfig[Config](json.RawMessage(config))
		require.NoError(t, err, config)
	}
}

// Between prefill and decode, with a relay that cuts, holds up, changes and reorders. Only what needs
// processes of its own is skipped here; the binary's test runs that.
func TestPD(t *testing.T) {
	if testing.Short() {
		t.Skip("20 s of waiting for producers that do not answer; make test runs it, and with -short the profile pipe has a part")
	}
	o := conformance.Options{Profiles: []conformance.Profile{conformance.PDProducer, conformance.PDConsumer}}
	for _, r := range conformance.Check(t.Context(), conformance.Wire(plugin(), json.RawMessage(`{}`)), o) {
		require.NotEqual(t, conformance.Fail, r.Status, "%s (%s): %v", r.ID, r.Rule, r.Log)
		// These want a load that fetches: this consumer has the blocks when it offers them.
		fetching := r.ID == "pd-late-next" || r.ID == "pd-asked-late"
		if r.Status == conformance.Skip && strings.HasPrefix(r.ID, "pd-") && !fetching {
			require.Contains(t, r.Log[0], "kvport conform runs it in its own", r.ID)
		}
	}
}

// With a shared key what was changed on its way fails in TLS.
func TestPDWithKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(path, []byte(strings.Repeat("k", 32)), 0o600))
	config, err := json.Marshal(Config{KeyFile: path, Digest: true, Listen: "127.0.0.1:0", Bytes: 1 << 24})
	require.NoError(t, err)
	o := conformance.Options{Only: []string{"pd-handoff", "pd-cut", "pd-corrupt", "pd-drip"}}
	for _, r := range conformance.Check(t.Context(), conformance.Wire(plugin(), config), o) {
		require.Equal(t, conformance.Pass, r.Status, "%s (%s): %v", r.ID, r.Rule, r.Log)
	}
}

func TestKeyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	c := Config{KeyFile: path, Listen: "0.0.0.0:0"}
	_, err := c.network(&connector.Env{})
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.WriteFile(path, []byte(strings.Repeat("k", 32)), 0o600))
	n, err := c.network(&connector.Env{})
	require.NoError(t, err)
	l, err := n.Listen(t.Context())
	require.NoError(t, err)
	require.NoError(t, l.Close())
	require.NoError(t, os.Chmod(path, 0o644))
	_, err = c.network(&connector.Env{})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "key_file")
}

// The host's link key is used if the config has no key file; without either, nothing starts.
func TestLinkKey(t *testing.T) {
	link := connector.Secret(strings.Repeat("l", 32))
	c := Config{Listen: defaultListen}
	more := []connector.Secret{connector.Secret(strings.Repeat("m", 32))}
	n, err := c.network(&connector.Env{LinkKey: link, MoreLinkKeys: more})
	require.NoError(t, err)
	require.Equal(t, link, n.Key)
	require.Equal(t, more, n.More)
	_, err = Open(t.Context(), connector.Env{}, c)
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "key_file")
	_, err = Open(t.Context(), connector.Env{}, Config{Transport: "shm"})
	require.NoError(t, err, "the kernel says there whose process it is")
}
