package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// plugins is the folder with the plugin binaries that TestMain builds.
var plugins string

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "kvport-engine-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	plugins = dir
	for name, pkg := range map[string]string{
		"kvport-sharedstorage": "github.com/kvport/kvport/plugins/sharedstorage", "kvport-hold": "./testdata/plugin",
		"kvport-p2p": "github.com/kvport/kvport/plugins/p2p", "kvport-test": "../host/testdata/plugin",
		"kvport-tier": "github.com/kvport/kvport/plugins/offload",
	} {
		if out, err := exec.Command("go", "build", "-o", filepath.Join(dir, name), pkg).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "building the plugin: %v\n%s", err, out)
			return 1
		}
	}
	code := m.Run()
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// shared is the config of an engine on a shared storage directory; extra fields overrule.
func shared(t testing.TB, cfg Config, role connector.Role, dir, settings string) Config {
	return sharedWith(t, cfg, role, map[string]any{"shared_storage_path": dir}, settings)
}

// sharedWith is shared with further fields of the connector's own configuration.
func sharedWith(t testing.TB, cfg Config, role connector.Role, fields map[string]any, settings string) Config {
	key := filepath.Join(fields["shared_storage_path"].(string), "..", "ticket.key")
	require.NoError(t, os.WriteFile(key, []byte("0123456789abcdef0123456789abcdef"), 0o600))
	extra, err := json.Marshal(fields)
	require.NoError(t, err)
	if settings == "" {
		settings = "{}"
	}
	c, err := host.ParseConfig(fmt.Sprintf(`{"kv_connector": %q, "kv_role": %q,
		"kv_connector_extra_config": %s, "kvport": %s}`, testkit.Typical(t, fixture.Store).Connector, role, extra, settings))
	require.NoError(t, err)
	c.Settings.TicketKeyFile = key
	cfg.Connector, cfg.PluginPath = c, []string{plugins}
	return cfg
}

// storage is a fresh directory for blocks.
func storage(t testing.TB) string {
	dir := filepath.Join(t.TempDir(), "kv")
	require.NoError(t, os.Mkdir(dir, 0o700))
	return dir
}

// prefill runs prompts on a producer as a router does and returns the decode requests.
func prefill(t testing.TB, p *rig, reqs []Request) []Request {
	decode := slices.Clone(reqs)
	for i, req := range reqs {
		req.MaxTokens, req.Remote = 1, true
		got := collect(submit(t, p, req))
		require.Len(t, got.tokens, 1)
		decode[i].Ticket = got.last.Ticket
	}
	return decode
}

func external(results []result) (tokens int) {
	for _, r := range results {
		tokens += r.last.Usage.External
	}
	return tokens
}

func TestPrefillThenDecode(t *testing.T) {
	for name, cfg := range map[string]Config{"sim": simConfig(t), "tiny": tinyConfig(t)} {
		t.Run(name, func(t *testing.T) {
			reqs := requests(16)
			want := tokensOf(start(t, cfg).ask(t, reqs, 1))
			dir := storage(t)
			p := start(t, shared(t, cfg, connector.RoleProducer, dir, ""))
			decode := prefill(t, p, reqs)
			cfg.PrefixCaching = false
			d := start(t, shared(t, cfg, connector.RoleConsumer, dir, ""))
			got := d.ask(t, decode, 8)
			require.Equal(t, want, tokensOf(got))
			full := 0
			for _, r := range reqs {
				full += (len(r.Prompt) - 1) / 16 * 16
			}
			require.Equal(t, full, external(got), "every full block came from the producer")
			require.Equal(t, full, d.metric(t, "kvport_prompt_tokens_total", "external"))
			requireIdle(t, p)
			requireIdle(t, d)
		})
	}
}

// TestBothRoles has one engine save and load through a tiny cache without a prefix cache.
func TestBothRoles(t *testing.T) {
	cfg := simConfig(t)
	reqs := requests(16)
	want := tokensOf(start(t, cfg).ask(t, reqs, 1))
	cfg.PrefixCaching, cfg.NumBlocks, cfg.BlockSize = false, 70, 4
	r := start(t, shared(t, cfg, connector.RoleBoth, storage(t), ""))
	require.Equal(t, want, tokensOf(r.ask(t, reqs, 16)))
	requireIdle(t, r)
	got := r.ask(t, reqs, 16)
	require.Equal(t, want, tokensOf(got))
	require.Positive(t, external(got))
	requireIdle(t, r)
}

