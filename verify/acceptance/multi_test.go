package acceptance

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

var (
	flagMultiKills     = flag.Int("multikills", 0, "kills and stops of MultiConnector's children on sim; default 10, in soak 100")
	flagMultiRealKills = flag.Int("multirealkills", 0, "the same on the real model; default 1, in soak 10")
	flagOrders         = flag.Int("orders", 0, "orders of three children on the real model; default 1, in soak all 6")
)

// kid is the transfer config of one child.
type kid struct {
	Connector string         `json:"kv_connector"`
	Role      string         `json:"kv_role"`
	Extra     map[string]any `json:"kv_connector_extra_config"`
}

func newKid(name string, extra map[string]any) kid { return kid{Connector: name, Extra: extra} }

// nested makes one child of several.
func nested(kids ...kid) kid { return newKid("MultiConnector", map[string]any{"connectors": kids}) }

// in gives a child a role, and those in it.
func (k kid) in(role string) kid {
	k.Role = role
	if inner, ok := k.Extra["connectors"].([]kid); ok {
		k.Extra = map[string]any{"connectors": kidsIn(role, inner)}
	}
	return k
}

func kidsIn(role string, kids []kid) []kid {
	out := make([]kid, len(kids))
	for i := range kids {
		out[i] = kids[i].in(role)
	}
	return out
}

// multi is the --kv-transfer-config of a MultiConnector; settings are its "kvport" object or nil.
func (r *rig) multi(role string, settings map[string]any, kids ...kid) string {
	r.Helper()
	return r.multiOf(role, settings, kidsIn(role, kids)...)
}

// multiOf is multi for children that have roles.
func (r *rig) multiOf(role string, settings map[string]any, kids ...kid) string {
	r.Helper()
	config := nested(kids...)
	config.Role = role
	data, err := json.Marshal(struct {
		kid
		Settings map[string]any `json:"kvport,omitempty"`
	}{config, settings})
	require.NoError(r, err)
	return string(data)
}

// permutations are all orders of n things.
func permutations(n int) [][]int {
	if n == 0 {
		return [][]int{nil}
	}
	var out [][]int
	for _, p := range permutations(n - 1) {
		for at := range n {
			out = append(out, slices.Insert(slices.Clone(p), at, n-1))
		}
	}
	return out
}

// trio is three children whose every order is run. A decode engine can load from those that are
// remote; what a slow one of them is still fetching comes from the others.
type trio struct {
	name   string
	kids   func(r *rig, at string) []kid // at tells the runs apart
	remote func(k kid) bool
	slow   string
	tail   string // a child that reads another engine's cache: what is behind a prompt's full blocks too
	full   bool   // only when all orders are run on the real model

	order []int
	at    string
}

func trios(url string) []trio {
	folder := func(r *rig, at string) map[string]any {
		return map[string]any{"shared_storage_path": filepath.Join(r.store, at)}
	}
	return []trio{
		{name: "stores", kids: func(r *rig, at string) []kid {
			return []kid{
				newKid("OffloadingConnector", map[string]any{"cpu_bytes_to_use": 256 << 20}),
				newKid("SharedStorageConnector", folder(r, at)),
				newKid("RemoteStoreConnector", map[string]any{"url": url, "key_prefix": at}),
			}
		}, remote: func(k kid) bool { return k.Connector != "OffloadingConnector" }},
		{name: "peers", kids: func(r *rig, at string) []kid {
			return []kid{
				newKid("PipeConnector", map[string]any{"buffer_bytes": 256 << 20}),
				newKid("AIBrixOffloadingConnectorV1Type1", aibrixMemory()),
				newKid("SharedStorageConnector", folder(r, at)),
			}
		}, remote: func(k kid) bool { return !strings.HasPrefix(k.Connector, "AIBrix") }, slow: "PipeConnector"},
		{name: "nixl", full: true, tail: "NixlConnector", kids: func(r *rig, at string) []kid {
			return []kid{
				newKid("NixlConnector", map[string]any{}),
				newKid("AIBrixOffloadingConnectorV1Type1", aibrixMemory()),
				newKid("SharedStorageConnector", folder(r, at)),
			}
		}, remote: func(k kid) bool { return !strings.HasPrefix(k.Connector, "AIBrix") }},
	}
}

