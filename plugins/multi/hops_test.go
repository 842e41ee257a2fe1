package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// TestNoTwoHops: a prefill engine loads prompts from a store that an earlier engine has filled. The decode engine takes
// them from the store too, and from the prefill engine only what the store cannot have, the last block of each prompt,
// whichever of the two children comes first in the list. Bytes are counted at both ends.
func TestNoTwoHops(t *testing.T) {
	mover := testkit.Fixtures(t).Of(children(t, "holder")[0].name(t))
	rig.Need(t, mover.Needs)
	for _, storeFirst := range []bool{false, true} {
		t.Run(fmt.Sprintf("store first=%t", storeFirst), func(t *testing.T) {
			r := rig.New(t)
			store := testkit.Typical(t, fixture.Store)
			listed, at := []child{ofFixture(mover), ofFixture(store)}, 1
			if storeFirst {
				listed, at = []child{ofFixture(store), ofFixture(mover)}, 0
			}
			values := fixture.Values{"TMP": r.Store}
			both := composed{children: listed, values: values, settings: `,"kvport":{"deadlines":{"match":"20s"}}`} // none is passed over for being late
			filler := composed{children: []child{ofFixture(store)}, values: values}
			prompts := rig.Texts(t, *rig.Seed+62000, 4, 400, 1600)
			earlier := r.ServeModel("sim", "earlier", filler.config(t, "kv_both", ""))
			want := r.All(earlier.URL, prompts, 2)
			r.Idle(earlier) // the store has all full blocks
			r.Stop(earlier)

			p := r.ServeModel("sim", "prefill", both.config(t, "kv_both", ""))
			d := r.ServeModel("sim", "decode", both.config(t, "kv_both", ""), "--enable-prefix-caching=false")
			r.All(p.URL, []string{strings.Repeat("what the store does not have ", 20)}, 1) // its cache can be read by others once it has computed a block
			router := r.Route(p, d, "--bidirectional", "0")
			got := r.All(router.URL, prompts, 2)
			rig.Same(t, "P/D", want, got)
			r.Idle(p)
			r.Idle(d)
			storeChild, moverChild := fmt.Sprintf("child=\"%d/%s\"", at, store.Connector), fmt.Sprintf("child=\"%d/%s\"", 1-at, mover.Connector)
			atP, atD := r.Metrics(p), r.Metrics(d)
			const loads = `direction="load"`
			byP := atP.Sum("kvport_child_blocks_total", storeChild, loads)
			stored, handed := atD.Sum("kvport_child_blocks_total", storeChild, loads), atD.Sum("kvport_child_blocks_total", moverChild, loads)
			require.Positive(t, byP, "the prefill engine loads from the store")
			require.GreaterOrEqual(t, stored, byP, "what it loaded from there is loaded from there")
			require.Positive(t, handed)
			require.LessOrEqual(t, handed, float64(len(prompts)), "the last block of each prompt")
			require.Zero(t, atD.Sum("kvport_child_failed_blocks_total"))
			loaded := atD.Sum("kvport_transfer_bytes_total", loads)
			block := loaded / (stored + handed)
			require.Eventually(t, func() bool { // what children count is shown some time later
				return r.Metrics(d).Sum("kvport_connector_read_bytes_total", moverChild) > 0 == (handed > 0)
			}, time.Minute, 20*time.Millisecond)
			read := r.Metrics(d).Sum("kvport_connector_read_bytes_total", moverChild)
			require.LessOrEqual(t, read, handed*block)
			require.Eventually(t, func() bool {
				return r.Metrics(p).Sum("kvport_connector_served_bytes_total", moverChild) == read
			}, time.Minute, 20*time.Millisecond, "what the decode engine has read is what the prefill engine has served")
			t.Logf("blocks: the prefill engine loads %.0f from the store; the decode engine %.0f from the store and %.0f from the prefill engine, which serves %.0f of %.0f bytes",
				byP, stored, handed, read, loaded)
		})
	}
}
