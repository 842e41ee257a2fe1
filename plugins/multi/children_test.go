package main

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

var (
	flagMultiKills     = flag.Int("multikills", 0, "kills and stops of MultiConnector's children on sim; default 4, in soak 100")
	flagMultiRealKills = flag.Int("multirealkills", 0, "the same on the real model; default 1, in soak 10")
	flagOrders         = flag.Int("orders", 0, "orders of three children on the real model; default 1, in soak all 6")
	flagSimOrders      = flag.Int("simorders", 0, "the same on sim; default 1, in soak all 6")
	flagMovers         = flag.Int("movers", 0, "P2P children that TestMultiPeer runs on the real model, too; default 1, in soak all")
)

// child is a child of a MultiConnector, and what a test expects of it.
type child struct {
	Config json.RawMessage `json:"config"` // @TMP@, @NAME@ and @SERVER@ are the test's own, @ROLE@ the engine's kv_role
	Remote bool            `json:"remote"` // another engine can load what it has
	Slow   bool            `json:"slow"`   // what it is still fetching comes from the others
	Tail   bool            `json:"tail"`   // it reads another engine's cache: what is behind a prompt's full blocks, too
	Named  bool            `json:"named"`  // a shared store beside one that hands blocks over: tickets name what the store has
}

// name is the child's connector.
func (c *child) name(t *testing.T) string {
	t.Helper()
	var config struct {
		Connector string `json:"kv_connector"`
	}
	require.NoError(t, json.Unmarshal(c.Config, &config))
	return config.Connector
}