// TestPluginDies kills and stops the plugin while requests run.
func TestPluginDies(t *testing.T) {
	const settings = `{"breaker": {"deaths": 1000, "backoff_max": "20ms"}, "heartbeat": {"interval": "20ms", "limit": "500ms"}}`
	cfg := simConfig(t)
	reqs := requests(16)
	want := tokensOf(start(t, cfg).ask(t, reqs, 1))
	dir := storage(t)
	prefill(t, start(t, shared(t, cfg, connector.RoleProducer, dir, "")), reqs)
	cfg.PrefixCaching = false
	d := start(t, shared(t, cfg, connector.RoleBoth, dir, settings))
	rng := rand.New(rand.NewPCG(5, 5))
	loaded, hits, pid := 0, 0, 0
	for round := range 12 {
		pid = livePID(t, d, pid)
		signal := syscall.SIGKILL
		if round%6 == 5 {
			signal = syscall.SIGSTOP
		}
		delay := time.NewTimer(time.Duration(rng.IntN(8000)) * time.Microsecond)
		hit := make(chan error)
		go func() {
			<-delay.C
			hit <- syscall.Kill(pid, signal)
		}()
		got := d.ask(t, reqs, 16)
		require.Equal(t, want, tokensOf(got), "round %d", round)
		loaded += external(got)
		if err := <-hit; err == nil {
			hits++
		} else {
			require.ErrorIs(t, err, syscall.ESRCH) // a busy machine: the host gave up on it first
		}
		require.Eventually(t, func() bool { return syscall.Kill(pid, 0) == syscall.ESRCH }, time.Minute, time.Millisecond)
	}
	require.Positive(t, loaded)
	require.Greater(t, hits, 6)
	require.GreaterOrEqual(t, d.metric(t, "kvport_plugin_restarts_total", ""), 11)
	livePID(t, d, pid)
	requireIdle(t, d)
	t.Logf("%d plugins killed or stopped, %d tokens loaded", hits, loaded)
}

// TestProducerLosesItsPlugin kills the plugin while a producer saves: every prefill is answered, and
// the consumer recomputes what was not saved.
func TestProducerLosesItsPlugin(t *testing.T) {
	cfg := simConfig(t)
	cfg.PrefixCaching = false
	reqs := requests(16)
	want := tokensOf(start(t, cfg).ask(t, reqs, 1))
	dir := storage(t)
	p := start(t, shared(t, cfg, connector.RoleProducer, dir, `{"breaker": {"deaths": 1000, "backoff_max": "20ms"}}`))
	d := start(t, shared(t, cfg, connector.RoleConsumer, dir, ""))
	rng := rand.New(rand.NewPCG(6, 6))
	pid := 0
	for round := range 6 {
		pid = livePID(t, p, pid)
		delay := time.NewTimer(time.Duration(rng.IntN(20_000)) * time.Microsecond)
		hit := make(chan error)
		go func() {
			<-delay.C
			hit <- syscall.Kill(pid, syscall.SIGKILL)
		}()
		for i := range reqs {
			reqs[i].Salt = fmt.Sprint("round ", round) // nothing of the last round is found
		}
		decode := prefill(t, p, reqs)
		require.NoError(t, <-hit)
		require.Equal(t, want, tokensOf(d.ask(t, decode, 8)), "round %d", round)
	}
	requireIdle(t, p)
	requireIdle(t, d)
}

// TestOtherWeights has two models on one directory: neither may find the other's blocks.
func TestOtherWeights(t *testing.T) {
	reqs := requests(8)
	dir := storage(t)
	for seed := range uint64(2) {
		cfg := simConfig(t)
		m, err := sim.New(sim.Options{Seed: seed, Layers: 3, BytesPerToken: 32})
		require.NoError(t, err)
		cfg.Model, cfg.PrefixCaching, cfg.MaxModelLen = m, false, 1024
		want := tokensOf(start(t, cfg).ask(t, reqs, 1))
		r := start(t, shared(t, cfg, connector.RoleBoth, dir, ""))
		for i := range reqs {
			reqs[i].Salt = fmt.Sprint(i) // nor those of another tenant
		}
		got := r.ask(t, reqs, 8)
		require.Equal(t, want, tokensOf(got))
		require.Zero(t, external(got))
		requireIdle(t, r)
		again := r.ask(t, reqs, 8)
		require.Equal(t, want, tokensOf(again))
		require.Positive(t, external(again))
	}
}

