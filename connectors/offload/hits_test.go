package offload_test

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/tier"
	"github.com/kvport/kvport/verify/cluster"
)

var (
	flagSeed  = flag.Uint64("seed", 1, "seed of the conversations in TestHitRatioIsThePolicys")
	flagAsked = flag.Int("requests", 0, "requests of those conversations, more if that is too few for the working set; 0: 400, or 800 with KVPORT_SOAK=1")
	flagTurns = flag.Int("turns", 0, "turns of TestManyTurns; 0: 7, or 40 with KVPORT_SOAK=1")
)

// binaries builds kvport and the plugin, and gives kvport's path.
func binaries(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("runs processes: left out with -short, which the race stage uses")
	}
	dir := t.TempDir()
	for name, pkg := range map[string]string{"kvport": "cmd/kvport", "kvport-offload": "plugins/offload"} {
		out, err := exec.Command("go", "build", "-buildvcs=false", "-o", filepath.Join(dir, name), "../../"+pkg).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	return filepath.Join(dir, "kvport")
}

func serve(t *testing.T, kvport, model, extra string, args ...string) *cluster.Process {
	t.Helper()
	all := []string{"serve", "--model", model, "--port", "0", "--enable-prefix-caching=false"}
	if extra != "" {
		all = append(all, "--kv-transfer-config", fmt.Sprintf(`{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":%s}`, extra))
	}
	p, err := cluster.Start(t.Context(), nil, "engine", kvport, append(all, args...)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("last output:\n%s", p.Logs())
		}
		p.Kill()
	})
	return p
}

func stop(t *testing.T, p *cluster.Process) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(t, p.Stop(ctx))
}

// turn is one request of a conversation: which, and how much was said.
type turn struct{ who, bytes int }

// talk is many conversations that take turns; some people talk more than others. Together they say at
// least that many blocks.
func talk(seed uint64, people, blocks, turns int) (out []turn, working int) {
	rng := rand.New(rand.NewPCG(seed, 0))
	said := make([]int, people)
	most := 6 * blocks / 5 / people * 16
	for len(out) < turns || working < blocks {
		who := min(rng.IntN(people), rng.IntN(people))
		working -= said[who] / 16
		said[who] = min(said[who]+32+rng.IntN(96), most)
		working += said[who] / 16
		out = append(out, turn{who, said[who]})
	}
	return out, working
}

// text is what a conversation has said, as many bytes.
func text(who, bytes int) string {
	return strings.Repeat(fmt.Sprintf("person %04d says. ", who), bytes/18+1)[:bytes]
}

// policySimulation is the policy alone: what a tier of n blocks would have had of each prompt.
type policySimulation struct{ index *tier.Index }

func (s *policySimulation) request(t *testing.T, who, blocks int) (hits int) {
	t.Helper()
	key := func(i int) (k connector.StoreKey) {
		binary.LittleEndian.PutUint32(k[:], uint32(who+1))
		binary.LittleEndian.PutUint32(k[4:], uint32(i))
		return k
	}
	for hits < blocks && s.index.Has(key(hits)) {
		hits++
	}
	for i := range hits {
		s.index.Touch(key(i))
	}
	for i := hits; i < blocks; i++ {
		if s.index.Has(key(i)) { // behind a hole: offered again, a use
			s.index.Touch(key(i))
			continue
		}
		id, _, err := s.index.Reserve(key(i))
		require.NoError(t, err)
		s.index.Commit(id, key(i))
	}
	return hits
}

// settled waits until the engine's saves are acknowledged.
func settled(t *testing.T, client *cluster.Client, p *cluster.Process) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; {
		m, err := client.Metrics(t.Context(), p.URL)
		require.NoError(t, err)
		if m.Sum("kvport_blocks", `state="pinned"`) == 0 {
			return
		}
		require.True(t, time.Now().Before(end), "saves are not acknowledged")
	}
}