// children are a list of testdata/children.json.
func children(t *testing.T, list string) []child {
	t.Helper()
	var lists map[string][]child
	data, err := os.ReadFile("testdata/children.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, &lists))
	require.NotEmpty(t, lists[list], list)
	return lists[list]
}

// needAll skips a test where make deps has not put what children need.
func needAll(t *testing.T, list string) {
	t.Helper()
	known := testkit.Fixtures(t)
	for _, c := range children(t, list) {
		if f := known.Of(c.name(t)); f != nil {
			rig.Need(t, f.Needs)
		}
	}
}

// ofFixture is a child as its fixture sets it up.
func ofFixture(f *fixture.Fixture) child {
	return child{Config: fmt.Appendf(nil, `{"kv_connector":%q,"kv_role":"@ROLE@","kv_connector_extra_config":%s}`, f.Connector, f.Setups[0].Config)}
}

// composed is a MultiConnector.
type composed struct {
	children []child
	values   fixture.Values // but @ROLE@
	settings string         // more members of the config, with a comma before them
}

// config is the --kv-transfer-config for a role; that of its children is another one, where it is not empty.
func (c *composed) config(t *testing.T, role, inner string) string {
	t.Helper()
	all := make([]string, len(c.children))
	values := fixture.Values{"ROLE": cmp.Or(inner, role)}
	maps.Copy(values, c.values)
	for i, one := range c.children {
		var err error
		all[i], err = fixture.Fill(one.Config, values)
		require.NoError(t, err)
	}
	return fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":{"connectors":[%s]}%s}`, host.MultiName, role, strings.Join(all, ","), c.settings)
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

// trio is three children whose every order is run.
type trio struct {
	name   string
	full   bool // only when all orders are run on the real model
	order  []int
	server string
	at     string // tells the runs apart
}

// TestMultiOrders: a MultiConnector of three children in orders that the seed picks, in soak in every order, prefill and decode
// apart and on one engine that saves and loads; blocks come from the first child that has them.
func TestMultiOrders(t *testing.T) {
	orders := min(6, rig.Count(t, "orders", *flagOrders, 1, 6))
	simOrders := min(6, rig.Count(t, "simorders", *flagSimOrders, 1, 6))
	_, relay := rig.RemoteServer(t)
	for i, three := range []trio{{name: "stores"}, {name: "peers"}, {name: "holder", full: true}} {
		three.server = relay.Address()
		if three.full && orders < 6 {
			t.Logf("%s: left out, -orders 6 runs it", three.name)
			continue
		}
		for _, m := range []string{"sim", rig.Model(t)} {
			if m == "sim" && *rig.ModelName != "" {
				continue
			}
			t.Run(three.name+"/"+filepath.Base(m), func(t *testing.T) {
				needAll(t, three.name)
				r := rig.New(t)
				prompts := rig.Texts(t, *rig.Seed+uint64(50000+1000*i), min(4, rig.Count(t, "prompts", *rig.Prompts, 2, 4)), 400, 1600)
				node := r.ServeModel(m, "single", "")
				want := r.All(node.URL, prompts, 2)
				r.Stop(node)
				all := permutations(3)
				rng := rand.New(rand.NewPCG(*rig.Seed, uint64(i)))
				rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
				if m == "sim" {
					all = all[:simOrders]
				} else {
					all = all[:orders]
				}
				tokens := 0
				for n, order := range all {
					three.order, three.at = order, fmt.Sprintf("%s-%s-%d", three.name, filepath.Base(m), n)
					tokens += testOrder(r, m, three, prompts, want)
				}
				t.Logf("%d orders of three children, P/D and single node: %d tokens compared, 0 differ", len(all), tokens)
			})
		}
	}
}

func testOrder(r *rig.Rig, m string, three trio, prompts []string, want []*cluster.Completion) (tokens int) {
	r.Helper()
	all, names, tail := children(r.T, three.name), "", false
	var listed []child
	for _, i := range three.order {
		listed = append(listed, all[i])
		names += " " + all[i].name(r.T)
		tail = tail || all[i].Tail
	}
	multi := func(at string) *composed {
		return &composed{
			children: listed, values: fixture.Values{"TMP": filepath.Join(r.Store, at), "NAME": at, "SERVER": three.server},
			settings: `,"kvport":{"deadlines":{"match":"20s"}}`, // also a child's patience: one that is late is passed over, and tickets do not name what it saves late, which is not to depend on the machine's load
		}
	}
	apart := multi(three.at + "-apart")
	p := r.ServeModel(m, "prefill", apart.config(r.T, "kv_producer", ""))
	d := r.ServeModel(m, "decode", apart.config(r.T, "kv_consumer", ""), "--enable-prefix-caching=false")
	router := r.Route(p, d)
	got := r.All(router.URL, prompts, 2)
	tokens += rig.Compare(r.T, "P/D,"+names, want, got)
	r.ExternalAndTail(d, got, tail)
	loadsOnlyFrom(r, d, listed, len(prompts))
	for _, e := range []*cluster.Process{p, d} {
		r.Idle(e)
		r.Stop(e)
	}
	r.Stop(router)

	both := r.ServeModel(m, "both", multi(three.at+"-one").config(r.T, "kv_both", ""), "--enable-prefix-caching=false")
	tokens += rig.Compare(r.T, "one engine, saves,"+names, want, r.All(both.URL, prompts, 2))
	r.Idle(both)
	tokens += rig.Compare(r.T, "one engine, loads,"+names, want, r.All(both.URL, prompts, 2))
	var alone []child
	for _, c := range listed { // a tail needs another engine
		alone = append(alone, child{Config: c.Config, Remote: !c.Tail, Slow: c.Slow})
	}
	loadsOnlyFrom(r, both, alone, 0)
	r.Idle(both)
	r.Stop(both)
	return tokens
}

// loadsOnlyFrom checks that all that was loaded came from the first child that has blocks, or, if that
// is the slow one, from it and the next. What tickets name comes from there, wherever it is in the list, and only the ends of so
// many prompts, which no store has, from the producer.
func loadsOnlyFrom(r *rig.Rig, p *cluster.Process, listed []child, prompts int) {
	r.Helper()
	m := r.Metrics(p)
	h, err := r.Client.Health(r.Context(), p.URL)
	require.NoError(r, err)
	require.Equal(r, "ready", h.Connector.State)
	loaded, first := 0.0, true
	named := slices.ContainsFunc(listed, func(c child) bool { return c.Named })
	for i, c := range listed {
		name := fmt.Sprintf("%d/%s", i, c.name(r.T))
		require.Equal(r, name, h.Connector.Children[i].Name)
		n := m.Sum("kvport_child_blocks_total", fmt.Sprintf("child=%q", name), `direction="load"`)
		switch {
		case c.Named:
			loaded += n
		case named && c.Tail:
			require.LessOrEqual(r, n, float64(prompts), "blocks from %s", name)
		case c.Remote && first && !named:
			first = c.Slow
			loaded += n
		case !c.Tail:
			require.Zero(r, n, "blocks from %s", name)
		}
	}
	require.Positive(r, loaded)
	require.Zero(r, m.Sum("kvport_child_failed_blocks_total", `direction="load"`))
	require.Zero(r, m.Sum("kvport_integrity_failures_total"))
}

// TestMultiPeer: blocks go to the decode engine by a child that connects the two and are kept by one
// that offloads them: the first request of a prompt is fetched from the producer, and the producer
// itself loads the second from its own memory.
func TestMultiPeer(t *testing.T) {
	onReal := rig.Count(t, "movers", *flagMovers, 1, len(rig.Movers(t))) // the others run on sim alone
	for i, mover := range rig.Movers(t) {
		models := []string{"sim"}
		if i < onReal {
			models = append(models, rig.Model(t))
		}
		for _, m := range models {
			t.Run(mover.Connector+"/"+filepath.Base(m), func(t *testing.T) { testMultiPeer(rig.New(t), mover, m) })
		}
	}
}

func testMultiPeer(r *rig.Rig, mover *fixture.Fixture, m string) {
	r.Helper()
	prompts := rig.Texts(r.T, *rig.Seed+55000, min(4, rig.Count(r.T, "prompts", *rig.Prompts, 2, 4)), 400, 1600)
	node := r.ServeModel(m, "single", "")
	want := r.All(node.URL, prompts, 2)
	r.Stop(node)
	memory := children(r.T, "memory")[0]
	both := composed{children: []child{ofFixture(mover), memory}}
	p := r.ServeModel(m, "prefill", both.config(r.T, "kv_both", "kv_producer"), "--enable-prefix-caching=false")
	d := r.ServeModel(m, "decode", both.config(r.T, "kv_both", "kv_consumer"), "--enable-prefix-caching=false")
	router := r.Route(p, d)
	tokens := rig.Compare(r.T, "first", want, r.All(router.URL, prompts, 2))
	blocks := func(e *cluster.Process, child, direction string) float64 {
		return r.Metrics(e).Sum("kvport_child_blocks_total", fmt.Sprintf("child=%q", child), fmt.Sprintf("direction=%q", direction))
	}
	fetched := blocks(d, "0/"+mover.Connector, "load")
	require.Positive(r, fetched)
	require.Zero(r, blocks(d, "1/"+memory.name(r.T), "load"))
	tokens += rig.Compare(r.T, "again", want, r.All(router.URL, prompts, 2))
	kept := blocks(p, "1/"+memory.name(r.T), "load")
	require.Positive(r, kept)
	for _, e := range []*cluster.Process{p, d} {
		r.Idle(e)
		require.Zero(r, r.Metrics(e).Sum("kvport_child_failed_blocks_total"))
		r.Stop(e)
	}
	r.Logf("%d tokens compared, 0 differ; %.0f blocks fetched from the producer, which loaded %.0f from its own memory the second time", tokens, fetched, kept)
}

// TestMultiKilled: children of MultiConnectors are killed and stopped at random under load, until the given number
// of faults have met a transfer; tokens are right, no request is lost, and the other children are not harmed.
func TestMultiKilled(t *testing.T) {
	t.Run("sim", func(t *testing.T) {
		testMultiKilled(rig.New(t), "sim", rig.Count(t, "multikills", *flagMultiKills, 4, 100), 600, 3000)
	})
	t.Run("real model", func(t *testing.T) {
		kills := rig.Count(t, "multirealkills", *flagMultiRealKills, 1, 10)
		lo, hi := 600, 1000 // a single fault meets a transfer of a short prompt just as well, and long ones take a minute to compute
		if kills > 1 {
			lo, hi = 1600, 2000+160*kills
		}
		testMultiKilled(rig.New(t), rig.Model(t), kills, lo, hi)
	})
}

func testMultiKilled(r *rig.Rig, m string, n, lo, hi int) {
	r.Helper()
	_, relay := rig.RemoteServer(r.T)
	// The children are of every kind, some nested. Prefill and decode share a folder and a server, and producers give tickets.
	all := composed{
		children: children(r.T, "struck"), values: fixture.Values{"TMP": r.Store, "SERVER": relay.Address()},
		settings: `,"kvport":{"breaker":{"deaths":100000,"backoff_max":"20ms"},"deadlines":{"transfer":"2s","save":"2s"},"heartbeat":{"limit":"2s"}}`,
	}
	stores := all
	stores.children = all.children[1:]
	const fresh, old = 2, 4
	most := 2*n + 10 // faults: some meet none
	prompts := rig.Texts(r.T, *rig.Seed+60000, old+fresh*(n+n/4+1), lo, hi)
	node := r.ServeModel(m, "single", "")
	want := r.All(node.URL, prompts, 4)
	r.Stop(node)
	p := r.ServeModel(m, "prefill", all.config(r.T, "kv_producer", ""), "--enable-prefix-caching=false")
	d := r.ServeModel(m, "decode", all.config(r.T, "kv_consumer", ""), "--enable-prefix-caching=false")
	both := r.ServeModel(m, "both", stores.config(r.T, "kv_both", ""), "--enable-prefix-caching=false")
	router := r.Route(p, d)
	tokens := rig.Compare(r.T, "before", want[:old], r.All(router.URL, prompts[:old], 4))
	rig.Compare(r.T, "before", want[:old], r.All(both.URL, prompts[:old], 4))
	var before []cluster.Resources
	for _, e := range []*cluster.Process{p, d, both} {
		r.Idle(e)
		before = append(before, rig.Settled(r.T, e))
	}

	rng := rand.New(rand.NewPCG(*rig.Seed, 10))
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
		hit, name, got := signalChild(r, rng, s, prompts)
		var expect []*cluster.Completion
		for _, k := range s.prompts {
			expect = append(expect, want[k])
		}
		tokens += rig.Compare(r.T, fmt.Sprintf("fault %d, %v of %s of %s", i, s.signal, name, s.engine.Name), expect, got)
		kinds[fmt.Sprintf("%s %v", name, s.signal)]++
		faults, requests = faults+1, requests+len(s.prompts)
		if hit {
			met++
		}
	}
	r.Logf("%d faults, %d of them while a transfer ran; %d tokens compared, 0 differ, 0 of %d requests lost; %v", faults, met, tokens, requests, kinds)
	for i, e := range []*cluster.Process{p, d, both} {
		r.Idle(e)
		childrenReady(r, e)
		require.Eventually(r, func() bool { return cluster.Usage(e.PID()) == before[i] }, time.Minute, 50*time.Millisecond,
			"resources of %s: before %+v, after %+v", e.Name, before[i], cluster.Usage(e.PID()))
		m := r.Metrics(e)
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
func childrenReady(r *rig.Rig, e *cluster.Process) (leaves []cluster.Connector) {
	r.Helper()
	require.Eventually(r, func() bool {
		h, err := r.Client.Health(r.Context(), e.URL)
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
func signalChild(r *rig.Rig, rng *rand.Rand, s fault, prompts []string) (hit bool, name string, got []*cluster.Completion) {
	r.Helper()
	leaves := childrenReady(r, s.engine)
	victim := rng.IntN(len(leaves))
	pid := leaves[victim].PID
	list := make([]string, len(s.prompts))
	for i, k := range s.prompts {
		list[i] = prompts[k]
	}
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		got = r.All(s.to, list, 4)
	}()
	// Wait for a transfer, which a slow model begins late, but not always: some faults are to meet an idle
	// child.
	deadline := time.Now().Add(time.Duration(5+rng.IntN(300)) * time.Millisecond)
	if rng.IntN(4) > 0 {
		deadline = deadline.Add(20 * time.Second)
	}
	for over := false; !hit && !over && time.Now().Before(deadline); {
		h, err := r.Client.Health(r.Context(), s.engine.URL)
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
		after = childrenReady(r, s.engine)
		return after[victim].PID != pid
	}, time.Minute, time.Millisecond)
	for i, c := range after {
		if i == victim {
			require.Equal(r, leaves[i].Restarts+1, c.Restarts)
		} else {
			require.Equal(r, leaves[i], c, "%s was harmed by the fault of %s", c.Name, leaves[victim].Name)
		}
	}
	return hit, leaves[victim].Name, got
}
