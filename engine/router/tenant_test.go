package router

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/router/policy"
)

// onlyKey knows the key k.
func onlyKey(authorization string) *apikeys.Key {
	if authorization != "Bearer k" {
		return nil
	}
	return &apikeys.Key{Name: "k", ID: KeyID("k"), Admin: true}
}

// anyKey knows every key.
func anyKey(authorization string) *apikeys.Key {
	_, key, _ := strings.Cut(authorization, " ")
	return &apikeys.Key{Name: key, ID: KeyID(key)}
}

func tenants(authorization string) *apikeys.Key {
	keys := map[string]*apikeys.Key{
		"Bearer alice":  {Name: "alice", ID: KeyID("alice"), Tenant: "alice"},
		"Bearer shared": {Name: "shared", ID: KeyID("shared")},
		"Bearer router": {Name: "router", ID: KeyID("router"), Router: true},
	}
	return keys[authorization]
}

// postAs is a POST with a key.
func postAs(t *testing.T, url, key, body string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions", strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+key)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp, string(data)
}

// Both instances of a request get the salt of its client's tenant, and the router's key instead of the client's.
func TestInstancesGetTheTenant(t *testing.T) {
	p, d := serveInstance(t, ticket("t")), serveInstance(t, tokens)
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d), OwnKeys: true, UpstreamKey: "inner", Key: tenants})
	alices := connector.TenantSalt("alice", "")
	for _, tt := range []struct{ key, given, want string }{
		{"alice", ``, `"` + alices + `"`},
		{"alice", `,"cache_salt":null`, `"` + alices + `"`},
		{"alice", `,"cache_salt":"s"`, `"` + alices + `s"`},
		{"alice", `,"cache_salt":"` + connector.TenantSalt("bob", "") + `"`, `"` + alices + connector.TenantSalt("bob", "") + `"`},
		{"router", `,"cache_salt":"` + alices + `"`, `"` + alices + `"`},
		{"shared", `,"cache_salt": "s"`, `"s"`},
		{"shared", ``, ``},
	} {
		resp, body := postAs(t, f.URL, tt.key, `{"prompt":"`+strings.Repeat("words ", 20)+`"`+tt.given+`}`)
		require.Equal(t, 200, resp.StatusCode, body)
		for _, in := range []*instanceServer{p, d} {
			list := in.requests()
			last := list[len(list)-1]
			require.Equal(t, tt.want, string(last.body["cache_salt"]), "%+v", tt)
			require.Equal(t, "Bearer inner", last.header.Get("Authorization"))
		}
	}
	before := len(d.requests())
	for _, refused := range [][2]string{{"alice", `7`}, {"shared", `"` + alices + `"`}, {"alice", `"` + strings.Repeat("s", apikeys.MaxSalt) + `"`}} {
		resp, body := postAs(t, f.URL, refused[0], `{"prompt":"x","cache_salt":`+refused[1]+`}`)
		require.Equal(t, 400, resp.StatusCode)
		require.Contains(t, body, "cache_salt: ")
	}
	resp, _ := postAs(t, f.URL, "mallory", `{"prompt":"x"}`)
	require.Equal(t, 401, resp.StatusCode)
	require.Len(t, d.requests(), before)
}

// A router that lets everybody in passes salts on, but no tenant: neither under its own key, which instances believe, nor to look
// up what the tenant has left there.
func TestOpenRouterNamesNoTenant(t *testing.T) {
	d := serveInstance(t, tokens)
	for _, c := range []Config{{UpstreamKey: "inner"}, {}} {
		c.Decode = urls(d)
		f := serveRouter(t, c)
		resp, text := postAs(t, f.URL, "bob", `{"prompt":"x","cache_salt":"`+connector.TenantSalt("alice", "")+`"}`)
		require.Equal(t, 400, resp.StatusCode)
		require.Contains(t, text, "it names a tenant")
		require.Empty(t, resp.Header.Values(routeHeader))
		require.Empty(t, d.requests())
	}
	resp, _ := postAs(t, serveRouter(t, Config{Decode: urls(d)}).URL, "bob", `{"prompt":"x","cache_salt":"s"}`)
	require.Equal(t, 200, resp.StatusCode)
}

