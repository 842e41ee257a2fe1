package offload_test

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk/tier"
	"github.com/kvport/kvport/verify/cluster"
)

var (
	flagSeed  = flag.Uint64("seed", 1, "seed of the conversations in TestHitRatioIsThePolicys")
	flagAsked = flag.Int("requests", 0, "requests of those conversations, more if that is too few for the working set; 0: 400, or 800 with KVPORT_SOAK=1")
	flagTurns = flag.Int("turns", 0, "turns of TestManyTurns; 0: 7, or 40 with KVPORT_SOAK=1")
)

// binaryFolder is where buildBinaries puts kvport and the plugin. TestMain makes and removes it.
var binaryFolder string

// buildBinaries builds them once for all tests.
var buildBinaries = sync.OnceValue(func() error {
	for name, pkg := range map[string]string{"kvport": "cmd/kvport", "kvport-offload": "plugins/offload"} {
		out, err := exec.Command("go", "build", "-buildvcs=false", "-o", filepath.Join(binaryFolder, name), "../../"+pkg).CombinedOutput()
		if err != nil {
			return fmt.Errorf("build %s: %w\n%s", name, err, out)
		}
	}
	return nil
})

func TestMain(m *testing.M) { os.Exit(withFolder(m)) }

func withFolder(m *testing.M) int {
	dir, err := os.MkdirTemp("", "kvport-offload-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binaryFolder = dir
	return m.Run()
}

// binaries are kvport and the plugin, which it finds beside it; it gives kvport's path.
func binaries(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("runs processes: left out with -short, which the race stage uses")
	}
	require.NoError(t, buildBinaries())
	return filepath.Join(binaryFolder, "kvport")
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
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
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

// policySimulation is the policy alone: what a tier of n blocks would have had of each prompt. Its blocks are a few bytes.
type policySimulation struct{ memory *tier.Store }

const simulatedBytes = 8

func newPolicySimulation(t *testing.T, n int, policy string) policySimulation {
	t.Helper()
	s, err := tier.Open(tier.Options{SlotBytes: simulatedBytes, MemoryBytes: tier.ArenaBytes(n, simulatedBytes), Slots: n, Policy: policy})
	require.NoError(t, err)
	require.Equal(t, n, s.Slots())
	return policySimulation{s}
}

func (s *policySimulation) request(t *testing.T, who, blocks int) (hits int) {
	t.Helper()
	key := func(i int) (k connector.StoreKey) {
		binary.LittleEndian.PutUint32(k[:], uint32(who+1))
		binary.LittleEndian.PutUint32(k[4:], uint32(i))
		return k
	}
	items := make([]connector.Item, blocks)
	for i := range items {
		items[i] = connector.Item{Key: key(i), Spans: [][]byte{make([]byte, simulatedBytes)}}
	}
	for hits < blocks && s.memory.Has(key(hits)) {
		hits++
	}
	require.NoError(t, s.memory.Get(t.Context(), items[:hits]))
	require.NoError(t, s.memory.Put(t.Context(), items[hits:])) // a block behind a hole is offered again, a use
	return hits
}

// settled waits until the engine's saves are acknowledged.
func settled(t *testing.T, client *cluster.Client, p *cluster.Process) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; {
		h, err := client.Health(t.Context(), p.URL) // all metrics would take longer than many a request
		require.NoError(t, err)
		if h.Blocks.Pinned == 0 {
			return
		}
		require.True(t, time.Now().Before(end), "saves are not acknowledged")
	}
}

// Many conversations whose working set is 20 times the device cache have the hit ratio of the policy, or a little more: slots that are lent to the
// host are evicted a save earlier, with which S3-FIFO hits more often here (record 172).
func TestHitRatioIsThePolicys(t *testing.T) {
	const device, memory = 64, 320
	kvport := binaries(t)
	asked := *flagAsked
	switch {
	case asked > 0:
	case os.Getenv("KVPORT_SOAK") != "":
		asked = 800
	default:
		asked = 200
	}
	turns, working := talk(*flagSeed, 48, 20*device, asked)
	for _, policy := range []string{tier.LRU, tier.ARC, tier.S3FIFO} {
		p := serve(t, kvport, "sim", fmt.Sprintf(`{"num_cpu_blocks":%d,"eviction_policy":%q}`, memory, policy), "--num-blocks", fmt.Sprint(device), "--max-model-len", fmt.Sprint(device*16))
		alone := newPolicySimulation(t, memory, policy)
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
		require.NoError(t, alone.memory.Close())
		engine, pure := got/float64(tokens), float64(want)/float64(tokens)
		t.Logf("%s: %d requests, %d prompt tokens, working set %d blocks, memory %d: hit ratio %.4f in the engine, %.4f in simulation",
			policy, len(turns), tokens, working, memory, engine, pure)
		require.Positive(t, want)
		require.GreaterOrEqual(t, engine, 0.99*pure)
		require.LessOrEqual(t, engine, 1.05*pure)
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