// Many conversations whose working set is 20 times the device cache have the hit ratio of the policy.
func TestHitRatioIsThePolicys(t *testing.T) {
	const device, memory = 64, 320
	kvport := binaries(t)
	asked := *flagAsked
	switch {
	case asked > 0:
	case os.Getenv("KVPORT_SOAK") != "":
		asked = 800
	default:
		asked = 400
	}
	turns, working := talk(*flagSeed, 48, 20*device, asked)
	for _, policy := range []string{tier.LRU, tier.ARC, tier.S3FIFO} {
		p := serve(t, kvport, "sim", fmt.Sprintf(`{"num_cpu_blocks":%d,"eviction_policy":%q}`, memory, policy), "--num-blocks", fmt.Sprint(device), "--max-model-len", fmt.Sprint(device*16))
		index, err := tier.NewIndex(memory, policy)
		require.NoError(t, err)
		alone := policySimulation{index}
		var client cluster.Client
		want, tokens := 0, 0
		for _, turn := range turns {
			c, err := client.Complete(t.Context(), p.URL, cluster.Request{Prompt: text(turn.who, turn.bytes), MaxTokens: 1, IgnoreEOS: true})
			require.NoError(t, err)
			settled(t, &client, p) // the next request finds all of this one's blocks, as in the simulation
			tokens += c.Prompt
			hits := alone.request(t, turn.who, c.Prompt/16)
			if hits*16 == c.Prompt {
				hits-- // the last token is computed, and its block with it
			}
			want += 16 * hits
		}
		m, err := client.Metrics(t.Context(), p.URL)
		require.NoError(t, err)
		got := m.Sum("kvport_prompt_tokens_total", `source="external"`)
		stop(t, p)
		engine, pure := got/float64(tokens), float64(want)/float64(tokens)
		t.Logf("%s: %d requests, %d prompt tokens, working set %d blocks, memory %d: hit ratio %.4f in the engine, %.4f in simulation",
			policy, len(turns), tokens, working, memory, engine, pure)
		require.Positive(t, want)
		require.InEpsilon(t, pure, engine, 0.01)
	}
}

// num_cpu_blocks counts blocks of block_size tokens, as in vLLM: 100 of 64 tokens hold four prompts of 1,024.
// Counted in the engine's blocks of 16 they hold one and a half, and a prompt that comes again has lost its head.
func TestBlocksHaveBlockSizeTokens(t *testing.T) {
	kvport := binaries(t)
	for _, extra := range []string{`{"block_size":64,"num_cpu_blocks":100}`, `{"blocks_per_chunk":4,"num_cpu_blocks":100}`} {
		p := serve(t, kvport, "sim", extra)
		var client cluster.Client
		for round := range 2 {
			for who := range 4 {
				c, err := client.Complete(t.Context(), p.URL, cluster.Request{Prompt: text(who, 1024), MaxTokens: 1, IgnoreEOS: true})
				require.NoError(t, err)
				settled(t, &client, p)
				require.Equal(t, 1024, c.Prompt)
				if round > 0 {
					require.GreaterOrEqual(t, c.Cached, 960, "%s: prompt %d", extra, who)
				}
			}
		}
		m, err := client.Metrics(t.Context(), p.URL)
		require.NoError(t, err)
		require.Equal(t, 400.0, m.Sum("kvport_connector_memory_slots"), extra)
		stop(t, p)
	}
}

