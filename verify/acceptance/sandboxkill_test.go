package acceptance

import (
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

var (
	flagSandboxRequests = flag.Int("sandboxrequests", 0, "requests to engines whose plugins are killed in their sandbox; default 60, in soak 2000")
	flagSandboxKills    = flag.Int("sandboxkills", 0, "plugins killed in their sandbox; default 4, in soak 100")
	flagSandboxStops    = flag.Int("sandboxstops", 0, "plugins stopped in their sandbox; default 2, in soak 50")
)

// TestSandboxKilled: plugins are killed and stopped in their sandbox while requests run. No token is wrong, no request is
// lost, and neither a descriptor, a process, a control group, a socket nor a file is left.
func TestSandboxKilled(t *testing.T) {
	requests := rig.Count(t, "sandboxrequests", *flagSandboxRequests, 60, 2000)
	kills, stops := rig.Count(t, "sandboxkills", *flagSandboxKills, 4, 100), rig.Count(t, "sandboxstops", *flagSandboxStops, 2, 50)
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp) // of the engines: plugins listen at sockets in it
	// A process that loses its parent becomes a child of this process, so that it can be counted.
	require.NoError(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	defer func() { require.NoError(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)) }()

	r := rig.New(t)
	const level = `,"kvport":{"trust":"staged","breaker":{"deaths":100000,"backoff_max":"20ms"},"deadlines":{"transfer":"1s"},"heartbeat":{"limit":"1s"}}`
	node := r.ServeModel("sim", "single", "")
	p := r.ServeModel("sim", "prefill", r.Config("kv_producer", "", level), "--enable-prefix-caching=false")
	d := r.ServeModel("sim", "decode", r.Config("kv_consumer", "", level), "--enable-prefix-caching=false")
	router := r.Route(p, d)
	engines := []*cluster.Process{p, d}
	if !inSandbox(r, p) {
		t.Log("not run: this kernel has no sandbox")
		return
	}
	r.All(router.URL, rig.Texts(t, *rig.Seed+22000, 2, 400, 400), 1)
	started := append(slices.Clone(engines), node, router)
	before := leftovers(r, started, temp)

	faults := slices.Concat(slices.Repeat([]syscall.Signal{syscall.SIGKILL}, kills), slices.Repeat([]syscall.Signal{syscall.SIGSTOP}, stops))
	rng := rand.New(rand.NewPCG(*rig.Seed, 11))
	rng.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })
	prompts := rig.Texts(t, *rig.Seed+23000, (requests+len(faults)-1)/len(faults), 600, 3000)
	want := r.All(node.URL, prompts, 4)
	tokens, met := 0, 0
	for i, signal := range faults {
		hit, got := r.SignalAmid(rng, router, engines[i%2], signal, prompts)
		tokens += rig.Compare(t, fmt.Sprintf("fault %d, %v", i, signal), want, got)
		if hit {
			met++
		}
		require.True(t, inSandbox(r, engines[i%2]), "a plugin that is started again is in the sandbox, too")
		if i%50 == 49 { // it takes minutes
			fmt.Fprintf(os.Stderr, "%d of %d faults, %d tokens compared\n", i+1, len(faults), tokens)
		}
	}
	t.Logf("%d kills and %d stops in the sandbox, %d of them while a transfer ran; %d tokens compared, 0 differ, 0 of %d requests lost",
		kills, stops, met, tokens, len(faults)*len(prompts))
	require.Greater(t, met, len(faults)/4)
	after := leftovers(r, started, temp)
	require.Equal(t, before, after)
	t.Logf("before and after: %+v", before)
}

// left is what a prefill and a decode engine have, with what their plugins could leave behind.
type left struct {
	Engines, Plugins [2]cluster.Resources
	Orphans          int // processes whose parent is gone
	Groups           int // control groups in which plugins are, apart from that of their engine
	Files            int // sockets and other files in the folder for temporary files
}

// leftovers counts it when the first two processes, the engines, are idle. Their plugins have just been started again: what one keeps
// open depends on what it has stored.
func leftovers(r *rig.Rig, started []*cluster.Process, temp string) (l left) {
	r.Helper()
	for i, e := range started[:2] {
		r.Idle(e)
		old := r.Plugin(e)
		require.NoError(r, syscall.Kill(old, syscall.SIGKILL))
		require.Eventually(r, func() bool { return !cluster.Alive(old) }, time.Minute, time.Millisecond)
		plugin := r.Plugin(e)
		l.Engines[i], l.Plugins[i] = rig.Settled(r.T, e), cluster.Usage(plugin)
		if controlGroup(r, plugin) != controlGroup(r, e.PID()) {
			l.Groups++
		}
	}
	for _, pid := range cluster.Children(os.Getpid()) {
		if !slices.ContainsFunc(started, func(p *cluster.Process) bool { return p.PID() == pid }) {
			l.Orphans++
		}
	}
	require.NoError(r, filepath.WalkDir(temp, func(_ string, _ fs.DirEntry, err error) error { l.Files++; return err }))
	return l
}

// controlGroup is where a process is in the kernel's control groups.
func controlGroup(r *rig.Rig, pid int) string {
	r.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	require.NoError(r, err)
	return string(data)
}

// inSandbox says whether an engine's plugin is ready and in the sandbox.
func inSandbox(r *rig.Rig, e *cluster.Process) bool {
	r.Helper()
	r.Plugin(e)
	h, err := r.Client.Health(r.Context(), e.URL)
	require.NoError(r, err)
	return h.Connector.Sandbox == "on" || h.Connector.Sandbox == "partial"
}
