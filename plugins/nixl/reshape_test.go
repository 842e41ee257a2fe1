package main

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

var flagReshapePrompts = flag.Int("reshapeprompts", 0, "prompts for each pair of shapes; default 3 with the model and 8 with sim, in soak 24 and 200")

// cutting is how an engine cuts its cache: tokens of a block, and ranks.
type cutting struct{ block, ranks int }

func (c cutting) String() string { return fmt.Sprintf("%d tokens on %d ranks", c.block, c.ranks) }

func (c cutting) args() []string {
	return []string{"--block-size", fmt.Sprint(c.block), "--tensor-parallel-size", fmt.Sprint(c.ranks)}
}

// reshapeConfig is the transfer config of one end.
func reshapeConfig(role string) string {
	return nixlConfig(role, "auto", 30*time.Second, rig.Unhurried)
}

// stagedConfig is that of a consumer whose plugin maps no cache. It runs without a sandbox, in which it could not find the libraries
// of make deps: no config and no NIXL_LIB_DIR names them here.
func stagedConfig(role string) string {
	if role == "kv_producer" {
		return reshapeConfig(role)
	}
	return strings.Replace(reshapeConfig(role), `"kvport":{`, `"kvport":{"trust":"staged","sandbox":"off",`, 1)
}

// multiConfig is that of a MultiConnector.
func multiConfig(role string) string {
	return fmt.Sprintf(`{"kv_connector":"MultiConnector","kv_role":%q,"kvport":{%s},"kv_connector_extra_config":{"connectors":[
		{"kv_connector":"NixlConnector","kv_role":%q}]}}`, role, fmt.Sprintf(calm, rig.Unhurried), role)
}

// crossing is prompts that are handed between engines of a model, and what a single node answers.
type crossing struct {
	*rig.Rig
	model   string
	prompts []string
	want    []*cluster.Completion
}

func newCrossing(t *testing.T, model string, prompts []string) *crossing {
	t.Helper()
	c := &crossing{Rig: rig.New(t), model: model, prompts: prompts}
	c.Tokens = 8
	node := c.ServeModel(model, "single", "")
	defer c.Stop(node)
	c.want = c.All(node.URL, prompts, 4)
	return c
}

// cross hands the prompts from engines of one shape to engines of another and compares all tokens with those of the
// single node. Each prompt's tokens but the last must come over, verified.
func (c *crossing) cross(config func(role string) string, pairs ...[2]cutting) {
	c.Helper()
	for _, pair := range pairs {
		p := c.ServeModel(c.model, "prefill", config("kv_producer"), pair[0].args()...)
		d := c.ServeModel(c.model, "decode", config("kv_consumer"), pair[1].args()...)
		router := c.Route(p, d)
		what := fmt.Sprintf("%v to %v", pair[0], pair[1])
		rig.Same(c.T, what, c.want, c.All(router.URL, c.prompts, 2))
		m := c.Metrics(d)
		external := m.Sum("kvport_prompt_tokens_total", `source="external"`)
		local := m.Sum("kvport_prompt_tokens_total", `source="local_compute"`)
		cached := m.Sum("kvport_prompt_tokens_total", `source="local_cache"`)
		c.Logf("%s: %.0f of %.0f prompt tokens from the prefill engine", what, external, external+local+cached)
		require.EqualValues(c, len(c.prompts), local, "all but the last token of each prompt comes over")
		require.Zero(c, m.Sum("kvport_unverified_blocks_total"))
		require.Zero(c, m.Sum("kvport_integrity_failures_total"))
		require.Zero(c, m.Sum("kvport_tickets_refused_total"))
		require.Zero(c, m.Sum("kvport_transfer_failed_blocks_total"))
		c.Idle(p)
		c.Idle(d)
		c.Stop(router)
		c.Stop(p)
		c.Stop(d)
	}
}

// modelPairs are shapes of engines with the real model, which has three KV heads.
func modelPairs() (pairs [][2]cutting) {
	for _, p := range [][2]cutting{
		{{16, 1}, {32, 3}},
		{{16, 1}, {32, 1}},
		{{16, 1}, {64, 1}},
		{{16, 1}, {128, 1}},
		{{16, 1}, {256, 1}},
		{{16, 1}, {16, 3}},
		{{16, 3}, {64, 1}},
		{{16, 3}, {128, 3}},
		{{16, 3}, {256, 1}},
		{{8, 1}, {128, 3}},
	} {
		pairs = append(pairs, p, [2]cutting{p[1], p[0]})
	}
	return pairs
}

// TestReshape: P and D of the real model with different block sizes, different ranks, and both.
func TestReshape(t *testing.T) {
	rig.Need(t, "nixl")
	name := rig.Model(t)
	if strings.HasPrefix(name, "sim") {
		t.Skip("TestReshapeSim runs sim")
	}
	n := rig.Count(t, "reshapeprompts", *flagReshapePrompts, 3, 24)
	pairs := modelPairs()
	if n <= 3 { // neither asked for nor in soak
		pairs = pairs[:2]
	}
	newCrossing(t, name, rig.Texts(t, *rig.Seed+126, n, 200, 900)).cross(reshapeConfig, pairs...)
}

// TestReshapeSim is TestReshape with sim, whose 24 heads go on one, two, three, four or eight ranks, also at trust level
// staged and under a MultiConnector.
func TestReshapeSim(t *testing.T) {
	rig.Need(t, "nixl")
	n := rig.Count(t, "reshapeprompts", *flagReshapePrompts, 8, 200)
	for _, stride := range []string{"blocks", "planes"}[:1+min(1, n/13)] {
		c := newCrossing(t, "sim:heads=24,stride="+stride, rig.Texts(t, *rig.Seed+127, n, 100, 2000))
		c.cross(reshapeConfig, [2]cutting{{16, 4}, {128, 1}}, [2]cutting{{256, 3}, {16, 8}})
		c.cross(stagedConfig, [2]cutting{{16, 2}, {32, 1}})
		c.cross(multiConfig, [2]cutting{{32, 1}, {8, 2}})
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
			d := r.ServeModel(c.d, "decode", nixlConfig("kv_consumer", "auto", 30*time.Second, rig.Unhurried), c.shape.args()...)
			node := r.ServeModel(c.d, "single", "")
			for i, want := range r.All(node.URL, prompts, 1) { // a router may find out first, and bring no tickets
				r.UseTicket(d, prompts[i], r.Ticket(p, prompts[i]), want)
			}
			require.Zero(t, r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`))
			require.NoError(t, d.Logged(t.Context(), c.why))
		})
	}
}
