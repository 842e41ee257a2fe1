package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/machine"
	"github.com/kvport/kvport/sdk"
)

// conform runs the command on the demo plugin and gives what it printed and its exit code.
func conform(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	plugin, err := exec.LookPath("kvport-demo")
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), "kvport", append(append([]string{"conform", "--config", `{"dir":"${TMP}"}`}, args...), plugin)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
		require.NotErrorIs(t, err, exec.ErrNotFound)
		code = exit.ExitCode()
	}
	return out.String(), errs.String(), code
}

func TestConformJSON(t *testing.T) {
	t.Parallel()
	out, errs, code := conform(t, "--format", "json")
	require.Zero(t, code, out+errs)
	require.Empty(t, errs)
	count := map[string]int{}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for _, line := range lines {
		var row struct {
			ID, Rule, Status string
			Log              []string
			N, Of            int
		}
		d := json.NewDecoder(strings.NewReader(line))
		d.DisallowUnknownFields()
		require.NoError(t, d.Decode(&row), line)
		require.NotEmpty(t, row.ID)
		require.NotEmpty(t, row.Rule)
		require.Positive(t, row.N)
		require.Equal(t, len(lines), row.Of)
		count[row.Status]++
	}
	cases := 0
	for _, c := range conformance.Cases() {
		if c.Needs != 0 || c.Groups || c.Arena || slices.Contains(c.Profiles, conformance.Store) {
			cases++
		}
	}
	require.Len(t, lines, cases)
	require.Equal(t, len(lines), count["pass"]+count["skip"])
	require.Greater(t, count["pass"], 20)
}

// A profile whose required cases do not run has failed, and the exit code says so.
func TestConformFails(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("with -short, which the race stage uses, TestConformJSON's process does the same; make test runs it")
	}
	out, errs, code := conform(t, "--profile", "store,groups", "--seed", "7")
	require.Equal(t, 1, code, out)
	require.Empty(t, errs)
	require.Contains(t, out, "profile groups requires this case")
	require.Regexp(t, `\d+ passed, [1-9]\d* failed, \d+ skipped\n$`, out)
}

func TestConformJUnit(t *testing.T) {
	t.Parallel()
	out, _, code := conform(t, "--format", "junit", "--case", "round-trip,visible,hold-order")
	require.Zero(t, code, out)
	var suite struct {
		Name     string     `xml:"name,attr"`
		Tests    int        `xml:"tests,attr"`
		Failures int        `xml:"failures,attr"`
		Cases    []struct{} `xml:"testcase"`
	}
	require.NoError(t, xml.Unmarshal([]byte(out), &suite))
	require.Equal(t, "DemoConnector", suite.Name)
	require.Zero(t, suite.Failures)
	require.Equal(t, 3, suite.Tests)
	require.Len(t, suite.Cases, suite.Tests)
}

// --profile auto says what it has chosen, and --log has the plugin's lines beside their case.
func TestConformAuto(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "log")
	out, errs, code := conform(t, "--profile", "auto", "--case", "round-trip,unknown-field", "--log", file)
	require.Zero(t, code, out)
	require.Equal(t, "profiles: store,lifecycle,multirank,fault\n", errs)
	log, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(log), "case=round-trip")
	require.Contains(t, string(log), "case=unknown-field")
	for _, args := range [][]string{{"--log", filepath.Join(file, "x")}, {"--profile", "autos"}, {"--profile", "auto", "--config", `{"dirs":1}`}} {
		out, errs, code := conform(t, args...)
		require.NotZero(t, code, out)
		require.Contains(t, errs, args[0])
	}
}

// A config whose words cannot be replaced, or whose server is away, is no fault of the plugin: no case runs. A machine without a Redis
// server fails just the cases that need one.
func TestConformServers(t *testing.T) {
	t.Parallel()
	away, err := machine.FreePort(t.Context())
	require.NoError(t, err)
	for word, want := range map[string]string{
		"@PROXY:localhost@":              "want @PROXY:HOST:PORT@",
		"@PROXY:127.0.0.1:" + away + "@": "no server is there",
	} {
		out, errs, code := conform(t, "--config", `{"dir":"`+word+`"}`)
		require.Equal(t, exitUsage, code, out)
		require.Empty(t, out)
		require.Contains(t, errs, "--config: "+word+": ")
		require.Contains(t, errs, want)
	}
	plugin, err := exec.LookPath("kvport-demo")
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), "kvport", "conform", "--config", `{"dir":"@TMP@/@SERVER@"}`, "--format", "junit", "--case", "round-trip", plugin)
	cmd.Env = append(os.Environ(), redistest.ProgramVariable+"=/no/such/server")
	out, err := cmd.Output()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, exitFailure, exit.ExitCode())
	require.Contains(t, string(out), "server for the config: ")
}

