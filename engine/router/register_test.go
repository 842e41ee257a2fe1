package router

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/internal/register"
	"github.com/kvport/kvport/verify/testkit"
)

// signer signs by a word in front.
func signer(ttl time.Duration) Registration {
	return Registration{
		Verify: func(body, signature string) string {
			by, is := strings.CutSuffix(signature, body)
			if !is || !strings.HasPrefix(by, "key") {
				return ""
			}
			return by
		}, TTL: ttl,
		Sign: func(text string, by ...string) string { return "signed-" + text[len(text)-3:] + strings.Join(by, "+") },
	}
}

// old is a registration as earlier versions make them.
func old(part, at, kv string, when int64) register.Message {
	return register.Message{Type: part, HTTP: at, KV: kv, At: when}
}

func say(t *testing.T, r *Router, mac bool, g any) (int, string) {
	t.Helper()
	body, err := json.Marshal(g)
	require.NoError(t, err)
	req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/register", strings.NewReader(string(body)))
	if mac {
		req.Header.Set(register.MacHeader, "key"+string(body))
	}
	w := httptest.NewRecorder()
	r.Registrar().ServeHTTP(w, req)
	return w.Code, w.Body.String()
}

// instance is an engine that notes the ids of its requests.
func registeredInstance(t *testing.T, part string, ids *sync.Map) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/completions" {
			ids.Store(part, r.Header.Get("X-Request-Id"))
			_, _ = io.WriteString(w, `{"kv_transfer_params":{"kvport_ticket":"t"}}`)
		}
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// Instances that register serve, know of each other by signed ids, and are forgotten when they stop.
func TestRegister(t *testing.T) {
	r, err := New(Config{Register: signer(3 * time.Second), HealthInterval: 20 * time.Millisecond})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	defer func() {
		stop()
		<-done
		r.Close()
	}()
	var ids sync.Map
	p, d := registeredInstance(t, "P", &ids), registeredInstance(t, "D", &ids)
	at := time.Now().UnixNano()
	register := func() {
		at++
		for part, host := range map[string]string{"P": p, "D": d} {
			code, text := say(t, r, true, old(part, host, "10.0.0.1:"+map[string]string{"P": "1", "D": "2"}[part], at))
			require.Equal(t, http.StatusOK, code, text)
		}
	}
	register()
	code, text := say(t, r, true, old("P", p, "10.9.9.9:1", at))
	require.Equal(t, http.StatusConflict, code, "a replay: %s", text)
	ask := func() (int, string) {
		w := httptest.NewRecorder()
		req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", strings.NewReader(`{"prompt":"x"}`))
		req.Header.Set("X-Request-Id", "___prefill_addr_6.6.6.6:6___decode_addr_6.6.6.6:6_x")
		r.ServeHTTP(w, req)
		return w.Code, w.Header().Get("X-Request-Id")
	}
	code, own := ask()
	require.Equal(t, http.StatusOK, code)
	require.Len(t, own, 32, "the client sees the router's id, and no address")
	idP, _ := ids.Load("P")
	idD, _ := ids.Load("D")
	require.Equal(t, idP, idD)
	require.Regexp(t, `^___prefill_addr_10\.0\.0\.1:1___decode_addr_10\.0\.0\.1:2_([0-9a-f]{29})([0-9a-f]{3})_signed-[0-9a-f]{3}key\+key$`, idP)
	require.Eventually(t, func() bool { code, _ := ask(); return code == http.StatusServiceUnavailable }, time.Minute, 20*time.Millisecond, "forgotten")
	register()
	require.Eventually(t, func() bool { code, _ := ask(); return code == http.StatusOK }, time.Minute, 20*time.Millisecond, "and there again")
	list := r.pool.health().instances
	require.Len(t, list, 2, "each has one place")
}

