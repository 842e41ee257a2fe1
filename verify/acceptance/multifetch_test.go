package acceptance

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// TestPipeFetchesOnlyTheRest counts what a peer sends for prompts that a store in the list has, too. Behind
// the store the peer is asked for nothing. Before it the peer begins to send with the first question, and
// the store is loaded from while the bytes are on their way: they are sent for nothing.
func TestPipeFetchesOnlyTheRest(t *testing.T) {
	for _, behind := range []bool{true, false} {
		t.Run(fmt.Sprintf("behind the store=%t", behind), func(t *testing.T) {
			r := newRig(t)
			first, second := typical(t, fixture.Store), typical(t, fixture.Peers)
			if !behind {
				first, second = second, first
			}
			both := composed{children: []child{ofFixture(first), ofFixture(second)}, values: fixture.Values{"TMP": r.store}}
			prompts := texts(t, *flagSeed+61000, 4, 400, 1600)
			p := r.serveModel("sim", "prefill", both.config(t, "kv_producer", ""))
			want := r.all(p.URL, prompts, 2)
			r.idle(p) // the store has all of them
			d := r.serveModel("sim", "decode", both.config(t, "kv_consumer", ""), "--enable-prefix-caching=false")
			router := r.route(p, d)
			same(t, "P/D", want, r.all(router.URL, prompts, 2))
			r.idle(d)
			store, pipe := fmt.Sprintf("child=\"0/%s\"", first.Connector), fmt.Sprintf("child=\"1/%s\"", second.Connector)
			if !behind {
				store, pipe = pipe, store
			}
			var m cluster.Metrics
			require.Eventually(t, func() bool { // what children count is shown some time later
				m = r.metrics(d)
				return m.Sum("kvport_connector_loaded_blocks_total", store)+m.Sum("kvport_connector_received_blocks_total", pipe) > 0
			}, time.Minute, 20*time.Millisecond)
			stored, piped := m.Sum("kvport_child_blocks_total", store, `direction="load"`), m.Sum("kvport_child_blocks_total", pipe, `direction="load"`)
			sent := m.Sum("kvport_connector_received_bytes_total", pipe)
			t.Logf("the peer sent %.0f bytes; %.0f blocks are loaded from the store, %.0f from the peer", sent, stored, piped)
			require.Positive(t, stored+piped)
			if behind {
				require.Zero(t, sent)
				require.Zero(t, piped)
			}
		})
	}
}