// TestConformList: the cases are listed without a plugin, and one of them can be run alone.
func TestConformList(t *testing.T) {
	t.Parallel()
	list := func(args ...string) (string, error) {
		out, err := exec.CommandContext(t.Context(), "kvport", append([]string{"conform", "--list"}, args...)...).Output()
		return string(out), err
	}
	all, err := list()
	require.NoError(t, err)
	require.Equal(t, len(conformance.Cases())+1, strings.Count(all, "\n"))
	require.Regexp(t, `(?m)^PIPE-02 +producer-gone +.+\[pipe\]$`, all)
	require.Contains(t, all, fmt.Sprintf("\n%d cases\n", len(conformance.Cases())))
	few, err := list("--profile", "pipe,buffer")
	require.NoError(t, err)
	require.NotContains(t, few, "STORE-01")
	_, err = list("kvport-demo")
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, exitUsage, exit.ExitCode())
	require.Contains(t, string(exit.Stderr), `--list lists the cases of the suite and takes no plugin: leave out "kvport-demo", or --list`)

	out, _, code := conform(t, "--case", "round-trip")
	require.Zero(t, code, out)
	require.Contains(t, out, "1 passed, 0 failed, 0 skipped")
	for arg, want := range map[string]string{"rond-trip": `no case "rond-trip"`, "": "--case names no case", "round-trip,": `no case ""`} {
		out, errs, code := conform(t, "--case", arg)
		require.Equal(t, exitUsage, code, "--case %q: %s", arg, out)
		require.Contains(t, errs, want)
	}
}

// sickPlugin is a connector of which each load, or each save, goes wrong as its config says.
func sickPlugin() {
	type config struct {
		Dir  string `json:"dir"`
		Load string `json:"load"`
	}
	sdk.Serve(sdk.FromStore(sdk.Definition{Name: "SickConnector", Version: "1", Scope: connector.ScopeShared},
		func(_ context.Context, _ connector.Env, c config) (connector.Store, error) {
			return &sick{folder{c.Dir}, c.Load}, os.MkdirAll(c.Dir, 0o700)
		}))
}

type sick struct {
	folder
	load string
}

// Get implements connector.Store.
func (s *sick) Get(ctx context.Context, items []connector.Item) error {
	switch s.load {
	case "hangs":
		select {}
	case "starves":
		starve()
		<-time.After(9 * time.Second) // longer than the suite waits for a call on any machine
	case "dies":
		fmt.Fprintln(os.Stderr, "the database said no")
		go func() { panic("a bug of the author's") }()
		select {}
	}
	return s.folder.Get(ctx, items)
}

// starve has two threads want one processor for as long as the process lives: each of them waits for half of the time, so that the
// machine is busy for this process, whatever else it does. Others, such as the tests beside this one, go before them.
func starve() {
	var own, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &own); err != nil {
		panic(err)
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if own.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	const threads = 2
	runtime.GOMAXPROCS(2 * threads)
	var never atomic.Bool
	for range threads {
		go func() {
			runtime.LockOSThread()
			if err := errors.Join(unix.SchedSetaffinity(0, &one), unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), 19)); err != nil {
				panic(err)
			}
			for !never.Load() {
			}
		}()
	}
}

// Put implements connector.Store.
func (s *sick) Put(ctx context.Context, items []connector.Item) error {
	if s.load == "never stores" {
		select {}
	}
	return s.folder.Put(ctx, items)
}

func sickly(t *testing.T, load string, args ...string) *exec.Cmd {
	t.Helper()
	plugin, err := exec.LookPath("kvport-sick")
	require.NoError(t, err)
	config := fmt.Sprintf(`{"dir":"@TMP@/kv","load":%q}`, load)
	return exec.CommandContext(t.Context(), "kvport", append(append([]string{"conform", "--config", config}, args...), plugin)...)
}

// Each case is written as it ends; a signal ends the run with what it has, and the case under way is named.
func TestConformStreams(t *testing.T) {
	t.Parallel()
	for format, want := range map[string][2]string{
		"text": {`1/2 .*pass  SCHED-02 +match-repeat`, `(?s)2/2 +inconclusive  WORK-01 +round-trip .*interrupted before it had ended.*1 passed, 0 failed, 0 skipped, 1 inconclusive\n$`},
		"json": {`^{"id":"match-repeat".*"status":"pass".*"n":1,"of":2}`, `\n{"id":"round-trip".*"status":"inconclusive".*"n":2,"of":2}\n$`},
	} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			cmd := sickly(t, "hangs", "--format", format, "--case", "match-repeat,round-trip")
			var errs bytes.Buffer
			cmd.Stderr = &errs
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			var said strings.Builder
			line, err := bufio.NewReader(io.TeeReader(out, &said)).ReadString('\n')
			require.NoError(t, err)
			require.Regexp(t, want[0], line, "the first case is written while the second hangs")
			require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
			_, err = io.Copy(&said, out)
			require.NoError(t, err)
			var exit *exec.ExitError
			require.ErrorAs(t, cmd.Wait(), &exit)
			require.Equal(t, exitFailure, exit.ExitCode())
			require.Regexp(t, "interrupted: [12] of 2 cases ran", errs.String())
			if strings.Contains(errs.String(), "2 of 2") { // else the signal came between the cases
				require.Regexp(t, want[1], said.String())
			}
		})
	}
}

