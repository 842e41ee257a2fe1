// Package rig starts engines, routers and single nodes for acceptance tests, sends them prompts and compares tokens. Package
// acceptance uses it, and so do the tests of one connector, in the folder of its plugin.
//
// Flags after -args change what is run: -prompts, -tokens, -seed, -model, -kills, -stops, and those of the test itself.
package rig

import (
	"context"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// What a run does; the defaults are the counts the project promises.
var (
	Prompts   = flag.Int("prompts", 16, "prompts to compare")
	Tokens    = flag.Int("tokens", 32, "tokens to generate for each")
	Seed      = flag.Uint64("seed", 1, "seed of prompts and faults")
	ModelName = flag.String("model", "", "GGUF file, tiny-random or sim; default: the model of make deps")
	Kills     = flag.Int("kills", 10, "plugin kills in mid-load")
	Stops     = flag.Int("stops", 2, "plugin stops (SIGSTOP) in mid-load")
)

// Count is how much of something a test runs: the value of the flag of that name if it was given, else a short
// count, or the full one with KVPORT_SOAK=1.
func Count(t *testing.T, name string, value, short, full int) int {
	t.Helper()
	n := short
	if os.Getenv("KVPORT_SOAK") != "" {
		n = full
	}
	if given(name) {
		n = value
	}
	t.Logf("-%s %d; soak runs %d", name, n, full)
	return n
}

// given reports whether a flag is on the command line.
func given(name string) (is bool) {
	flag.Visit(func(f *flag.Flag) { is = is || f.Name == name })
	return is
}

// Binary is kvport as make build has built it.
func Binary(t *testing.T) string {
	t.Helper()
	path := filepath.Join(testkit.Root(t), "bin", "kvport")
	require.FileExists(t, path, "run make build first")
	return path
}

// Model is -model, or the file of the real model that make deps fetches.
func Model(t *testing.T) string {
	t.Helper()
	if *ModelName != "" {
		return *ModelName
	}
	path := filepath.Join(testkit.Root(t), ".deps", "model", "SmolLM2-135M-Instruct.Q4_1.gguf")
	require.FileExists(t, path, "run make deps first")
	return path
}

// Rig starts processes for one test and stops them at its end.
type Rig struct {
	*testing.T
	Client cluster.Client // for requests
	Store  string         // where the typical store keeps its blocks
	Tokens int            // to generate for each prompt
}

// New makes a rig for short answers. It skips the test with -short.
func New(t *testing.T) *Rig {
	t.Helper()
	if testing.Short() {
		t.Skip("runs the real model: left out with -short, which the race stage uses")
	}
	return &Rig{T: t, Store: filepath.Join(t.TempDir(), "blocks"), Tokens: Count(t, "tokens", *Tokens, 12, 32)}
}

// NewLong is a rig whose answers have all of -tokens.
func NewLong(t *testing.T) *Rig {
	t.Helper()
	r := New(t)
	r.Tokens = *Tokens
	return r
}

// Config is the --kv-transfer-config of a role with the typical store; extra and host are further JSON members, or empty.
func (r *Rig) Config(role, extra, host string) string {
	r.Helper()
	f := testkit.Typical(r.T, fixture.Store)
	own, err := fixture.Fill(f.Setups[0].Config, fixture.Values{"TMP": r.Store})
	require.NoError(r, err, "%s/fixture.json", f.Folder)
	return fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":%s%s}%s}`,
		f.Connector, role, strings.TrimSuffix(own, "}"), extra, host)
}

// Serve starts an engine. config may be empty.
func (r *Rig) Serve(name, config string, args ...string) *cluster.Process {
	r.Helper()
	return r.ServeModel(Model(r.T), name, config, args...)
}

// ServeModel starts an engine with a model: a GGUF file, sim or tiny-random.
func (r *Rig) ServeModel(model, name, config string, args ...string) *cluster.Process {
	r.Helper()
	all := []string{"serve", "--model", model, "--port", "0"}
	if strings.HasSuffix(model, ".gguf") { // room for 4096 tokens: to fill the default 512 MiB with zeros takes most of a start
		all = append(all, "--num-blocks", "256")
	}
	if config != "" {
		all = append(all, "--kv-transfer-config", config)
	}
	return r.Start(name, append(all, args...)...)
}

// Route starts a router for a prefill and a decode engine.
func (r *Rig) Route(prefill, decode *cluster.Process, args ...string) *cluster.Process {
	r.Helper()
	return r.Start("router", append([]string{"route", "--port", "0", "--prefill", prefill.URL, "--decode", decode.URL}, args...)...)
}

// Start runs kvport until the test is over. A test that fails shows its output.
func (r *Rig) Start(name string, args ...string) *cluster.Process {
	r.Helper()
	p, err := cluster.Start(r.Context(), nil, name, Binary(r.T), args...)
	require.NoError(r, err)
	r.Cleanup(func() {
		if r.Failed() {
			r.Logf("last output of %s:\n%s", name, p.Logs())
		}
		KillAll(r.T, p)
	})
	return p
}

// KillAll kills an engine, and waits until its plugins are gone, too: until then they write to their folders.
func KillAll(t *testing.T, p *cluster.Process) {
	t.Helper()
	plugins := cluster.Plugins(p.PID())
	p.Kill()
	gone := func() bool { return !slices.ContainsFunc(plugins, cluster.Alive) }
	require.Eventually(t, gone, time.Minute, time.Millisecond, "plugins %v outlive %s", plugins, p.Name)
}

