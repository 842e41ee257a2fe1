package acceptance

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// connectorRow is what one connector did for the engines before it.
type connectorRow struct {
	name               string
	compared           int // tokens, none of which differ
	warm, later, apart int // prompt tokens that came from the connector; -1: not for this one
}

// TestConnectors: the model gives a single node's tokens through every connector that is found: on one engine that saves
// and loads, on a later engine, and with prefill and decode apart. What the connector gave is counted.
func TestConnectors(t *testing.T) {
	r := rig.New(t)
	n, tokens := rig.Count(t, "prompts", *rig.Prompts, 1, 6), rig.Count(t, "tokens", *rig.Tokens, 8, 32)
	prompts := rig.Texts(t, *rig.Seed+9100, n, 250, 600)
	r.Tokens = tokens
	node := r.Serve("single", "")
	want := r.All(node.URL, prompts, 1)
	r.Stop(node)
	b := newBackend(t)
	var rows []connectorRow
	for _, f := range scenes(t) {
		for _, v := range f.variants() {
			t.Run(v.title(), func(t *testing.T) {
				s := connectorScene{Rig: &rig.Rig{T: t, Tokens: tokens}, f: v, b: b.under(t, v.name+v.Name), prompts: prompts, want: want}
				rows = append(rows, s.run())
			})
		}
	}
	var out strings.Builder
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "\nconnector\tcompared\tdiffer\tprompt tokens loaded: one engine\ta later engine\tdecode of prefill's")
	for _, row := range rows {
		fmt.Fprintf(w, "\n%s\t%d\t0\t%d\t%d\t%d", row.name, row.compared, row.warm, row.later, row.apart)
	}
	require.NoError(t, w.Flush())
	t.Log(out.String(), "\n-1: not what the connector is for")
}

// connectorScene is one connector's part.
type connectorScene struct {
	*rig.Rig
	f       scene
	b       backend
	prompts []string
	want    []*cluster.Completion
	row     connectorRow
}

// run goes through the engines.
func (s *connectorScene) run() connectorRow {
	s.row = connectorRow{name: s.f.title(), warm: -1, later: -1}
	one := s.engine("one", "kv_both")
	s.same(one.URL, "cold")
	s.Idle(one)
	s.same(one.URL, "warm")
	if got := s.loaded(one); !s.f.Peers {
		require.Positive(s, got, "prompt tokens from the connector on one engine")
		s.row.warm = got
	}
	s.Idle(one)
	s.Stop(one)
	if s.f.Keeps {
		later := s.engine("later", "kv_both")
		s.same(later.URL, "a later engine")
		s.row.later = s.loaded(later)
		require.Positive(s, s.row.later, "prompt tokens from the connector on a later engine")
		s.Stop(later)
	}
	s.apart()
	return s.row
}

// apart has prefill and decode in two engines. Those behind tiers of their own compute what they cannot find.
func (s *connectorScene) apart() {
	s.b = s.b.under(s.T, s.f.name+" apart") // nothing is there but what prefill saves
	require.NoError(s, s.b.redis.Do(s.Context(), "flushall"))
	p, d := s.engine("prefill", "kv_producer"), s.engine("decode", "kv_consumer")
	router := s.Route(p, d)
	s.same(router.URL, "prefill and decode apart")
	s.row.apart = s.loaded(d)
	if s.f.Pairs {
		require.Positive(s, s.row.apart, "prompt tokens that decode had of prefill")
	}
	s.Idle(p)
	s.Idle(d)
	for _, e := range []*cluster.Process{router, d, p} {
		s.Stop(e)
	}
}

func (s *connectorScene) engine(name, role string) *cluster.Process {
	config := s.f.config(role, name, s.f.extra(s.T, s.b, role), `"deadlines":{"handshake":"30s"}`)
	return s.Serve(name, config, "--enable-prefix-caching=false", "--num-blocks", "96") // the prompts of one direction are far shorter
}

func (s *connectorScene) same(url, what string) {
	s.Helper()
	s.row.compared += rig.Compare(s.T, s.row.name+", "+what, s.want, s.All(url, s.prompts, 2))
}

func (s *connectorScene) loaded(e *cluster.Process) int {
	return int(s.Metrics(e).Sum("kvport_prompt_tokens_total", `source="external"`))
}

// TestRemoteConnectors: the real model goes through prefill, a Redis server and decode by each connector that has one, with
// keyed digests, and on one engine that saves and loads. The tokens are those of a single node.
func TestRemoteConnectors(t *testing.T) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+8800, rig.Count(t, "prompts", *rig.Prompts, 1, 6), 300, 1200)
	node := r.Serve("single", "")
	want := r.All(node.URL, prompts, 1)
	r.Stop(node)
	b := newBackend(t)
	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(secret, []byte("a tenant's secret"), 0o600))
	keyed := fmt.Sprintf(`"tenant_secret_file":%q`, secret)
	ran := 0
	for _, f := range scenes(t) {
		apart := slices.IndexFunc(f.Setups, func(s fixture.Setup) bool {
			return s.Pairs && bytes.Contains(s.Config, []byte("@SERVER@")) && !bytes.Contains(s.Config, []byte("@TMP@"))
		})
		if apart < 0 {
			continue
		}
		ran++
		t.Run(f.name, func(t *testing.T) {
			r, own := &rig.Rig{T: t, Tokens: r.Tokens}, b.under(t, f.name)
			shared := f.variants()[apart]
			p := r.Serve("prefill", shared.config("kv_producer", "P", shared.extra(t, own, "kv_producer"), keyed))
			d := r.Serve("decode", shared.config("kv_consumer", "D", shared.extra(t, own, "kv_consumer"), keyed), "--enable-prefix-caching=false")
			router := r.Route(p, d)
			got := r.All(router.URL, prompts, 2)
			rig.Same(t, f.name+", prefill and decode apart", want, got)
			r.External(d, got)
			require.Zero(t, r.Metrics(d).Sum("kvport_integrity_failures_total"))
			for _, e := range []*cluster.Process{router, d, p} {
				r.Stop(e)
			}
			both := r.Serve("both", f.config("kv_both", "both", f.extra(t, own, "kv_both"), keyed), "--enable-prefix-caching=false")
			rig.Same(t, f.name+", saves", want, r.All(both.URL, prompts, 2))
			r.Idle(both)
			rig.Same(t, f.name+", loads", want, r.All(both.URL, prompts, 2))
			external := r.Metrics(both).Sum("kvport_prompt_tokens_total", `source="external"`)
			t.Logf("%s: %.0f tokens of %d prompts loaded by one engine", f.name, external, len(prompts))
			require.Positive(t, external)
			r.Stop(both)
		})
	}
	if *flagConnector == "" {
		require.Positive(t, ran, "no connector has a setup with a server")
	}
}
