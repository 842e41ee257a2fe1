package router

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/testkit"
)

// How long tests wait for what other goroutines do, and how often they look.
const (
	waitLimit = time.Minute
	waitTick  = time.Millisecond
)

// engineFit is what an instance of a healthy pair reports; change alters it.
func engineFit(role string, change ...func(*fit)) *fit {
	f := &fit{
		Role: role, EngineID: "engine of " + role, Connector: "X", Scope: "shared", Carries: true, Model: "m", BlockSize: 16,
		Shape: "s16", ShapeText: "block_size 16, 2 layers", TicketKey: "k",
	}
	for _, c := range change {
		c(f)
	}
	return f
}

const multi = "MultiConnector"

// gives and takes alter the ways of blocks in what an instance reports.
func gives(ways ...string) func(*fit) { return func(f *fit) { f.Gives = ways } }

func takes(connector string, ways ...string) func(*fit) {
	return func(f *fit) { f.Connector, f.Takes = connector, append([]string{}, ways...) }
}

// What an instance reports about itself is bounded, and most instances report nothing.
func TestParseFit(t *testing.T) {
	for _, body := range []string{"", "ok", "{}", `{"kv":null}`, `{"kv":{}}`, `{"kv":7}`, `{"kv":{"role":1}}`} {
		require.Nil(t, parseFit([]byte(body)), body)
	}
	data, err := json.Marshal(map[string]any{"kv": engineFit("kv_both", func(f *fit) { f.ShapeText = strings.Repeat("é", maxWords) })})
	require.NoError(t, err)
	got := parseFit(data)
	require.Equal(t, engineFit("kv_both", func(f *fit) { f.ShapeText = strings.Repeat("é", maxWords/2) }), got)
}

// Which instances save to a store that instances share, and which load from there, follows from how blocks leave them and
// come to them.
func TestSharedStores(t *testing.T) {
	for _, tt := range []struct {
		f            *fit
		saves, loads bool
	}{
		{nil, false, true},
		{engineFit("none"), false, false},
		{engineFit("kv_both"), false, true}, // a plugin that has others does not say
		{engineFit("kv_both", gives("X"), takes("X", "X")), false, false},
		{engineFit("kv_producer", gives(sharedStore, "the node's X"), takes("X")), true, false},
		{engineFit("kv_both", gives(sharedStore), takes("X", sharedStore)), true, true},
	} {
		saves, loads := tt.f.shares()
		require.Equal(t, []bool{tt.saves, tt.loads}, []bool{saves, loads}, "%+v", tt.f)
	}
}

