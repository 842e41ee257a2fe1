package acceptance

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/fixture"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/testkit"
)

var flagConnector = flag.String("connector", "", "connectors to test, by name with commas between; default: all that are found")

// backend is where the connectors of one test keep their blocks.
type backend struct {
	dir, server string // a folder of its own; host:port of a real Redis or Valkey server
	redis       *redistest.Server
}

// backend starts a server and makes a folder.
func newBackend(t *testing.T) backend {
	t.Helper()
	server, err := redistest.Start()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Close()) })
	return backend{dir: t.TempDir(), server: server.Address, redis: server}
}

// under is a backend apart from its siblings' on the same server.
func (b backend) under(t *testing.T, name string) backend {
	t.Helper()
	dir := filepath.Join(b.dir, strings.NewReplacer("/", "-", " ", "-").Replace(name))
	require.NoError(t, os.MkdirAll(dir, 0o700))
	return backend{dir: dir, server: b.server, redis: b.redis}
}

// scene is a connector as tests set it up.
type scene struct {
	*fixture.Fixture
	fixture.Setup
	name, binary string // binary is empty where the host composes the connector
}

// extra is the connector's own config for an engine of a role.
func (s *scene) extra(t *testing.T, b backend, role string) string {
	t.Helper()
	config, err := fixture.Fill(s.Config, fixture.Values{"TMP": b.dir, "NAME": filepath.Base(b.dir), "SERVER": b.server, "ROLE": role})
	require.NoError(t, err, "%s/fixture.json", s.Folder)
	return config
}

// title is the scene's name and how it is set up.
func (s *scene) title() string { return strings.TrimSuffix(s.name+", "+s.Name, ", ") }

// exampleFolder is where buildExamples puts its programs. TestMain makes and removes it.
var exampleFolder string

// buildExamples builds the examples that are Go programs as kvport-example-NAME, once for all tests: to link one takes longer than most tests.
var buildExamples = sync.OnceValue(func() error {
	mains, err := filepath.Glob("../../examples/*/main.go")
	if err != nil {
		return err
	}
	args := []string{"build", "-buildvcs=false", "-o", exampleFolder + "/"}
	var names []string
	for _, main := range mains {
		if name := filepath.Base(filepath.Dir(main)); name != "demo" {
			names, args = append(names, name), append(args, "../../examples/"+name)
		}
	}
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("build the examples: %w\n%s", err, out)
	}
	for _, name := range names {
		if err := os.Rename(filepath.Join(exampleFolder, name), filepath.Join(exampleFolder, "kvport-example-"+name)); err != nil {
			return err
		}
	}
	return nil
})

// example is the program of an example in Go.
func example(t *testing.T, name string) string {
	t.Helper()
	require.NoError(t, buildExamples())
	return filepath.Join(exampleFolder, "kvport-example-"+name)
}

// pluginPath are the folders in which the connectors are found: those of make build, the example in Python, and
// the examples that are built here.
func pluginPath(t *testing.T) []string {
	t.Helper()
	require.NoError(t, buildExamples())
	return []string{filepath.Join(testkit.Root(t), "bin"), filepath.Join(testkit.Root(t), "examples", "python"), exampleFolder}
}

// scenes are all connectors that answer with a manifest, each once and as its fixture sets it up first, or those of
// -connector. One without a fixture fails the test.
func scenes(t *testing.T) []scene {
	t.Helper()
	known := testkit.Fixtures(t)
	var out []scene
	for _, found := range host.List(t.Context(), pluginPath(t)) {
		require.NoError(t, found.Err)
		name := found.Manifest.Name
		if slices.ContainsFunc(out, func(s scene) bool { return s.name == name }) {
			continue
		}
		f := known.Of(name)
		require.NotNil(t, f, "no fixture.json for %s of %s", name, found.Path)
		if !rig.Ready(t, f) {
			continue
		}
		s := scene{Fixture: f, Setup: f.Setups[0], name: name, binary: found.Path}
		if name == host.MultiName {
			s.binary = "" // the host composes it
		}
		out = append(out, s)
	}
	require.GreaterOrEqual(t, len(out), 12, "connectors found")
	if *flagConnector != "" {
		out = slices.DeleteFunc(out, func(s scene) bool { return !slices.Contains(strings.Split(*flagConnector, ","), s.name) })
		require.NotEmpty(t, out, "-connector %s", *flagConnector)
	}
	return out
}

// variants are all ways in which its fixture sets a scene's connector up.
func (s *scene) variants() []scene {
	out := make([]scene, len(s.Setups))
	for i, setup := range s.Setups {
		out[i] = *s
		out[i].Setup = setup
	}
	return out
}

// config is a --kv-transfer-config of the connector.
func (s *scene) config(role, engine, extra, settings string) string {
	return fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"engine_id":%q,"kv_connector_module_path":%q,"kv_connector_extra_config":%s,"kvport":{%s}}`,
		s.name, role, engine, s.binary, extra, settings)
}
