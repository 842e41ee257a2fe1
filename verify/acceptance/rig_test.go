// Package rig starts engines, routers and single nodes for acceptance tests, sends them prompts and compares tokens. Package
// acceptance uses it, and so do the tests of one connector, which stand beside its plugin.
//
// Flags after -args change what is run: -prompts, -tokens, -seed, -model, -kills, -stops, and those of the test itself.
package acceptance

import (
	"context"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// What a run does; the defaults are the counts the project promises.
var (
	flagPrompts = flag.Int("prompts", 16, "prompts to compare")
	flagTokens  = flag.Int("tokens", 32, "tokens to generate for each")
	flagSeed    = flag.Uint64("seed", 1, "seed of prompts and faults")
	flagModel   = flag.String("model", "", "GGUF file, tiny-random or sim; default: the model of make deps")
	flagKills   = flag.Int("kills", 10, "plugin kills in mid-load")
	flagStops   = flag.Int("stops", 2, "plugin stops (SIGSTOP) in mid-load")
)

// count is how much of something a test runs: the value of the flag of that name if it was given, else a short
// count, or the full one with KVPORT_SOAK=1.
func count(t *testing.T, name string, value, short, full int) int {
	t.Helper()
	n := short
	if os.Getenv("KVPORT_SOAK") != "" {
		n = full
	}
	flag.Visit(func(f *flag.Flag) {
		if f.Name == name {
			n = value
		}
	})
	t.Logf("-%s %d; soak runs %d", name, n, full)
	return n
}

// root is the folder with go.mod.
func root(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	require.NoError(t, err)
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		parent := filepath.Dir(dir)
		require.NotEqual(t, dir, parent, "no go.mod above the test")
		dir = parent
	}
}

// binary is kvport as make build has built it.
func binary(t *testing.T) string {
	t.Helper()
	path := filepath.Join(root(t), "bin", "kvport")
	require.FileExists(t, path, "run make build first")
	return path
}

// model is -model, or the file of the real model that make deps fetches.
func model(t *testing.T) string {
	t.Helper()
	if *flagModel != "" {
		return *flagModel
	}
	path := filepath.Join(root(t), ".deps", "model", "SmolLM2-135M-Instruct.Q4_1.gguf")
	require.FileExists(t, path, "run make deps first")
	return path
}

// rig starts processes for one test and stops them at its end.
type rig struct {
	*testing.T
	client cluster.Client // for requests
	store  string         // where the typical store keeps its blocks
	tokens int            // to generate for each prompt
}

// newRig makes a rig for short answers. It skips the test with -short.
func newRig(t *testing.T) *rig {
	t.Helper()
	if testing.Short() {
		t.Skip("runs the real model: left out with -short, which the race stage uses")
	}
	return &rig{T: t, store: filepath.Join(t.TempDir(), "blocks"), tokens: count(t, "tokens", *flagTokens, 12, 32)}
}

// newLongRig is a rig whose answers have all of -tokens.
func newLongRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.tokens = *flagTokens
	return r
}

// config is the --kv-transfer-config of a role with the typical store; extra and host are further JSON members, or empty.
func (r *rig) config(role, extra, host string) string {
	r.Helper()
	f := typical(r.T, fixture.Store)
	own, err := fixture.Fill(f.Setups[0].Config, fixture.Values{"TMP": r.store})
	require.NoError(r, err, "%s/fixture.json", f.Folder)
	return fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":%s%s}%s}`,
		f.Connector, role, strings.TrimSuffix(own, "}"), extra, host)
}

// serve starts an engine. config may be empty.
func (r *rig) serve(name, config string, args ...string) *cluster.Process {
	r.Helper()
	return r.serveModel(model(r.T), name, config, args...)
}

// serveModel starts an engine with a model: a GGUF file, sim or tiny-random.
func (r *rig) serveModel(model, name, config string, args ...string) *cluster.Process {
	r.Helper()
	all := []string{"serve", "--model", model, "--port", "0"}
	if strings.HasSuffix(model, ".gguf") { // room for 8192 tokens: to fill the default 512 MiB with zeros takes most of a start
		all = append(all, "--num-blocks", "512")
	}
	if config != "" {
		all = append(all, "--kv-transfer-config", config)
	}
	return r.start(name, append(all, args...)...)
}

// route starts a router for a prefill and a decode engine.
func (r *rig) route(prefill, decode *cluster.Process, args ...string) *cluster.Process {
	r.Helper()
	return r.start("router", append([]string{"route", "--port", "0", "--prefill", prefill.URL, "--decode", decode.URL}, args...)...)
}

// start runs kvport until the test is over. A test that fails shows its output.
func (r *rig) start(name string, args ...string) *cluster.Process {
	r.Helper()
	p, err := cluster.Start(r.Context(), nil, name, binary(r.T), args...)
	require.NoError(r, err)
	r.Cleanup(func() {
		if r.Failed() {
			r.Logf("last output of %s:\n%s", name, p.Logs())
		}
		p.Kill()
	})
	return p
}

// stop ends a process with SIGTERM.
func (r *rig) stop(p *cluster.Process) {
	r.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(r, p.Stop(ctx))
}

// complete sends one greedy request.
func (r *rig) complete(url, prompt string) (*cluster.Completion, error) {
	return r.client.Complete(r.Context(), url, cluster.Request{Prompt: prompt, MaxTokens: r.tokens, IgnoreEOS: true})
}