// What does not fit is said in words, and only that.
func TestMisfit(t *testing.T) {
	const at = "http://10.0.0.1:1"
	for _, tt := range []struct {
		name string
		p, d *fit
		want string
	}{
		{"both well", engineFit("kv_producer"), engineFit("kv_consumer"), ""},
		{"kv_both", engineFit("kv_both", func(f *fit) { f.EngineID = "a" }), engineFit("kv_both"), ""},
		{"an engine that says nothing", nil, engineFit("kv_consumer"), ""},
		{"block sizes that divide", engineFit("kv_producer", func(f *fit) { f.Base = "b" }), engineFit("kv_consumer", func(f *fit) { f.BlockSize, f.Shape, f.Base = 32, "s32", "b" }), ""},
		{"block sizes that do not", engineFit("kv_producer", func(f *fit) { f.Base = "b" }), engineFit("kv_consumer", func(f *fit) { f.BlockSize, f.Shape, f.Base = 24, "s24", "b" }), "incompatible: block_size 16 / 24"},
		{"block size", engineFit("kv_producer"), engineFit("kv_consumer", func(f *fit) { f.BlockSize, f.Shape = 32, "s32" }), "incompatible: block_size 16 / 32"},
		{
			"shape", engineFit("kv_producer"), engineFit("kv_consumer", func(f *fit) { f.Shape, f.ShapeText = "other", "block_size 16, 3 layers" }),
			`incompatible: shape "block_size 16, 2 layers" / "block_size 16, 3 layers"`,
		},
		{
			"blocks that can be cut", engineFit("kv_producer", func(f *fit) { f.Base = "b" }),
			engineFit("kv_consumer", func(f *fit) { f.BlockSize, f.Shape, f.Base = 32, "s32", "b" }), "",
		},
		{"swapped", engineFit("kv_consumer"), engineFit("kv_producer"), "incompatible: kv_role kv_consumer / kv_producer: the roles are swapped"},
		{"saves nothing", engineFit("kv_consumer"), engineFit("kv_both"), "incompatible: kv_role of the prefill instance is kv_consumer, which saves nothing"},
		{"loads nothing", engineFit("kv_both"), engineFit("kv_producer"), "incompatible: kv_role of the decode instance is kv_producer, which loads nothing"},
		{"no connector", engineFit("none"), engineFit("kv_consumer"), "incompatible: kv_role none / kv_consumer: an engine without a connector hands nothing over"},
		{
			"no connector and so no key", engineFit("kv_producer"), engineFit("none", func(f *fit) { f.TicketKey, f.Model, f.BlockSize, f.Shape = "", "n", 32, "" }),
			"incompatible: kv_role kv_producer / none: an engine without a connector hands nothing over",
		},
		{
			"one name for two", engineFit("kv_producer", func(f *fit) { f.EngineID = "e" }), engineFit("kv_consumer", func(f *fit) { f.EngineID = "e" }),
			`incompatible: engine_id "e" is that of both`,
		},
		{
			"one engine's own", engineFit("kv_producer", func(f *fit) { f.Carries = false }), engineFit("kv_consumer", func(f *fit) { f.Carries = false }),
			"incompatible: X keeps blocks inside one engine, no other can load them",
		},
		{"model", engineFit("kv_producer"), engineFit("kv_consumer", func(f *fit) { f.Model = "n" }), "incompatible: model m / n: other weights"},
		{
			"other peers", engineFit("kv_producer", gives("X")), engineFit("kv_consumer", takes("Y", "Y")),
			"incompatible: connector X / Y: prefill hands blocks over through X, and decode takes them through Y",
		},
		{
			"several connectors and one of them alone", engineFit("kv_producer", gives(multi+"/X"), func(f *fit) { f.Connector = multi }), engineFit("kv_consumer", takes("X", "X")),
			"incompatible: connector MultiConnector / X: prefill hands blocks over through MultiConnector/X, and decode takes them through X",
		},
		{
			"children that load nothing", engineFit("kv_producer", gives("a shared store")), engineFit("kv_consumer", takes(multi)),
			"incompatible: connector X / MultiConnector: prefill hands blocks over through a shared store, and decode takes them through nothing",
		},
		{
			"several connectors with one in common", engineFit("kv_producer", gives("a shared store", multi+"/X"), func(f *fit) { f.Connector = multi }),
			engineFit("kv_consumer", takes(multi, multi+"/X", multi+"/Z")), "",
		},
		{
			"tenants", engineFit("kv_producer", func(f *fit) { f.Tenant = "none" }), engineFit("kv_consumer", func(f *fit) { f.Tenant = "0123" }),
			"incompatible: the tenant secrets differ, see kvport.tenant_secret_file",
		},
		{"a tenant that is not known", engineFit("kv_producer"), engineFit("kv_consumer", func(f *fit) { f.Tenant = "0123" }), ""},
		{"stores with two names", engineFit("kv_producer"), engineFit("kv_consumer", func(f *fit) { f.Connector = "Y" }), ""},
		{"ways that are not known", engineFit("kv_producer", gives("X")), engineFit("kv_consumer", func(f *fit) { f.Connector = multi }), ""},
	} {
		one, two := base(t, at), base(t, "http://10.0.0.1:2")
		require.Equal(t, tt.want, misfit(&registered{fit: tt.p}, &registered{fit: tt.d}, one, two), tt.name)
		require.Equal(t, "prefill and decode are the same instance", misfit(&registered{fit: tt.p}, &registered{fit: tt.d}, one, one), tt.name)
	}
}

// Engines fit while their key is replaced, as long as decode reads the key with which prefill signs.
func TestMisfitOfKeys(t *testing.T) {
	for _, tt := range []struct {
		name string
		p, d *fit
		want string
	}{
		{
			"key", engineFit("kv_producer"), engineFit("kv_consumer", func(f *fit) { f.TicketKey = "l" }),
			"incompatible: the ticket keys differ, see kvport.ticket_key_file",
		},
		{
			"a key that is replaced", engineFit("kv_producer", func(f *fit) { f.TicketKey, f.TicketKeys = "l", []string{"l", "k"} }),
			engineFit("kv_consumer", func(f *fit) { f.TicketKeys = []string{"k", "l"} }), "",
		},
		{
			"a key that is dropped at one end only", engineFit("kv_producer"),
			engineFit("kv_consumer", func(f *fit) { f.TicketKey, f.TicketKeys = "l", []string{"l"} }), "incompatible: the ticket keys differ, see kvport.ticket_key_file",
		},
		{
			"other digests", engineFit("kv_producer", func(f *fit) { f.Digest = "keyed" }), engineFit("kv_consumer", func(f *fit) { f.Digest = "xxh3" }),
			"incompatible: kvport.digest keyed / xxh3",
		},
		{
			"an earlier version", engineFit("kv_producer"), engineFit("kv_consumer", func(f *fit) { f.Digest = "keyed" }),
			"incompatible: kvport.digest of an earlier version / keyed",
		},
		{
			"equal digests", engineFit("kv_producer", func(f *fit) { f.Digest = "keyed" }), engineFit("kv_consumer", func(f *fit) { f.Digest = "keyed" }), "",
		},
	} {
		require.Equal(t, tt.want, misfit(&registered{fit: tt.p}, &registered{fit: tt.d}, base(t, "http://10.0.0.1:1"), base(t, "http://10.0.0.1:2")), tt.name)
	}
}