func aibrixMemory() map[string]any {
	return map[string]any{"AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB": "0.25"}
}

// TestMultiOrders: a MultiConnector of three children in every order, prefill and decode apart and on
// one engine that saves and loads; blocks come from the first child that has them.
func TestMultiOrders(t *testing.T) {
	orders := min(6, count(t, "orders", *flagOrders, 1, 6))
	_, relay := remoteServer(t)
	for i, three := range trios("redis://" + relay.Address()) {
		if three.full && (orders < 6 || !haveNixl(t)) {
			t.Logf("%s: left out, -orders 6 and NIXL run it", three.name)
			continue
		}
		for _, m := range []string{"sim", model(t)} {
			if m == "sim" && *flagModel != "" {
				continue
			}
			t.Run(three.name+"/"+filepath.Base(m), func(t *testing.T) {
				r := newRig(t)
				prompts := texts(t, *flagSeed+uint64(50000+1000*i), min(4, count(t, "prompts", *flagPrompts, 2, 4)), 400, 1600)
				node := r.serveModel(m, "single", "")
				want := r.all(node.URL, prompts, 2)
				r.stop(node)
				all := permutations(3)
				rng := rand.New(rand.NewPCG(*flagSeed, uint64(i)))
				rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
				if m != "sim" {
					all = all[:orders]
				}
				tokens := 0
				for n, order := range all {
					three.order, three.at = order, fmt.Sprintf("%s-%s-%d", three.name, filepath.Base(m), n)
					tokens += r.testOrder(m, three, prompts, want)
				}
				t.Logf("%d orders of three children, P/D and single node: %d tokens compared, 0 differ", len(all), tokens)
			})
		}
	}
}

func (r *rig) testOrder(m string, three trio, prompts []string, want []*cluster.Completion) (tokens int) {
	r.Helper()
	listed := func(at string) (kids []kid, names string) {
		all := three.kids(r, at)
		for _, i := range three.order {
			kids = append(kids, all[i])
			names += " " + all[i].Connector
		}
		return kids, names
	}
	apart, names := listed(three.at + "-apart")
	// A child whose saves are late would be passed over: which is first would depend on the machine's load.
	waits := map[string]any{"deadlines": map[string]any{"match": "20s"}}
	p := r.serveModel(m, "prefill", r.multi("kv_producer", waits, apart...))
	d := r.serveModel(m, "decode", r.multi("kv_consumer", nil, apart...), "--enable-prefix-caching=false")
	router := r.route(p, d)
	got := r.all(router.URL, prompts, 2)
	tokens += compare(r.T, "P/D,"+names, want, got)
	r.externalAndTail(d, got, three.tail != "")
	r.loadsOnlyFrom(d, apart, three)
	for _, e := range []*cluster.Process{p, d} {
		r.idle(e)
		r.stop(e)
	}
	r.stop(router)

	one, _ := listed(three.at + "-one")
	both := r.serveModel(m, "both", r.multi("kv_both", nil, one...), "--enable-prefix-caching=false")
	tokens += compare(r.T, "one engine, saves,"+names, want, r.all(both.URL, prompts, 2))
	r.idle(both)
	tokens += compare(r.T, "one engine, loads,"+names, want, r.all(both.URL, prompts, 2))
	r.loadsOnlyFrom(both, one, trio{remote: func(k kid) bool { return k.Connector != three.tail }}) // which needs another engine
	r.idle(both)
	r.stop(both)
	return tokens
}

