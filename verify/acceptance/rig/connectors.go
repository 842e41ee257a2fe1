package rig

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/conformance/relay"
	"github.com/kvport/kvport/internal/machine"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// Connectors are the fixtures of plugins that have a property. What one needs and make deps has not put there is left out.
func Connectors(t *testing.T, have func(*fixture.Fixture) bool) (out fixture.List) {
	t.Helper()
	known := 0
	for _, f := range testkit.Fixtures(t) {
		if !strings.HasPrefix(f.Folder, "plugins/") || !have(f) {
			continue
		}
		known++
		if Ready(t, f) {
			out = append(out, f)
		}
	}
	require.Positive(t, known, "no fixture of a plugin has the property")
	if len(out) == 0 {
		t.Skip("no such connector is there")
	}
	return out
}

// Movers are the connectors that bring blocks from a prefill engine to a decode engine.
func Movers(t *testing.T) fixture.List {
	t.Helper()
	return Connectors(t, func(f *fixture.Fixture) bool { return f.Peers && f.Setups[0].Pairs })
}

// Ready says whether make deps has put what a connector needs.
func Ready(t *testing.T, f *fixture.Fixture) bool {
	t.Helper()
	if Have(t, f.Needs) {
		return true
	}
	t.Logf("%s IS NOT TESTED: there is no .deps/%s; run make deps", f.Connector, f.Needs)
	return false
}

// Have says whether make deps has put what a fixture needs where its plugin looks.
func Have(t *testing.T, needs string) bool {
	t.Helper()
	if needs == "" {
		return true
	}
	_, err := os.Stat(filepath.Join(testkit.Root(t), ".deps", needs, "lock.sha256"))
	require.True(t, err == nil || os.IsNotExist(err), "%v", err)
	require.False(t, err != nil && os.Getenv("KVPORT_NATIVE_TEST") != "", "make native-test needs %s", needs)
	return err == nil
}

// Need skips a test where make deps has not put a folder of .deps.
func Need(t *testing.T, folder string) {
	t.Helper()
	if !Have(t, folder) {
		t.Skipf("IT IS NOT TESTED: there is no .deps/%s; run make deps", folder)
	}
}

// FreePort is a port that nobody listens at, for those who must know theirs beforehand.
func FreePort(t *testing.T) string {
	t.Helper()
	port, err := machine.FreePort(t.Context())
	require.NoError(t, err)
	return port
}

// RemoteServer is a real server behind a relay, for one test.
func RemoteServer(t *testing.T, args ...string) (*redistest.Server, *relay.Relay) {
	t.Helper()
	srv, err := redistest.Start(args...)
	require.NoError(t, err)
	between, err := relay.New(srv.Address, 0)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, between.Close())
		require.NoError(t, srv.Close())
	})
	return srv, between
}

// Simulated is sim, unless -model says otherwise.
func Simulated() string {
	if *ModelName != "" {
		return *ModelName
	}
	return "sim"
}

// Pair is a prefill and a decode engine behind a router, with a connector given by its config.
func (r *Rig) Pair(config string) (p, d, router *cluster.Process) {
	r.Helper()
	of := func(role string) string { return fmt.Sprintf(`{"kv_role":%q,%s}`, role, config) }
	p, d = r.ServeModel(Simulated(), "prefill", of("kv_producer")), r.ServeModel(Simulated(), "decode", of("kv_consumer"))
	return p, d, r.Route(p, d)
}
