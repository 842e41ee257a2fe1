package acceptance

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

var (
	flagResidentDeaths = flag.Int("residentdeaths", 0, "deaths of a plugin on sim whose blocks are hit meanwhile; default 4, in soak 100")
	flagResidentReal   = flag.Int("residentreal", 0, "the same with the real model; default 1, in soak 10")
)

// residents are clients that send one prompt each again and again, whose blocks are resident.
type residents struct {
	*rig.Rig
	engine  *cluster.Process
	prompts [][]int32
	want    [][]int32 // of each client

	asked, tokens, wrong atomic.Int64
}

// ask sends a client's prompt. Nothing that is generated fills a block, so a hit leads to no save.
func (l *residents) ask(ctx context.Context, p *cluster.Process, i int) ([]int32, error) {
	c, err := l.Client.Complete(ctx, p.URL, cluster.Request{Tokens: l.prompts[i], MaxTokens: 8, IgnoreEOS: true})
	if err != nil {
		return nil, err
	}
	return c.Tokens, nil
}

// all sends each prompt once.
func (l *residents) all(p *cluster.Process) (answers [][]int32) {
	for i := range l.prompts {
		c, err := l.ask(l.Context(), p, i)
		require.NoError(l, err)
		answers = append(answers, c)
	}
	return answers
}

// repeat is one client, until ctx ends.
func (l *residents) repeat(ctx context.Context, i int) {
	for {
		answer, err := l.ask(ctx, l.engine, i)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			l.Errorf("client %d: %v", i, err)
			return
		}
		l.asked.Add(1)
		l.tokens.Add(int64(len(answer)))
		if !slices.Equal(l.want[i], answer) {
			l.wrong.Add(1)
		}
	}
}

func (l *residents) count(metric string) float64 { return l.Metrics(l.engine).Sum(metric) }

// blocks that were loaded from the plugin's memory without a call, and those of them while no plugin was up.
const (
	placedBlocks = "kvport_placed_blocks_total"
	aloneBlocks  = "kvport_placed_alone_blocks_total"
)

// stopped stops the plugin, and gives how many blocks were hit until its host killed it.
func (l *residents) stopped(plugin int) (n float64) {
	l.Helper()
	before := l.count(placedBlocks)
	require.NoError(l, syscall.Kill(plugin, syscall.SIGSTOP))
	require.Eventually(l, func() bool {
		if now := l.count(placedBlocks); cluster.Alive(plugin) {
			n = now - before
		}
		return !cluster.Alive(plugin)
	}, time.Minute, time.Millisecond, "a plugin that was stopped lives on")
	return n
}

// death ends the plugin, by a signal, as often as it takes until something was hit before the next was up, and gives how many blocks.
func (l *residents) death(signal syscall.Signal) (alone, stopped float64) {
	l.Helper()
	for try := 0; alone == 0; try++ {
		require.Less(l, try, 20, "no client's hit came between twenty deaths and the plugins that followed")
		plugin := l.Plugin(l.engine)
		before := l.count(aloneBlocks)
		if signal == syscall.SIGSTOP {
			stopped += l.stopped(plugin)
		} else {
			require.NoError(l, syscall.Kill(plugin, signal))
			// Else the next death could be one of the same process.
			require.Eventually(l, func() bool { return !cluster.Alive(plugin) }, time.Minute, time.Millisecond, "a plugin that was killed lives on")
		}
		require.Eventually(l, func() bool {
			if alone = l.count(aloneBlocks) - before; alone > 0 {
				return true
			}
			h, err := l.Client.Health(l.Context(), l.engine.URL)
			return err == nil && h.Connector.State == "ready" && h.Connector.PID != plugin
		}, time.Minute, time.Millisecond)
	}
	return alone, stopped
}

// serveTier starts an engine with a connector that keeps blocks in memory of its host, with some settings of that.
func serveTier(r *rig.Rig, model string, setup *fixture.Setup, settings string) *cluster.Process {
	r.Helper()
	own, err := fixture.Fill(setup.Config, fixture.Values{"TMP": r.Store})
	require.NoError(r, err)
	config := fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both","kv_connector_extra_config":%s,"kvport":{%s}}`,
		testkit.Typical(r.T, fixture.Tier).Connector, own, settings)
	return r.ServeModel(model, "engine", config, "--enable-prefix-caching=false")
}

