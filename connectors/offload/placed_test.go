package offload_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// A connector alone, and two as children of a MultiConnector; the trust level is still to be filled in.
const (
	alone = `{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":67108864},"kvport":{"trust":%q}}`
	pair  = `{"kv_connector":"MultiConnector","kv_role":"kv_both","kvport":{"trust":%q},"kv_connector_extra_config":{"connectors":[
		{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":67108864}},
		{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":33554432}}]}}`
)

type placedSetup struct {
	name, config, trust string
	args                []string
}

func placedSetups() []placedSetup {
	return []placedSetup{
		{"in place", alone, "in-place", nil},
		{"staged", alone, "staged", nil},
		{"two ranks", alone, "in-place", []string{"--tensor-parallel-size", "2"}},
		{"children", pair, "in-place", nil},
		{"children, staged", pair, "staged", nil},
	}
}

// Rules PLACE-23 and PLACE-24: prompts that come again are matched and loaded without a call of the plugin, also after the
// plugin was killed and after a reset, at both trust levels and on several ranks; no token differs.
func TestPlacedHits(t *testing.T) {
	kvport := binaries(t)
	var client cluster.Client
	prompts := make([]string, 6)
	for i := range prompts {
		prompts[i] = text(i, 16*(8+i)+3) // all but the last block are full
	}
	ask := func(p *cluster.Process) (tokens [][]int32) {
		for _, prompt := range prompts {
			c, err := client.Complete(t.Context(), p.URL, cluster.Request{Prompt: prompt, MaxTokens: 4, IgnoreEOS: true})
			require.NoError(t, err)
			settled(t, &client, p)
			tokens = append(tokens, c.Tokens)
		}
		return tokens
	}
	single := serve(t, kvport, "sim", "")
	want := ask(single)
	stop(t, single)
	for _, c := range placedSetups() {
		t.Run(c.name, func(t *testing.T) {
			config := fmt.Sprintf(c.config, c.trust)
			p := serve(t, kvport, "sim", "", append([]string{"--kv-transfer-config", config}, c.args...)...)
			want := want
			if c.args != nil { // ranks have other bytes, and so other tokens
				single := serve(t, kvport, "sim", "", c.args...)
				want = ask(single)
				stop(t, single)
			}
			sum := func(name string, labels ...string) float64 {
				m, err := client.Metrics(t.Context(), p.URL)
				require.NoError(t, err)
				return m.Sum(name, labels...)
			}
			require.Equal(t, want, ask(p))
			require.Zero(t, sum("kvport_placed_blocks_total"))
			for round := range 2 {
				blocks, matches, external := sum("kvport_placed_blocks_total"), sum("kvport_placed_matches_total"), sum("kvport_prompt_tokens_total", `source="external"`)
				require.Equal(t, want, ask(p), "round %d", round)
				blocks, matches, external = sum("kvport_placed_blocks_total")-blocks, sum("kvport_placed_matches_total")-matches, sum("kvport_prompt_tokens_total", `source="external"`)-external
				t.Logf("round %d: %v blocks and %v matches without a call, %v external tokens", round, blocks, matches, external)
				require.GreaterOrEqual(t, matches, float64(len(prompts)))
				require.Positive(t, external)
				require.GreaterOrEqual(t, blocks, external/16)
				if round == 0 {
					kill(t, &client, p)
				}
			}
			resetCache(t, p)
			blocks := sum("kvport_placed_blocks_total")
			require.Equal(t, want, ask(p))
			require.InDelta(t, blocks, sum("kvport_placed_blocks_total"), 0, "nothing is resident after a reset")
			require.Equal(t, want, ask(p))
			require.Greater(t, sum("kvport_placed_blocks_total"), blocks)
			if c.config == alone { // else it counts what the MultiConnector was asked, which asks its children's indexes
				require.Zero(t, sum("kvport_plugin_match_seconds_count"), "nor has its next life, or after a reset")
			}
			require.Zero(t, sum("kvport_plugin_violations_total"))
			require.Zero(t, sum("kvport_integrity_failures_total"))
			stop(t, p)
		})
	}
}

// resetCache has an engine forget every block.
func resetCache(t *testing.T, p *cluster.Process) {
	t.Helper()
	resp, err := http.Post(p.URL+"/reset_prefix_cache", "", nil)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusOK, resp.StatusCode)
}