// Stop ends a process with SIGTERM.
func (r *Rig) Stop(p *cluster.Process) {
	r.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(r, p.Stop(ctx))
}

// Complete sends one greedy request.
func (r *Rig) Complete(url, prompt string) (*cluster.Completion, error) {
	return r.Client.Complete(r.Context(), url, cluster.Request{Prompt: prompt, MaxTokens: r.Tokens, IgnoreEOS: true})
}

// All sends the prompts, several at a time, and gives the answers in order.
func (r *Rig) All(url string, prompts []string, parallel int) []*cluster.Completion {
	r.Helper()
	out := make([]*cluster.Completion, len(prompts))
	var g errgroup.Group
	g.SetLimit(parallel)
	for i, p := range prompts {
		g.Go(func() (err error) {
			out[i], err = r.Complete(url, p)
			if err != nil {
				err = fmt.Errorf("prompt %d: %w", i, err)
			}
			return err
		})
	}
	require.NoError(r, g.Wait())
	return out
}

// Metrics asks an engine or a router for its metrics.
func (r *Rig) Metrics(p *cluster.Process) cluster.Metrics {
	r.Helper()
	m, err := r.Client.Metrics(r.Context(), p.URL)
	require.NoError(r, err)
	return m
}

// Same compares answers token by token and logs how many tokens were compared.
func Same(t *testing.T, what string, want, got []*cluster.Completion) {
	t.Helper()
	t.Logf("%s: %d prompts, %d tokens compared, 0 differ", what, len(want), Compare(t, what, want, got))
}

// Compare fails the test if a token differs, and counts them.
func Compare(t *testing.T, what string, want, got []*cluster.Completion) (tokens int) {
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

// Idle waits until the engine runs nothing and holds no block for a transfer.
func (r *Rig) Idle(p *cluster.Process) {
	r.Helper()
	var m cluster.Metrics
	require.Eventually(r, func() bool {
		var err error
		m, err = r.Client.Metrics(r.Context(), p.URL)
		return err == nil && m.Sum("kvport_blocks", `state="pinned"`) == 0 && m.Sum("kvport_blocks", `state="held"`) == 0 &&
			m.Sum("kvport_blocks", `state="used"`) == 0
	}, time.Minute, 20*time.Millisecond, "blocks of %s are still used, pinned or held", p.Name)
}

// Texts cuts n prompts of lo to hi bytes of real text from the repository, at places the seed
// chooses. Unless the counts are full, or chosen with -prompts, only the shortest third of the lengths is used.
func Texts(t *testing.T, seed uint64, n, lo, hi int) []string {
	t.Helper()
	if os.Getenv("KVPORT_SOAK") == "" && !given("prompts") {
		hi = lo + (hi-lo)/3
	}
	var all strings.Builder
	for _, name := range []string{"LICENSE", "CONTRIBUTING.md", "README.md", "connector/connector.go", "engine/model/model.go"} {
		data, err := os.ReadFile(filepath.Join(testkit.Root(t), name))
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

// Single is the node without a connector that all others are compared with.
var Single = oracle{known: map[question]*cluster.Completion{}}

// Answers are the single node's, for prompts and the tokens of a rig.
func (o *oracle) Answers(r *Rig, prompts []string) []*cluster.Completion {
	r.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	var missing []string
	for _, p := range prompts {
		if o.known[question{p, r.Tokens}] == nil {
			missing = append(missing, p)
		}
	}
	if len(missing) > 0 {
		node := r.Serve("single", "")
		for i, c := range r.All(node.URL, missing, 1) {
			o.known[question{missing[i], r.Tokens}] = c
		}
		r.Stop(node)
	}
	out := make([]*cluster.Completion, len(prompts))
	for i, p := range prompts {
		out[i] = o.known[question{p, r.Tokens}]
	}
	return out
}

// Unaligned picks n prompts that do not end with a full block: then every stored block of a prompt is
// read by the next request for it.
func (r *Rig) Unaligned(prompts []string, n int) (picked []string, want []*cluster.Completion) {
	r.Helper()
	for i, c := range Single.Answers(r, prompts) {
		if c.Prompt%16 != 0 && len(picked) < n {
			picked, want = append(picked, prompts[i]), append(want, c)
		}
	}
	require.Len(r, picked, n)
	return picked, want
}

// External checks that all full blocks of the prompts came through the connector.
func (r *Rig) External(d *cluster.Process, answers []*cluster.Completion) {
	r.Helper()
	r.ExternalAndTail(d, answers, false)
}

// ExternalAndTail is external; with tail there may be a part of a block behind them too.
func (r *Rig) ExternalAndTail(d *cluster.Process, answers []*cluster.Completion, tail bool) {
	r.Helper()
	full, all := 0, 0
	for _, a := range answers {
		full, all = full+(a.Prompt-1)/16*16, all+a.Prompt-1
	}
	if !tail {
		all = full
	}
	got := r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`)
	require.GreaterOrEqual(r, got, float64(full))
	require.LessOrEqual(r, got, float64(all))
}

// BlockFiles lists the stored blocks.
func (r *Rig) BlockFiles() []string {
	r.Helper()
	var out []string
	require.NoError(r, filepath.WalkDir(r.Store, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && len(d.Name()) >= 64 {
			out = append(out, path)
		}
		return err
	}))
	return out
}