// Places become free whatever the time is after which registrations are forgotten, and however short that is.
func TestPlacesBecomeFree(t *testing.T) {
	for _, ttl := range []time.Duration{1, notSoon} {
		r, err := New(Config{Decode: []string{refusing(t)}, Register: signer(ttl)})
		require.NoError(t, err)
		running(t, r)
		require.NoError(t, r.SetInstances([]Instance{{URL: refusing(t), Role: "decode"}}))
		require.NoError(t, r.SetInstances(nil))
		require.Eventually(t, func() bool {
			r.pool.mu.Lock()
			defer r.pool.mu.Unlock()
			return len(r.pool.free) == 1
		}, waitLimit, waitTick)
	}
}

func TestRegisterRefuses(t *testing.T) {
	r, err := New(Config{Register: signer(time.Minute), Decode: []string{"http://127.0.0.1:7"}})
	require.NoError(t, err)
	now := time.Now().UnixNano()
	good := old("D", "127.0.0.1:7", "127.0.0.1:9", now)
	code, _ := say(t, r, false, good)
	require.Equal(t, http.StatusForbidden, code)
	for _, bad := range []any{
		old("X", good.HTTP, good.KV, now),
		old("D", "127.0.0.1", good.KV, now),
		old("D", good.HTTP, "evil/path:1", now),
		old("D", "user@host:1", good.KV, now),
		old("D", good.HTTP, "a___decode_addr_b:1", now),
		old("D", good.HTTP, ":1", now),
		register.Message{Type: "D", HTTP: good.HTTP, Group: "a", Nonce: "none"},
		[]int{1},
	} {
		code, _ := say(t, r, true, bad)
		require.Equal(t, http.StatusBadRequest, code, "%v", bad)
	}
	code, _ = say(t, r, true, good)
	require.Equal(t, http.StatusOK, code)
	kv, _ := r.pool.kvAddress(0)
	require.Equal(t, "127.0.0.1:9", kv, "one of the command line only says where it takes blocks")
	r.pool.expire(0)
	list := r.pool.health().instances
	require.Len(t, list, 1, "and is never forgotten")
	for i := range maxInstances {
		code, _ = say(t, r, true, old("P", fmt.Sprintf("127.0.0.1:%d", 1000+i), good.KV, now))
	}
	require.Equal(t, http.StatusConflict, code, "there is a limit")
	none, err := New(Config{Decode: []string{"http://127.0.0.1:7"}})
	require.NoError(t, err)
	code, _ = say(t, none, true, good)
	require.Equal(t, http.StatusForbidden, code)
}

// audited are the lines about registrations in a log, without what they all begin with.
func audited(log *testkit.Log) (lines []string) {
	for line := range strings.Lines(log.String()) {
		if _, rest, is := strings.Cut(line, "msg=audit action=register "); is {
			lines = append(lines, strings.TrimSpace(rest))
		}
	}
	return lines
}

// The log has a line when an instance comes or leaves by registering, and not for each time it says that it is still there;
// registrations that are refused leave one line in a while, which counts them. What nobody has signed hides nothing that somebody has.
func TestRegistrationsAreAudited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Log
		r, err := New(Config{Register: signer(time.Minute), Log: slog.New(slog.NewTextHandler(&log, nil))})
		require.NoError(t, err)
		defer r.Close()
		now := time.Now().UnixNano()
		for i := range 3 {
			code, _ := say(t, r, true, old("D", "127.0.0.1:7", "127.0.0.1:9", now+int64(i)))
			require.Equal(t, http.StatusOK, code)
		}
		leaving := old("D", "127.0.0.1:7", "127.0.0.1:9", now+3)
		leaving.Leave = true
		for range 2 {
			code, _ := say(t, r, true, leaving)
			require.Equal(t, http.StatusOK, code)
			leaving.At++
		}
		want := []string{
			"key=key remote=192.0.2.1:1234 result=ok instance=127.0.0.1:7 role=decode leaves=false",
			"key=key remote=192.0.2.1:1234 result=ok instance=127.0.0.1:7 role=decode leaves=true",
		}
		require.Equal(t, want, audited(&log))
		for range 3 {
			code, _ := say(t, r, false, leaving)
			require.Equal(t, http.StatusForbidden, code)
		}
		code, _ := say(t, r, true, []int{1})
		require.Equal(t, http.StatusBadRequest, code)
		unsigned := `key="" remote=192.0.2.1:1234 result="the registration is not signed with this deployment's key" refused=`
		want = append(want, unsigned+"1",
			`key=key remote=192.0.2.1:1234 result="json: cannot unmarshal array into Go value of type register.Message" refused=1`)
		require.Equal(t, want, audited(&log))
		<-time.After(apikeys.LogInterval)
		synctest.Wait()
		require.Equal(t, append(want, unsigned+"2"), audited(&log), "though nobody came")
	})
}

