package offload_test

import (
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// Rule PLACE-36: hits of some MiB are loaded layer by layer out of the plugin's memory, at both trust levels and on several ranks, also after
// the plugin was killed, and no token differs.
func TestPlacedHitsByLayer(t *testing.T) {
	kvport := binaries(t)
	var client cluster.Client
	const model, clients = "sim:layers=8,bytes=4096", 2 // half a MiB for each block on each rank
	prompts := make([]string, 4)
	if os.Getenv("KVPORT_SOAK") != "" {
		prompts = make([]string, 16)
	}
	for i := range prompts {
		prompts[i] = text(i, 16*(8+i%8)+3)
	}
	ask := func(p *cluster.Process) [][]int32 {
		tokens := make([][]int32, len(prompts))
		var asking sync.WaitGroup
		for c := range clients {
			asking.Go(func() {
				for i := c; i < len(prompts); i += clients {
					got, err := client.Complete(t.Context(), p.URL, cluster.Request{Prompt: prompts[i], MaxTokens: 32, IgnoreEOS: true})
					if err != nil {
						t.Errorf("prompt %d: %v", i, err)
						return
					}
					tokens[i] = got.Tokens
				}
			})
		}
		asking.Wait()
		settled(t, &client, p)
		return tokens
	}
	wants := map[int][][]int32{} // by how many arguments an engine has
	for _, c := range placedSetups() {
		if c.config != alone { // children are read whole
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			args := append([]string{"--num-blocks", "96"}, c.args...)
			want := wants[len(args)]
			if want == nil {
				single := serve(t, kvport, model, "", args...)
				want = ask(single)
				wants[len(args)] = want
				stop(t, single)
			}
			config := fmt.Sprintf(`{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":268435456},"kvport":{"trust":%q}}`, c.trust)
			p := serve(t, kvport, model, "", append([]string{"--kv-transfer-config", config}, args...)...)
			require.Equal(t, want, ask(p))
			kill(t, &client, p)
			for range 2 {
				require.Equal(t, want, ask(p))
			}
			m := metrics(t, &client, p)
			for n := 0; n < 3 && m.Sum("kvport_overlapped_chunks_total") == 0; n++ { // it is a matter of a millisecond, and of what else the machine does
				require.Equal(t, want, ask(p))
				m = metrics(t, &client, p)
			}
			placed, byLayer := m.Sum("kvport_placed_blocks_total"), m.Sum("kvport_placed_by_layer_blocks_total")
			t.Logf("%v blocks without a call, %v of them layer by layer, %v chunks amid their loads, %v external tokens",
				placed, byLayer, m.Sum("kvport_overlapped_chunks_total"), m.Sum("kvport_prompt_tokens_total", `source="external"`))
			require.Positive(t, byLayer)
			require.LessOrEqual(t, byLayer, placed)
			require.Zero(t, m.Sum("kvport_integrity_failures_total"))
			require.Zero(t, m.Sum("kvport_placed_failed_blocks_total"))
			stop(t, p)
		})
	}
}

// metrics are those of an engine now.
func metrics(t *testing.T, client *cluster.Client, p *cluster.Process) cluster.Metrics {
	t.Helper()
	m, err := client.Metrics(t.Context(), p.URL)
	require.NoError(t, err)
	return m
}
