package server

import (
	"bytes"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/internal/pairid"
	"github.com/kvport/kvport/internal/ticket"
)

const (
	hex32    = "0123456789abcdef0123456789abcdef"
	unsigned = pairid.Prefix + "127.0.0.1:1___decode_addr_127.0.0.1:2_" + hex32
	signed   = unsigned + "_" + hex32
)

// labelled is the id of the engine's request that a client's request with a label becomes.
func (e *script) labelled(t *testing.T, s *Server, key, label, body string) (id string, remote bool) {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", strings.NewReader(body))
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	r.Header.Set("X-Request-Id", label)
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	require.Equal(t, 200, w.Code, "%s: %s", label, w.Body)
	all := e.requests()
	last := all[len(all)-1]
	return string(last.ID), last.Remote
}

// spellings are a label that nobody has signed in other words: none of them may be taken for a signed one, nor for one that names two engines
// and needs no signature.
func spellings() []string {
	key := bytes.Repeat([]byte("k"), 32)
	half := unsigned[:strings.LastIndex(unsigned, "___decode")]
	return []string{
		unsigned, unsigned + "-", unsigned + "-0", unsigned + "-" + hex32 + "-0", unsigned + "_", unsigned + "0", unsigned[:len(unsigned)-1],
		unsigned[:len(unsigned)-1] + "F", strings.ToUpper(unsigned), pairid.Prefix + strings.ToUpper(unsigned[len(pairid.Prefix):]),
		unsigned + "_" + hex32[1:], unsigned + "_" + hex32 + "0", unsigned + "_" + strings.ToUpper(hex32), unsigned + "_" + hex32 + "_" + hex32,
		unsigned + "-_" + hex32, unsigned + "-0_" + hex32, unsigned + "-" + hex32 + "_" + hex32, unsigned + "-x_" + hex32 + "_" + hex32, unsigned + "__" + hex32,
		unsigned + "_" + strings.Repeat("g", 32), unsigned + "_%30" + hex32[1:], unsigned + "%5f" + hex32, unsigned + "," + signed, unsigned + ";" + hex32 + "_" + hex32,
		unsigned + ticket.SignText(key, ticket.RequestIDText, unsigned),
		"cmpl-" + unsigned, "cmpl-" + unsigned + "_" + hex32, "chatcmpl-" + unsigned, "x" + unsigned, "_" + unsigned, hex32 + "_" + hex32 + unsigned, hex32 + "-0-" + unsigned,
		strings.ReplaceAll(unsigned, "_", "%5f"), strings.ReplaceAll(unsigned, "_", "%5F") + "_" + hex32, strings.Replace(unsigned, "___", "__", 1), strings.Replace(unsigned, "127", "%3127", 1),
		half + unsigned, unsigned + unsigned, unsigned + signed[len(unsigned):] + unsigned, pairid.Prefix + signed, pairid.Prefix + hex32, pairid.Prefix + hex32 + "_" + hex32, half + "_" + hex32 + "_" + hex32,
		half + "___decode_addr_127.0.0.1:2___decode_addr_127.0.0.1:3_" + hex32 + "_" + hex32, half + "/x___decode_addr_127.0.0.1:2_" + hex32 + "_" + hex32,
		strings.Replace(signed, "127.0.0.1:1", "a@127.0.0.1:1", 1), strings.Replace(signed, ":1_", ":01_", 1), strings.Replace(signed, ":2_", ":65536_", 1), strings.Replace(signed, ":2_", ":_", 1),
		strings.Replace(signed, "127.0.0.1:2", "[127.0.0.1]:2", 1), strings.Replace(signed, "127.0.0.1:2", "[fe80::1%eth0]:2", 1), strings.Replace(signed, "127.0.0.1:2", "127.0.0.1:2-"+hex32, 1),
	}
}

