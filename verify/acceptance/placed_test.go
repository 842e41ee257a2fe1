package acceptance

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// TestPlacedHits: the real model gives a single node's tokens through every connector with a memory tier, alone and behind a MultiConnector, at
// both trust levels, and each full block of a prompt that comes again is copied by the host from where the connector has placed it: all that the
// engine loads came without a call of the plugin. Unless the counts are full each setup runs at one of the levels.
func TestPlacedHits(t *testing.T) {
	r := rig.New(t)
	n := rig.Count(t, "prompts", *rig.Prompts, 2, 16)
	prompts := rig.Texts(t, *rig.Seed+1700, n, 200, 450)
	want := rig.Single.Answers(r, prompts)
	b := newBackend(t)
	levels := []string{"in-place", "staged"}
	turn, compared, placed := 0, 0, 0.0
	for _, f := range rig.Connectors(t, func(f *fixture.Fixture) bool { return len(placing(f)) > 0 }) {
		for _, setup := range placing(f) {
			turn++
			for i, level := range levels {
				if n < 16 && i != turn%len(levels) {
					continue
				}
				s := scene{Fixture: f, Setup: setup, name: f.Connector}
				t.Run(s.title()+"/"+level, func(t *testing.T) {
					h := placedHits{Rig: &rig.Rig{T: t, Tokens: r.Tokens}, prompts: prompts, want: want}
					tokens, blocks := h.run(&s, b.under(t, s.title()+level), level)
					compared, placed = compared+tokens, placed+blocks
				})
			}
		}
	}
	t.Logf("%d setups, %d tokens compared, 0 differ; %.0f blocks were loaded from where they were placed, and none in another way", turn, compared, placed)
}

// placing are the setups of a connector whose blocks the host finds by itself.
func placing(f *fixture.Fixture) []fixture.Setup {
	return slices.DeleteFunc(slices.Concat(f.Setups, f.VLLM), func(s fixture.Setup) bool { return !s.Places })
}

// placedHits is one engine, to which prompts come twice.
type placedHits struct {
	*rig.Rig
	prompts []string
	want    []*cluster.Completion
}

// run gives how many tokens were compared, and how many blocks were loaded from where they were placed.
func (h *placedHits) run(s *scene, b backend, level string) (tokens int, blocks float64) {
	h.Helper()
	require.NoError(h, b.redis.Do(h.Context(), "flushall"))
	config := s.config("kv_both", "both", s.extra(h.T, b, "kv_both"), fmt.Sprintf(`"trust":%q,"deadlines":{"handshake":"30s"}`, level))
	e := h.Serve("both", config, "--enable-prefix-caching=false", "--num-blocks", "96")
	tokens = rig.Compare(h.T, "cold", h.want, h.All(e.URL, h.prompts, 2))
	h.Idle(e)
	require.Zero(h, h.Metrics(e).Sum("kvport_prompt_tokens_total", `source="external"`), "no prompt has come before")
	warm := h.All(e.URL, h.prompts, 2)
	tokens += rig.Compare(h.T, "warm", h.want, warm)
	h.Idle(e)
	h.External(e, warm)
	m := h.Metrics(e)
	blocks = m.Sum("kvport_placed_blocks_total")
	require.Positive(h, blocks)
	require.InDelta(h, m.Sum("kvport_prompt_tokens_total", `source="external"`), 16*blocks, 0, "prompt tokens that were loaded, and those of placed blocks")
	require.GreaterOrEqual(h, m.Sum("kvport_placed_matches_total"), float64(len(h.prompts)), "prompts that were found without a call of the plugin")
	for _, name := range []string{"kvport_placed_failed_blocks_total", "kvport_placed_alone_blocks_total", "kvport_failed_loads_total", "kvport_integrity_failures_total"} {
		require.Zero(h, m.Sum(name), name)
	}
	h.NobodyBlamed(e)
	h.mapped(e, level == "staged")
	h.Logf("%d tokens compared, 0 differ; %.0f blocks from where they were placed, %.0f saved into lent slots", tokens, blocks, m.Sum("kvport_placed_saved_blocks_total"))
	h.Stop(e)
	return tokens, blocks
}

// mapped checks which of the engine's memory its plugins map.
func (h *placedHits) mapped(e *cluster.Process, staged bool) {
	h.Helper()
	plugins := cluster.Plugins(e.PID())
	require.NotEmpty(h, plugins)
	for _, pid := range plugins {
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		require.NoError(h, err)
		require.Equal(h, !staged, strings.Contains(string(maps), "memfd:kvport-cache"))
	}
}
