package acceptance

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// TestPipeFetchesOnlyTheRest counts what a peer sends for prompts that a store in the list has, too: nothing,
// whichever of the two comes first in the list.
func TestPipeFetchesOnlyTheRest(t *testing.T) {
	for _, behind := range []bool{true, false} {
		t.Run(fmt.Sprintf("behind the store=%t", behind), func(t *testing.T) {
			r := newRig(t)
			kids := []kid{
				newKid("SharedStorageConnector", map[string]any{"shared_storage_path": r.store}),
				newKid("PipeConnector", map[string]any{"buffer_bytes": 64 << 20}),
			}
			if !behind {
				slices.Reverse(kids)
			}
			prompts := texts(t, *flagSeed+61000, 4, 400, 1600)
			p := r.serveModel("sim", "prefill", r.multi("kv_producer", nil, kids...))
			want := r.all(p.URL, prompts, 2)
			r.idle(p) // the store has all of them
			d := r.serveModel("sim", "decode", r.multi("kv_consumer", nil, kids...), "--enable-prefix-caching=false")
			router := r.route(p, d)
			same(t, "P/D", want, r.all(router.URL, prompts, 2))
			r.idle(d)
			at := map[bool]int{true: 0, false: 1}[behind]
			store, pipe := fmt.Sprintf("child=\"%d/SharedStorageConnector\"", at), fmt.Sprintf("child=\"%d/PipeConnector\"", 1-at)
			var m cluster.Metrics
			require.Eventually(t, func() bool { // what children count is shown some time later
				m = r.metrics(d)
				return m.Sum("kvport_connector_loaded_blocks_total", store)+m.Sum("kvport_connector_received_blocks_total", pipe) > 0
			}, time.Minute, 20*time.Millisecond)
			stored, piped := m.Sum("kvport_child_blocks_total", store, `direction="load"`), m.Sum("kvport_child_blocks_total", pipe, `direction="load"`)
			sent := m.Sum("kvport_connector_received_bytes_total", pipe)
			t.Logf("the peer sent %.0f bytes; %.0f blocks are loaded from the store, %.0f from the peer", sent, stored, piped)
			require.Positive(t, stored+piped)
			require.Zero(t, sent)
			require.Zero(t, piped)
		})
	}
}
