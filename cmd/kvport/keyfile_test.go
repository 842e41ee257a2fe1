package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// bothWith are an engine and a router in front of another one, both with the same file of API keys.
func bothWith(t *testing.T, file string) []*cluster.Process {
	t.Helper()
	behind := start(t, "serve", "--model", "sim", "--port", "0")
	return []*cluster.Process{
		start(t, "serve", "--model", "sim", "--port", "0", "--api-key-file", file),
		start(t, "route", "--decode", behind.URL, "--port", "0", "--api-key-file", file),
	}
}

// asks sends a small request with a key.
func asks(t *testing.T, url, key string) (int, string) {
	t.Helper()
	return do(t, "POST", url+"/v1/completions", `{"prompt":"hi","max_tokens":2}`, "Authorization", "Bearer "+key)
}

// replaced puts another file of clients in a file's place and has a process read it.
func replaced(t *testing.T, p *cluster.Process, file string, lines ...string) {
	t.Helper()
	before := strings.Count(p.Logs(), `"action":"reload"`)
	require.NoError(t, os.Rename(clientLines(t, lines...), file))
	require.NoError(t, p.Signal(syscall.SIGHUP))
	require.Eventually(t, func() bool { return strings.Count(p.Logs(), `"action":"reload"`) > before }, time.Minute, time.Millisecond)
}

// The limits in a client's line hold in serve and in route, and change with the file, as does its tenant.
func TestLimitsInTheKeyFile(t *testing.T) {
	file := clientLines(t, "alice requests_per_minute=2", "bob")
	for _, p := range bothWith(t, file) {
		for _, want := range []int{200, 200, 429} {
			code, text := asks(t, p.URL, "alice")
			require.Equal(t, want, code, "%s: %s", p.Name, text)
			require.Equal(t, want == 429, strings.Contains(text, "alice may send 2 requests a minute (requests_per_minute)"), text)
		}
		for range 4 {
			code, text := asks(t, p.URL, "bob")
			require.Equal(t, 200, code, text)
		}
		for _, salt := range []string{"first", "second"} {
			require.Zero(t, cachedFor(t, p.URL, "bob", "completion", salt), p.Name)
		}
		replaced(t, p, file, "alice", "bob")
		for range 4 {
			code, text := asks(t, p.URL, "alice")
			require.Equal(t, 200, code, text)
		}
		require.Zero(t, cachedFor(t, p.URL, "alice", "completion", "first"), p.Name)
		replaced(t, p, file, "alice salt=bob", "bob")
		require.Positive(t, cachedFor(t, p.URL, "alice", "completion", "second"), p.Name)
		require.NoError(t, os.Rename(clientLines(t, "alice requests_per_minute=2", "bob"), file))
	}
}

// A file of keys that others can read by now, or that has a weak key, leaves serve and route with the keys that they have.
func TestHangupWithABadKeyFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(file, []byte(alpha+"\n"), 0o600))
	for _, p := range bothWith(t, file) {
		for _, bad := range []struct {
			text string
			mode os.FileMode
			want string
		}{
			{beta + "\n", 0o640, "mode 0640 lets others read it, use chmod 600"},
			{beta + "\nweak\n", 0o600, "line 2: the key has 24 bits at most, want 128"},
		} {
			require.NoError(t, errors.Join(os.WriteFile(file, []byte(bad.text), 0o600), os.Chmod(file, bad.mode)))
			require.NoError(t, p.Signal(syscall.SIGHUP))
			require.NoError(t, p.Logged(t.Context(), `"msg":"audit","action":"reload","key":"","remote":"","result":"API key file `+file+": "+bad.want), p.Name)
			for key, want := range map[string]int{alpha: 200, beta: 401} {
				code, _ := asks(t, p.URL, key)
				require.Equal(t, want, code, "%s after %s", p.Name, bad.want)
			}
		}
		require.NoError(t, os.WriteFile(file, []byte(beta+"\n"), 0o600))
		require.NoError(t, p.Signal(syscall.SIGHUP))
		require.Eventually(t, func() bool {
			code, _ := asks(t, p.URL, beta)
			return code == 200
		}, time.Minute, time.Millisecond, p.Name)
		code, _ := asks(t, p.URL, alpha)
		require.Equal(t, 401, code)
		require.NoError(t, os.WriteFile(file, []byte(alpha+"\n"), 0o600))
	}
}

