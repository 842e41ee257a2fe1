package acceptance

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// TestKeyRotation: the key of two engines and a router is replaced as an operator replaces it on three machines, one file
// after the other, while requests run. No request fails, no token differs, no ticket is refused, and blocks are handed over
// after each step, also between a plugin that was started before it and one that was started after it.
func TestKeyRotation(t *testing.T) {
	for _, f := range rig.Connectors(t, func(f *fixture.Fixture) bool { return f.LayerWise != nil }) {
		t.Run(f.Connector, func(t *testing.T) {
			t.Parallel() // most of it is waiting until files are read again
			r := rig.New(t)
			r.Tokens = 4
			rotate(&rotation{Rig: r}, f)
		})
	}
}

// registrar finds the address at which a router takes registrations.
var registrar = regexp.MustCompile(`"instances can register","address":"([0-9.:]+)"`)

// rotation is a deployment whose key is replaced. Each of its processes has a file of keys of its own.
type rotation struct {
	*rig.Rig
	origin string   // where the operator changes the keys
	copies []string // of the prefill engine, the decode engine and the router
	p, d   *cluster.Process
	router *cluster.Process
	want   []*cluster.Completion
	texts  []string
}

// keys runs kvport keys on the operator's file, and gives the ids, the one that signs first.
func (r *rotation) keys(args ...string) (ids []string) {
	r.Helper()
	args = append([]string{"keys"}, append(args, "--format", "json", "--file", r.origin)...)
	out, err := exec.CommandContext(r.Context(), rig.Binary(r.T), args...).Output()
	require.NoError(r, err, args)
	for line := range strings.Lines(string(out)) {
		var k struct{ ID string }
		require.NoError(r, json.Unmarshal([]byte(line), &k))
		ids = append(ids, k.ID)
	}
	return ids
}

// distribute copies the operator's file to one machine after the other. After each, it waits for the engine to read it, and
// has blocks handed over.
func (r *rotation) distribute(step string, ids []string) {
	r.Helper()
	data, err := os.ReadFile(r.origin)
	require.NoError(r, err)
	for i, path := range r.copies {
		require.NoError(r, os.WriteFile(path+".new", data, 0o600))
		require.NoError(r, os.Rename(path+".new", path))
		if i < 2 {
			engine := []*cluster.Process{r.p, r.d}[i]
			require.EventuallyWithT(r, func(c *assert.CollectT) { require.Equal(c, ids, r.known(c, engine)) }, time.Minute, 50*time.Millisecond)
		} else {
			require.NoError(r, r.router.Logged(r.Context(), `"reads":["`+strings.Join(ids, `","`)+`"]`))
		}
		r.handsOver(fmt.Sprintf("%s, machine %d", step, i))
	}
}

// known are the keys that an engine has.
func (r *rotation) known(t require.TestingT, p *cluster.Process) []string {
	data, err := r.Client.Get(r.Context(), p.URL+"/health")
	require.NoError(t, err)
	var h struct {
		KV struct {
			Keys []string `json:"ticket_keys"`
		} `json:"kv"`
	}
	require.NoError(t, json.Unmarshal(data, &h))
	return h.KV.Keys
}

// handsOver has the blocks of every request of a round handed over. A plugin that has just started may need a moment until
// its peers are connected again, so rounds before that do not count.
func (r *rotation) handsOver(step string) {
	r.Helper()
	for until := time.Now().Add(time.Minute); ; {
		got := r.All(r.router.URL, r.texts, 2)
		rig.Same(r.T, step, r.want, got)
		if !slices.ContainsFunc(got, func(c *cluster.Completion) bool { return c.Cached == 0 }) {
			return
		}
		require.True(r, time.Now().Before(until), "%s: requests of each round get no blocks", step)
	}
}

// restartPlugin ends the plugin of an engine, which starts it again.
func (r *rotation) restartPlugin(p *cluster.Process) {
	r.Helper()
	old := r.Plugin(p)
	process, err := os.FindProcess(old)
	require.NoError(r, err)
	require.NoError(r, process.Kill())
	require.EventuallyWithT(r, func(c *assert.CollectT) {
		h, err := r.Client.Health(r.Context(), p.URL)
		require.NoError(c, err)
		require.Equal(c, "ready", h.Connector.State)
		require.NotEqual(c, old, h.Connector.PID)
	}, time.Minute, 5*time.Millisecond)
}

