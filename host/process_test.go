package host

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/leaktest"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/sandbox"
)

func testPlugin() string { return filepath.Join(pluginFolder, "kvport-test") }

func TestFind(t *testing.T) {
	empty := t.TempDir()
	for _, name := range []string{"TestConnector", "TestAlias"} {
		b, err := Find([]string{empty, "/does/not/exist", pluginFolder}, name)
		require.NoError(t, err)
		require.Equal(t, testPlugin(), b.Path)
		require.Equal(t, "TestConnector", b.Manifest.Name)
		require.Equal(t, []string{"KVPORT_TEST_SEEN", "TOKEN_OF_ANOTHER"}, b.Manifest.Environment)
	}
	_, err := Find([]string{empty, pluginFolder}, "TestConector")
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "did you mean the connector of kvport-test?")
	require.ErrorContains(t, err, empty)
	_, err = Find(nil, "X")
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "no plugin folder is set")

	broken := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(broken, "kvport-broken"), []byte("#!/bin/sh\necho no\n"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(broken, "kvport-data"), []byte("x"), 0o644))
	require.NoError(t, os.Mkdir(filepath.Join(broken, "kvport-folder"), 0o755))
	_, err = Find([]string{broken}, "BrokenConnector")
	require.ErrorContains(t, err, "kvport-broken --manifest")
	require.NotContains(t, err.Error(), "kvport-data")
	list := List(t.Context(), []string{pluginFolder, broken, pluginFolder})
	require.Len(t, list, 2)
	require.Equal(t, "TestConnector", list[0].Manifest.Name)
	require.ErrorContains(t, list[1].Err, "kvport-broken --manifest")
	require.Nil(t, list[1].Manifest)
}

func TestManifestThatHangs(t *testing.T) {
	leaks := leaktest.Watch(t)
	path := alias(t, "kvport-hangmanifest")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := ReadManifest(ctx, path)
	require.ErrorContains(t, err, path)
	require.ErrorContains(t, err, "gave no answer")
	leaks()
}

func TestLaunchFailures(t *testing.T) {
	for name, c := range map[string]struct {
		handshake time.Duration
		want      string
	}{
		"kvport-hang":  {400 * time.Millisecond, "raise kvport.deadlines.handshake (400ms) if its start needs longer"},
		"kvport-talks": {time.Hour, `Unrecognized remote plugin message: "hello": it must call sdk.Serve`},
		"kvport-exits": {time.Hour, `handshake: it did not say on standard output where it listens: it must call sdk.Serve; ` +
			`its process ended: exit status 3; its last line on standard error: "no licence"`},
	} {
		t.Run(name, func(t *testing.T) {
			leaks := leaktest.Watch(t)
			path := alias(t, name)
			began := time.Now()
			_, err := Launch(t.Context(), path, LaunchOptions{Handshake: c.handshake})
			require.ErrorIs(t, err, ErrConfig)
			require.ErrorContains(t, err, path)
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "\n")
			require.Less(t, time.Since(began), time.Minute, "not after an hour, and soon after a deadline")
			late, is := errors.AsType[*LateError](err)
			require.Equal(t, name == "kvport-hang", is)
			if is {
				require.Equal(t, c.handshake, late.Limit)
				require.GreaterOrEqual(t, late.Waited, late.Limit)
			}
			leaks()
		})
	}
	for path, want := range map[string]string{
		"/does/not/exist": "no such file", pluginFolder: "not a regular file", "process_test.go": "not executable",
	} {
		_, err := Launch(t.Context(), path, LaunchOptions{})
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, want)
	}
	t.Run("long TMPDIR", func(t *testing.T) {
		long := filepath.Join(t.TempDir(), strings.Repeat("x", 100))
		require.NoError(t, os.Mkdir(long, 0o700))
		t.Setenv("TMPDIR", long)
		p, err := Launch(t.Context(), testPlugin(), LaunchOptions{}) // the socket is in /tmp, or where the user's runtime files are
		require.NoError(t, err)
		require.NoError(t, p.Close(t.Context()))
		left, err := os.ReadDir(long)
		require.NoError(t, err)
		require.Empty(t, left)
	})
	leaks := leaktest.Watch(t)
	path := filepath.Join(t.TempDir(), "kvport-text")
	require.NoError(t, os.WriteFile(path, []byte("no program"), 0o755))
	_, err := Launch(t.Context(), path, LaunchOptions{})
	require.ErrorIs(t, err, ErrConfig)
	leaks()
}