// A conversation of many turns on the real model: no token differs, and at most half of the prompt tokens are computed. How
// long both take is printed.
func TestManyTurns(t *testing.T) {
	kvport := binaries(t)
	model, err := filepath.Abs("../../.deps/model/SmolLM2-135M-Instruct.Q4_1.gguf")
	require.NoError(t, err)
	require.FileExists(t, model, "run make deps first")
	turns := 7
	if os.Getenv("KVPORT_SOAK") != "" {
		turns = 40
	}
	if *flagTurns > 0 {
		turns = *flagTurns
	}
	var client cluster.Client
	run := func(extra string, prompts []string) (answers []*cluster.Completion, took time.Duration) {
		p := serve(t, kvport, model, extra, "--num-blocks", "128", "--max-model-len", "2048")
		history := ""
		begin := time.Now()
		for _, say := range prompts {
			history += say
			c, err := client.Complete(t.Context(), p.URL, cluster.Request{Prompt: history, MaxTokens: 4, IgnoreEOS: true})
			require.NoError(t, err)
			answers = append(answers, c)
			history += c.Text
		}
		took = time.Since(begin)
		stop(t, p)
		return answers, took
	}
	license, err := os.ReadFile("../../LICENSE")
	require.NoError(t, err)
	prompts := make([]string, turns)
	for i := range prompts {
		prompts[i] = string(license[100*i : 100*i+100])
	}
	prompts[0] = string(license[4000:5200]) + prompts[0]
	want, slow := run("", prompts)
	got, fast := run(`{"cpu_bytes_to_use":536870912}`, prompts)
	compared, external, asked := 0, 0, 0
	for i := range want {
		require.Equal(t, want[i].Tokens, got[i].Tokens, "turn %d", i)
		compared += len(want[i].Tokens)
		external += got[i].Cached
		asked += got[i].Prompt
	}
	t.Logf("%d turns, last prompt %d tokens: %d tokens compared, 0 differ; %v recomputing, %v offloading: %.1f x; %d of %d prompt tokens from the cache",
		turns, want[turns-1].Prompt, compared, slow, fast, float64(slow)/float64(fast), external, asked)
	require.Greater(t, external, asked/2)
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
	alone := serve(t, kvport, "sim", "")
	want := ask(alone)
	stop(t, alone)
	for _, c := range []struct {
		name, trust string
		args        []string
	}{
		{"in place", "in-place", nil}, {"staged", "staged", nil}, {"two ranks", "in-place", []string{"--tensor-parallel-size", "2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := fmt.Sprintf(`{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":67108864},"kvport":{"trust":%q}}`, c.trust)
			p := serve(t, kvport, "sim", "", append([]string{"--kv-transfer-config", config}, c.args...)...)
			want := want
			if c.args != nil { // ranks have other bytes, and so other tokens
				alone := serve(t, kvport, "sim", "", c.args...)
				want = ask(alone)
				stop(t, alone)
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
			resp, err := http.Post(p.URL+"/reset_prefix_cache", "", nil)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, http.StatusOK, resp.StatusCode)
			matches := sum("kvport_placed_matches_total")
			require.Equal(t, want, ask(p))
			require.InDelta(t, matches, sum("kvport_placed_matches_total"), 0, "nothing is resident after a reset")
			require.Equal(t, want, ask(p))
			require.GreaterOrEqual(t, sum("kvport_placed_matches_total"), matches+float64(len(prompts)))
			require.Zero(t, sum("kvport_plugin_violations_total"))
			require.Zero(t, sum("kvport_integrity_failures_total"))
			stop(t, p)
		})
	}
}

// Plugins that are killed at any moment, or stand still, cost no token: what is resident is a hit while the plugin stands still, and
// again after each death, and no memory is left behind.
func TestPlacedHitsThroughDeaths(t *testing.T) {
	kvport := binaries(t)
	deaths, clients := 20, 3
	if os.Getenv("KVPORT_SOAK") != "" {
		deaths = 100
	}
	var client cluster.Client
	prompt := func(i int) string { return text(i, 16*(8+i)+3) } // nothing that is generated fills a block, so no hit leads to a save
	ask := func(ctx context.Context, p *cluster.Process, i int) ([]int32, error) {
		c, err := client.Complete(ctx, p.URL, cluster.Request{Prompt: prompt(i), MaxTokens: 4, IgnoreEOS: true})
		if err != nil {
			return nil, err
		}
		return c.Tokens, nil
	}
	alone := serve(t, kvport, "sim", "")
	want := make([][]int32, clients)
	for i := range want {
		var err error
		want[i], err = ask(t.Context(), alone, i)
		require.NoError(t, err)
	}
	stop(t, alone)
	config := `{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":67108864},
		"kvport":{"breaker":{"deaths":1000,"backoff_max":"20ms"},"heartbeat":{"limit":"1m"}}}`
	p := serve(t, kvport, "sim", "", "--kv-transfer-config", config)
	for i := range want {
		tokens, err := ask(t.Context(), p, i)
		require.NoError(t, err)
		require.Equal(t, want[i], tokens)
	}
	settled(t, &client, p)
	hits := func() float64 {
		m, err := client.Metrics(t.Context(), p.URL)
		require.NoError(t, err)
		return m.Sum("kvport_placed_blocks_total")
	}
	goOn := func(what string) {
		before := hits()
		require.Eventually(t, func() bool { return hits() > before }, time.Minute, time.Millisecond, what)
	}
	memories := memoryFiles(t, p)
	ctx, cancel := context.WithCancel(t.Context())
	var load sync.WaitGroup
	var asked, wrong atomic.Int64
	for i := range clients {
		load.Go(func() {
			for ctx.Err() == nil {
				tokens, err := ask(ctx, p, i)
				if ctx.Err() == nil && assert.NoError(t, err) {
					asked.Add(1)
					if !slices.Equal(want[i], tokens) {
						wrong.Add(1)
					}
				}
			}
		})
	}
	stopped := 0.0
	for n := range deaths {
		goOn("what is resident is a hit")
		if n%2 == 0 {
			health, err := client.Health(t.Context(), p.URL)
			require.NoError(t, err)
			require.NoError(t, syscall.Kill(health.Connector.PID, syscall.SIGSTOP))
			before := hits()
			goOn("also while the plugin stands still")
			stopped += hits() - before
		}
		kill(t, &client, p)
	}
	goOn("after the last death")
	cancel()
	load.Wait()
	settled(t, &client, p)
	t.Logf("%d deaths, %d requests, %d with wrong tokens; %v blocks without a call, %v of them while the plugin stood still", deaths, asked.Load(), wrong.Load(), hits(), stopped)
	require.Zero(t, wrong.Load())
	require.Equal(t, memories, memoryFiles(t, p), "memory of dead plugins")
	stop(t, p)
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
	pid := health.Connector.PID
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	require.Eventually(t, func() bool {
		now, err := client.Health(t.Context(), p.URL)
		return err == nil && now.Connector.State == "ready" && now.Connector.PID != pid
	}, time.Minute, 5*time.Millisecond)
}