// What is refused for other reasons than a nonce that an engine does not have yet is in the log: there are too many instances, or
// an earlier registration comes again. So is an instance that leaves without a word.
func TestAuditOfOddRegistrations(t *testing.T) {
	registration := func(address, engine, nonce string) register.Message {
		return register.Message{Type: "D", HTTP: address, Engine: engine, Nonce: nonce}
	}
	nonceOf := func(r *Router, address string) string { return r.pool.fresh.nonces[freshKey(decode, address, false)] }
	comes := func(address string) string {
		return `key=key remote=192.0.2.1:1234 result=ok instance=` + address + ` role=decode leaves=false`
	}
	leaves := func(key, why string) string {
		return `key=` + key + ` remote="" result=` + why + ` instance=127.0.0.1:7 role=decode leaves=true`
	}
	for name, tt := range map[string]struct {
		do   func(t *testing.T, r *Router)
		want []string // the last lines
	}{
		"begins": {func(t *testing.T, r *Router) {
			code, _ := say(t, r, true, registration("127.0.0.1:7", "e", register.NoNonce))
			require.Equal(t, http.StatusConflict, code)
			code, _ = say(t, r, true, registration("127.0.0.1:7", "e", register.NoNonce))
			require.Equal(t, http.StatusConflict, code, "it has begun again")
		}, nil},
		"again": {func(t *testing.T, r *Router) {
			say(t, r, true, registration("127.0.0.1:7", "e", register.NoNonce))
			nonce := nonceOf(r, "127.0.0.1:7")
			for _, want := range []int{http.StatusOK, http.StatusConflict} {
				code, _ := say(t, r, true, registration("127.0.0.1:7", "e", nonce))
				require.Equal(t, want, code)
			}
		}, []string{comes("127.0.0.1:7"), `key=key remote=192.0.2.1:1234 result="` + errReplay.Error() + `" refused=1`}},
		"too many": {func(t *testing.T, r *Router) {
			now := time.Now().UnixNano()
			for i := range maxInstances + 1 {
				say(t, r, true, old("D", fmt.Sprintf("127.0.0.1:%d", 1000+i), "", now))
			}
		}, []string{fmt.Sprintf(`key=key remote=192.0.2.1:1234 result="too many instances: there are %d already" refused=1`, maxInstances)}},
		"expired": {func(t *testing.T, r *Router) {
			say(t, r, true, old("D", "127.0.0.1:7", "", time.Now().UnixNano()))
			r.pool.expire(0)
		}, []string{comes("127.0.0.1:7"), leaves("key", "expired")}},
		"expired under another key": {func(t *testing.T, r *Router) {
			say(t, r, true, old("D", "127.0.0.1:7", "127.0.0.1:9", time.Now().UnixNano()))
			_, _, err := r.pool.register(decode, &register.Message{Type: "D", HTTP: "127.0.0.1:7", At: time.Now().UnixNano()}, "other")
			require.NoError(t, err)
			r.pool.expire(0)
		}, []string{comes("127.0.0.1:7"), leaves("other", "expired")}},
		"moved": {func(t *testing.T, r *Router) {
			for _, address := range []string{"127.0.0.1:7", "127.0.0.1:8"} {
				say(t, r, true, registration(address, "e", register.NoNonce))
				say(t, r, true, registration(address, "e", nonceOf(r, address)))
			}
		}, []string{comes("127.0.0.1:7"), leaves("key", "moved"), comes("127.0.0.1:8")}},
	} {
		t.Run(name, func(t *testing.T) {
			var log testkit.Log
			r, err := New(Config{Register: signer(time.Minute), Log: slog.New(slog.NewTextHandler(&log, nil))})
			require.NoError(t, err)
			tt.do(t, r)
			got := audited(&log)
			require.Equal(t, tt.want, got[max(0, len(got)-len(tt.want)):])
			require.Equal(t, tt.want == nil, got == nil)
		})
	}
}