// Rule PLACE-23: each turn of a conversation has a new end, and with memory alone it is matched as far as it is known without a call of the plugin.
func TestTurnsWithoutACall(t *testing.T) {
	kvport := binaries(t)
	var client cluster.Client
	p := serve(t, kvport, "sim", `{"cpu_bytes_to_use":67108864}`)
	said := ""
	for turn := range 4 {
		said += text(turn, 16*5+3)
		_, err := client.Complete(t.Context(), p.URL, cluster.Request{Prompt: said, MaxTokens: 4, IgnoreEOS: true})
		require.NoError(t, err)
		settled(t, &client, p)
	}
	m, err := client.Metrics(t.Context(), p.URL)
	require.NoError(t, err)
	require.GreaterOrEqual(t, m.Sum("kvport_prompt_tokens_total", `source="external"`), 16.0*5*(1+2+3))
	require.GreaterOrEqual(t, m.Sum("kvport_placed_blocks_total"), 5.0*(1+2+3))
	require.Zero(t, m.Sum("kvport_plugin_match_seconds_count"), "nothing lies below memory, so the plugin has no more to say")
	stop(t, p)
}

// Rules PLACE-35 and PLACE-34: once the plugin has lent slots, what is computed is saved without a call of the plugin, and found by the next life, which nobody has
// told about the last of it. Ranks share what is lent, and each has its own.
func TestSavesWithoutACall(t *testing.T) {
	kvport := binaries(t)
	t.Run("one rank", func(t *testing.T) { savesWithoutACall(t, kvport, 1) })
	t.Run("two ranks", func(t *testing.T) { savesWithoutACall(t, kvport, 2, "--tensor-parallel-size", "2") })
}

func savesWithoutACall(t *testing.T, kvport string, ranks float64, args ...string) {
	t.Helper()
	var client cluster.Client
	p := serve(t, kvport, "sim", `{"cpu_bytes_to_use":67108864}`, args...)
	ask := func(n int) []int32 {
		c, err := client.Complete(t.Context(), p.URL, cluster.Request{Prompt: text(n, 16*6+3), MaxTokens: 4, IgnoreEOS: true})
		require.NoError(t, err)
		settled(t, &client, p)
		return c.Tokens
	}
	sum := func(name string, labels ...string) float64 {
		m, err := client.Metrics(t.Context(), p.URL)
		require.NoError(t, err)
		return m.Sum(name, labels...)
	}
	var want [][]int32
	for end := time.Now().Add(time.Minute); sum("kvport_placed_saved_blocks_total") < 60*ranks; {
		require.True(t, time.Now().Before(end), "only %v blocks were saved without a call", sum("kvport_placed_saved_blocks_total"))
		want = append(want, ask(len(want)))
	}
	kill(t, &client, p)
	external := sum("kvport_prompt_tokens_total", `source="external"`)
	for n := range want {
		require.Equal(t, want[n], ask(n))
	}
	require.InDelta(t, 16.0*6*float64(len(want)), sum("kvport_prompt_tokens_total", `source="external"`)-external, 0, "nothing of it is lost")
	require.Zero(t, sum("kvport_plugin_violations_total"))
	require.Zero(t, sum("kvport_integrity_failures_total"))
	stop(t, p)
}

// A prefix that several prompts share is a hit from the third one on where blocks are stored when they are offered twice, although each
// save of such a prompt fails for its own blocks, and an answer with an error names no slot.
func TestPrefixBesideWhatIsDeclined(t *testing.T) {
	kvport := binaries(t)
	var client cluster.Client
	p := serve(t, kvport, "sim", `{"cpu_bytes_to_use":67108864,"store_threshold":2}`)
	for n := range 6 {
		_, err := client.Complete(t.Context(), p.URL, cluster.Request{Prompt: text(0, 16*5) + text(10+n, 16*3+3), MaxTokens: 4, IgnoreEOS: true})
		require.NoError(t, err)
		settled(t, &client, p)
	}
	m, err := client.Metrics(t.Context(), p.URL)
	require.NoError(t, err)
	require.GreaterOrEqual(t, m.Sum("kvport_prompt_tokens_total", `source="external"`), 16.0*5*4)
	stop(t, p)
}

// placedLoad is clients that send one prompt each again and again, whose blocks are resident.
type placedLoad struct {
	*testing.T
	client cluster.Client
	p      *cluster.Process
	want   [][]int32 // of each client

	asked, wrong atomic.Int64
}

// ask sends a client's prompt. Nothing that is generated fills a block, so a hit leads to no save.
func (l *placedLoad) ask(ctx context.Context, i int) ([]int32, error) {
	c, err := l.client.Complete(ctx, l.p.URL, cluster.Request{Prompt: text(i, 16*(8+i)+3), MaxTokens: 4, IgnoreEOS: true})
	if err != nil {
		return nil, err
	}
	return c.Tokens, nil
}