// A client whose key is an instance's may be of one of that instance's tenants: it learns nothing about what others have asked. A
// client without a key does not even learn which instances there are.
func TestKeysOfInstancesShowNoReasons(t *testing.T) {
	d := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "Bearer wrong" || r.Header.Get("X-Closed") != "" {
			code(401)(w, r)
			return
		}
		tokens(w, r)
	})
	f := serveRouter(t, Config{Decode: urls(d), Policy: policy.PrefixAware})
	for _, tt := range []struct {
		header []string
		status int
		want   string
	}{
		{[]string{"Authorization", "Bearer bob"}, 200, "policy=prefix_aware; decode=" + d.URL},
		{[]string{"Authorization", "Bearer wrong"}, 401, ""},
		{[]string{"X-Closed", "1"}, 401, ""},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.URL+"/v1/completions", strings.NewReader(completion("hi")))
		require.NoError(t, err)
		req.Header.Set(routeHeader, "1")
		req.Header.Set(tt.header[0], tt.header[1])
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, tt.status, resp.StatusCode)
		require.Equal(t, tt.want, resp.Header.Get(routeHeader))
	}
	require.Contains(t, complete(t, f, completion("hi"), routeHeader, "1").Get(routeHeader), "; why=", "an instance that asks for no key has no tenants")
}

// What a client has sent decides where its next prompt goes, and not where another client's does that may be of another tenant. Where
// no instance has tenants, it decides for all, and all learn the reasons.
func TestHistoryOfOtherTenants(t *testing.T) {
	for body, tenants := range map[string]bool{`{"status":"ok"}`: true, `{"status":"ok","instances":[]}`: true, `{"status":"ok","model":"m"}`: false, ``: false} {
		d := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/health" {
				_, _ = io.WriteString(w, body)
				return
			}
			tokens(w, r)
		})
		f := serveRouter(t, Config{Decode: urls(d), Policy: policy.PrefixAware, HealthInterval: 10 * time.Millisecond})
		running(t, f.router)
		require.Eventually(t, func() bool { return len(d.requests()) > 1 && f.router.pool.mayHaveTenants() == tenants }, time.Minute, time.Millisecond, body)
		prompt := func(authorization string) policy.Prompt {
			parsed, err := parse([]byte(completion(strings.Repeat("words of a prompt ", 50))))
			require.NoError(t, err)
			c := &call{router: f.router, body: parsed, header: http.Header{"Authorization": {authorization}}}
			return c.prepare(t.Context()).Prompt
		}
		alices, bobs := prompt("Bearer alice"), prompt("Bearer bob")
		require.Equal(t, alices, prompt("Bearer alice"))
		if tenants {
			require.NotEqual(t, alices, bobs)
		} else {
			require.Equal(t, alices, bobs)
		}
		got := complete(t, f, completion("hi"), routeHeader, "1", "Authorization", "Bearer bob").Get(routeHeader)
		require.Equal(t, !tenants, strings.Contains(got, "; why="), got)
	}
}

