// Package acceptance checks the product from the outside: the binaries in bin, the real model, real
// processes, and faults that are shown to have happened. Every test compares tokens with those of a
// single node that has no connector.
//
// Package rig has the flags that change what is run; -damages, -connector and those of the campaigns on sim (-simkills, -simstops,
// -simdamages, -tickets) are here.
package acceptance

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
)

// TestEqualTokens: the same prompts give the same tokens whatever the engine's options, wherever the
// prompt was computed, and whatever happens to the plugin.
func TestEqualTokens(t *testing.T) {
	prompts := rig.Texts(t, *rig.Seed, rig.Count(t, "prompts", *rig.Prompts, 2, 16), 400, 2400)
	want := rig.Single.Answers(rig.NewLong(t), prompts)

	t.Run("chunk 64, block 32", func(t *testing.T) {
		r := rig.NewLong(t)
		node := r.Serve("chunked", "", "--max-num-batched-tokens", "64", "--block-size", "32")
		rig.Same(t, "chunk 64, block 32", want, r.All(node.URL, prompts, 1))
		r.Idle(node)
	})
	t.Run("batch of 8, warm prefix cache", func(t *testing.T) {
		r := rig.NewLong(t)
		node := r.Serve("warm", "", "--num-blocks", "512")
		rig.Same(t, "batch of 8", want, r.All(node.URL, prompts, 8))
		again := r.All(node.URL, prompts, 8)
		rig.Same(t, "warm prefix cache", want, again)
		for i, c := range again {
			require.Positive(t, c.Cached, "prompt %d was not served from the cache", i)
		}
		r.Idle(node)
	})
	t.Run("preempted", func(t *testing.T) {
		r := rig.NewLong(t)
		node := r.Serve("small", "", "--num-blocks", "64", "--max-model-len", "960")
		short := rig.Texts(t, *rig.Seed+300, 10, 380, 420) // together they fit until they have grown
		alone := rig.Single.Answers(r, short)
		preempted := 0.0
		for range 5 { // whether requests meet is up to their order
			rig.Same(t, "preempted", alone, r.All(node.URL, short, 16))
			if preempted = r.Metrics(node).Sum("kvport_preemptions_total"); preempted > 0 {
				break
			}
		}
		t.Logf("preemptions: %.0f", preempted)
		require.Positive(t, preempted)
		r.Idle(node)
	})
	t.Run("prefill and decode apart", func(t *testing.T) {
		r := rig.NewLong(t)
		p, d := r.Serve("prefill", r.Config("kv_producer", "", "")), r.Serve("decode", r.Config("kv_consumer", "", ""))
		router := r.Route(p, d)
		rig.Same(t, "P/D", want, r.All(router.URL, prompts, 2))
		m := r.Metrics(d)
		external := m.Sum("kvport_prompt_tokens_total", `source="external"`)
		t.Logf("tokens from external KV: %.0f, bytes loaded: %.0f, saved: %.0f", external,
			m.Sum("kvport_transfer_bytes_total", `direction="load"`), r.Metrics(p).Sum("kvport_transfer_bytes_total", `direction="save"`))
		promptTokens := 0
		for _, c := range want {
			promptTokens += c.Prompt
		}
		require.Greater(t, external, float64(promptTokens)*0.8, "most of %d prompt tokens should have been loaded", promptTokens)
		r.Idle(p)
		r.Idle(d)
	})
	t.Run("one engine that saves and loads", func(t *testing.T) {
		r := rig.NewLong(t)
		node := r.Serve("both", r.Config("kv_both", "", ""), "--enable-prefix-caching=false")
		rig.Same(t, "kv_both, cold", want, r.All(node.URL, prompts, 4))
		rig.Same(t, "kv_both, warm", want, r.All(node.URL, prompts, 4))
		require.Positive(t, r.Metrics(node).Sum("kvport_prompt_tokens_total", `source="external"`))
		r.Idle(node)
	})
}