// Where a plugin hangs stands below the case in which it does: the goroutines in its own code, and in the log all of them.
func TestConformSaysWhereItHangs(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "log")
	out, err := sickly(t, "hangs", "--case", "amid-call", "--log", file).Output()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.NotEqual(t, exitUsage, exit.ExitCode(), string(exit.Stderr))
	const where = `\[select \(no cases\)\] kvport\.\(\*sick\)\.Get \(conform_test\.go:\d+\)\n`
	require.Regexp(t, `\n      the plugin's process \d+ had to be killed, with \d+ of its \d+ goroutines in the connector's own code; --log FILE has all\n        `+where, string(out))
	require.Regexp(t, `\n        hung: +`+where, string(out))
	log, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(log), "SIGQUIT: quit")
	require.Contains(t, string(log), "/sdk.Serve(")
}

// What ends the trial of --profile auto is not the plugin's fault, and is said.
func TestConformAutoEnds(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd := sickly(t, "hangs", "--profile", "auto", "--config", fmt.Sprintf(`{"dir":%q,"load":"hangs"}`, dir))
	var errs bytes.Buffer
	cmd.Stderr = &errs
	require.NoError(t, cmd.Start())
	require.Eventually(t, func() bool { // the trial has saved its blocks
		files, err := os.ReadDir(dir)
		return err == nil && len(files) > 0
	}, time.Minute, 5*time.Millisecond)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	var exit *exec.ExitError
	require.ErrorAs(t, cmd.Wait(), &exit)
	require.Equal(t, exitFailure, exit.ExitCode())
	require.Contains(t, errs.String(), "interrupted: no case ran\n")
	require.NotContains(t, errs.String(), "trial")

	out, err := sickly(t, "hangs", "--profile", "auto", "--timeout", "3s").Output()
	require.ErrorAs(t, err, &exit)
	require.Equal(t, exitFailure, exit.ExitCode())
	require.Contains(t, string(exit.Stderr), "--timeout of 3s is over: no case ran")
	require.Empty(t, out)
}

// What is late on a busy machine says nothing of the plugin: its case runs three times, and the exit code is neither that of a failure nor of
// a success.
func TestConformInconclusive(t *testing.T) {
	t.Parallel()
	out, err := sickly(t, "starves", "--case", "amid-call").Output()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, exitInconclusive, exit.ExitCode(), "%s%s", out, exit.Stderr)
	require.Contains(t, string(exit.Stderr), "cases stayed inconclusive")
	require.Equal(t, 3, strings.Count(string(out), "1/1 "), string(out))
	require.Regexp(t, `Load had not returned 2s after its context ended.*; the machine was busy: of .* the connector or the suite waited for a processor for`, string(out))
	require.Contains(t, string(out), "0 passed, 0 failed, 0 skipped, 1 inconclusive\n")
}

// --timeout ends a run, with its results; --fail-fast ends it at the first failure.
func TestConformEnds(t *testing.T) {
	t.Parallel()
	out, err := sickly(t, "hangs", "--timeout", "3s", "--format", "junit", "--case", "match-repeat,round-trip,partial-load").Output()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, exitFailure, exit.ExitCode())
	require.Regexp(t, `--timeout of 3s is over: \d of \d cases ran`, string(exit.Stderr))
	require.Contains(t, string(out), "</testsuite>")
	if strings.Contains(string(exit.Stderr), "2 of 3") { // on a machine that is busy the first may take as long
		require.Regexp(t, `(?s)tests="2" failures="0" errors="1" .*interrupted before it had ended`, string(out))
	}

	out, err = sickly(t, "dies", "--fail-fast", "--case", "match-repeat,round-trip,partial-load").Output()
	require.ErrorAs(t, err, &exit)
	require.Equal(t, exitFailure, exit.ExitCode())
	require.Contains(t, string(out), "\n1 passed, 1 failed, 0 skipped\n")
	// The last words of the process stand below the case in which it died.
	require.Regexp(t, `(?s)2/3 .*fail  WORK-01 .*ended by itself: exit status 2; the last lines of its standard error:\n        panic: a bug of the author's\n.*conform_test\.go:\d+`, string(out))
	require.Regexp(t, `\n        died: +.* ended by itself: exit status 2: panic: a bug of the author's\n`, string(out))
}

// A control program that is none, or that has no server, is no fault of the plugin.
func TestConformControl(t *testing.T) {
	t.Parallel()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, listener.Close()) }()
	for config, want := range map[string]string{
		`{"dir":"@TMP@"}`: "--config names no server that it could change",
		`{"dir":"@TMP@/@PROXY:` + listener.Addr().String() + `@"}`:          "--config has no @UNIQUE@",
		`{"dir":"@TMP@/@UNIQUE@/@PROXY:` + listener.Addr().String() + `@"}`: "no such file or directory",
	} {
		out, errs, code := conform(t, "--config", config, "--server-control", "/no/such/program")
		require.Equal(t, exitUsage, code, out+errs)
		require.Empty(t, out)
		require.Contains(t, errs, "--server-control: ")
		require.Contains(t, errs, want)
	}
}
