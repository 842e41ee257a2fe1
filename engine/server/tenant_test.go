package server

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/tokenizer"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/testkit"
)

// onlyKey knows the key k.
func onlyKey(authorization string) *apikeys.Key {
	if authorization != "Bearer k" {
		return nil
	}
	return &apikeys.Key{Name: "k", Admin: true}
}

// tenants are the clients of these tests: each key is its client's name.
func tenants(authorization string) *apikeys.Key {
	keys := map[string]*apikeys.Key{
		"Bearer alice":  {Name: "alice", Tenant: "alice"},
		"Bearer friend": {Name: "friend", Tenant: "alice"},
		"Bearer bob":    {Name: "bob", Tenant: "bob"},
		"Bearer shared": {Name: "shared"},
		"Bearer router": {Name: "router", Router: true},
		"Bearer admin":  {Name: "admin", Tenant: "admin", Admin: true},
		"Bearer watch":  {Name: "watch", Tenant: "watch", Metrics: true},
	}
	return keys[authorization]
}

// postAs is a POST with a key.
func postAs(t *testing.T, s http.Handler, key, path, body string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer "+key)
	r.RemoteAddr = "192.0.2.7:123"
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	return w
}

// On every path the salt of a request lies within the tenant of its client, whatever it says itself.
func TestSaltIsWithinTheTenant(t *testing.T) {
	e := &script{outputs: []engine.Output{queried(nil, "")}}
	f := serve(t, e, func(c *Config) { c.Key = tenants })
	alices, inBobs := connector.TenantSalt("alice", ""), connector.TenantSalt("bob", "")
	for _, tt := range []struct{ key, given, want string }{
		{"alice", `""`, alices},
		{"alice", "null", alices},
		{"alice", `"s"`, alices + "s"},
		{"alice", `"` + inBobs + `"`, alices + inBobs},
		{"shared", `""`, ""},
		{"shared", `"s"`, "s"},
		{"router", `"` + inBobs + `"`, inBobs},
		{"router", `"s"`, "s"},
	} {
		for path, prompt := range map[string]string{
			"/v1/completions":      `"prompt":"hi"`,
			"/v1/chat/completions": `"messages":[{"role":"user","content":"hi"}]`,
		} {
			for _, more := range []string{"", `,"stream":true,"stream_options":{"include_usage":true}`, `,"kv_transfer_params":{"cache_query":true}`} {
				w := postAs(t, f.server, tt.key, path, `{`+prompt+`,"cache_salt":`+tt.given+more+`}`)
				require.Equal(t, 200, w.Code, w.Body.String())
				list := e.requests()
				require.Equal(t, tt.want, list[len(list)-1].Salt, "%+v %s %s", tt, path, more)
			}
		}
	}
	before := len(e.requests())
	w := postAs(t, f.server, "shared", "/v1/completions", `{"prompt":"hi","cache_salt":"`+inBobs+`"}`)
	require.Equal(t, 400, w.Code)
	require.Contains(t, w.Body.String(), `"param":"cache_salt"`)
	require.Len(t, e.requests(), before)
}

// A key that is dropped between the front and the server is no client without a tenant.
func TestKeyIsGone(t *testing.T) {
	e := &script{outputs: []engine.Output{queried(nil, "")}}
	f := serve(t, e, func(c *Config) { c.Key = tenants })
	for _, path := range []string{"/v1/completions", "/reset_prefix_cache"} {
		require.Equal(t, 401, postAs(t, f.server, "mallory", path, `{"prompt":"hi"}`).Code)
	}
	require.Empty(t, e.requests())
}

// The cache is everybody's, so only some may empty it, and the log says who did. Whoever is refused does not fill the log, and hides
// no other client.
func TestResetNeedsAnAdmin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Log
		s, err := New(Config{
			Engine: &script{}, Tokenizer: tokenizer.Bytes(), ModelName: "x", Key: tenants, Log: slog.New(slog.NewTextHandler(&log, nil)),
		})
		require.NoError(t, err)
		audited := func(key string) (lines []string) {
			for line := range strings.Lines(log.String()) {
				if _, rest, is := strings.Cut(line, `level=INFO msg=audit action=reset key=`+key+` remote=192.0.2.7:123 result=`); is {
					lines = append(lines, strings.TrimSpace(rest))
				}
			}
			return lines
		}
		const refused = `"only a client whose line in the file of API keys says admin may empty the cache, which all tenants share" refused=`
		for key, want := range map[string]int{"alice": 403, "router": 403, "admin": 200} {
			for range 100 {
				require.Equal(t, want, postAs(t, s, key, "/reset_prefix_cache", "").Code, key)
			}
			if want == 200 {
				require.Equal(t, slices.Repeat([]string{"ok"}, 100), audited(key))
			} else {
				require.Equal(t, []string{refused + "1"}, audited(key))
			}
		}
		<-time.After(apikeys.LogInterval)
		synctest.Wait()
		for _, key := range []string{"alice", "router"} {
			require.Equal(t, []string{refused + "1", refused + "99"}, audited(key))
		}
	})
}

// What is about all tenants is for clients whose line says so. Others learn as little as one without a key.
func TestWatchingNeedsAnOption(t *testing.T) {
	registry := prometheus.NewRegistry()
	f := serve(t, &fitting{fit: host.Fit{Role: "none", Model: "m"}}, func(c *Config) {
		c.Key, c.Metrics, c.Gatherer, c.Events = tenants, registry, registry, &kvevents.Place{Endpoint: "tcp://127.0.0.1:1"}
	})
	get := func(key, path string) (int, string) {
		r := httptest.NewRequestWithContext(t.Context(), "GET", path, nil)
		r.Header.Set("Authorization", "Bearer "+key)
		w := httptest.NewRecorder()
		f.server.ServeHTTP(w, r)
		return w.Code, w.Body.String()
	}
	for key, watches := range map[string]bool{"alice": false, "admin": true, "watch": true, "router": true} {
		code, body := get(key, "/health")
		require.Equal(t, 200, code)
		metrics, _ := get(key, "/metrics")
		if !watches {
			require.JSONEq(t, `{"status":"ok","max_in_flight":256,"tls":false}`, body)
			require.Equal(t, 403, metrics)
			continue
		}
		require.Contains(t, body, `"kv":`, key)
		require.Equal(t, key == "router", strings.Contains(body, `"events":`), "a router whose requests are all its own tenant's would take every engine for empty")
		require.Equal(t, 200, metrics, key)
	}
	code, _ := get("mallory", "/metrics")
	require.Equal(t, 401, code)
}
