//go:build kvport_fault

package faultsuite

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/internal/fault"
)

// plugins is the folder of the plugin binaries, built with failpoints.
var plugins string

func TestMain(m *testing.M) {
	if os.Getenv(workFolder) != "" {
		if err := work(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "kvport-fault-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	plugins = dir
	for name, path := range map[string]string{
		"kvport-sharedstorage": "github.com/kvport/kvport/plugins/sharedstorage",
		"kvport-offload":       "github.com/kvport/kvport/plugins/offload",
		"kvport-test":          "../../host/testdata/plugin",
	} {
		build := exec.Command("go", "build", "-tags", "kvport_fault", "-o", filepath.Join(dir, name), path)
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "building %s: %v\n%s", name, err, out)
			return 1
		}
	}
	return m.Run()
}

// trial is one run of the workload.
type trial struct {
	orders string
	kind   string
	trust  string
	mount  string
	folder string

	out, errs bytes.Buffer
	fired     string         // orders that were carried out
	hits      map[string]int // of each point
	killed    bool           // by SIGKILL, the engine that is
}

// do runs the workload with some orders. If they kill the engine, it runs once more without them: a
// restart on what is left.
func (x *trial) do(dir string) error {
	x.folder = dir
	if x.trust == "" {
		x.trust = "staged"
	}
	if x.kind == "" {
		x.kind = kindOf(x.orders)
	}
	hits := filepath.Join(dir, "hits")
	if err := errors.Join(os.MkdirAll(hits, 0o700), os.MkdirAll(filepath.Join(dir, "tmp"), 0o700)); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "ticket.key"), []byte("0123456789abcdef0123456789abcdef"), 0o600); err != nil {
		return err
	}
	err := x.once(fault.Folder+"="+hits, fault.Orders+"="+x.orders)
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		status, ok := exit.Sys().(syscall.WaitStatus)
		x.killed = ok && status.Signaled() && status.Signal() == syscall.SIGKILL
	}
	if e := x.count(hits); e != nil {
		return e
	}
	if x.killed && strings.HasPrefix(x.orders, "host.") {
		err = x.once()
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", x.orders, err, x.errs.String())
	}
	return x.whole()
}

// once runs the process and waits until nothing of it is left.
func (x *trial) once(environment ...string) error {
	x.out.Reset()
	before := x.sockets() // of an engine that was killed
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), workFolder+"="+x.folder, workPlugins+"="+plugins, workTrust+"="+x.trust, workKind+"="+x.kind, workMount+"="+x.mount,
		"TMPDIR="+filepath.Join(x.folder, "tmp"), "XDG_RUNTIME_DIR=")
	cmd.Env = append(cmd.Env, environment...)
	cmd.Stdout, cmd.Stderr = &x.out, &x.errs
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if x.mount != "" {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	err := cmd.Run()
	killed := cmd.ProcessState != nil && !cmd.ProcessState.Exited()
	for deadline := time.Now().Add(time.Minute); ; {
		left := x.left(!killed, before)
		if left == "" {
			return err
		}
		if time.Now().After(deadline) {
			return errors.Join(err, fmt.Errorf("left behind: %s", left))
		}
		pause()
	}
}

func (x *trial) sockets() int {
	sockets, _ := filepath.Glob(filepath.Join(x.folder, "tmp", "kvport-plugin-*"))
	return len(sockets)
}

// left names a process or, if the end was an orderly one, says that there are socket folders that
// were not there before.
func (x *trial) left(orderly bool, before int) string {
	environs, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range environs {
		data, err := os.ReadFile(path)
		if err == nil && bytes.Contains(data, []byte(x.folder)) {
			return path
		}
	}
	if n := x.sockets(); orderly && n > before {
		return fmt.Sprintf("%d socket folders", n-before)
	}
	return ""
}

// count reads which points were hit and which orders carried out.
func (x *trial) count(hits string) error {
	x.hits = map[string]int{}
	entries, err := os.ReadDir(hits)
	for _, e := range entries {
		data, rerr := os.ReadFile(filepath.Join(hits, e.Name()))
		err = errors.Join(err, rerr)
		if e.Name() == fault.Fired {
			x.fired = string(data)
			continue
		}
		x.hits[e.Name()] = len(data)
	}
	return err
}

// whole looks for torn files: all blocks have one shape, so whatever is visible has one length.
func (x *trial) whole() error {
	w := &workload{folder: x.folder}
	size := int64(0)
	for _, path := range w.files() {
		st, err := os.Stat(path)
		if err != nil {
			continue
		}
		if size == 0 {
			size = st.Size()
		}
		if st.Size() != size || size < 1024 {
			return fmt.Errorf("%s: %s is torn: %d bytes, others have %d", x.orders, path, st.Size(), size)
		}
	}
	return nil
}

// documented are the points of docs/failpoints.md, and whether each can return an error.
func documented(t *testing.T) map[string]bool {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "docs", "failpoints.md"))
	require.NoError(t, err)
	out := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		cells := strings.Split(line, "|")
		if len(cells) < 5 || !strings.HasPrefix(strings.TrimSpace(cells[1]), "`") {
			continue
		}
		out[strings.Trim(strings.TrimSpace(cells[1]), "`")] = strings.TrimSpace(cells[3]) == "yes"
	}
	require.NotEmpty(t, out)
	return out
}

// kindOf is the workload that meets the points of some orders.
func kindOf(orders string) string {
	for _, part := range []string{"hold", "held", "consumed"} {
		if strings.Contains(orders, part) {
			return "hold"
		}
	}
	if strings.Contains(orders, ".lend") || strings.Contains(orders, ".lent") {
		return "lend"
	}
	return "split"
}