// loadsOnlyFrom checks that all that was loaded came from the first child that has blocks, or, if that
// is the slow one, from it and the next.
func (r *rig) loadsOnlyFrom(p *cluster.Process, kids []kid, three trio) {
	r.Helper()
	m := r.metrics(p)
	h, err := r.client.Health(r.Context(), p.URL)
	require.NoError(r, err)
	require.Equal(r, "ready", h.Connector.State)
	loaded, first := 0.0, true
	for i, k := range kids {
		name := fmt.Sprintf("%d/%s", i, k.Connector)
		require.Equal(r, name, h.Connector.Children[i].Name)
		n := m.Sum("kvport_child_blocks_total", fmt.Sprintf("child=%q", name), `direction="load"`)
		switch {
		case three.remote(k) && first:
			first = k.Connector == three.slow
			loaded += n
		case k.Connector != three.tail:
			require.Zero(r, n, "blocks from %s", name)
		}
	}
	require.Positive(r, loaded)
	require.Zero(r, m.Sum("kvport_child_failed_blocks_total", `direction="load"`))
	require.Zero(r, m.Sum("kvport_integrity_failures_total"))
}

// movers are the connectors that bring blocks from a prefill engine to a decode engine.
func movers(t *testing.T) []string {
	t.Helper()
	out := []string{"PipeConnector"}
	if haveNixl(t) {
		return append(out, "NixlConnector")
	}
	t.Log("NixlConnector IS NOT TESTED: NIXL is not in .deps/nixl; run make deps")
	return out
}

// TestMultiPeer: blocks go to the decode engine by a child that connects the two and are kept by one
// that offloads them: the first request of a prompt is fetched from the producer, and the producer
// itself loads the second from its own memory.
func TestMultiPeer(t *testing.T) {
	for _, mover := range movers(t) {
		for _, m := range []string{"sim", model(t)} {
			t.Run(mover+"/"+filepath.Base(m), func(t *testing.T) { testMultiPeer(newRig(t), mover, m) })
		}
	}
}

func testMultiPeer(r *rig, mover, m string) {
	r.Helper()
	prompts := texts(r.T, *flagSeed+55000, min(4, count(r.T, "prompts", *flagPrompts, 2, 4)), 400, 1600)
	node := r.serveModel(m, "single", "")
	want := r.all(node.URL, prompts, 2)
	r.stop(node)
	peer, memory := newKid(mover, map[string]any{}), newKid("AIBrixOffloadingConnectorV1Type1", aibrixMemory())
	p := r.serveModel(m, "prefill", r.multiOf("kv_both", nil, peer.in("kv_producer"), memory.in("kv_both")), "--enable-prefix-caching=false")
	d := r.serveModel(m, "decode", r.multiOf("kv_both", nil, peer.in("kv_consumer"), memory.in("kv_both")), "--enable-prefix-caching=false")
	router := r.route(p, d)
	tokens := compare(r.T, "first", want, r.all(router.URL, prompts, 2))
	blocks := func(e *cluster.Process, child, direction string) float64 {
		return r.metrics(e).Sum("kvport_child_blocks_total", fmt.Sprintf("child=%q", child), fmt.Sprintf("direction=%q", direction))
	}
	fetched := blocks(d, "0/"+mover, "load")
	require.Positive(r, fetched)
	require.Zero(r, blocks(d, "1/AIBrixOffloadingConnectorV1Type1", "load"))
	tokens += compare(r.T, "again", want, r.all(router.URL, prompts, 2))
	kept := blocks(p, "1/AIBrixOffloadingConnectorV1Type1", "load")
	require.Positive(r, kept)
	for _, e := range []*cluster.Process{p, d} {
		r.idle(e)
		require.Zero(r, r.metrics(e).Sum("kvport_child_failed_blocks_total"))
		r.stop(e)
	}
	r.Logf("%d tokens compared, 0 differ; %.0f blocks fetched from the producer, which loaded %.0f from its own memory the second time", tokens, fetched, kept)
}

// struckKids are the children of the engines whose children are killed: of every kind, some nested.
// Prefill and decode share a folder and a server, and producers give tickets.
func struckKids(r *rig, url string) []kid {
	return []kid{
		newKid("PipeConnector", map[string]any{"buffer_bytes": 64 << 20}),
		nested(
			newKid("OffloadingConnector", map[string]any{"cpu_bytes_to_use": 64 << 20}),
			newKid("SharedStorageConnector", map[string]any{"shared_storage_path": r.store}),
		),
		newKid("RemoteStoreConnector", map[string]any{"url": url}),
	}
}