// TestTenantSecrets has tenants on one directory: only those with the same secret share blocks.
func TestTenantSecrets(t *testing.T) {
	reqs := requests(4)
	for i := range reqs {
		reqs[i].Salt = fmt.Sprint(i) // nothing is found because another request has just saved it
	}
	dir := storage(t)
	var want [][]int32
	for i, secret := range []string{"a secret of at least thirty-two bytes", "another one of at least thirty-two bytes", "a secret of at least thirty-two bytes"} {
		file := filepath.Join(t.TempDir(), "secret")
		require.NoError(t, os.WriteFile(file, []byte(secret), 0o600))
		cfg := shared(t, simConfig(t), connector.RoleBoth, dir, "")
		cfg.Connector.Settings.TenantSecretFile, cfg.PrefixCaching = file, false
		r := start(t, cfg)
		got := r.ask(t, reqs, 4)
		if i == 0 {
			want = tokensOf(got)
		}
		require.Equal(t, want, tokensOf(got))
		require.Equal(t, i == 2, external(got) > 0, "engine %d", i)
		requireIdle(t, r)
		r.stop(t)
	}
}

// TestResetWithConnector: afterwards neither the engine nor the store knows a block; where the
// connector kept its blocks Reset says so, and the engine's own cache is empty all the same.
func TestResetWithConnector(t *testing.T) {
	dir := storage(t)
	req := Request{ID: "a", Prompt: make([]int32, 100), MaxTokens: 1}
	usage := func(r *rig) Usage { return collect(submit(t, r, req)).last.Usage }
	r := start(t, shared(t, simConfig(t), connector.RoleBoth, dir, ""))
	require.Zero(t, usage(r).Local)
	require.Equal(t, 96, usage(r).Local)
	require.NoError(t, r.Reset(t.Context()))
	got := usage(r)
	require.Zero(t, got.Local+got.External)
	r.stop(t)

	r = start(t, sharedWith(t, simConfig(t), connector.RoleBoth, map[string]any{"shared_storage_path": dir, "read_only": true}, ""))
	require.Equal(t, 96, usage(r).External)
	require.Equal(t, 96, usage(r).Local)
	require.ErrorContains(t, r.Reset(t.Context()), "kept")
	got = usage(r)
	require.Zero(t, got.Local)
	require.Equal(t, 96, got.External)
}

// livePID waits until a plugin runs, another one than old.
func livePID(t testing.TB, r *rig, old int) (pid int) {
	require.Eventually(t, func() bool {
		h := r.Health().Host
		pid = h.PID
		return h.State == "ready" && pid != old
	}, time.Minute, time.Millisecond)
	return pid
}

// TestDamagedStore flips bytes of stored blocks, cuts some short and removes some.
func TestDamagedStore(t *testing.T) {
	cfg := simConfig(t)
	reqs := requests(16)
	want := tokensOf(start(t, cfg).ask(t, reqs, 1))
	dir := storage(t)
	prefill(t, start(t, shared(t, cfg, connector.RoleProducer, dir, "")), reqs)
	cfg.PrefixCaching = false
	d := start(t, shared(t, cfg, connector.RoleConsumer, dir, ""))
	rng := rand.New(rand.NewPCG(9, 9))
	flips := 0
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() || rng.IntN(4) > 0 {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil || len(data) == 0 {
			return err
		}
		switch rng.IntN(6) {
		case 0:
			return os.Remove(path)
		case 1:
			return os.Truncate(path, int64(rng.IntN(len(data))))
		}
		data[len(data)/2+rng.IntN(len(data)/2)] ^= 1 << rng.IntN(8)
		flips++
		return os.WriteFile(path, data, 0o600)
	})
	require.NoError(t, err)
	require.Positive(t, flips)
	got := d.ask(t, reqs, 8)
	require.Equal(t, want, tokensOf(got))
	require.Positive(t, external(got))
	n := d.metric(t, "kvport_integrity_failures_total", "")
	t.Logf("%d bytes flipped, %v integrity failures", flips, n)
	require.Positive(t, n)
	requireIdle(t, d)
}

// TestFailPolicy ends requests whose load fails; nothing else may end them.
func TestFailPolicy(t *testing.T) {
	cfg := simConfig(t)
	reqs := requests(16)
	want := tokensOf(start(t, cfg).ask(t, reqs, 1))
	dir := storage(t)
	prefill(t, start(t, shared(t, cfg, connector.RoleProducer, dir, "")), reqs)
	cfg = shared(t, cfg, connector.RoleConsumer, dir, "")
	cfg.PrefixCaching, cfg.Connector.FailurePolicy = false, host.PolicyFail
	d := start(t, cfg)
	require.Equal(t, want, tokensOf(d.ask(t, reqs, 8)))
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil || len(data) == 0 {
			return err
		}
		data[len(data)-100] ^= 4
		return os.WriteFile(path, data, 0o600)
	})
	require.NoError(t, err)
	failed := 0
	for i, r := range d.ask(t, reqs, 8) {
		if r.last.Reason == connector.ReasonError {
			require.ErrorIs(t, r.last.Err, ErrLoadFailed)
			require.Empty(t, r.tokens)
			failed++
			continue
		}
		require.Equal(t, want[i], r.tokens)
	}
	require.Positive(t, failed)
	requireIdle(t, d)
}