// clean counts the hits of a run without faults.
func clean(t *testing.T, trust, kind string) map[string]int {
	t.Helper()
	x := &trial{trust: trust, kind: kind}
	require.NoError(t, x.do(t.TempDir()))
	require.Empty(t, x.fired)
	t.Logf("clean run of %s at level %s: %s", kind, trust, strings.TrimSpace(x.out.String()))
	var tokens, external, failed int
	_, err := fmt.Sscanf(x.out.String(), "tokens %d external %d failed_saves %d", &tokens, &external, &failed)
	require.NoError(t, err)
	require.Positive(t, tokens)
	require.Equal(t, kind != "hold", external > 0)
	require.Zero(t, failed)
	return x.hits
}

func soak() bool { return os.Getenv("KVPORT_SOAK") != "" }

// TestKillAtEveryPoint kills the process that reaches a failpoint for the k-th time, for every point:
// k is 1, for every third point the last, too, and in soak every hit of a clean run.
func TestKillAtEveryPoint(t *testing.T) {
	levels := []string{"staged"}
	if soak() {
		levels = append(levels, "in-place")
	}
	for _, trust := range levels {
		hits := map[string]map[string]int{"split": clean(t, trust, "split"), "hold": clean(t, trust, "hold"), "lend": clean(t, trust, "lend")}
		var list []*trial
		for i, name := range slices.Sorted(maps.Keys(documented(t))) {
			n := hits[kindOf(name)][name]
			if trust == "staged" && name != "store.put.discard" {
				require.Positive(t, n, "point %s is not hit in a clean run", name)
			}
			when := kills(n, i%3 == 0)
			if kindOf(name) == "lend" { // a late hit is one more block like the others
				when = slices.DeleteFunc(when, func(k int) bool { return k > 2 })
			}
			for _, k := range when {
				list = append(list, &trial{orders: fmt.Sprintf("%s:%d:kill", name, k), trust: trust})
			}
		}
		// Files are discarded only after an error.
		list = append(list, &trial{orders: "store.put.written:1:EIO,store.put.discard:1:kill", trust: trust})
		runAll(t, list)
	}
}

// kills are the hits at which a point is struck.
func kills(hits int, last bool) []int {
	if soak() {
		out := make([]int, hits)
		for i := range out {
			out[i] = i + 1
		}
		return out
	}
	if hits > 1 && last {
		return []int{1, hits}
	}
	return slices.Repeat([]int{1}, min(hits, 1))
}

// TestErrorAtEveryPoint makes every point that can fail return an error at its first hit, and those
// of the store errors of the disk at the first and at every hit.
func TestErrorAtEveryPoint(t *testing.T) {
	var list []*trial
	points := documented(t)
	for _, name := range slices.Sorted(maps.Keys(points)) {
		if !points[name] {
			continue
		}
		list = append(list, &trial{orders: name + ":1:error"})
		if strings.HasPrefix(name, "store.put") {
			list = append(list, &trial{orders: name + ":*:ENOSPC"}, &trial{orders: name + ":*:EROFS"}, &trial{orders: name + ":*:EIO"})
		}
		if strings.HasPrefix(name, "store.get") {
			list = append(list, &trial{orders: name + ":*:EIO"})
		}
	}
	runAll(t, list)
}

// runAll runs trials a few at a time. A late hit may be missed, since goroutines race to it; that is
// counted, and a first hit never is.
func runAll(t *testing.T, list []*trial) {
	t.Helper()
	began := time.Now()
	var killed, missed atomic.Int64
	var g errgroup.Group
	g.SetLimit(4)
	for i, x := range list {
		dir := filepath.Join(t.TempDir(), strconv.Itoa(i))
		g.Go(func() error {
			err := x.do(dir)
			switch {
			case err != nil:
				return err
			case x.fired == "" && strings.Contains(x.orders, ":1:"):
				return fmt.Errorf("%s: the fault did not happen", x.orders)
			case x.fired == "":
				missed.Add(1)
			case x.killed:
				killed.Add(1)
			}
			return os.RemoveAll(dir)
		})
	}
	require.NoError(t, g.Wait())
	t.Logf("%d faults, %d of them killed the engine, %d late hits not reached; tokens equal, nothing left, nothing torn; %v",
		len(list), killed.Load(), missed.Load(), time.Since(began).Round(time.Second))
	require.LessOrEqual(t, int(missed.Load()), len(list)/5)
}

// TestDisk gives the store a file system of its own, in a user namespace: one that is full, one that
// becomes read-only.
func TestDisk(t *testing.T) {
	if why := namespaces(t); why != "" {
		t.Logf("2 disk faults NOT run: no tmpfs in a user namespace here: %s", why)
		return
	}
	for _, mount := range []string{"full", "read-only"} {
		x := &trial{mount: mount}
		require.NoError(t, x.do(t.TempDir()))
		var tokens, external, failed int
		_, err := fmt.Sscanf(x.out.String(), "tokens %d external %d failed_saves %d", &tokens, &external, &failed)
		require.NoError(t, err)
		require.Positive(t, failed, "the disk was not %s", mount)
		t.Logf("disk %s: %d tokens equal, %d blocks not saved, %d tokens loaded", mount, tokens, failed, external)
	}
}

// namespaces probes whether a user may mount a tmpfs in a namespace of its own.
func namespaces(t *testing.T) (why string) {
	t.Helper()
	cmd := exec.Command("sh", "-c", "mount -t tmpfs none "+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Sprintf("%v %s", err, out)
	}
	return ""
}
