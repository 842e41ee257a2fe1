package main

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/url"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

var (
	flagNixlRequests = flag.Int("nixlrequests", 0, "requests between engines of 24 blocks with leases of 50 ms; default 100, in soak 2000")
	flagNixlMode     = flag.String("nixlmode", "", "pull, push or auto: mode of all NixlConnectors; default both pull and push")
	flagNixlKills    = flag.Int("nixlkills", 0, "kills in mid-transfer of each of P, D and their plugins, by NIXL; default 1 with sim, in soak 5 with the real model and 100 with -model sim; more than 1 are with the real model, if -model names no other")
)

// calm settings let a stopped plugin be: a test decides what becomes of it, and how long a transfer may take.
const calm = `"breaker":{"deaths":1000},"heartbeat":{"limit":"1m"},"deadlines":{"transfer":%q}`

// nixlConfig is a --kv-transfer-config of NixlConnector.
func nixlConfig(role, mode string, lease, transfer time.Duration) string {
	return fmt.Sprintf(`{"kv_connector":"NixlConnector","kv_role":%q,"kv_connector_extra_config":{"lease_ms":%d,"mode":%q},"kvport":{%s}}`,
		role, lease.Milliseconds(), mode, fmt.Sprintf(calm, transfer))
}

// nixlModes are who may move the bytes: consumers, or producers.
func nixlModes() []string {
	if *flagNixlMode != "" {
		return []string{*flagNixlMode}
	}
	return []string{"pull", "push"}
}

// TestNixlFewBlocks: caches so small that blocks are reused at once, leases so short that many are over before
// their consumer comes: no token is wrong, and in the end nothing is held.
func TestNixlFewBlocks(t *testing.T) {
	rig.Need(t, "nixl")
	for _, mode := range nixlModes() {
		t.Run(mode, func(t *testing.T) { nixlFewBlocks(t, mode) })
	}
}

func nixlFewBlocks(t *testing.T, mode string) {
	r := rig.New(t)
	r.Tokens = 4
	n := rig.Count(t, "nixlrequests", *flagNixlRequests, 100, 2000)
	prompts := rig.Texts(t, *rig.Seed, n, 40, 150)
	node := r.ServeModel("sim", "single", "")
	want := r.All(node.URL, prompts, 4)
	r.Stop(node)
	const lease = 50 * time.Millisecond
	p := r.ServeModel("sim", "prefill", nixlConfig("kv_producer", mode, lease, rig.Unhurried), "--num-blocks", "24")
	d := r.ServeModel("sim", "decode", nixlConfig("kv_consumer", mode, lease, rig.Unhurried), "--num-blocks", "24")
	rig.Same(t, "24 blocks, leases of 50 ms", want, r.All(r.Route(p, d).URL, prompts, 8))
	r.Idle(p)
	r.Idle(d)
	fetched := func() float64 { return r.Metrics(p).Sum("kvport_connector_holds_consumed_total") }
	require.Eventually(t, func() bool { return fetched() > 0 }, time.Minute, 50*time.Millisecond) // it is asked about once a second
	m, q := r.Metrics(d), r.Metrics(p)
	external := m.Sum("kvport_prompt_tokens_total", `source="external"`)
	require.Positive(t, external)
	t.Logf("%.0f tokens from the prefill engine, %.0f loads failed; holds fetched %.0f, expired %.0f; %.0f questions came too late",
		external, m.Sum("kvport_failed_loads_total"), fetched(),
		q.Sum("kvport_connector_holds_expired_total"), q.Sum("kvport_connector_late_questions_total"))
}

// nixlFleet is two prefill and two decode engines behind a router. An engine that dies comes back at its port.
type nixlFleet struct {
	*rig.Rig
	model  string
	lease  time.Duration
	limit  time.Duration // of a transfer
	p, d   [2]*cluster.Process
	router *cluster.Process
	node   *cluster.Process
}

func (f *nixlFleet) engine(role string, i int, port string) *cluster.Process {
	f.Helper()
	modes := nixlModes() // the engines of a role differ in it
	return f.Start(fmt.Sprintf("%s %d", role, i), "serve", "--model", f.model, "--port", port, "--num-blocks", "512",
		"--kv-transfer-config", nixlConfig(role, modes[i%len(modes)], f.lease, f.limit))
}

