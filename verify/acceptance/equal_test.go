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
)

// TestEqualTokens: the same prompts give the same tokens whatever the engine's options, wherever the
// prompt was computed, and whatever happens to the plugin.
func TestEqualTokens(t *testing.T) {
	prompts := texts(t, *flagSeed, count(t, "prompts", *flagPrompts, 4, 16), 400, 2400)
	want := single.answers(newLongRig(t), prompts)

	t.Run("chunk 64, block 32", func(t *testing.T) {
		r := newLongRig(t)
		node := r.serve("chunked", "", "--max-num-batched-tokens", "64", "--block-size", "32")
		same(t, "chunk 64, block 32", want, r.all(node.URL, prompts, 1))
		r.idle(node)
	})
	t.Run("batch of 8, warm prefix cache", func(t *testing.T) {
		r := newLongRig(t)
		node := r.serve("warm", "")
		same(t, "batch of 8", want, r.all(node.URL, prompts, 8))
		again := r.all(node.URL, prompts, 8)
		same(t, "warm prefix cache", want, again)
		for i, c := range again {
			require.Positive(t, c.Cached, "prompt %d was not served from the cache", i)
		}
		r.idle(node)
	})
	t.Run("preempted", func(t *testing.T) {
		r := newLongRig(t)
		node := r.serve("small", "", "--num-blocks", "64", "--max-model-len", "960")
		preempted := 0.0
		for range 5 { // whether requests meet is up to their order
			same(t, "preempted", append(want, want...), r.all(node.URL, append(prompts, prompts...), 16))
			if preempted = r.metrics(node).Sum("kvport_preemptions_total"); preempted > 0 {
				break
			}
		}
		t.Logf("preemptions: %.0f", preempted)
		require.Positive(t, preempted)
		r.idle(node)
	})
	t.Run("prefill and decode apart", func(t *testing.T) {
		r := newLongRig(t)
		p, d := r.serve("prefill", r.config("kv_producer", "", "")), r.serve("decode", r.config("kv_consumer", "", ""))
		router := r.route(p, d)
		same(t, "P/D", want, r.all(router.URL, prompts, 2))
		m := r.metrics(d)
		external := m.Sum("kvport_prompt_tokens_total", `source="external"`)
		t.Logf("tokens from external KV: %.0f, bytes loaded: %.0f, saved: %.0f", external,
			m.Sum("kvport_transfer_bytes_total", `direction="load"`), r.metrics(p).Sum("kvport_transfer_bytes_total", `direction="save"`))
		promptTokens := 0
		for _, c := range want {
			promptTokens += c.Prompt
		}
		require.Greater(t, external, float64(promptTokens)*0.8, "most of %d prompt tokens should have been loaded", promptTokens)
		r.idle(p)
		r.idle(d)
	})
	t.Run("one engine that saves and loads", func(t *testing.T) {
		r := newLongRig(t)
		node := r.serve("both", r.config("kv_both", "", ""), "--enable-prefix-caching=false")
		same(t, "kv_both, cold", want, r.all(node.URL, prompts, 4))
		same(t, "kv_both, warm", want, r.all(node.URL, prompts, 4))
		require.Positive(t, r.metrics(node).Sum("kvport_prompt_tokens_total", `source="external"`))
		r.idle(node)
	})
}
