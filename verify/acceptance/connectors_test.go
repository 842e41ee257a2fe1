package acceptance

import (
	"fmt"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// connectorRow is what one connector did for the engines before it.
type connectorRow struct {
	name               string
	compared           int // tokens, none of which differ
	warm, later, apart int // prompt tokens that came from the connector; -1: not for this one
}

// variants are further ways to set a connector up, beside its scene.
func variants(f fixture) []fixture {
	out := []fixture{f}
	add := func(what, extra string, change func(v *fixture)) {
		v := f
		v.name, v.variant = f.name, what
		v.extra = func(b backend) string {
			return strings.NewReplacer("@DIR@", b.dir, "@SERVER@", b.server).Replace(extra)
		}
		change(&v)
		out = append(out, v)
	}
	switch f.name {
	case "OffloadingConnector":
		add("memory alone", `{"cpu_bytes_to_use":268435456}`, func(v *fixture) { v.keeps = false })
		add("mostly disk", `{"cpu_bytes_to_use":4194304,"disk_path":"@DIR@/disk","disk_bytes":1073741824,"disk_admit_after":1}`, func(*fixture) {})
	case "AIBrixOffloadingConnectorV1Type1":
		add("server alone", `{"AIBRIX_KV_CACHE_OL_L1_CACHE_ENABLED":"0","AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND":"REDIS",`+
			`"AIBRIX_KV_CACHE_OL_L2_CACHE_NAMESPACE":"alone","AIBRIX_KV_CACHE_OL_REDIS_URL":"redis://@SERVER@"}`, func(v *fixture) { v.pairs = true })
	case "LMCacheConnectorV1":
		add("server alone", `{"lmcache.chunk_size":16,"lmcache.local_cpu":"false","lmcache.remote_url":"redis://@SERVER@/2"}`, func(v *fixture) { v.pairs = true })
	}
	return out
}

// TestConnectors: the model gives a single node's tokens through every connector that is found: on one engine that saves
// and loads, on a later engine, and with prefill and decode apart. What the connector gave is counted.
func TestConnectors(t *testing.T) {
	r := newRig(t)
	n, tokens := count(t, "prompts", *flagPrompts, 1, 6), count(t, "tokens", *flagTokens, 8, 32)
	prompts := texts(t, *flagSeed+9100, n, 300, 1000)
	r.tokens = tokens
	node := r.serve("single", "")
	want := r.all(node.URL, prompts, 1)
	r.stop(node)
	b := newBackend(t)
	var rows []connectorRow
	for _, f := range fixtures(t) {
		for _, v := range variants(f) {
			t.Run(strings.TrimSuffix(v.name+", "+v.variant, ", "), func(t *testing.T) {
				s := connectorScene{rig: &rig{T: t, tokens: tokens}, f: v, b: b.under(t, v.name+v.variant), prompts: prompts, want: want}
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
	*rig
	f       fixture
	b       backend
	prompts []string
	want    []*cluster.Completion
	row     connectorRow
}

// run goes through the engines.
func (s *connectorScene) run() connectorRow {
	s.row = connectorRow{name: strings.TrimSuffix(s.f.name+", "+s.f.variant, ", "), warm: -1, later: -1}
	one := s.engine("one", "kv_both")
	s.same(one.URL, "cold")
	s.idle(one)
	s.same(one.URL, "warm")
	if got := s.loaded(one); !s.f.peers {
		require.Positive(s, got, "prompt tokens from the connector on one engine")
		s.row.warm = got
	}
	s.idle(one)
	s.stop(one)
	if s.f.keeps {
		later := s.engine("later", "kv_both")
		s.same(later.URL, "a later engine")
		s.row.later = s.loaded(later)
		require.Positive(s, s.row.later, "prompt tokens from the connector on a later engine")
		s.stop(later)
	}
	s.apart()
	return s.row
}

// apart has prefill and decode in two engines. Those behind tiers of their own compute what they cannot find.
func (s *connectorScene) apart() {
	s.b = s.b.under(s.T, s.f.name+" apart") // nothing is there but what prefill saves
	require.NoError(s, s.b.redis.Do(s.Context(), "flushall"))
	p, d := s.engine("prefill", "kv_producer"), s.engine("decode", "kv_consumer")
	router := s.route(p, d)
	s.same(router.URL, "prefill and decode apart")
	s.row.apart = s.loaded(d)
	if s.f.pairs {
		require.Positive(s, s.row.apart, "prompt tokens that decode had of prefill")
	}
	s.idle(p)
	s.idle(d)
	for _, e := range []*cluster.Process{router, d, p} {
		s.stop(e)
	}
}

func (s *connectorScene) engine(name, role string) *cluster.Process {
	f := s.f
	extra := f.extra(s.b)
	if f.name == "MultiConnector" {
		extra = multi(s.b, role, multiChildren()...)
	}
	config := f.config(role, name, extra, `"deadlines":{"handshake":"30s"}`)
	return s.serve(name, config, "--enable-prefix-caching=false")
}

func (s *connectorScene) same(url, what string) {
	s.Helper()
	s.row.compared += compare(s.T, s.row.name+", "+what, s.want, s.all(url, s.prompts, 2))
}

func (s *connectorScene) loaded(e *cluster.Process) int {
	return int(s.metrics(e).Sum("kvport_prompt_tokens_total", `source="external"`))
}