// TestResidentByLayer: the real model learns of the layers of hits while others are copied out of the plugin's memory, and may compute with
// them, at both trust levels, and no token differs. That an engine does so is what TestOverlap of package engine shows.
func TestResidentByLayer(t *testing.T) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+9300, rig.Count(t, "prompts", *rig.Prompts, 2, 16), 300, 900)
	single := r.Serve("single", "")
	want := r.All(single.URL, prompts, 1)
	r.Stop(single)
	setup := &testkit.Typical(t, fixture.Tier).Setups[1]
	for _, trust := range []string{"in-place", "staged"} {
		t.Run(trust, func(t *testing.T) {
			r := &rig.Rig{T: t, Store: r.Store, Tokens: r.Tokens}
			e := serveTier(r, rig.Model(t), setup, fmt.Sprintf(`"trust":%q`, trust))
			rig.Same(t, "saved", want, r.All(e.URL, prompts, 2))
			r.Idle(e) // so all is saved
			rig.Same(t, "hits", want, r.All(e.URL, prompts, 2))
			m := r.Metrics(e)
			for range 3 { // whether a chunk is computed amid a load is a matter of a millisecond, and of what else the machine does
				if m.Sum("kvport_overlapped_chunks_total") > 0 {
					break
				}
				rig.Same(t, "hits", want, r.All(e.URL, prompts, 2))
				m = r.Metrics(e)
			}
			t.Logf("%.0f blocks loaded without a call of the plugin, %.0f of them layer by layer; %.0f chunks amid their loads",
				m.Sum(placedBlocks), m.Sum("kvport_placed_by_layer_blocks_total"), m.Sum("kvport_overlapped_chunks_total"))
			require.Positive(t, m.Sum("kvport_placed_by_layer_blocks_total"))
			require.Zero(t, m.Sum("kvport_integrity_failures_total"))
			r.Stop(e)
		})
	}
}

// serveResidents starts an engine with a connector that keeps blocks in memory of its host, and makes the clients' blocks resident.
func serveResidents(r *rig.Rig, model string, setup *fixture.Setup) *residents {
	r.Helper()
	l := &residents{Rig: r}
	rng := rand.New(rand.NewPCG(*rig.Seed, 17))
	for i := range 3 {
		var tokens []int32
		for range 16*(6+i) + 3 {
			tokens = append(tokens, 32+rng.Int32N(90))
		}
		l.prompts = append(l.prompts, tokens)
	}
	single := r.ServeModel(model, "single", "")
	l.want = l.all(single)
	r.Stop(single)
	l.engine = serveTier(r, model, setup, `"breaker":{"deaths":100000,"backoff_min":"500ms","backoff_max":"500ms"},"heartbeat":{"limit":"1s"}`)
	require.Equal(r, l.want, l.all(l.engine))
	r.Idle(l.engine) // so all is saved
	require.Equal(r, l.want, l.all(l.engine))
	require.Positive(r, l.count(placedBlocks))
	require.Zero(r, l.count(aloneBlocks))
	return l
}

// TestResidentThroughDeaths: plugins are killed and stopped while clients are served. What is resident is hit while no plugin is up, no token is
// wrong, no request is lost, and nothing is left behind.
func TestResidentThroughDeaths(t *testing.T) {
	rig.New(t)
	setups := testkit.Typical(t, fixture.Tier).Setups
	onSim := rig.Count(t, "residentdeaths", *flagResidentDeaths, 4, 100)
	for _, c := range []struct {
		name, model string
		setup       *fixture.Setup
		deaths      int
	}{
		{"sim, memory alone", "sim", &setups[1], onSim},
		{"sim, a disk below", "sim", &setups[0], max(1, onSim/4)},
		{"model", rig.Model(t), &setups[1], rig.Count(t, "residentreal", *flagResidentReal, 1, 10)},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := serveResidents(rig.New(t), c.model, c.setup)
			before := rig.Settled(t, l.engine)
			ctx, cancel := context.WithCancel(t.Context())
			var clients sync.WaitGroup
			for i := range l.prompts {
				clients.Go(func() { l.repeat(ctx, i) })
			}
			alone, stopped, stops := 0.0, 0.0, 0
			for n := range c.deaths {
				signal := syscall.SIGKILL
				if n%4 == 1 {
					signal = syscall.SIGSTOP
					stops++
				}
				a, s := l.death(signal)
				alone, stopped = alone+a, stopped+s
			}
			cancel()
			clients.Wait()
			l.Plugin(l.engine)
			l.Idle(l.engine)
			require.Eventually(t, func() bool { return cluster.Usage(l.engine.PID()) == before }, time.Minute, 50*time.Millisecond,
				"resources of the engine: before %+v, after %+v", before, cluster.Usage(l.engine.PID()))
			m := l.Metrics(l.engine)
			t.Logf("%d deaths, %d of them stops, amid %d requests: %d tokens compared, %d answers differ; %.0f blocks hit while no plugin was up, %.0f while one was stopped, of %.0f; %.0f restarts",
				c.deaths, stops, l.asked.Load(), l.tokens.Load(), l.wrong.Load(), m.Sum(aloneBlocks), stopped, m.Sum(placedBlocks), m.Sum("kvport_plugin_restarts_total"))
			require.Zero(t, l.wrong.Load())
			require.Zero(t, m.Sum("kvport_integrity_failures_total"))
			if stops == 0 { // one that was stopped may owe an answer for longer than is allowed before its heartbeat is missed
				require.Zero(t, m.Sum("kvport_plugin_violations_total"))
			}
			require.GreaterOrEqual(t, m.Sum(aloneBlocks), alone)
			require.GreaterOrEqual(t, m.Sum("kvport_plugin_restarts_total"), float64(c.deaths))
			if stops > 1 { // within the second of a single one no client may have asked
				require.Positive(t, stopped)
			}
			plugin := l.Plugin(l.engine)
			require.NoError(t, syscall.Kill(plugin, syscall.SIGKILL))
			l.Stop(l.engine) // while none is up
			require.Empty(t, cluster.Plugins(l.engine.PID()))
		})
	}
}