// TestMultiKilled: children of MultiConnectors are killed and stopped at random under load, until the given number
// of faults have met a transfer; tokens are right, no request is lost, and the other children are not harmed.
func TestMultiKilled(t *testing.T) {
	t.Run("sim", func(t *testing.T) {
		testMultiKilled(newRig(t), "sim", count(t, "multikills", *flagMultiKills, 6, 100), 600, 3000)
	})
	t.Run("real model", func(t *testing.T) {
		testMultiKilled(newRig(t), model(t), count(t, "multirealkills", *flagMultiRealKills, 1, 10), 1600, 3600)
	})
}

func testMultiKilled(r *rig, m string, n, lo, hi int) {
	r.Helper()
	_, relay := remoteServer(r.T)
	kids := struckKids(r, "redis://"+relay.Address())
	settings := map[string]any{
		"breaker":   map[string]any{"deaths": 100000, "backoff_max": "20ms"},
		"deadlines": map[string]any{"transfer": "2s", "save": "2s"}, "heartbeat": map[string]any{"limit": "2s"},
	}
	const fresh, old = 2, 4
	most := 2*n + 10 // faults: some meet none
	prompts := texts(r.T, *flagSeed+60000, old+fresh*(n+n/4+1), lo, hi)
	node := r.serveModel(m, "single", "")
	want := r.all(node.URL, prompts, 4)
	r.stop(node)
	p := r.serveModel(m, "prefill", r.multi("kv_producer", settings, kids...), "--enable-prefix-caching=false")
	d := r.serveModel(m, "decode", r.multi("kv_consumer", settings, kids...), "--enable-prefix-caching=false")
	both := r.serveModel(m, "both", r.multi("kv_both", settings, kids[1:]...), "--enable-prefix-caching=false")
	router := r.route(p, d)
	tokens := compare(r.T, "before", want[:old], r.all(router.URL, prompts[:old], 4))
	compare(r.T, "before", want[:old], r.all(both.URL, prompts[:old], 4))
	var before []cluster.Resources
	for _, e := range []*cluster.Process{p, d, both} {
		r.idle(e)
		before = append(before, settled(r.T, e))
	}

	rng := rand.New(rand.NewPCG(*flagSeed, 10))
	met, faults, requests, kinds := 0, 0, 0, map[string]int{}
	for i := 0; met < n; i++ {
		require.Less(r, i, most, "%d faults met a transfer, want %d", met, n)
		s := fault{engine: []*cluster.Process{p, d, both}[i%3], to: router.URL, signal: syscall.SIGKILL}
		if s.engine == both {
			s.to = both.URL
		}
		if rng.IntN(4) == 0 {
			s.signal = syscall.SIGSTOP
		}
		known := min(len(prompts), old+fresh*i) // of these prompts some were saved
		s.prompts = append(s.prompts, rng.Perm(known)[:old]...)
		for k := known; k < min(len(prompts), known+fresh); k++ {
			s.prompts = append(s.prompts, k)
		}
		hit, name, got := r.signalChild(rng, s, prompts)
		var expect []*cluster.Completion
		for _, k := range s.prompts {
			expect = append(expect, want[k])
		}
		tokens += compare(r.T, fmt.Sprintf("fault %d, %v of %s of %s", i, s.signal, name, s.engine.Name), expect, got)
		kinds[fmt.Sprintf("%s %v", name, s.signal)]++
		faults, requests = faults+1, requests+len(s.prompts)
		if hit {
			met++
		}
	}
	r.Logf("%d faults, %d of them while a transfer ran; %d tokens compared, 0 differ, 0 of %d requests lost; %v", faults, met, tokens, requests, kinds)
	for i, e := range []*cluster.Process{p, d, both} {
		r.idle(e)
		r.childrenReady(e)
		require.Eventually(r, func() bool { return cluster.Usage(e.PID()) == before[i] }, time.Minute, 50*time.Millisecond,
			"resources of %s: before %+v, after %+v", e.Name, before[i], cluster.Usage(e.PID()))
		m := r.metrics(e)
		r.Logf("%s: blocks loaded and saved by child %v and %v, failed %v and %v; resources before and after %+v", e.Name,
			byChild(m, "kvport_child_blocks_total", "load"), byChild(m, "kvport_child_blocks_total", "save"),
			byChild(m, "kvport_child_failed_blocks_total", "load"), byChild(m, "kvport_child_failed_blocks_total", "save"), before[i])
		require.Zero(r, m.Sum("kvport_integrity_failures_total"))
	}
}

