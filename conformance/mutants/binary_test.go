package mutants_test

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// The test binary is a plugin when it is called by a plugin's name.
func TestMain(m *testing.M) {
	name := filepath.Base(os.Args[0])
	if p, is := mutants.PDPrograms()[name]; is {
		sdk.Serve(p)
	}
	if p, is := plain()[name]; is {
		sdk.Serve(p())
	}
	switch name {
	case "kvport-files-service":
		if len(os.Environ()) > 0 && os.Getenv("PLUGIN_CLIENT_CERT") == "" && len(os.Args) == 1 {
			os.Exit(0) // started by hand
		}
		sdk.Serve(mutants.Files())
	case "kvport-files-daemon":
		daemon()
	case "kvport-crashes":
		sdk.Serve(changed(func(context.Context) error {
			os.Exit(3)
			return nil
		}))
	case "kvport-hangs":
		sdk.Serve(changed(func(context.Context) error { select {} }))
	}
	os.Exit(m.Run())
}

// plain are the programs that serve one connector and do nothing else.
func plain() map[string]func() connector.Plugin {
	return map[string]func() connector.Plugin{
		"kvport-private": mutants.Private, "kvport-arena": mutants.ArenaReference, "kvport-arena-none": mutants.ArenaNone,
		"kvport-arena-torn": mutants.ArenaTorn, "kvport-files": mutants.Files, "kvport-held": mutants.Held,
	}
}

// daemon serves from a child process, which does not see our parent die.
func daemon() {
	if len(os.Args) > 1 || os.Getenv("KVPORT_TEST_CHILD") != "" {
		sdk.Serve(mutants.Files())
	}
	signal.Ignore(os.Interrupt)
	cmd := exec.Command("/proc/self/exe")
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), "KVPORT_TEST_CHILD=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	for fd := uintptr(3); fd < 8; fd++ {
		if f := os.NewFile(fd, "inherited"); f != nil {
			cmd.ExtraFiles = append(cmd.ExtraFiles, f)
		}
	}
	if err := cmd.Run(); err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// changed is a connector whose Load runs instead.
func changed(instead func(context.Context) error) connector.Plugin {
	p := mutants.Private()
	worker := p.Worker
	p.Worker = func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Worker, error) {
		w, err := worker(ctx, env, config)
		return &changedWorker{w, instead}, err
	}
	return p
}

type changedWorker struct {
	connector.Worker
	instead func(context.Context) error
}

// Load implements connector.Worker.
func (w *changedWorker) Load(ctx context.Context, _ *connector.Transfer, _ *connector.KV) error {
	return w.instead(ctx)
}

// plugin copies the test binary to a plugin's name.
func plugin(t *testing.T, name string) string {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	in, err := os.Open(self)
	require.NoError(t, err)
	defer in.Close()
	path := filepath.Join(t.TempDir(), name)
	out, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o700)
	require.NoError(t, err)
	_, err = io.Copy(out, in)
	require.NoError(t, err)
	require.NoError(t, out.Close())
	return path
}

func TestPrivateInProcess(t *testing.T) {
	conformance.Run(t, conformance.InProcess(mutants.Private(), nil), inProcess()...)
}

// Every power works across the process boundary.
func TestPrivateAsBinary(t *testing.T) {
	if testing.Short() {
		t.Skip("some 80 processes, each with the race detector in make race; make test runs them")
	}
	others := []conformance.Profile{ // its blocks are its process's own
		conformance.Remote, conformance.Pipe, conformance.PDProducer, conformance.PDConsumer, conformance.Bidirectional, conformance.Reshape, conformance.LayerWise,
		conformance.Offload, conformance.Bounded, conformance.Place, conformance.MultiChildren,
	}
	if os.Getenv("KVPORT_SOAK") == "" { // over the wire TestReferenceOverTheWire has it, and make conform as a process of the plugins
		others = append(others, conformance.Store)
	}
	profiles := slices.DeleteFunc(conformance.Profiles(), func(p conformance.Profile) bool { return slices.Contains(others, p) })
	conformance.Run(t, conformance.Binary(plugin(t, "kvport-private"), nil), profiles...)
}

// What is kept in the arena outlives its process, as far as a Store of the sdk goes.
func TestArenaAsBinary(t *testing.T) {
	if testing.Short() {
		t.Skip("some 60 processes, each with the race detector in make race; make test runs them")
	}
	conformance.Run(t, conformance.Binary(plugin(t, "kvport-arena"), nil), conformance.Store)
}

// A connector whose blocks outlive its process survives every fault.
func TestFilesAsBinary(t *testing.T) {
	if testing.Short() {
		t.Skip("some 150 processes, each with the race detector in make race; make test runs them")
	}
	profiles := []conformance.Profile{conformance.Lifecycle, conformance.Fault}
	if os.Getenv("KVPORT_SOAK") != "" { // else make conform has them, of the plugins
		profiles = append(profiles, conformance.Store, conformance.MultiRank)
	}
	conformance.Run(t, conformance.Binary(plugin(t, "kvport-files"), filesConfig()), profiles...)
}

func check(t *testing.T, path string, deadline time.Duration, id string) conformance.Result {
	t.Helper()
	results := conformance.Check(t.Context(), conformance.Binary(path, nil), conformance.Options{Only: []string{id}, Deadline: deadline})
	require.Len(t, results, 1)
	require.Equal(t, conformance.Fail, results[0].Status)
	return results[0]
}

// A plugin that dies fails the case, and the next one starts a new process.
func TestPluginThatCrashes(t *testing.T) {
	path := plugin(t, "kvport-crashes")
	r := check(t, path, time.Minute, "round-trip")
	require.Contains(t, r.Log[0], "load: ")
	require.Less(t, r.Took, 10*time.Second)
	results := conformance.Check(t.Context(), conformance.Binary(path, nil), conformance.Options{Only: []string{"match-repeat"}})
	require.Equal(t, conformance.Pass, results[0].Status, "%v", results[0].Log)
}

// A plugin that hangs fails the case after its deadline; its process does not stay.
func TestPluginThatHangs(t *testing.T) {
	var r conformance.Result
	for deadline := 500 * time.Millisecond; len(r.Stacks) < 2 && deadline < time.Minute; deadline *= 4 { // it may take longer until it has started, and until it loads
		r = check(t, plugin(t, "kvport-hangs"), deadline, "round-trip")
		require.Less(t, r.Took, deadline+30*time.Second)
	}
	require.Greater(t, len(r.Stacks), 1)
	require.Regexp(t, `^the plugin's process \d+ had to be killed, with \d+ of its \d+ goroutines in the connector's own code; --log FILE has all$`, r.Stacks[0])
	require.Regexp(t, `^  \[select \(no cases\)\] mutants_test\.TestMain\.func\d+ \(binary_test\.go:\d+\) < mutants_test\.\(\*changedWorker\)\.Load \(binary_test\.go:\d+\)`, r.Stacks[1])
	require.Empty(t, r.LastWords, "it did not end by itself")
	children, err := filepath.Glob("/proc/self/task/*/children")
	require.NoError(t, err)
	for _, c := range children {
		b, err := os.ReadFile(c)
		if err == nil {
			require.Empty(t, string(b), "a process was left behind")
		}
	}
}

func TestNoPlugin(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kvport-missing")
	r := check(t, path, time.Minute, "round-trip")
	require.Contains(t, r.Log[0], "kvport-missing")
}