// TestUnsignedNamesNeedARouter: where clients have API keys, a label that names two engines goes on to the connector if it has a
// signature, which the connector checks, or comes from a router. Anybody else may have written it, in whatever spelling.
func TestUnsignedNamesNeedARouter(t *testing.T) {
	e := &script{outputs: []engine.Output{{Reason: connector.ReasonLength}}}
	f := serve(t, e, func(c *Config) { c.Key = tenants })
	for _, test := range []struct {
		key, label string
		named      bool
	}{
		{"router", unsigned, true},
		{"router", signed, true},
		{"alice", signed, true},
		{"shared", signed, true},
		{"admin", signed, true},
		{"admin", unsigned, false},
		{"watch", unsigned, false},
	} {
		id, _ := e.labelled(t, f.server, test.key, test.label, `{"prompt":"x"}`)
		require.Equal(t, test.named, strings.HasPrefix(id, test.label+"-"), "%s %s", test.key, test.label)
		_, ok := pairid.Parse(id)
		require.Equal(t, test.named, ok, "%s %s", test.key, test.label)
	}
	for _, label := range spellings() {
		for _, key := range []string{"alice", "shared", "watch"} {
			id, _ := e.labelled(t, f.server, key, label, `{"prompt":"x"}`)
			require.NotContains(t, id, pairid.Prefix, "%s %s", key, label)
			require.NotContains(t, id, "_", "%s %s", key, label)
		}
	}
}

// TestIgnoredIDsAreToldOnce: of ids that do not get to the connector the log has one line for each reason, which says what was met and what
// to do, and the rest is counted.
func TestIgnoredIDsAreToldOnce(t *testing.T) {
	var log bytes.Buffer
	e := &script{outputs: []engine.Output{{Reason: connector.ReasonLength}}}
	f := serve(t, e, func(c *Config) { c.Key, c.Log = tenants, slog.New(slog.NewTextHandler(&log, nil)) })
	const says = "names two engines and does not get to the connector"
	for range 20 {
		for _, label := range []string{hex32, unsigned, strings.Replace(unsigned, "127.0.0.1:1", "prefill_1:1", 1), signed, signed + strings.Repeat("-0", 400)} {
			id, _ := e.labelled(t, f.server, "alice", label, `{"prompt":"x"}`)
			require.Equal(t, label == signed, strings.Contains(id, pairid.Prefix), label)
		}
		e.labelled(t, f.server, "router", unsigned, `{"prompt":"x"}`)
	}
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	require.Len(t, lines, 2)
	require.Contains(t, lines[0], says)
	require.Contains(t, lines[0], "kind=key")
	require.Contains(t, lines[0], "whose line says router")
	require.NotContains(t, lines[0], "moreover")
	require.Contains(t, lines[1], "kind=unfit")
	ignored := f.server.metrics.ignoredIDs
	require.Equal(t, 40.0, testutil.ToFloat64(ignored.WithLabelValues(ignoredKey)))
	require.Equal(t, 20.0, testutil.ToFloat64(ignored.WithLabelValues(ignoredUnfit)))

	log.Reset()
	f = serve(t, e, func(c *Config) { c.Key, c.Log = tenants, slog.New(slog.NewTextHandler(&log, nil)) })
	e.labelled(t, f.server, "alice", strings.Replace(unsigned, "127.0.0.1:1", "prefill_1:1", 1), `{"prompt":"x"}`)
	require.Contains(t, log.String(), `the address of its prefill engine is \"prefill_1:1\", want HOST:PORT`)
}

// TestLongestID: an id that a router may make of the longest names fits.
func TestLongestID(t *testing.T) {
	host := strings.Repeat("h", 253) + ":65535"
	text, ok := pairid.New(host, host, hex32)
	require.True(t, ok)
	require.Len(t, text+"_"+hex32, pairid.Longest)
	require.Equal(t, text+"_"+hex32, label(text+"_"+hex32, "own"))
	require.Equal(t, "own", label(text+"_"+hex32+"0", "own"))
	require.Equal(t, "own", label(strings.Repeat("h", 129), "own"))
}

// FuzzUnsignedNames: the server asks about the very id that the connector gets, so that no label of a client gets past it that the connector
// takes for one which needs no signature.
func FuzzUnsignedNames(f *testing.F) {
	f.Add(signed)
	for _, s := range spellings() {
		f.Add(s)
	}
	m, err := newMetrics(nil)
	require.NoError(f, err)
	s := &Server{metrics: m, config: Config{Log: slog.New(slog.DiscardHandler)}}
	f.Fuzz(func(t *testing.T, given string) {
		for _, key := range []*apikeys.Key{{Name: "alice"}, {Name: "router", Router: true}, nil} {
			x := &exchange{id: hex32, key: key, pair: pairOf(label(given, hex32))}
			s.takePair(x, 1)
			id := x.requestID(0)
			p, ok := pairid.Parse(id)
			switch {
			case !ok && (key == nil || key.Router):
			case !ok:
				require.NotContains(t, id, pairid.Prefix)
			case key != nil && !key.Router:
				require.NotEmpty(t, p.Signature)
				fallthrough
			default:
				require.True(t, strings.HasPrefix(given, p.Text), "whom it names is what the client has written")
			}
			require.False(t, x.params.remote)
		}
	})
}