// Connections to a router have a client's certificate where it has their CA, those of engines that register, too. Another CA is taken
// at SIGHUP. Whoever has a certificate and lacks the deployment's key is refused, and the log says so.
func TestClientCAOfRoute(t *testing.T) {
	ca, other, dir, stranger := newAuthority(t), newAuthority(t), t.TempDir(), t.TempDir()
	cert, key := ca.issue(dir, 2)
	otherCert, otherKey := other.issue(stranger, 3)
	cas := filepath.Join(dir, "cas")
	takes := func(a *authority) {
		data, err := os.ReadFile(a.file)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(cas, data, 0o600))
	}
	takes(ca)
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	own := []string{"--port", "0", "--tls-cert-file", cert, "--tls-key-file", key}
	router := start(t, append([]string{"route", "--register", "https://127.0.0.1:0", "--upstream-ca-file", ca.file, "--tls-client-ca-file", cas}, own...)...)
	at := "https://" + strings.TrimPrefix(registrarOf(t, router), "http://")
	status := func(url, cert, key string) int {
		resp, err := ca.client(cert, key).Post(url, "application/json", strings.NewReader(`{"prompt":"hi","max_tokens":2}`))
		if err != nil {
			return 0
		}
		require.NoError(t, resp.Body.Close())
		return resp.StatusCode
	}
	start(t, append([]string{"serve", "--model", "sim", "--register", at, "--register-ca-file", ca.file}, own...)...)
	require.Eventually(t, func() bool { return status(router.URL+"/v1/completions", cert, key) == 200 }, time.Minute, 10*time.Millisecond, "its certificate lets the engine register")
	for _, url := range []string{router.URL + "/v1/completions", at + "/register"} {
		require.Zero(t, status(url, "", ""), url)
		require.Zero(t, status(url, otherCert, otherKey), url)
	}
	require.Equal(t, 403, status(at+"/register", cert, key))
	require.NoError(t, router.Logged(t.Context(), `"msg":"audit","action":"register","key":"","remote":"127.0.0.1:`))
	require.NoError(t, router.Logged(t.Context(), `"result":"the registration is not signed with this deployment's key","refused":1}`))

	takes(other)
	require.NoError(t, router.Signal(syscall.SIGHUP))
	require.Eventually(t, func() bool { return status(router.URL+"/v1/completions", otherCert, otherKey) == 200 }, time.Minute, 10*time.Millisecond)
	require.Zero(t, status(router.URL+"/v1/completions", cert, key))
}

// An engine registers with the certificate that its server has by then.
func TestRegistrationHasTheNewCertificate(t *testing.T) {
	ca, dir := newAuthority(t), t.TempDir()
	cert, key := ca.issue(dir, 2)
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	serials := make(chan int64, 100)
	registrar := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Connection", "close")
		serials <- r.TLS.PeerCertificates[0].SerialNumber.Int64()
	}))
	var err error
	registrar.TLS, err = (&tlsFiles{cert: cert, key: key, ca: ca.file}).server()
	require.NoError(t, err)
	require.Equal(t, tls.RequireAndVerifyClientCert, registrar.TLS.ClientAuth)
	registrar.StartTLS()
	t.Cleanup(registrar.Close)
	engine := start(t, "serve", "--model", "sim", "--port", "0", "--tls-cert-file", cert, "--tls-key-file", key, "--register", registrar.URL, "--register-ca-file", ca.file)
	require.Equal(t, int64(2), <-serials)
	ca.issue(dir, 3)
	require.NoError(t, engine.Signal(syscall.SIGHUP))
	require.NoError(t, engine.Logged(t.Context(), fmt.Sprintf(`"action":"reload","key":"","remote":"","result":"ok","file":%q`, cert)))
	late := time.After(time.Minute)
	for {
		select {
		case serial := <-serials:
			if serial == 3 {
				return
			}
		case <-late:
			require.Fail(t, "the old certificate stays")
		}
	}
}