// all sends the prompts, several at a time, and gives the answers in order.
func (r *rig) all(url string, prompts []string, parallel int) []*cluster.Completion {
	r.Helper()
	out := make([]*cluster.Completion, len(prompts))
	var g errgroup.Group
	g.SetLimit(parallel)
	for i, p := range prompts {
		g.Go(func() (err error) {
			out[i], err = r.complete(url, p)
			if err != nil {
				err = fmt.Errorf("prompt %d: %w", i, err)
			}
			return err
		})
	}
	require.NoError(r, g.Wait())
	return out
}

// metrics asks an engine or a router for its metrics.
func (r *rig) metrics(p *cluster.Process) cluster.Metrics {
	r.Helper()
	m, err := r.client.Metrics(r.Context(), p.URL)
	require.NoError(r, err)
	return m
}

// same compares answers token by token and logs how many tokens were compared.
func same(t *testing.T, what string, want, got []*cluster.Completion) {
	t.Helper()
	t.Logf("%s: %d prompts, %d tokens compared, 0 differ", what, len(want), compare(t, what, want, got))
}

// compare fails the test if a token differs, and counts them.
func compare(t *testing.T, what string, want, got []*cluster.Completion) (tokens int) {
	t.Helper()
	require.Len(t, got, len(want))
	differ := 0
	for i := range want {
		require.NotEmpty(t, want[i].Tokens)
		require.Len(t, got[i].Tokens, len(want[i].Tokens), "%s: prompt %d", what, i)
		for j := range want[i].Tokens {
			tokens++
			if want[i].Tokens[j] != got[i].Tokens[j] {
				differ++
			}
		}
	}
	require.Zero(t, differ, "%s: differing tokens, of %d", what, tokens)
	return tokens
}

// idle waits until the engine runs nothing and holds no block for a transfer.
func (r *rig) idle(p *cluster.Process) {
	r.Helper()
	var m cluster.Metrics
	require.Eventually(r, func() bool {
		var err error
		m, err = r.client.Metrics(r.Context(), p.URL)
		return err == nil && m.Sum("kvport_blocks", `state="pinned"`) == 0 && m.Sum("kvport_blocks", `state="held"`) == 0 &&
			m.Sum("kvport_blocks", `state="used"`) == 0
	}, time.Minute, 20*time.Millisecond, "blocks of %s are still used, pinned or held", p.Name)
}

// texts cuts n prompts of lo to hi bytes of real text from the repository, at places the seed
// chooses.
func texts(t *testing.T, seed uint64, n, lo, hi int) []string {
	t.Helper()
	var all strings.Builder
	for _, name := range []string{"LICENSE", "CONTRIBUTING.md", "README.md", "connector/connector.go", "engine/model/model.go"} {
		data, err := os.ReadFile(filepath.Join(root(t), name))
		require.NoError(t, err)
		all.Write(data)
	}
	text := all.String()
	rng := rand.New(rand.NewPCG(seed, 0))
	out := make([]string, n)
	for i := range out {
		size := lo + rng.IntN(hi-lo+1)
		at := rng.IntN(len(text) - size)
		out[i] = fmt.Sprintf("%d.%d: %s", seed, i, strings.ToValidUTF8(text[at:at+size], ""))
	}
	return out
}

// oracle gives a single node's answers, computed once for each prompt and length.
type oracle struct {
	mu    sync.Mutex
	known map[question]*cluster.Completion
}

type question struct {
	prompt string
	tokens int
}

// single is the node without a connector that all others are compared with.
var single = oracle{known: map[question]*cluster.Completion{}}

// answers are the single node's, for prompts and the tokens of a rig.
func (o *oracle) answers(r *rig, prompts []string) []*cluster.Completion {
	r.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	var missing []string
	for _, p := range prompts {
		if o.known[question{p, r.tokens}] == nil {
			missing = append(missing, p)
		}
	}
	if len(missing) > 0 {
		node := r.serve("single", "")
		for i, c := range r.all(node.URL, missing, 1) {
			o.known[question{missing[i], r.tokens}] = c
		}
		r.stop(node)
	}
	out := make([]*cluster.Completion, len(prompts))
	for i, p := range prompts {
		out[i] = o.known[question{p, r.tokens}]
	}
	return out
}

// external checks that all full blocks of the prompts came through the connector.
func (r *rig) external(d *cluster.Process, answers []*cluster.Completion) {
	r.Helper()
	r.externalAndTail(d, answers, false)
}

// externalAndTail is external; with tail there may be a part of a block behind them too.
func (r *rig) externalAndTail(d *cluster.Process, answers []*cluster.Completion, tail bool) {
	r.Helper()
	full, all := 0, 0
	for _, a := range answers {
		full, all = full+(a.Prompt-1)/16*16, all+a.Prompt-1
	}
	if !tail {
		all = full
	}
	got := r.metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`)
	require.GreaterOrEqual(r, got, float64(full))
	require.LessOrEqual(r, got, float64(all))
}

// blockFiles lists the stored blocks.
func (r *rig) blockFiles() []string {
	r.Helper()
	var out []string
	require.NoError(r, filepath.WalkDir(r.store, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && len(d.Name()) >= 64 {
			out = append(out, path)
		}
		return err
	}))
	return out
}