// all sends each prompt once.
func (l *placedLoad) all(clients int) (tokens [][]int32) {
	for i := range clients {
		c, err := l.ask(l.Context(), i)
		require.NoError(l, err)
		tokens = append(tokens, c)
	}
	return tokens
}

// repeat is one client, until ctx ends.
func (l *placedLoad) repeat(ctx context.Context, i int) {
	for ctx.Err() == nil {
		tokens, err := l.ask(ctx, i)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			l.Errorf("request %d: %v", i, err)
			return
		}
		l.asked.Add(1)
		if !slices.Equal(l.want[i], tokens) {
			l.wrong.Add(1)
		}
	}
}

// hits is how many blocks were loaded without a call of the plugin.
func (l *placedLoad) hits() float64 {
	m, err := l.client.Metrics(l.Context(), l.p.URL)
	require.NoError(l, err)
	return m.Sum("kvport_placed_blocks_total")
}

// more waits for hits, and says how many came.
func (l *placedLoad) more(what string) (n float64) {
	l.Helper()
	before := l.hits()
	require.Eventually(l, func() bool {
		n = l.hits() - before
		return n > 0
	}, time.Minute, time.Millisecond, what)
	return n
}

// Plugins that are killed or stopped at any moment cost no token: what is resident is a hit while the plugin is stopped, and
// again after each death, and no memory is left behind.
func TestPlacedHitsThroughDeaths(t *testing.T) {
	kvport := binaries(t)
	const clients = 3
	deaths := 20
	if os.Getenv("KVPORT_SOAK") != "" {
		deaths = 100
	}
	l := &placedLoad{T: t, p: serve(t, kvport, "sim", "")}
	l.want = l.all(clients)
	stop(t, l.p)
	l.p = serve(t, kvport, "sim", "", "--kv-transfer-config", `{"kv_connector":"OffloadingConnector","kv_role":"kv_both",
		"kv_connector_extra_config":{"cpu_bytes_to_use":67108864},"kvport":{"breaker":{"deaths":1000,"backoff_max":"20ms"},"heartbeat":{"limit":"1m"}}}`)
	require.Equal(t, l.want, l.all(clients))
	settled(t, &l.client, l.p)
	memories := memoryFiles(t, l.p)
	ctx, cancel := context.WithCancel(t.Context())
	var load sync.WaitGroup
	for i := range clients {
		load.Go(func() { l.repeat(ctx, i) })
	}
	stopped := 0.0
	for n := range deaths {
		l.more("what is resident is a hit")
		if n%2 == 0 {
			health, err := l.client.Health(t.Context(), l.p.URL)
			require.NoError(t, err)
			require.NoError(t, syscall.Kill(health.Connector.PID, syscall.SIGSTOP))
			stopped += l.more("also while the plugin is stopped")
		}
		kill(t, &l.client, l.p)
	}
	l.more("after the last death")
	cancel()
	load.Wait()
	settled(t, &l.client, l.p)
	t.Logf("%d deaths, %d requests, %d with wrong tokens; %v blocks without a call, %v of them while the plugin was stopped",
		deaths, l.asked.Load(), l.wrong.Load(), l.hits(), stopped)
	require.Zero(t, l.wrong.Load())
	require.Equal(t, memories, memoryFiles(t, l.p), "memory of dead plugins")
	stop(t, l.p)
}

// memoryFiles is how many descriptors of shared memory an engine has.
func memoryFiles(t *testing.T, p *cluster.Process) (n int) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", p.PID())
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, f := range files {
		if to, err := os.Readlink(filepath.Join(dir, f.Name())); err == nil && strings.HasPrefix(to, "/memfd:") {
			n++
		}
	}
	return n
}

// kill kills the plugin and waits for the next one.
func kill(t *testing.T, client *cluster.Client, p *cluster.Process) {
	t.Helper()
	health, err := client.Health(t.Context(), p.URL)
	require.NoError(t, err)
	first := func(h *cluster.Connector) *cluster.Connector {
		if len(h.Children) > 0 {
			return &h.Children[0]
		}
		return h
	}
	pid := first(&health.Connector).PID
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	require.Eventually(t, func() bool {
		now, err := client.Health(t.Context(), p.URL)
		return err == nil && now.Connector.State == "ready" && first(&now.Connector).PID != pid
	}, time.Minute, 5*time.Millisecond)
}
