package acceptance

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// misfits is what a router's /health says about pairs that it never forms.
func misfits(r *rig.Rig, router *cluster.Process) (status string, reasons []string) {
	data, err := r.Client.Get(r.Context(), router.URL+"/health")
	if err != nil {
		return err.Error(), nil
	}
	var h struct {
		Status       string
		Incompatible []struct{ Reason string }
	}
	require.NoError(r, json.Unmarshal(data, &h))
	for _, m := range h.Incompatible {
		reasons = append(reasons, m.Reason)
	}
	return h.Status, reasons
}

// TestMisfits: a prefill and a decode instance that cannot hand blocks over are named by the router, in its
// log and its health, and their requests are served by decode alone and counted as that.
func TestMisfits(t *testing.T) {
	keyFile := func(t *testing.T, text string) string {
		path := filepath.Join(t.TempDir(), "ticket.key")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	shared := func(r *rig.Rig, role, key string) string {
		return r.Config(role, "", fmt.Sprintf(`,"kvport":{"ticket_key_file":%q}`, key))
	}
	alone := rig.Connectors(t, func(f *fixture.Fixture) bool { return f.Demo != nil && f.Demo.Alone })[0]
	keeping := func(role string) string {
		return fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":%s}`, alone.Connector, role, alone.Demo.Config)
	}
	one, other := keyFile(t, strings.Repeat("one key ", 8)), keyFile(t, strings.Repeat("other key ", 4))
	for _, tt := range []struct {
		name, want string
		pair       func(r *rig.Rig) (p, d *cluster.Process)
	}{
		{"block sizes", "incompatible: block_size 16 / 32", func(r *rig.Rig) (p, d *cluster.Process) {
			return r.ServeModel("sim", "prefill", shared(r, "kv_producer", one)),
				r.ServeModel("sim", "decode", shared(r, "kv_consumer", one), "--block-size", "32")
		}},
		{"ticket keys", "incompatible: the ticket keys differ, see kvport.ticket_key_file", func(r *rig.Rig) (p, d *cluster.Process) {
			return r.ServeModel("sim", "prefill", shared(r, "kv_producer", one)), r.ServeModel("sim", "decode", shared(r, "kv_consumer", other))
		}},
		{"swapped roles", "incompatible: kv_role kv_consumer / kv_producer: the roles are swapped", func(r *rig.Rig) (p, d *cluster.Process) {
			return r.ServeModel("sim", "prefill", shared(r, "kv_consumer", one)), r.ServeModel("sim", "decode", shared(r, "kv_producer", one))
		}},
		{"models", "other weights", func(r *rig.Rig) (p, d *cluster.Process) {
			return r.ServeModel("sim:seed=1", "prefill", shared(r, "kv_producer", one)), r.ServeModel("sim", "decode", shared(r, "kv_consumer", one))
		}},
		{"no connector", "an engine without a connector hands nothing over", func(r *rig.Rig) (p, d *cluster.Process) {
			return r.ServeModel("sim", "prefill", ""), r.ServeModel("sim", "decode", shared(r, "kv_consumer", one))
		}},
		{"inside one engine", alone.Connector + " keeps blocks inside one engine, no other can load them", func(r *rig.Rig) (p, d *cluster.Process) {
			p, d = r.ServeModel("sim", "prefill", keeping("kv_producer")), r.ServeModel("sim", "decode", keeping("kv_consumer"))
			for _, engine := range []*cluster.Process{p, d} {
				require.NoError(r, engine.Logged(r.Context(), "keeps blocks inside one engine"))
				require.Equal(r, 1, strings.Count(engine.Logs(), "keeps blocks inside one engine"), engine.Logs())
			}
			return p, d
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := rig.New(t)
			r.Tokens = 8
			prompts := rig.Texts(t, *rig.Seed, 3, 200, 400)
			p, d := tt.pair(r)
			router := r.Route(p, d)
			require.Eventually(t, func() bool {
				status, reasons := misfits(r, router)
				return status == "degraded" && len(reasons) == 1 && strings.Contains(reasons[0], tt.want) && strings.Contains(router.Logs(), tt.want)
			}, time.Minute, 20*time.Millisecond, "%s", router.Logs())
			want := r.All(d.URL, prompts, 1)
			rig.Same(t, tt.name, want, r.All(router.URL, prompts, 1))
			counted(r, router, "plain", len(prompts))
			require.InDelta(t, len(prompts), r.Metrics(router).Sum("kvport_router_handoffs_total", `result="none"`, `reason="incompatible"`), 0)
			require.Zero(t, r.Metrics(router).Sum("kvport_router_requests_total", `outcome="disaggregated"`))
			require.Equal(t, 1, strings.Count(router.Logs(), tt.want), "once a change: %s", router.Logs())
		})
	}
}

// counted waits until n requests have ended with an outcome: an answer comes a little before it is counted.
func counted(r *rig.Rig, router *cluster.Process, outcome string, n int) {
	r.Helper()
	require.Eventually(r, func() bool {
		m, err := r.Client.Metrics(r.Context(), router.URL)
		return err == nil && m.Sum("kvport_router_requests_total", fmt.Sprintf("outcome=%q", outcome)) == float64(n)
	}, time.Minute, 20*time.Millisecond, "%d requests that are %s", n, outcome)
}

// TestHandoffsAreTold: a decode instance that fits and yet loads nothing, since it looks into another folder,
// says so with each answer, and the router does not count its requests as disaggregated. One that looks into
// the right one is counted as before.
func TestHandoffsAreTold(t *testing.T) {
	r := rig.New(t)
	r.Tokens = 8
	prompts := rig.Texts(t, *rig.Seed, 3, 200, 400)
	p := r.ServeModel("sim", "prefill", r.Config("kv_producer", "", ""))
	good := r.ServeModel("sim", "decode", r.Config("kv_consumer", "", ""))
	r.Store = filepath.Join(t.TempDir(), "elsewhere")
	lost := r.ServeModel("sim", "lost", r.Config("kv_consumer", "", `,"kvport":{"deadlines":{"later":"100ms"}}`))
	want := r.All(r.ServeModel("sim", "single", "").URL, prompts, 1)

	router := r.Route(p, lost)
	rig.Same(t, "another folder", want, r.All(router.URL, prompts, 1))
	counted(r, router, "recomputed", len(prompts))
	m := r.Metrics(router)
	require.InDelta(t, len(prompts), m.Sum("kvport_router_handoffs_total", `result="none"`, `reason="gone"`), 0)
	require.Zero(t, m.Sum("kvport_router_requests_total", `outcome="disaggregated"`))

	router = r.Route(p, good)
	rig.Same(t, "the right folder", want, r.All(router.URL, prompts, 1))
	counted(r, router, "disaggregated", len(prompts))
	require.InDelta(t, len(prompts), r.Metrics(router).Sum("kvport_router_handoffs_total", `result="loaded"`), 0)
	rig.Same(t, "once more", want, r.All(router.URL, prompts, 1))
	counted(r, router, "local", len(prompts))
	status, reasons := misfits(r, router)
	require.Equal(t, "ok", status)
	require.Empty(t, reasons)
}
