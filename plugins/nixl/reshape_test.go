package main

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
)

var flagReshapePrompts = flag.Int("reshapeprompts", 0, "prompts for each pair of shapes; default 3 with the model and 12 with sim, in soak 16 and 200")

// cutting is how an engine cuts its cache: tokens of a block, and ranks.
type cutting struct{ block, ranks int }

func (c cutting) String() string { return fmt.Sprintf("%d tokens on %d ranks", c.block, c.ranks) }

func (c cutting) args() []string {
	return []string{"--block-size", fmt.Sprint(c.block), "--tensor-parallel-size", fmt.Sprint(c.ranks)}
}

// unverified accepts blocks of engines of other shapes.
func unverified(config string) string {
	return strings.Replace(config, `"kvport":{`, `"kvport":{"unverified":true,`, 1)
}

// reshapes hands prompts from engines of one shape to engines of another and compares all tokens with those of
// a single node. Each prompt's tokens but the last must come over.
func reshapes(t *testing.T, model string, n int, pairs [][2]cutting, size [2]int) {
	t.Helper()
	r := rig.New(t)
	r.Tokens = 8
	prompts := rig.Texts(t, *rig.Seed+126, n*len(pairs), size[0], size[1])
	node := r.ServeModel(model, "single", "")
	want := r.All(node.URL, prompts, 4)
	r.Stop(node)
	for i, pair := range pairs {
		p := r.ServeModel(model, "prefill", nixlConfig("kv_producer", "auto", 30*time.Second, rig.Unhurried), pair[0].args()...)
		d := r.ServeModel(model, "decode", unverified(nixlConfig("kv_consumer", "auto", 30*time.Second, rig.Unhurried)), pair[1].args()...)
		router := r.Route(p, d)
		what := fmt.Sprintf("%v to %v", pair[0], pair[1])
		rig.Same(t, what, want[i*n:(i+1)*n], r.All(router.URL, prompts[i*n:(i+1)*n], 2))
		m := r.Metrics(d)
		external := m.Sum("kvport_prompt_tokens_total", `source="external"`)
		local := m.Sum("kvport_prompt_tokens_total", `source="local_compute"`)
		t.Logf("%s: %.0f of %.0f prompt tokens from the prefill engine, %.0f blocks unverified", what, external, external+local, m.Sum("kvport_unverified_blocks_total"))
		require.EqualValues(t, n, local, "all but the last token of each prompt comes over")
		require.Positive(t, m.Sum("kvport_unverified_blocks_total"))
		require.Zero(t, m.Sum("kvport_tickets_refused_total"))
		require.Zero(t, m.Sum("kvport_transfer_failed_blocks_total"))
		r.Idle(p)
		r.Idle(d)
		r.Stop(router)
		r.Stop(p)
		r.Stop(d)
	}
}

// TestReshape: P and D of the real model with different block sizes, different ranks (it has three KV heads),
// and both.
func TestReshape(t *testing.T) {
	rig.Need(t, "nixl")
	name := rig.Model(t)
	if strings.HasPrefix(name, "sim") {
		t.Skip("TestReshapeSim runs sim")
	}
	n := rig.Count(t, "reshapeprompts", *flagReshapePrompts, 3, 16)
	pairs := [][2]cutting{{{16, 1}, {32, 3}}, {{32, 3}, {16, 1}}}
	if n > 3 { // asked for, or in soak: each by itself, too
		pairs = append(pairs, [][2]cutting{{{16, 1}, {32, 1}}, {{32, 1}, {16, 1}}, {{16, 1}, {16, 3}}, {{16, 3}, {16, 1}}}...)
	}
	reshapes(t, name, n, pairs, [2]int{200, 900})
}

// TestReshapeSim is TestReshape with sim, whose four heads go on one, two or four ranks.
func TestReshapeSim(t *testing.T) {
	rig.Need(t, "nixl")
	n := rig.Count(t, "reshapeprompts", *flagReshapePrompts, 12, 200)
	for _, stride := range []string{"blocks", "planes"}[:1+min(1, n/13)] {
		pairs := [][2]cutting{{{16, 1}, {32, 2}}, {{32, 4}, {16, 2}}, {{8, 2}, {64, 1}}}
		reshapes(t, "sim:stride="+stride, n, pairs, [2]int{100, 2000})
	}
}

// TestReshapeRefused: what does not divide is refused with a reason, and computed.
func TestReshapeRefused(t *testing.T) {
	rig.Need(t, "nixl")
	r := rig.New(t)
	r.Tokens = 8
	for name, c := range map[string]struct {
		p, d  string
		shape cutting
		why   string
	}{
		"windows":      {"sim:groups=2,window=64", "sim:groups=2,window=64", cutting{32, 1}, "neither it nor we can cut blocks"},
		"other heads":  {"sim:heads=4", "sim:heads=8", cutting{32, 1}, "model"},
		"other bytes":  {"sim:heads=4,bytes=64", "sim:heads=4,bytes=128", cutting{16, 1}, "more than block size and ranks differs"},
		"other blocks": {"sim", "sim", cutting{24, 1}, "neither is a multiple of the other"},
	} {
		t.Run(name, func(t *testing.T) {
			prompts := rig.Texts(t, *rig.Seed+127, 2, 300, 900)
			p := r.ServeModel(c.p, "prefill", nixlConfig("kv_producer", "auto", 30*time.Second, rig.Unhurried))
			d := r.ServeModel(c.d, "decode", unverified(nixlConfig("kv_consumer", "auto", 30*time.Second, rig.Unhurried)), c.shape.args()...)
			node := r.ServeModel(c.d, "single", "")
			for i, want := range r.All(node.URL, prompts, 1) { // a router may find out first, and bring no tickets
				r.UseTicket(d, prompts[i], r.Ticket(p, prompts[i]), want)
			}
			require.Zero(t, r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`))
			require.NoError(t, d.Logged(t.Context(), c.why))
		})
	}
}

// TestReshapeIsRefusedUnlessAccepted: without kvport.unverified nothing comes over from an engine of another shape,
// since no digest would verify it. The reason names the setting, and the tokens are right.
func TestReshapeIsRefusedUnlessAccepted(t *testing.T) {
	rig.Need(t, "nixl")
	r := rig.New(t)
	r.Tokens = 8
	prompts := rig.Texts(t, *rig.Seed+128, 4, 300, 900)
	node := r.ServeModel("sim", "single", "")
	p := r.ServeModel("sim", "prefill", unverified(nixlConfig("kv_producer", "auto", 30*time.Second, rig.Unhurried)))
	d := r.ServeModel("sim", "decode", nixlConfig("kv_consumer", "auto", 30*time.Second, rig.Unhurried), cutting{32, 2}.args()...)
	router := r.Route(p, d)
	rig.Same(t, "refused", r.All(node.URL, prompts, 1), r.All(router.URL, prompts, 1))
	m := r.Metrics(d)
	require.Zero(t, m.Sum("kvport_prompt_tokens_total", `source="external"`))
	require.Zero(t, m.Sum("kvport_unverified_blocks_total"))
	// The router compares the two and brings no tickets; those that came before it had are refused.
	require.NoError(t, router.Logged(t.Context(), "block_size 16 / 32"))
	if m.Sum("kvport_tickets_refused_total", `reason="unverified"`) > 0 {
		require.NoError(t, d.Logged(t.Context(), "set kvport.unverified to true to accept that"))
	}
}
