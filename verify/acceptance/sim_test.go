package acceptance

import (
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// spreadArgs are three ranks and blocks of 16.
var spreadArgs = []string{"--tensor-parallel-size", "3", "--max-model-len", "2048"}

// spread is the model of the tests below: layers in two groups, one with a window of 100 tokens.
func spread(stride string) string { return "sim:groups=2,window=100,layers=6,seed=5,stride=" + stride }

// TestSpread: a model of three ranks and two groups, whose blocks lie in memory in every way there
// is, goes through prefill, decode and router at both trust levels; single nodes, other strides and damaged shards give
// the same tokens.
func TestSpread(t *testing.T) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+8000, 8, 100, 900)
	node := r.ServeModel(spread("layers"), "single", "", spreadArgs...)
	want := r.All(node.URL, prompts, 1)
	r.Stop(node)
	single := r.ServeModel(spread("layers"), "one rank", "")
	require.NotEqual(t, want[0].Tokens, r.All(single.URL, prompts[:1], 1)[0].Tokens, "ranks should show in the tokens")
	r.Stop(single)
	const staged = `,"kvport":{"trust":"staged"}`
	for _, c := range []struct{ p, d, trust string }{
		{"layers", "blocks", ""}, {"blocks", "shared", staged}, {"planes", "planes", ""}, {"planes", "planes", staged}, {"shared", "layers", ""},
	} {
		t.Run(fmt.Sprintf("%s to %s, staged %t", c.p, c.d, c.trust == staged), func(t *testing.T) {
			r := rig.New(t)
			p := r.ServeModel(spread(c.p), "prefill", r.Config("kv_producer", "", c.trust), spreadArgs...)
			d := r.ServeModel(spread(c.d), "decode", r.Config("kv_consumer", "", c.trust), append(spreadArgs, "--enable-prefix-caching=false")...)
			router := r.Route(p, d)
			got := r.All(router.URL, prompts, 4)
			rig.Same(t, c.p+" to "+c.d, want, got)
			r.External(d, got)
			files := r.BlockFiles()
			blocks := 0
			for _, w := range want { // every full block of a prompt on three ranks in two groups, at most
				blocks += w.Prompt / 16
			}
			require.Zero(t, len(files)%6)
			require.LessOrEqual(t, len(files), 6*blocks)
			require.Greater(t, len(files), 3*blocks)
			damageSome(r, d, prompts, want)
			r.Idle(p)
			r.Idle(d)
			r.Stop(d)
			r.Stop(p)
		})
	}
}

// damageSome changes one byte in some shards and removes others, then asks for the prompts again.
func damageSome(r *rig.Rig, d *cluster.Process, prompts []string, want []*cluster.Completion) {
	r.Helper()
	rng := rand.New(rand.NewPCG(*rig.Seed, 2))
	files := r.BlockFiles()
	damaged := 0
	for _, i := range rng.Perm(len(files))[:len(files)/8] {
		if rng.IntN(3) == 0 {
			require.NoError(r, os.Remove(files[i]))
			continue
		}
		data, err := os.ReadFile(files[i])
		require.NoError(r, err)
		data[rng.IntN(len(data))] ^= 1 << rng.IntN(8)
		require.NoError(r, os.WriteFile(files[i], data, 0o600))
		damaged++
	}
	got := r.All(d.URL, prompts, 4)
	found := r.Metrics(d).Sum("kvport_integrity_failures_total")
	rig.Same(r.T, fmt.Sprintf("%d shards damaged, %v found", damaged, found), want, got)
	require.Positive(r, found)
	require.LessOrEqual(r, found, float64(damaged))
}

// TestSpreadPluginKilled: the plugin that serves all three ranks dies or stops at random moments while
// they load and save; no token is wrong, no request is lost, no block is left.
func TestSpreadPluginKilled(t *testing.T) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+9000, 8, 300, 900)
	node := r.ServeModel(spread("blocks"), "single", "", spreadArgs...)
	want := r.All(node.URL, prompts, 1)
	r.Stop(node)
	args := append(spreadArgs, "--enable-prefix-caching=false")
	both := r.ServeModel(spread("blocks"), "both", r.Config("kv_both", "", rig.Patient), args...)
	rng := rand.New(rand.NewPCG(*rig.Seed, 3))
	tokens := 0
	for i := range *rig.Kills + *rig.Stops {
		signal := syscall.SIGKILL
		if i >= *rig.Kills {
			signal = syscall.SIGSTOP
		}
		plugin := r.Plugin(both)
		delay := time.NewTimer(time.Duration(rng.IntN(30)) * time.Millisecond)
		struck := make(chan error, 1)
		go func() {
			<-delay.C
			struck <- syscall.Kill(plugin, signal)
		}()
		tokens += rig.Compare(t, fmt.Sprintf("%v %d", signal, i), want, r.All(both.URL, prompts, 4))
		require.NoError(t, <-struck)
		require.Eventually(t, func() bool { return !cluster.Alive(plugin) }, time.Minute, time.Millisecond)
		if i%4 == 3 { // so that blocks are saved again
			r.Idle(both)
			require.NoError(t, os.RemoveAll(r.Store))
		}
	}
	r.Idle(both)
	m := r.Metrics(both)
	t.Logf("%d kills, %d stops, %d tokens compared, 0 differ; %v tokens external, %v loads failed, %v started again", *rig.Kills, *rig.Stops, tokens,
		m.Sum("kvport_prompt_tokens_total", `source="external"`), m.Sum("kvport_failed_loads_total"), m.Sum("kvport_transfer_retries_total"))
	require.Positive(t, m.Sum("kvport_prompt_tokens_total", `source="external"`))
}