// newNixlFleet starts everything; limit is of a transfer.
func newNixlFleet(t *testing.T, model string, limit time.Duration) *nixlFleet {
	t.Helper()
	f := &nixlFleet{Rig: rig.New(t), model: model, lease: time.Second, limit: limit}
	f.Tokens = 8
	f.node = f.ServeModel(model, "single", "")
	for i := range f.p {
		f.p[i], f.d[i] = f.engine("kv_producer", i, "0"), f.engine("kv_consumer", i, "0")
	}
	f.router = f.Start("router", "route", "--port", "0", "--prefill", f.p[0].URL+","+f.p[1].URL, "--decode", f.d[0].URL+","+f.d[1].URL)
	return f
}

// connector is how an engine's plugin is; without an answer it is nothing.
func (f *nixlFleet) connector(e *cluster.Process) cluster.Connector {
	h, err := f.Client.Health(f.Context(), e.URL)
	if err != nil {
		return cluster.Connector{}
	}
	return h.Connector
}

// caught is a load in the middle of which the plugin that reads is stopped.
type caught struct {
	p, d   int
	plugin int // of d, stopped
}

// catch sends a prompt and stops the plugin that loads its blocks. The answer comes on the channel. It fails with
// ErrTooLate if the load was over.
func (f *nixlFleet) catch(prompt string) (c caught, answer chan *cluster.Completion, err error) {
	f.Helper()
	answer = make(chan *cluster.Completion, 1)
	over := make(chan struct{})
	go func() {
		defer close(over)
		got, err := f.Complete(f.router.URL, prompt)
		if err != nil {
			f.Errorf("a request was lost: %v", err)
		}
		answer <- got
	}()
	tick := time.NewTicker(200 * time.Microsecond)
	defer tick.Stop()
	for {
		for i, d := range f.d {
			x := f.connector(d)
			if x.Loading == 0 || x.PID == 0 {
				continue
			}
			if err := syscall.Kill(x.PID, syscall.SIGSTOP); err != nil {
				return c, answer, err
			}
			c = caught{p: -1, d: i, plugin: x.PID}
			for k, p := range f.p {
				if f.connector(p).Held > 0 {
					c.p = k
				}
			}
			if f.connector(d).Loading == 0 || c.p < 0 {
				return c, answer, errors.Join(cluster.ErrTooLate, syscall.Kill(x.PID, syscall.SIGCONT))
			}
			return c, answer, nil
		}
		select {
		case <-over:
			return c, answer, cluster.ErrTooLate
		case <-tick.C:
		}
	}
}

// caughtAnew tries prompts until one is caught.
func (f *nixlFleet) caughtAnew(n uint64) (c caught, prompt string, answer chan *cluster.Completion) {
	f.Helper()
	lo, hi := 1200, 3000
	for try := range uint64(50) {
		prompt = rig.Texts(f.T, *rig.Seed+1000*n+try, 1, lo, hi)[0]
		var err error
		if c, answer, err = f.catch(prompt); err == nil {
			return c, prompt, answer
		}
		<-answer
		require.ErrorIs(f, err, cluster.ErrTooLate)
	}
	require.FailNow(f, "50 loads in a row were over before they could be met")
	return c, prompt, answer
}

// again starts an engine at the port of one that has died.
func (f *nixlFleet) again(role string, i int, e **cluster.Process) {
	f.Helper()
	u, err := url.Parse((*e).URL)
	require.NoError(f, err)
	_, port, err := net.SplitHostPort(u.Host)
	require.NoError(f, err)
	*e = f.engine(role, i, port)
}

// killPlugin ends an engine's plugin with SIGKILL.
func (f *nixlFleet) killPlugin(e *cluster.Process) {
	f.Helper()
	for _, pid := range cluster.Plugins(e.PID()) {
		require.NoError(f, exec.Command("kill", "-9", fmt.Sprint(pid)).Run())
	}
}

// ready waits until all engines serve and their plugins run.
func (f *nixlFleet) ready() {
	f.Helper()
	for _, e := range []*cluster.Process{f.p[0], f.p[1], f.d[0], f.d[1]} {
		require.Eventually(f, func() bool { return f.connector(e).State == "ready" }, time.Minute, 10*time.Millisecond, "%s is not ready", e.Name)
	}
}