// leads is a scripted engine of a role whose connector believes ids that nobody has signed, or does not.
type leads struct {
	*script
	role     connector.Role
	believes bool
}

func (e *leads) Info() engine.Info {
	info := e.script.Info()
	info.Fit.Role, info.UnsignedPairs = e.role.String(), e.believes
	return info
}

// TestPrefillOfAProxy: vLLM's proxy for P2P NCCL asks the first of the two engines that it names for one token, and means a handover. Nothing else
// is taken for one: neither what the second engine is asked for, nor a request that says itself what it means, nor anything where the
// connector does not believe the proxy. A router that signs says so itself.
func TestPrefillOfAProxy(t *testing.T) {
	for _, test := range []struct {
		role     connector.Role
		believes bool
		label    string
		body     string
		remote   bool
	}{
		{connector.RoleProducer, true, unsigned, `{"prompt":"x","max_tokens":1}`, true},
		{connector.RoleProducer, false, unsigned, `{"prompt":"x","max_tokens":1}`, false},
		{connector.RoleConsumer, true, unsigned, `{"prompt":"x","max_tokens":1}`, false},
		{connector.RoleBoth, true, unsigned, `{"prompt":"x","max_tokens":1}`, false},
		{0, false, unsigned, `{"prompt":"x","max_tokens":1}`, false},
		{connector.RoleProducer, true, unsigned, `{"prompt":"x","max_tokens":2}`, false},
		{connector.RoleProducer, true, unsigned, `{"prompt":"x"}`, false},
		{connector.RoleProducer, true, unsigned, `{"prompt":["x","y"],"max_tokens":1}`, false},
		{connector.RoleProducer, true, unsigned, `{"prompt":"x","max_tokens":1,"kv_transfer_params":null}`, true},
		{connector.RoleProducer, true, unsigned, `{"prompt":"x","max_tokens":1,"kv_transfer_params":{}}`, false},
		{connector.RoleProducer, true, unsigned, `{"prompt":"x","max_tokens":1,"kv_transfer_params":{"do_remote_decode":false}}`, false},
		{connector.RoleProducer, true, unsigned, `{"prompt":"x","max_tokens":1,"kv_transfer_params":{"do_remote_decode":true}}`, true},
		{connector.RoleProducer, false, unsigned, `{"prompt":"x","max_tokens":7,"kv_transfer_params":{"do_remote_decode":true}}`, true},
		{connector.RoleProducer, true, unsigned, `{"prompt":"x","max_tokens":1,"kv_transfer_params":{"do_remote_prefill":true,"kvport_ticket":"AAAA"}}`, false},
		{connector.RoleProducer, true, signed, `{"prompt":"x","max_tokens":1}`, false},
		{connector.RoleProducer, true, hex32, `{"prompt":"x","max_tokens":1}`, false},
		{connector.RoleProducer, true, unsigned[:len(unsigned)-1], `{"prompt":"x","max_tokens":1}`, false},
	} {
		e := &leads{&script{outputs: []engine.Output{{Reason: connector.ReasonLength}}}, test.role, test.believes}
		_, remote := e.labelled(t, serve(t, e).server, "", test.label, test.body)
		require.Equal(t, test.remote, remote, "%v %v %s %s", test.role, test.believes, test.label, test.body)
	}
}

// TestPrefillOfAProxyNeedsItsKey: with API keys, only a router's request is taken for the first of a proxy's two.
func TestPrefillOfAProxyNeedsItsKey(t *testing.T) {
	e := &leads{&script{outputs: []engine.Output{{Reason: connector.ReasonLength}}}, connector.RoleProducer, true}
	f := serve(t, e, func(c *Config) { c.Key = tenants })
	for key, want := range map[string]bool{"router": true, "alice": false, "admin": false} {
		_, remote := e.labelled(t, f.server, key, unsigned, `{"prompt":"x","max_tokens":1}`)
		require.Equal(t, want, remote, key)
	}
}