func rotate(r *rotation, f *fixture.Fixture) {
	dir := r.TempDir()
	r.origin = filepath.Join(dir, "origin")
	old := r.keys("init")
	data, err := os.ReadFile(r.origin)
	require.NoError(r, err)
	for _, name := range []string{"prefill", "decode", "router"} {
		r.copies = append(r.copies, filepath.Join(dir, name))
		require.NoError(r, os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	r.router = r.Start("router", "route", "--port", "0", "--register", "127.0.0.1:0", "--ticket-key-file", r.copies[2], "--health-interval", "200ms")
	require.NoError(r, r.router.Logged(r.Context(), "instances can register"))
	at := registrar.FindStringSubmatch(r.router.Logs())
	require.NotNil(r, at, r.router.Logs())
	port, err := strconv.Atoi(rig.FreePort(r.T))
	require.NoError(r, err)
	serve := func(role string, own json.RawMessage, key string) *cluster.Process {
		extra, err := fixture.Fill(own, fixture.Values{"PORT": port})
		require.NoError(r, err)
		return r.ServeModel("sim", role, fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":%s,"kvport":{"ticket_key_file":%q}}`,
			f.Connector, role, extra, key), "--enable-prefix-caching=false", "--register", "http://"+at[1])
	}
	r.p, r.d = serve("kv_producer", f.LayerWise.Producer, r.copies[0]), serve("kv_consumer", f.LayerWise.Consumer, r.copies[1])
	r.texts = rig.Texts(r.T, *rig.Seed+8000, 8, 60, 300)
	r.want = r.All(r.ServeModel("sim", "single", "").URL, r.texts, 2)
	require.Eventually(r, func() bool {
		data, err := r.Client.Get(r.Context(), r.router.URL+"/health")
		return err == nil && strings.Contains(string(data), r.p.URL) && strings.Contains(string(data), r.d.URL)
	}, time.Minute, 20*time.Millisecond)
	r.handsOver("before")
	stop := r.underLoad()

	both := r.keys("rotate")
	require.Equal(r, old, both[:1])
	r.distribute("rotate", both)
	r.restartPlugin(r.p) // has both keys now, and the other one only the old one
	r.handsOver("rotate, one plugin restarted")
	promoted := r.keys("rotate", "--promote", both[1])
	r.distribute("promote", promoted)
	r.restartPlugin(r.p) // uses the new key first, and the other one still has only the old one
	r.handsOver("promote, one plugin restarted")
	r.restartPlugin(r.d)
	r.handsOver("promote, both plugins restarted")
	r.distribute("drop", r.keys("rotate", "--drop", old[0]))
	for _, engine := range []*cluster.Process{r.p, r.d} { // only now is the old key out of use
		r.restartPlugin(engine)
		r.handsOver("drop, a plugin restarted")
	}

	require.Positive(r, stop())
	for _, engine := range []*cluster.Process{r.p, r.d} {
		require.Zero(r, r.Metrics(engine).Sum("kvport_tickets_refused_total"), "tickets refused")
		require.Zero(r, r.Metrics(engine).Sum("kvport_connector_request_ids_total", `kind="forged"`), "request ids refused")
		require.NotContains(r, engine.Logs(), "the peer's key is not ours")
	}
	require.NotContains(r, r.router.Logs(), "do not fit")
}

// underLoad has two clients send requests until it is stopped, and says then how many. None of them fails and no token differs.
func (r *rotation) underLoad() (stop func() int64) {
	ctx, cancel := context.WithCancel(r.Context())
	var sent atomic.Int64
	var tasks sync.WaitGroup
	r.Cleanup(func() { cancel(); tasks.Wait() })
	ask := func() {
		for ctx.Err() == nil {
			n := sent.Add(1)
			i := int(n) % len(r.texts)
			got, err := r.Complete(r.router.URL, r.texts[i])
			if err != nil {
				r.Errorf("request %d: %v", n, err)
				return
			}
			if !slices.Equal(r.want[i].Tokens, got.Tokens) {
				r.Errorf("request %d: tokens %v, want %v", n, got.Tokens, r.want[i].Tokens)
			}
			select {
			case <-time.After(20 * time.Millisecond): // else the requests take all there is of the processors
			case <-ctx.Done():
			}
		}
	}
	tasks.Go(ask)
	tasks.Go(ask)
	return func() int64 {
		cancel()
		tasks.Wait()
		r.Logf("%d requests while the key was replaced: 0 failed", sent.Load())
		return sent.Load()
	}
}