// back waits until a prefill engine holds nothing, and says how long that took.
func (f *nixlFleet) back(p *cluster.Process) time.Duration {
	f.Helper()
	began := time.Now()
	require.Eventually(f, func() bool { x := f.connector(p); return x.State == "ready" && x.Held == 0 }, time.Minute, 5*time.Millisecond)
	return time.Since(began)
}

// TestNixlKills: P, D and their plugins get SIGKILL while D's plugin is in the middle of reading P's cache. No
// request is lost, no token is wrong, and P has its blocks back when the lease is over. CI asks for more than one kill of each, with the
// real model, in a stage of its own; without that the model is sim.
func TestNixlKills(t *testing.T) {
	rig.Need(t, "nixl")
	full := 5
	if strings.HasPrefix(*rig.ModelName, "sim") {
		full = 100
	}
	n, model := rig.Count(t, "nixlkills", *flagNixlKills, 1, full), rig.Simulated()
	if n > 1 {
		model = rig.Model(t)
	}
	f := newNixlFleet(t, model, rig.Unhurried)
	var longest time.Duration
	for k := range n {
		for i, what := range []string{"the decode engine", "the decode engine's plugin", "the prefill engine", "the prefill engine's plugin"} {
			f.ready()
			c, prompt, answer := f.caughtAnew(uint64(4*k + i + 1))
			p := f.p[c.p]
			switch i {
			case 0:
				f.d[c.d].Kill()
			case 1:
				require.NoError(t, syscall.Kill(c.plugin, syscall.SIGKILL))
			case 2:
				p.Kill()
			case 3:
				f.killPlugin(p)
				f.reuse(p, uint64(4*k+i)) // the blocks that D's plugin is reading
			}
			if i < 2 {
				took := f.back(p)
				longest = max(longest, took)
				require.Less(t, took, f.lease+time.Second+busy, "P's blocks come back")
			} else {
				require.NoError(t, syscall.Kill(c.plugin, syscall.SIGCONT))
			}
			got := <-answer
			require.NotNil(t, got, what)
			switch i {
			case 0:
				f.again("kv_consumer", c.d, &f.d[c.d])
			case 2:
				f.again("kv_producer", c.p, &f.p[c.p])
			}
			rig.Same(t, "SIGKILL of "+what, f.All(f.node.URL, []string{prompt}, 1), []*cluster.Completion{got})
		}
	}
	f.ready()
	for i := range f.p {
		f.Idle(f.p[i])
		f.Idle(f.d[i])
	}
	t.Logf("%d kills of each in mid-transfer; P's blocks were back %v after the death of their reader at the latest", n, longest.Round(time.Millisecond))
}

// busy is what a machine with too much to do may add to a limit.
const busy = 15 * time.Second

// reuse has an engine compute other prompts, which takes the slots that are free again.
func (f *nixlFleet) reuse(p *cluster.Process, n uint64) {
	f.Helper()
	f.All(p.URL, rig.Texts(f.T, *rig.Seed+500_000+n, 2, 1200, 3000), 2)
}

// TestNixlPeerStops: a prefill engine that is stopped together with its plugin costs D its load after a bounded time,
// not the request.
func TestNixlPeerStops(t *testing.T) {
	rig.Need(t, "nixl")
	const limit = 5 * time.Second // the default
	f := newNixlFleet(t, rig.Simulated(), limit)
	c, prompt, answer := f.caughtAnew(7)
	p := f.p[c.p]
	stopped := append(cluster.Plugins(p.PID()), p.PID())
	for _, pid := range stopped {
		require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	}
	wake := sync.OnceFunc(func() {
		for _, pid := range stopped {
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
	})
	defer wake()
	began := time.Now()
	require.NoError(t, syscall.Kill(c.plugin, syscall.SIGCONT))
	got := <-answer
	require.NotNil(t, got)
	took := time.Since(began)
	t.Logf("the request was answered %v after its prefill engine had stopped", took.Round(time.Millisecond))
	require.Less(t, took, limit+2*time.Second+busy, "what a transfer may take, and what its end may")
	rig.Same(t, "a prefill engine that is stopped", f.All(f.node.URL, []string{prompt}, 1), []*cluster.Completion{got})
	wake()
	require.Eventually(t, func() bool { return f.connector(p).State == "ready" }, time.Minute, 10*time.Millisecond)
	f.Idle(p)
	f.Idle(f.d[c.d])
}