func base(t *testing.T, text string) *url.URL {
	t.Helper()
	u, err := parseURL(text)
	require.NoError(t, err)
	return u
}

// A pair that does not fit is named once by the log and as long as it lasts by /health, and is never formed:
// the decode instance serves alone. When it fits again, it is used again.
func TestMisfitsAreNeverPaired(t *testing.T) {
	p, d := serveInstance(t, ticket("T")), serveInstance(t, becameOf("loaded", tokens))
	var log testkit.Log
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d), Log: logTo(&log)})
	f.router.pool.saw(0, engineFit("kv_producer"))
	require.Empty(t, log.String())
	for range 3 {
		f.router.pool.saw(1, engineFit("kv_consumer", func(f *fit) { f.BlockSize, f.Shape = 32, "s32" }))
	}
	require.Equal(t, 1, strings.Count(log.String(), `reason="incompatible: block_size 16 / 32"`), log.String())
	require.Contains(t, log.String(), "prefill="+p.URL+" decode="+d.URL)
	h := routerHealth(t, f, "")
	require.Equal(t, "degraded", h.Status)
	require.Equal(t, []Misfit{{p.URL, d.URL, "incompatible: block_size 16 / 32"}}, h.Incompatible)

	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.Empty(t, p.requests())
	require.Eventually(t, func() bool { return f.outcomes(t, plain) == 1 }, waitLimit, waitTick)
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.handoffs.WithLabelValues("none", "incompatible")))

	f.router.pool.saw(1, engineFit("kv_consumer"))
	require.Contains(t, log.String(), "fit again")
	h = routerHealth(t, f, "")
	require.Equal(t, "ok", h.Status)
	require.Empty(t, h.Incompatible)
	post(t, f.URL+"/v1/completions", doc)
	require.Eventually(t, func() bool { return f.outcomes(t, disaggregated) == 1 }, waitLimit, waitTick)
}

// Among several prefill instances one is taken that fits.
func TestFittingPrefillIsTaken(t *testing.T) {
	wrong, right, d := serveInstance(t, ticket("W")), serveInstance(t, ticket("R")), serveInstance(t, tokens)
	f := serveRouter(t, Config{Prefill: urls(wrong, right), Decode: urls(d)})
	f.router.pool.saw(0, engineFit("kv_producer", func(f *fit) { f.TicketKey = "l" }))
	f.router.pool.saw(1, engineFit("kv_producer"))
	f.router.pool.saw(2, engineFit("kv_consumer"))
	for range 4 {
		post(t, f.URL+"/v1/completions", doc)
	}
	require.Empty(t, wrong.requests())
	require.Len(t, right.requests(), 4)
	require.Equal(t, "ok", routerHealth(t, f, "").Status)
	require.Len(t, routerHealth(t, f, "").Incompatible, 1)
}

// One address as both prefill and decode is no pair, and nobody has to say so.
func TestSameInstanceTwice(t *testing.T) {
	both := serveInstance(t, tokens)
	f := serveRouter(t, Config{Prefill: urls(both), Decode: urls(both)})
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.Len(t, both.requests(), 1)
	require.Equal(t, "prefill and decode are the same instance", routerHealth(t, f, "").Incompatible[0].Reason)
}

// The probes bring what instances report about themselves.
func TestProbesCompare(t *testing.T) {
	says := func(f *fit) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(map[string]any{"status": "ok", "kv": f})
		}
	}
	p := serveInstance(t, says(engineFit("kv_producer")))
	d := serveInstance(t, says(engineFit("kv_consumer", func(f *fit) { f.TicketKey = "l" })))
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d), HealthInterval: 5 * time.Millisecond, UpstreamKey: "up"})
	stop := running(t, f.router)
	require.Eventually(t, func() bool {
		list := routerHealth(t, f, "").Incompatible
		return len(list) == 1 && strings.Contains(list[0].Reason, "ticket keys differ")
	}, waitLimit, waitTick)
	stop()
	require.Equal(t, "Bearer up", p.requests()[0].header.Get("Authorization"))
}