// A connector registers its engine, and the engine's server does, too, each in its own time. Both are believed, the engine is reached as
// the one says that knows, its place stays, and nothing is refused.
func TestTwoRegisterOneEngine(t *testing.T) {
	var log testkit.Log
	r, err := New(Config{Register: signer(time.Minute), Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	secured := true
	registrations := map[string]*register.Message{
		"connector": {Type: "D", HTTP: "127.0.0.1:7", KV: "127.0.0.1:9", Nonce: register.NoNonce},
		"server":    {Type: "D", HTTP: "127.0.0.1:7", Engine: "e", TLS: &secured, Nonce: register.NoNonce},
	}
	says := func(who string) int {
		m := registrations[who]
		code, _ := say(t, r, true, m)
		m.Nonce = r.pool.fresh.nonces[freshKey(decode, m.HTTP, m.KV != "")]
		return code
	}
	for _, who := range []string{"connector", "server"} {
		require.Equal(t, http.StatusConflict, says(who), "it has no nonce yet")
		require.Equal(t, http.StatusOK, says(who))
	}
	var places []int
	for _, who := range []string{"connector", "server", "server", "connector", "connector", "server"} {
		require.Equal(t, http.StatusOK, says(who), who)
		r.pool.mu.Lock()
		places = append(places, r.pool.find(decode, &url.URL{Scheme: "https", Host: "127.0.0.1:7"}))
		r.pool.mu.Unlock()
	}
	require.NotEqual(t, -1, places[0])
	require.Equal(t, slices.Repeat(places[:1], len(places)), places)
	kv, _ := r.pool.kvAddress(places[0])
	require.Equal(t, "127.0.0.1:9", kv)
	require.NotContains(t, log.String(), "refused=")
}

// registers has a decode instance register, or leave, as an engine does: with the nonce of an answer.
func registers(t *testing.T, r *Router, m *register.Message) {
	t.Helper()
	first := *m
	first.Nonce = register.NoNonce
	nonce, _, err := r.pool.register(decode, &first, "key")
	if err != nil {
		require.ErrorIs(t, err, errNonce)
	}
	again := *m
	again.Nonce = nonce
	_, _, err = r.pool.register(decode, &again, "key")
	require.NoError(t, err)
}

// states are the instances by address, with their states.
func states(r *Router) map[string]string {
	list := map[string]string{}
	for _, in := range r.pool.health().instances {
		list[in.URL] = in.State
	}
	return list
}

// What an engine's server and its connector register, each leaves for itself. When the connector leaves, the engine serves on, without
// blocks of others. When the server leaves, the engine gets no new requests, however long its connector registers on, until the server
// registers again.
func TestEachRegistrantLeavesForItself(t *testing.T) {
	const address, url = "127.0.0.1:7", "http://127.0.0.1:7"
	r, err := New(Config{Register: signer(time.Minute), Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	connector := &register.Message{HTTP: address, KV: "127.0.0.1:9"}
	server := &register.Message{HTTP: address, Engine: "e"}
	leaves := func(m register.Message) {
		m.Leave = true
		registers(t, r, &m)
	}
	kv := func() string {
		kv, _ := r.pool.kvAddress(r.pool.index(decode, address))
		return kv
	}
	registers(t, r, connector)
	registers(t, r, server)
	leaves(*connector)
	require.Equal(t, map[string]string{url: "up"}, states(r))
	require.Empty(t, kv())
	registers(t, r, connector)
	require.Equal(t, connector.KV, kv())
	leaves(*server)
	for range 2 {
		require.Equal(t, map[string]string{url: "draining"}, states(r))
		_, ok := r.pool.pickDecode(map[int]bool{})
		require.False(t, ok)
		registers(t, r, connector)
	}
	registers(t, r, server)
	require.Equal(t, map[string]string{url: "up"}, states(r), "it has begun again")
	leaves(*server)
	leaves(*connector)
	require.Empty(t, states(r))
	registers(t, r, connector)
	require.Equal(t, map[string]string{url: "up"}, states(r), "the next engine there registers by its connector alone")
}

// The log says once that an engine leaves whose server and connector register it, though the connector does so after the server.
func TestAuditOfTwoRegistrants(t *testing.T) {
	var log testkit.Log
	r, err := New(Config{Register: signer(time.Minute), Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	at := time.Now().UnixNano()
	says := func(kv string, leaves bool) {
		at++
		m := old("D", "127.0.0.1:7", kv, at)
		m.Leave = leaves
		code, text := say(t, r, true, m)
		require.Equal(t, http.StatusOK, code, text)
	}
	says("", false)
	says("127.0.0.1:9", false)
	says("", true)
	says("127.0.0.1:9", false)
	says("127.0.0.1:9", true)
	require.Equal(t, []string{
		"key=key remote=192.0.2.1:1234 result=ok instance=127.0.0.1:7 role=decode leaves=false",
		"key=key remote=192.0.2.1:1234 result=ok instance=127.0.0.1:7 role=decode leaves=true",
	}, audited(&log))
}

// What a connector registers does not take away what the server has said, and is forgotten in its own time.
func TestEachRegistrantIsBelieved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 15 * time.Second
		r, err := New(Config{Register: signer(ttl), Log: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		registers(t, r, &register.Message{HTTP: "10.0.0.1:1", Engine: "e"})
		registers(t, r, &register.Message{HTTP: "10.0.0.1:1", KV: "10.0.0.1:9"})
		registers(t, r, &register.Message{HTTP: "10.0.0.1:2", Engine: "e"})
		require.Equal(t, map[string]string{"http://10.0.0.1:2": "up"}, states(r), "it has moved")

		registers(t, r, &register.Message{HTTP: "10.0.0.1:2", KV: "10.0.0.1:9"})
		<-time.After(ttl - time.Second) // of synctest
		registers(t, r, &register.Message{HTTP: "10.0.0.1:2", Engine: "e"})
		<-time.After(time.Second) // of synctest
		r.pool.expire(ttl)
		kv, _ := r.pool.kvAddress(r.pool.index(decode, "10.0.0.1:2"))
		require.Empty(t, kv, "its connector is gone")
		require.Equal(t, map[string]string{"http://10.0.0.1:2": "up"}, states(r))
	})
}

// A connector registers the address of an engine, and not how it is reached: that is the instance of this address, however its URL is
// spelled, and none that has left.
func TestConnectorFindsItsInstance(t *testing.T) {
	for url, address := range map[string]string{
		"https://engine": "engine:443", "https://Engine:443": "engine:443", "https://engine:8000": "Engine:8000", "http://engine": "engine:80",
	} {
		r, err := New(Config{Decode: []string{url}, Register: signer(time.Minute), Log: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		registers(t, r, &register.Message{HTTP: address, KV: "10.0.0.1:9"})
		require.Len(t, states(r), 1, "%s %s", url, address)
		kv, _ := r.pool.kvAddress(0)
		require.Equal(t, "10.0.0.1:9", kv)
	}
	r, err := New(Config{Register: signer(time.Minute), Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	registers(t, r, &register.Message{HTTP: "engine:1", Engine: "e"})
	_, ok := r.pool.pickDecode(map[int]bool{}) // which keeps its place
	require.True(t, ok)
	secured := true
	registers(t, r, &register.Message{HTTP: "engine:1", Engine: "e", TLS: &secured})
	registers(t, r, &register.Message{HTTP: "engine:1", KV: "10.0.0.1:9"})
	require.Equal(t, map[string]string{"https://engine:1": "up"}, states(r))
}