// The ticket of one client's answer is not for another client that may be of another tenant, though it asks the same. Where no instance has
// tenants it is for all.
func TestTurnsOfOtherTenants(t *testing.T) {
	for health, want := range map[string]string{`{"status":"ok"}`: "", `{"status":"ok","model":"m"}`: "of D"} {
		says := func(answer http.HandlerFunc) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/health" {
					_, _ = io.WriteString(w, health)
					return
				}
				answer(w, r)
			}
		}
		p, d := serveInstance(t, says(ticket("of P"))), serveInstance(t, says(held("of D", false)))
		f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d), Turns: 10, HealthInterval: 10 * time.Millisecond})
		running(t, f.router)
		tenants := want == ""
		require.Eventually(t, func() bool {
			return len(p.requests()) > 0 && len(d.requests()) > 0 && f.router.pool.mayHaveTenants() == tenants
		}, waitLimit, waitTick)
		prompt := strings.Repeat("words ", 20)
		asks := func(key, prompt string) (given string) {
			resp, text := postAs(t, f.URL, key, `{"prompt":"`+prompt+`"}`)
			require.Equal(t, 200, resp.StatusCode, text)
			for _, r := range p.requests() {
				if r.path == "/v1/completions" {
					given = string(r.body["kv_transfer_params"])
				}
			}
			return given
		}
		asks("alice", prompt)
		bobs := asks("bob", prompt+"and more")
		require.Equal(t, !tenants, strings.Contains(bobs, "of D"), bobs)
		require.Contains(t, asks("alice", prompt+"and more"), "of D")
	}
}

// Of an instance whose /health breaks off nobody knows that it has no tenants.
func TestBrokenHealthMayHaveTenants(t *testing.T) {
	for body, open := range map[string]bool{"": false, `{"status":"ok","model":"m"}`: false, "whole": true} {
		d := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) {
			if body != "whole" {
				w.Header().Set("Content-Length", "1000")
			}
			w.WriteHeader(http.StatusOK)
			_, _ = io.WriteString(w, strings.TrimPrefix(body, "whole"))
		})
		c := &checker{client: http.DefaultClient, timeout: waitLimit}
		got := c.probe(t.Context(), at(t, d.URL))
		require.Equal(t, healthy, got.result)
		require.Equal(t, open, got.open, "%q", body)
	}
}

// A key's limits are those of the config file, else of its own line, else those of all.
func TestLimitsOfAKey(t *testing.T) {
	d := serveInstance(t, tokens)
	f := serveRouter(t, Config{Decode: urls(d), OwnKeys: true, Key: func(authorization string) *apikeys.Key {
		k := tenants(authorization)
		if k != nil && k.Name == "alice" {
			k.Limits.RequestsPerMinute = 2
		}
		return k
	}})
	allowed := func(key string) (n int) {
		for range 4 {
			if resp, _ := postAs(t, f.URL, key, `{"prompt":"x"}`); resp.StatusCode == 200 {
				n++
			}
		}
		return n
	}
	require.Equal(t, 2, allowed("alice"))
	resp, text := postAs(t, f.URL, "alice", `{"prompt":"x"}`)
	require.Equal(t, 429, resp.StatusCode)
	require.Contains(t, text, "alice may send 2 requests a minute (requests_per_minute)")
	require.NotEmpty(t, resp.Header.Get("Retry-After"))
	require.Equal(t, 4, allowed("shared"))
}

// What is about all tenants is for clients whose line says so. Others learn as little as one without a key.
func TestWatchingNeedsAnOption(t *testing.T) {
	d := serveInstance(t, tokens)
	registry := prometheus.NewRegistry()
	f := serveRouter(t, Config{Decode: urls(d), OwnKeys: true, Metrics: registry, Gatherer: registry, Key: func(authorization string) *apikeys.Key {
		if authorization == "Bearer watch" {
			return &apikeys.Key{Name: "watch", Tenant: "watch", Metrics: true}
		}
		return tenants(authorization)
	}})
	for key, want := range map[string]int{"mallory": 401, "alice": 403, "watch": 200} {
		for path, code := range map[string]int{"/metrics": want, "/health": 200} {
			r := httptest.NewRequestWithContext(t.Context(), "GET", path, nil)
			r.Header.Set("Authorization", "Bearer "+key)
			w := httptest.NewRecorder()
			f.router.ServeHTTP(w, r)
			require.Equal(t, code, w.Code, "%s %s", key, path)
			if path == "/health" {
				require.Equal(t, key == "watch", strings.Contains(w.Body.String(), d.URL), w.Body.String())
			}
		}
	}
}