// TestAbortsWithConnector aborts in every state there is, loads and saves in flight included.
func TestAbortsWithConnector(t *testing.T) {
	cfg := simConfig(t)
	reqs := requests(16)
	cfg.PrefixCaching, cfg.NumBlocks, cfg.BlockSize = false, 70, 4
	r := start(t, shared(t, cfg, connector.RoleBoth, storage(t), ""))
	want := tokensOf(r.ask(t, reqs, 1))
	rng := rand.New(rand.NewPCG(2, 3))
	for range 10 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rng.IntN(6000))*time.Microsecond)
		var outs []<-chan Output
		for i := range reqs {
			reqs[i].Remote = rng.IntN(3) == 0
			out, err := r.Submit(ctx, reqs[i])
			require.NoError(t, err)
			outs = append(outs, out)
		}
		for i, out := range outs {
			got := collect(out)
			require.True(t, slices.Equal(want[i][:len(got.tokens)], got.tokens))
			require.NotZero(t, got.last.Reason)
		}
		cancel()
	}
	require.Positive(t, r.metric(t, "kvport_requests_total", "abort"))
	requireIdle(t, r)
}

// TestNothingIsLeft opens and closes engines and looks for processes and files that stayed.
func TestNothingIsLeft(t *testing.T) {
	cfg := simConfig(t)
	dir := storage(t)
	fds := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(list)
	}
	cycle := func() {
		r := start(t, shared(t, cfg, connector.RoleBoth, dir, ""))
		pid := livePID(t, r, 0)
		out := submit(t, r, Request{ID: "a", Prompt: []int32{1, 2, 3}, MaxTokens: 200, IgnoreEOS: true})
		r.stop(t)
		require.Len(t, collect(out).tokens, 200)
		require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH)
	}
	cycle() // what is opened once stays
	before := fds()
	for range 3 {
		cycle()
	}
	require.Eventually(t, func() bool { return fds() <= before }, time.Minute, time.Millisecond)
}

func TestConnectorDoesNotStart(t *testing.T) {
	cfg := shared(t, simConfig(t), connector.RoleBoth, storage(t), "")
	cfg.PluginPath = []string{t.TempDir()}
	_, err := New(t.Context(), cfg)
	require.ErrorIs(t, err, host.ErrConfig)
}

// TestWaitsWithoutSpinning looks at the processor time of an engine that has nothing to compute:
// without requests, and with one that waits for a plugin that has stopped. A thread that spins beside it is the measure.
func TestWaitsWithoutSpinning(t *testing.T) {
	const settings = `{"deadlines": {"later": "1h"}, "heartbeat": {"limit": "1h"}}` // nothing but the plugin ends the wait
	r := start(t, shared(t, simConfig(t), connector.RoleBoth, storage(t), settings))
	used := func(who int) time.Duration {
		var u unix.Rusage
		require.NoError(t, unix.Getrusage(who, &u))
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	const spins = 100 * time.Millisecond
	spent := func() time.Duration {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		runtime.GC() // not meanwhile
		all, own := used(unix.RUSAGE_SELF), used(unix.RUSAGE_THREAD)
		for used(unix.RUSAGE_THREAD) < own+spins {
		}
		own = used(unix.RUSAGE_THREAD) - own
		return used(unix.RUSAGE_SELF) - all - own
	}
	rests := func() bool { // an engine that spins does so every time, what the runtime does once it does not
		for range 3 {
			if spent() < spins/2 {
				return true
			}
		}
		return false
	}
	pid := livePID(t, r, 0)
	require.True(t, rests(), "idle")
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	require.Eventually(t, func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err == nil && strings.Contains(string(stat), ") T ")
	}, time.Minute, time.Millisecond, "the plugin has not stopped")
	out := submit(t, r, Request{ID: "a", Prompt: make([]int32, 100), MaxTokens: 4, IgnoreEOS: true})
	require.Eventually(t, func() bool { return r.Health().Waiting == 1 }, time.Minute, time.Millisecond)
	require.True(t, rests(), "waiting for an answer")
	require.Equal(t, 1, r.Health().Waiting)
	require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
	require.Len(t, collect(out).tokens, 4)
	requireIdle(t, r)
}
