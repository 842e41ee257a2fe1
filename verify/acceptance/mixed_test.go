package acceptance

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

var (
	flagMixed   = flag.Int("mixedseconds", 0, "seconds of mixed load; default 6, in soak 1800")
	flagClients = flag.Int("mixedclients", 6, "clients of the mixed load, each with one request at a time")
)

const (
	mixedPrompts = 16     // of each connector's engines, each in mixedSalts
	mixedTrends  = 4 * 60 // seconds from which on trends are looked at
)

// mixedSalts are those of the clients: what one has stored is not there for another.
var mixedSalts = []string{"", "one tenant", "another tenant"}

// TestMixedLoad: every connector serves at the same time while clients come and leave, caches are reset, plugins are killed and
// stopped, stored blocks are damaged and tickets are forged, replayed and shown late. No token is wrong, no request is
// lost, and neither memory nor descriptors, goroutines, threads or processes grow.
//
// Half of the plugins, which the seed picks, are left alone, so that their own memory shows. In seconds, as without soak, no trend shows:
// then the test has a third of the connectors, and is about tokens, requests and what is left.
func TestMixedLoad(t *testing.T) {
	r := rig.New(t)
	seconds := rig.Count(t, "mixedseconds", *flagMixed, 6, 1800)
	m := newMix(r, seconds >= mixedTrends)
	m.warm()
	before := m.resources()
	watch := rig.NewWatch(m.processes...)
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(seconds)*time.Second)
	defer cancel()
	var watching sync.WaitGroup
	watching.Go(func() { watch.Run(ctx, min(2*time.Second, time.Duration(seconds)*time.Second/100)) })
	watching.Go(func() { m.tell(ctx, max(10*time.Second, time.Duration(seconds)*time.Second/30)) })
	err := m.load(ctx)
	cancel()
	watching.Wait()
	require.NoError(t, err)

	t.Logf("%d connectors at once, %d processes of kvport, %d s: %s; 0 tokens differ, 0 requests lost", len(m.spots), len(m.processes), seconds, m.told())
	m.nothingLeft(before)
	if seconds < mixedTrends {
		return
	}
	for _, a := range acts() {
		if *flagConnector != "" {
			break // one connector may have nothing that some act needs
		}
		require.Positive(t, m.done[a.name], "%s: it never happened", a.name)
	}
	table, grows, err := watch.Trends(os.Stderr)
	require.NoError(t, err)
	for line := range strings.Lines(table) {
		t.Log(strings.TrimSpace(line))
	}
	require.Empty(t, grows)
}

// mix is a mixed load.
type mix struct {
	*rig.Rig
	spots     []*spot
	processes []*cluster.Process
	redis     backend

	mu   sync.Mutex
	done map[string]int // what happened, by name
}

// spot is a connector that serves: on one engine, or on a prefill and a decode engine behind a router.
type spot struct {
	scene
	backend
	p, d, front *cluster.Process // front takes the requests
	alone       bool             // its plugins are left alone
	prompts     []string
	want        []*cluster.Completion
	old         []byte // a ticket from the beginning
}

// newMix starts everything, or one connector of three with fewer prompts, and has a single node say what is right.
func newMix(r *rig.Rig, full bool) *mix {
	r.Helper()
	m := &mix{Rig: r, redis: newBackend(r.T), done: map[string]int{}}
	rng := rand.New(rand.NewPCG(*rig.Seed, 27))
	node := r.ServeModel("sim", "single", "")
	all, prompts := scenes(r.T), mixedPrompts
	if !full {
		prompts = mixedPrompts / 4
	}
	for i, s := range all {
		if !full && i%3 != 0 {
			continue
		}
		for _, v := range s.variants() {
			s := &spot{scene: v, backend: m.redis.under(r.T, v.name+v.Name)}
			s.prompts = rig.Texts(r.T, *rig.Seed+70000+uint64(100*i), prompts, 100, 1500)
			s.want = r.All(node.URL, s.prompts, 4)
			m.spots = append(m.spots, s)
		}
	}
	r.Stop(node)
	for i, at := range rng.Perm(len(m.spots)) {
		m.spots[at].alone = i%2 == 0
	}
	for i, s := range m.spots {
		if s.Peers {
			s.p, s.d = m.engine(s, "kv_producer", i), m.engine(s, "kv_consumer", i)
			s.front = r.Route(s.p, s.d)
			m.processes = append(m.processes, s.p, s.d, s.front)
			continue
		}
		s.p = m.engine(s, "kv_both", i)
		s.d, s.front = s.p, s.p
		m.processes = append(m.processes, s.p)
	}
	return m
}

