package protocol

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// oldCommit is the other end's commit in TestSkew: of November 22, 2026, the first that has package host where it is now. Digests had no
// key then, and there was neither a sandbox nor a ring of keys.
const oldCommit = "8ba6421b72a9253fb93b8cf67f721a7426795c8c"

// hostProgram is the folder of the small host, in every tree.
const hostProgram = "verify/protocol/testdata/host"

// tree is the source of one commit, in which programs are built.
type tree struct {
	*testing.T
	root string
}

// oldTree takes the old commit out of the repository.
func oldTree(t *testing.T) tree {
	t.Helper()
	repository, root := testkit.Root(t), t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "git", "-C", repository, "cat-file", "-e", oldCommit+"^{commit}").CombinedOutput(); err != nil {
		t.Skipf("PLUGINS AND HOSTS OF TWO COMMITS ARE NOT TESTED: %s is not in this clone, which may be shallow (git fetch --unshallow): %s", oldCommit, out)
	}
	archive := filepath.Join(t.TempDir(), "old.tar")
	o := tree{t, root}
	o.run(repository, "git", "archive", "-o", archive, oldCommit, "cmd/kvport", "connector", "connectors", "examples/minimal", "go.mod", "go.sum",
		"host", "internal", "lookupbuffer", "multiconnector", "native", "pipe", "plugins", "proto", "sdk")
	o.run(root, "tar", "-xf", archive)
	require.NoError(t, os.CopyFS(filepath.Join(root, hostProgram), os.DirFS(filepath.Join(repository, hostProgram))))
	return o
}

func (o tree) run(dir, name string, args ...string) string {
	o.Helper()
	cmd := exec.CommandContext(o.Context(), name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(o, err, "%s %v: %s", name, args, out)
	return string(out)
}

// build makes a program of a folder.
func (o tree) build(folder string) (path string) {
	o.Helper()
	path = filepath.Join(o.TempDir(), "kvport-"+filepath.Base(folder))
	o.run(o.root, "go", "build", "-buildvcs=false", "-o", path, "./"+folder)
	return path
}

// meet runs a host with a plugin, whose blocks are in a fresh folder.
func meet(t *testing.T, hostPath, pluginPath string, f *fixture.Fixture) (string, error) {
	t.Helper()
	config := strings.ReplaceAll(string(f.Setups[0].Config), "@TMP@", t.TempDir())
	out, err := exec.CommandContext(t.Context(), hostPath, pluginPath, config).Output()
	return string(out), err
}

// TestSkew: a host and a plugin of two commits do the same together as two of one commit, through saves, loads, a reset and the
// plugin's death; old plugins answer today's transcripts; and where no version is common the plugin is refused with one line.
func TestSkew(t *testing.T) {
	if os.Getenv("KVPORT_SOAK") == "" {
		t.Skip("builds the host and plugins of an old commit: KVPORT_SOAK=1 runs it; TestTranscripts is the short form")
	}
	old, now := oldTree(t), tree{t, testkit.Root(t)}
	store := testkit.Typical(t, fixture.Store)
	oldHost, newHost := old.build(hostProgram), now.build(hostProgram)
	oldPlugin, newPlugin := old.build(store.Folder), now.build(store.Folder)

	want, err := meet(t, newHost, newPlugin, store)
	require.NoError(t, err, "%s", want)
	t.Log("\n" + want)
	require.Equal(t, 16, strings.Count(want, "\n"))
	for name, pair := range map[string][2]string{
		"both old": {oldHost, oldPlugin}, "old plugin, new host": {newHost, oldPlugin}, "new plugin, old host": {oldHost, newPlugin},
	} {
		got, err := meet(t, pair[0], pair[1], store)
		require.NoError(t, err, "%s: %s", name, got)
		require.Equal(t, want, got, name)
	}
	for _, plugin := range []string{oldPlugin, newPlugin} {
		require.Contains(t, now.run(".", plugin, "--version"), "(protocol 1)")
	}

	minimal := old.build("examples/minimal")
	for _, name := range transcripts() { // the version that is negotiated is in their second line
		require.NoError(t, play(t, minimal, name), name)
	}

	old.speak("2")
	later, laterHost := old.build(store.Folder), old.build(hostProgram)
	for _, pair := range [][2]string{{newHost, later}, {laterHost, newPlugin}} {
		got, err := meet(t, pair[0], pair[1], store)
		require.Error(t, err)
		require.Equal(t, 1, strings.Count(got, "\n"), got)
		require.Regexp(t, `ncompatible API version with plugin\. Plugin version: [12], Client versions: \[[12]\]`, got)
		t.Log(got)
	}
}

// speak changes the protocol version of a tree.
func (o tree) speak(version string) {
	o.Helper()
	path := filepath.Join(o.root, "internal", "wire", "wire.go")
	code, err := os.ReadFile(path)
	require.NoError(o, err)
	const line = "const ProtocolVersion = "
	require.Contains(o, string(code), line+"1\n")
	require.NoError(o, os.WriteFile(path, []byte(strings.Replace(string(code), line+"1\n", line+version+"\n", 1)), 0o600))
}