// A host that opens a plugin which hangs at start is back within the handshake deadline.
func TestOpenHangingPlugin(t *testing.T) {
	leaks := leaktest.Watch(t)
	o := rigOptions{path: alias(t, "kvport-hang"), settings: map[string]any{"deadlines": map[string]any{"handshake": "300ms"}}}
	cfg, eng, opts := o.build(t)
	_, err := Open(t.Context(), cfg, eng, opts)
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "no handshake within 300ms")
	cfg.ModulePath = "/does/not/exist"
	_, err = Open(t.Context(), cfg, eng, opts)
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "kv_connector_module_path")
	cfg.ModulePath, cfg.Connector = testPlugin(), "Other"
	_, err = Open(t.Context(), cfg, eng, opts)
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, `answers to ["TestConnector" "TestAlias"]`)
	leaks()
}

func TestProcessLife(t *testing.T) {
	leaks := leaktest.Watch(t)
	t.Setenv("HOME", "/seen-by-nobody")
	t.Setenv("KVPORT_TEST_SEEN", "yes")
	p, err := Launch(t.Context(), testPlugin(), LaunchOptions{Environment: []string{"KVPORT_TEST_SEEN"}})
	require.NoError(t, err)
	env, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID()) + "/environ")
	require.NoError(t, err)
	require.Contains(t, string(env), "KVPORT_TEST_SEEN=yes")
	require.NotContains(t, string(env), "HOME=")
	require.NotContains(t, string(env), "PATH=")
	info, err := p.Describe(t.Context(), json.RawMessage(`{}`))
	require.NoError(t, err)
	require.Equal(t, "TestConnector", info.Name)
	require.NoError(t, p.Err())
	require.NoError(t, p.Close(t.Context()))
	<-p.Done()
	require.NoError(t, p.Err())

	p, err = Launch(t.Context(), testPlugin(), LaunchOptions{})
	require.NoError(t, err)
	p.Kill()
	p.Kill()
	require.ErrorContains(t, p.Err(), "killed by the host")
	require.ErrorIs(t, syscall.Kill(p.PID(), 0), syscall.ESRCH)

	p, err = Launch(t.Context(), testPlugin(), LaunchOptions{})
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(p.PID(), syscall.SIGSTOP))
	require.Eventually(t, func() bool { return state(p.PID()) == "T" }, time.Minute, time.Millisecond)
	began := time.Now()
	require.ErrorContains(t, p.Close(t.Context()), "it did not end when asked", "a stopped plugin cannot obey")
	require.Less(t, time.Since(began), time.Minute, "soon after its patience, however busy the machine, and not never")
	leaks()
}

// A process is asked where it is before it is killed, if somebody has asked to be told: a Go program answers with all its stacks, and for one that
// is stopped the kernel does.
func TestProcessSaysWhereItIs(t *testing.T) {
	leaks := leaktest.Watch(t)
	said := []string{"nothing yet"}
	options := LaunchOptions{Where: func(lines []string) { said = lines }}
	p, err := Launch(t.Context(), testPlugin(), options)
	require.NoError(t, err)
	p.Kill()
	p.Kill()
	require.ErrorContains(t, p.Err(), "killed by the host")
	require.Contains(t, strings.Join(said, "\n"), "SIGQUIT: quit\n")
	require.Contains(t, strings.Join(said, "\n"), "\ngithub.com/kvport/kvport/sdk.Serve(")
	ended, _ := p.LastWords()
	require.Empty(t, ended, "it did not end by itself")

	p, err = Launch(t.Context(), testPlugin(), options)
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(p.PID(), syscall.SIGSTOP))
	require.Eventually(t, func() bool { return state(p.PID()) == "T" }, time.Minute, time.Millisecond)
	require.ErrorContains(t, p.Close(t.Context()), "it did not end when asked")
	require.NotEmpty(t, said)
	for _, line := range said {
		require.Contains(t, line, OfKernel)
	}

	p, err = Launch(t.Context(), testPlugin(), LaunchOptions{Where: func([]string) { t.Error("one that ends when it is asked to is asked nothing else") }})
	require.NoError(t, err)
	require.NoError(t, p.Close(t.Context()))
	p.Kill()
	leaks()
}

