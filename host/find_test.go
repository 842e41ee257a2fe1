package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/host/internal/leaktest"
	"github.com/kvport/kvport/host/internal/plugin"
)

// say makes a plugin that has a manifest and nothing else.
func say(t *testing.T, path, name string) string {
	t.Helper()
	script := fmt.Sprintf("#!/bin/sh\necho ran >> '%s.ran'\necho '{\"name\":%q,\"protocol_versions\":[1]}'\n", path, name)
	require.NoError(t, os.WriteFile(path, []byte(script), 0o755))
	return path
}

// Files of other plugins that hang or break do not delay a start, and which one is found does not
// depend on who answers first.
func TestFindAmongBadNeighbours(t *testing.T) {
	leaks := leaktest.Watch(t)
	hanging, first, second := filepath.Dir(alias(t, "kvport-hangmanifest")), t.TempDir(), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(first, "kvport-aaa"), []byte("#!/bin/sh\nexit 1\n"), 0o755))
	one := say(t, filepath.Join(first, "kvport-one"), "SharedName")
	say(t, filepath.Join(second, "kvport-two"), "SharedName")
	disk := say(t, filepath.Join(second, "kvport-disk"), "DiskConnector")
	liar := say(t, filepath.Join(first, "kvport-zzz"), "DiskConnector")
	for range 5 {
		b, err := Find([]string{first, second}, "SharedName")
		require.NoError(t, err)
		require.Equal(t, one, b.Path, "the first folder wins")
	}
	// The first folder's answer ends the others, so it may not have begun at all.
	if err := os.Remove(liar + ".ran"); !errors.Is(err, os.ErrNotExist) {
		require.NoError(t, err)
	}
	began := time.Now()
	find := func(name string) string {
		b, err := plugin.Find(t.Context(), &plugin.Wanted{Connector: name, Paths: []string{hanging, first, second}, Handshake: time.Hour})
		require.NoError(t, err)
		return b.Path
	}
	require.Equal(t, disk, find("DiskConnector"), "the file that is called like the connector wins")
	require.NoFileExists(t, liar+".ran", "nobody else was asked")
	require.Equal(t, one, find("SharedName"))
	require.Less(t, time.Since(began), time.Minute, "a hanging neighbour is not waited for: it may take an hour")
	leaks()
}

// An unknown name is answered with the files that there are; one is suggested only for a misspelt name.
func TestFindSaysWhatThereIs(t *testing.T) {
	dir := t.TempDir()
	say(t, filepath.Join(dir, "kvport-minimal"), "MinimalConnector")
	say(t, filepath.Join(dir, "kvport-other"), "OtherConnector")
	_, err := Find([]string{dir}, "MooncakeConnector")
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, `no plugin is called "MooncakeConnector"; there are MultiConnector (looked in `)
	require.ErrorContains(t, err, "not asked, since the name is nowhere in them: kvport-minimal, kvport-other (if one of them is meant, set kv_connector_module_path;")
	for name, meant := range map[string]string{"OterConnector": "the connector of kvport-other", "MinimalConector": "the connector of kvport-minimal", "Multiconnector": `"MultiConnector"`} {
		_, err = Find([]string{dir}, name)
		require.ErrorContains(t, err, "did you mean "+meant+"?")
	}
}

// A plugin that cannot be run is distinguished from a file that is not a plugin.
func TestManifestOfWhatIsNoPlugin(t *testing.T) {
	other, machine := "arm64", byte(183) // EM_AARCH64
	if runtime.GOARCH == other {
		other, machine = "amd64", 62
	}
	foreign := filepath.Join(t.TempDir(), "kvport-foreign")
	image, err := os.ReadFile(filepath.Join(pluginFolder, "kvport-test"))
	require.NoError(t, err)
	image[18] = machine // e_machine of an ELF file
	require.NoError(t, os.WriteFile(foreign, image, 0o755))
	_, err = ReadManifest(t.Context(), foreign)
	require.ErrorContains(t, err, foreign+" cannot be run on this machine, it was built for "+other+" and this is "+runtime.GOARCH)

	hi := filepath.Join(t.TempDir(), "kvport-hi")
	for script, want := range map[string]string{
		"echo 'no such flag' >&2; exit 3": hi + " --manifest: it is no kvport plugin, or a broken one: exit status 3: \"no such flag\"",
		"echo hello":                      hi + " --manifest: it is no kvport plugin: ",
	} {
		require.NoError(t, os.WriteFile(hi, []byte("#!/bin/sh\n"+script+"\n"), 0o755))
		_, err = ReadManifest(t.Context(), hi)
		require.ErrorContains(t, err, want)
	}
}

// A manifest counts although a child of the plugin holds the plugin's output open, and that child is killed.
func TestManifestOfOpenOutput(t *testing.T) {
	leaks := leaktest.Watch(t)
	path := filepath.Join(t.TempDir(), "kvport-open")
	script := fmt.Sprintf("#!/bin/sh\nsleep 600 &\necho $! > '%s.child'\necho '{\"name\":\"OpenConnector\",\"protocol_versions\":[1]}'\n", path)
	require.NoError(t, os.WriteFile(path, []byte(script), 0o755))
	m, err := ReadManifest(t.Context(), path)
	require.NoError(t, err)
	require.Equal(t, "OpenConnector", m.Name)
	pid, err := os.ReadFile(path + ".child")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		status, err := os.ReadFile(filepath.Join("/proc", strings.TrimSpace(string(pid)), "stat"))
		return err != nil || strings.Contains(string(status), ") Z ")
	}, time.Minute, time.Millisecond, "the child lives")
	leaks()
}

// A plugin that prints without end for its manifest is killed when it has printed too much, whichever
// output it floods, and takes no more memory than that.
func TestManifestThatFloods(t *testing.T) {
	leaks := leaktest.Watch(t)
	for _, to := range []string{"1", "2"} {
		path := filepath.Join(t.TempDir(), "kvport-flood")
		require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\nwhile :; do echo "+strings.Repeat("x", 4096)+" >&"+to+"; done\n"), 0o755))
		_, err := ReadManifest(t.Context(), path)
		require.ErrorContains(t, err, path+" --manifest prints more than 1 MiB")
	}
	leaks()
}
