package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/sdk"
	"github.com/kvport/kvport/verify/bench"
)

func TestMain(m *testing.M) {
	host.SandboxMain() // the commands are this program, which becomes their plugins
	testscript.Main(m, map[string]func(){"kvport": main, "kvport-demo": demoPlugin, "kvport-slow": slowPlugin, "kvport-sick": sickPlugin, "kvport-bench-memory": bench.ServePlugin, "kvport-bench-bare": bench.ServePlugin})
}

// demoPlugin is a connector that keeps blocks as files in a folder.
func demoPlugin() {
	type config struct {
		Dir string `json:"dir" jsonschema:"required,minLength=1"`
	}
	sdk.Serve(sdk.FromStore(sdk.Definition{Name: "DemoConnector", Aliases: []string{"Demo"}, Version: "1", Scope: connector.ScopeShared},
		func(_ context.Context, env connector.Env, c config) (connector.Store, error) {
			env.Log.Debug("opened", "plugin", "mine", "time", "now", "level", 7, "timestamp", 1, "err", "none", "error", "none",
				"base", env.Model, "pause", time.Minute, "key", connector.StoreKey{1})
			return &folder{dir: c.Dir}, os.MkdirAll(c.Dir, 0o700)
		}))
}

type folder struct{ dir string }

func (f *folder) path(k connector.StoreKey) string { return filepath.Join(f.dir, k.String()) }

func (f *folder) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	found := make([]int, len(runs))
	for i, keys := range runs {
		for _, k := range keys {
			if _, err := os.Stat(f.path(k)); err != nil {
				break
			}
			found[i]++
		}
	}
	return found, nil
}

func (f *folder) Get(ctx context.Context, items []connector.Item) error {
	hideFence(f.dir)
	return each(ctx, items, func(it connector.Item) error {
		data, err := os.ReadFile(f.path(it.Key))
		if err != nil {
			return fmt.Errorf("%w: %w", connector.ErrGone, err)
		}
		for _, span := range it.Spans {
			data = data[copy(span, data):]
		}
		return nil
	})
}

func (f *folder) Put(ctx context.Context, items []connector.Item) error {
	return each(ctx, items, func(it connector.Item) error {
		file, err := os.CreateTemp(f.dir, "new")
		if err != nil {
			return err
		}
		_, err = file.Write(bytes.Join(it.Spans, nil))
		if err = errors.Join(err, file.Close()); err != nil {
			return err
		}
		return os.Rename(file.Name(), f.path(it.Key))
	})
}

func each(ctx context.Context, items []connector.Item, do func(connector.Item) error) error {
	failed := &connector.ItemError{}
	for i, it := range items {
		if err := errors.Join(ctx.Err(), do(it)); err != nil {
			failed.Items, failed.Err = append(failed.Items, i), err
		}
	}
	if failed.Items == nil {
		return nil
	}
	return failed
}

func (f *folder) Close() error { return nil }

func TestScripts(t *testing.T) {
	t.Parallel()
	tmp, err := os.MkdirTemp("", "kvport") //nolint:usetesting // short: unix sockets lie below it
	require.NoError(t, err)
	t.Cleanup(func() {
		left, err := os.ReadDir(tmp)
		require.NoError(t, err)
		for _, e := range left { // the private folder of this user's ticket key stays
			require.Equal(t, fmt.Sprintf("kvport-%d", os.Getuid()), e.Name(), "commands left temporary files")
		}
		require.NoError(t, os.RemoveAll(tmp))
	})
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", "script"),
		Setup: func(e *testscript.Env) error {
			e.Setenv("TMPDIR", tmp) // a script's own is too long a path for a unix socket
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits, "brief": isBrief, "big": big, "gone": gone,
		},
	})
}

// exits CODE COMMAND [ARGS]: runs a command and checks its exit code.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND [ARGS]")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			ts.Fatalf("%v", err)
		}
		got = exit.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// brief: the last command wrote one or two lines of bearable length to stderr and none to stdout.
func isBrief(ts *testscript.TestScript, _ bool, _ []string) {
	if out := ts.ReadFile("stdout"); out != "" {
		ts.Fatalf("stdout is not empty: %q", out)
	}
	text := strings.TrimSuffix(ts.ReadFile("stderr"), "\n")
	lines := strings.Split(text, "\n")
	if text == "" || len(lines) > 2 || len(text) > 2100 {
		ts.Fatalf("%d lines of %d bytes on stderr", len(lines), len(text))
	}
	if !strings.HasPrefix(text, "kvport: ") {
		ts.Fatalf("stderr does not begin with the program's name: %q", text)
	}
}

// big FILE SIZE TEXT: writes TEXT with its %s replaced so that the file has SIZE bytes.
func big(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: big FILE SIZE TEXT")
	}
	size, err := strconv.Atoi(args[1])
	ts.Check(err)
	text := strings.Replace(args[2], "%s", strings.Repeat("x", size-len(args[2])+len("%s")), 1)
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(text), 0o600))
}

// gone: no process runs that was started with this script's folder on its command line, in its
// environment or as its working folder.
func gone(ts *testscript.TestScript, _ bool, _ []string) {
	work := []byte(ts.Getenv("WORK"))
	dirs, err := filepath.Glob("/proc/[0-9]*")
	ts.Check(err)
	for _, dir := range dirs {
		if dir == fmt.Sprintf("/proc/%d", os.Getpid()) {
			continue
		}
		// What cannot be read is gone by now.
		command, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		environ, _ := os.ReadFile(filepath.Join(dir, "environ"))
		cwd, _ := os.Readlink(filepath.Join(dir, "cwd"))
		if bytes.Contains(bytes.Join([][]byte{command, environ, []byte(cwd)}, nil), work) {
			ts.Fatalf("%s still runs: %q", dir, bytes.ReplaceAll(command, []byte{0}, []byte(" ")))
		}
	}
}