// Kills at every moment of a start leave nothing behind.
func TestKillWhileStarting(t *testing.T) {
	leaks := leaktest.Watch(t)
	for i := range 25 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*3*time.Millisecond)
		p, err := Launch(ctx, testPlugin(), LaunchOptions{})
		cancel()
		if err == nil {
			p.Kill()
		} else {
			require.ErrorIs(t, err, ErrConfig)
		}
	}
	leaks()
}

func TestPinnedBinary(t *testing.T) {
	path := alias(t, "kvport-pinned")
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	sum := sha256.Sum256(data)
	hash := hex.EncodeToString(sum[:])

	leaks := leaktest.Watch(t)
	p, err := plugin.OpenProgram(path, hash)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path+".new", []byte("#!/bin/sh\nexit 1\n"), 0o755))
	require.NoError(t, os.Rename(path+".new", path)) // swapped after the check
	m, err := p.Manifest(t.Context(), time.Minute, nil)
	require.NoError(t, err)
	require.Equal(t, "TestConnector", m.Name)
	region, err := NewRegion(4096)
	require.NoError(t, err)
	proc, err := launch(t.Context(), p, LaunchOptions{Regions: []*Region{region, region, region}})
	require.NoError(t, err)
	require.NoError(t, proc.Close(t.Context()))
	require.NoError(t, p.Close())
	require.NoError(t, region.Close())

	_, err = plugin.OpenProgram(path, hash)
	require.ErrorContains(t, err, hash)
	leaks()

	o := rigOptions{settings: map[string]any{"plugin_sha256": strings.Repeat("0", 64)}}
	cfg, eng, opts := o.build(t)
	_, err = Open(t.Context(), cfg, eng, opts)
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "kvport.plugin_sha256")
	cfg.Settings.PluginSHA256 = hash
	h, err := Open(t.Context(), cfg, eng, opts)
	require.NoError(t, err)
	require.NoError(t, h.Close(t.Context()))
	leaks()
}

// The plugin dies with its host, however the host dies, in the sandbox too.
func TestHostDeathKillsPlugin(t *testing.T) {
	if path, box, set := strings.Cut(os.Getenv("KVPORT_TEST_HOST"), " "); path != "" {
		var opts LaunchOptions
		if set {
			opts.Sandbox = &Sandbox{of: sandbox.Spec{Trampoline: box}}
		}
		p, err := Launch(context.Background(), path, opts)
		require.NoError(t, err)
		_, _ = os.Stdout.WriteString("pid " + strconv.Itoa(p.PID()) + "\n")
		select {}
	}
	for _, box := range []string{"", " " + Self} {
		diesWithHost(t, box)
	}
}

func diesWithHost(t *testing.T, box string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestHostDeathKillsPlugin$")
	cmd.Env = append(os.Environ(), "KVPORT_TEST_HOST="+testPlugin()+box)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(line, "pid ")))
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(pid, 0))
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	require.Eventually(t, func() bool { return gone(pid) }, time.Minute, time.Millisecond)
}

// gone reports whether a process has ended, reaped or not.
func gone(pid int) bool { return state(pid) == "" || state(pid) == "Z" }

// state is the letter that ps shows; empty if there is no such process.
func state(pid int) string { return stateIn("/proc/" + strconv.Itoa(pid) + "/stat") }

// stateIn is the letter in the stat of a process or thread.
func stateIn(path string) string {
	stat, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return rest[:min(1, len(rest))]
}

func TestWithDigestsHasRoomForAll(t *testing.T) {
	l := connector.Layout{
		Blocks: 3, Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}, {BlockTokens: 8, Policy: connector.PolicyAll}},
		Segments: []connector.Segment{{Group: 0, BlockStride: 100, Bytes: 90}, {Layer: 1, Group: 1, Offset: 300, BlockStride: 50, Bytes: 50}},
	}
	with, size := WithDigests(l)
	require.NoError(t, with.Validate([]int64{size}))
	require.Len(t, with.Segments, 4)
}
