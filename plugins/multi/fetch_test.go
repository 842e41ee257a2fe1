package main

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// TestPipeFetchesOnlyTheRest counts what a peer sends for prompts that a store in the list has, too: nothing,
// whichever of the two comes first in the list.
func TestPipeFetchesOnlyTheRest(t *testing.T) {
	for _, behind := range []bool{true, false} {
		t.Run(fmt.Sprintf("behind the store=%t", behind), func(t *testing.T) {
			r := rig.New(t)
			first, second := testkit.Typical(t, fixture.Store), testkit.Typical(t, fixture.Peers)
			if !behind {
				first, second = second, first
			}
			both := composed{children: []child{ofFixture(first), ofFixture(second)}, values: fixture.Values{"TMP": r.Store}}
			prompts := rig.Texts(t, *rig.Seed+61000, 4, 400, 1600)
			p := r.ServeModel("sim", "prefill", both.config(t, "kv_producer", ""))
			want := r.All(p.URL, prompts, 2)
			r.Idle(p) // the store has all of them
			d := r.ServeModel("sim", "decode", both.config(t, "kv_consumer", ""), "--enable-prefix-caching=false")
			router := r.Route(p, d)
			rig.Same(t, "P/D", want, r.All(router.URL, prompts, 2))
			r.Idle(d)
			store, pipe := fmt.Sprintf("child=\"0/%s\"", first.Connector), fmt.Sprintf("child=\"1/%s\"", second.Connector)
			if !behind {
				store, pipe = pipe, store
			}
			var m cluster.Metrics
			require.Eventually(t, func() bool { // what children count is shown some time later
				m = r.Metrics(d)
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