// engine starts an engine of a spot: every second one of those that need not be in place is staged, and so in a sandbox.
func (m *mix) engine(s *spot, role string, i int) *cluster.Process {
	m.Helper()
	settings := `"breaker":{"deaths":1000000,"backoff_max":"20ms"},"deadlines":{"handshake":"30s"}`
	if !s.alone {
		settings = `"breaker":{"deaths":1000000,"backoff_max":"20ms"},"deadlines":{"handshake":"30s","transfer":"2s"},"heartbeat":{"limit":"2s"}`
	}
	if !s.Peers && i%2 == 0 {
		scene := sandboxScene{Rig: m.Rig, f: s.scene}
		settings += "," + strings.TrimSuffix(scene.settings(), `,"deadlines":{"handshake":"30s"}`)
	}
	name := s.title() + " " + role
	return m.ServeModel("sim", name, s.config(role, fmt.Sprint(role, i), s.extra(m.T, s.backend, role), settings), "--num-blocks", "512", "--max-model-len", "4096")
}

// warm has every spot answer each prompt twice, so that it has met all blocks that it will have to do with.
func (m *mix) warm() {
	m.Helper()
	for _, s := range m.spots {
		for range 2 {
			rig.Compare(m.T, s.title(), s.want, m.All(s.front.URL, s.prompts, 4))
			m.Idle(s.p)
			m.Idle(s.d)
		}
		if s.Peers {
			s.old = m.Ticket(s.p, s.prompts[0])
			m.UseTicket(s.d, s.prompts[0], s.old, s.want[0])
		}
	}
}

// load runs the clients until the time is over, or until one of them has got something wrong.
func (m *mix) load(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for i := range *flagClients {
		rng := rand.New(rand.NewPCG(*rig.Seed, uint64(1000+i)))
		g.Go(func() error {
			for ctx.Err() == nil {
				s := m.spots[rng.IntN(len(m.spots))]
				a := pick(rng)
				happened, err := a.do(m, rng, s)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", s.title(), a.name, err)
				}
				if happened {
					m.count(a.name, 1)
				}
			}
			return nil
		})
	}
	return g.Wait()
}

func (m *mix) count(name string, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.done[name] += n
}

// told says what has happened so far.
func (m *mix) told() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(m.done)) {
		parts = append(parts, fmt.Sprintf("%d %s", m.done[name], name))
	}
	return strings.Join(parts, ", ")
}

// tell writes that down again and again, so that somebody who waits for half an hour sees it go on.
func (m *mix) tell(ctx context.Context, every time.Duration) {
	began := time.Now()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			fmt.Fprintf(os.Stderr, "mixed load, %s: %s\n", time.Since(began).Round(time.Second), m.told())
		}
	}
}

// resources are those of all engines when they have nothing to do, their plugins are ready and nothing has changed for a second.
func (m *mix) resources() []cluster.Resources {
	m.Helper()
	var engines []*cluster.Process
	for _, s := range m.spots {
		engines = append(engines, slices.Compact([]*cluster.Process{s.p, s.d})...)
	}
	for _, e := range engines {
		m.Idle(e)
		m.ready(e)
	}
	var last []cluster.Resources
	var since time.Time
	require.Eventually(m, func() bool {
		var now []cluster.Resources
		for _, e := range engines {
			use := cluster.Usage(e.PID())
			use.Files = 0 // the runtime opens some when it first needs them; the trend of descriptors shows a leak
			now = append(now, use)
		}
		if !slices.Equal(now, last) {
			last, since = now, time.Now()
		}
		return time.Since(since) > time.Second
	}, time.Minute, 50*time.Millisecond)
	return last
}

// ready waits until all plugins of an engine are ready.
func (m *mix) ready(e *cluster.Process) {
	m.Helper()
	require.Eventually(m, func() bool {
		h, err := m.Client.Health(m.Context(), e.URL)
		return err == nil && !slices.ContainsFunc(h.Connector.Leaves(), func(c cluster.Connector) bool { return c.State != "ready" || !cluster.Alive(c.PID) })
	}, time.Minute, 20*time.Millisecond, "a plugin of %s is not ready", e.Name)
}

// nothingLeft requires that processes, sockets and shared memory are as before, and that no block is lost.
func (m *mix) nothingLeft(before []cluster.Resources) {
	m.Helper()
	require.Equal(m, before, m.resources())
	restarts := map[bool]float64{}
	for _, s := range m.spots {
		for _, e := range slices.Compact([]*cluster.Process{s.p, s.d}) {
			metrics := m.Metrics(e)
			require.Zero(m, metrics.Sum("kvport_blocks_lost"), "%s has lost blocks", e.Name)
			require.Zero(m, metrics.Sum("kvport_plugin_breaker_open"), e.Name)
			restarts[s.alone] += metrics.Sum("kvport_plugin_restarts_total")
		}
	}
	m.Logf("plugins started again: %.0f of those that are killed, %.0f of those that are left alone", restarts[false], restarts[true])
}