// byChild are the values of a metric for one direction.
func byChild(m cluster.Metrics, name, direction string) []string {
	var out []string
	for key, v := range m {
		if strings.HasPrefix(key, name+"{") && strings.Contains(key, fmt.Sprintf("direction=%q", direction)) {
			_, child, _ := strings.Cut(key, `child="`)
			child, _, _ = strings.Cut(child, `"`)
			out = append(out, fmt.Sprintf("%s:%.0f", child, v))
		}
	}
	slices.Sort(out)
	return out
}

// fault is one fault: the prompts, the engine they are sent to, and the engine whose child gets the signal.
type fault struct {
	engine  *cluster.Process
	to      string
	signal  syscall.Signal
	prompts []int
}

// childrenReady waits until all children of an engine take calls.
func (r *rig) childrenReady(e *cluster.Process) (leaves []cluster.Connector) {
	r.Helper()
	require.Eventually(r, func() bool {
		h, err := r.client.Health(r.Context(), e.URL)
		if err != nil || h.Connector.State != "ready" {
			return false
		}
		leaves = h.Connector.Leaves()
		return !slices.ContainsFunc(leaves, func(c cluster.Connector) bool { return c.State != "ready" })
	}, time.Minute, 2*time.Millisecond, "not all children are ready")
	return leaves
}

// signalChild sends prompts and signals a child in the middle of them. It returns when the child is gone and
// all answers are there; hit says whether a transfer was running.
func (r *rig) signalChild(rng *rand.Rand, s fault, prompts []string) (hit bool, name string, got []*cluster.Completion) {
	r.Helper()
	leaves := r.childrenReady(s.engine)
	victim := rng.IntN(len(leaves))
	pid := leaves[victim].PID
	list := make([]string, len(s.prompts))
	for i, k := range s.prompts {
		list[i] = prompts[k]
	}
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		got = r.all(s.to, list, 4)
	}()
	// Wait for a transfer, which a slow model begins late, but not always: some faults are to meet an idle
	// child.
	deadline := time.Now().Add(time.Duration(5+rng.IntN(300)) * time.Millisecond)
	if rng.IntN(4) > 0 {
		deadline = deadline.Add(20 * time.Second)
	}
	for over := false; !hit && !over && time.Now().Before(deadline); {
		h, err := r.client.Health(r.Context(), s.engine.URL)
		hit = err == nil && h.Connector.Pending > 0
		select {
		case <-answered:
			over = true
		default:
		}
	}
	require.NoError(r, syscall.Kill(pid, s.signal), "the child died by itself")
	<-answered
	require.Eventually(r, func() bool { return !cluster.Alive(pid) }, time.Minute, time.Millisecond, "child %d lives on after %v", pid, s.signal)
	after := leaves
	require.Eventually(r, func() bool { // the engine may not have noticed yet
		after = r.childrenReady(s.engine)
		return after[victim].PID != pid
	}, 20*time.Second, time.Millisecond)
	for i, c := range after {
		if i == victim {
			require.Equal(r, leaves[i].Restarts+1, c.Restarts)
		} else {
			require.Equal(r, leaves[i], c, "%s was harmed by the fault of %s", c.Name, leaves[victim].Name)
		}
	}
	return hit, leaves[victim].Name, got
}
