package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	integers "math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// authority is a CA of a test.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t}
	a.cert = &x509.Certificate{
		SerialNumber: integers.NewInt(1), Subject: pkix.Name{CommonName: "CA of a test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	var cert string
	cert, _, a.key = a.write(t.TempDir(), a.cert)
	a.file = cert
	return a
}

// write signs a certificate and puts it and its key into a folder.
func (a *authority) write(dir string, template *x509.Certificate) (cert, key string, private *ecdsa.PrivateKey) {
	a.t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	signer := a.key
	if signer == nil {
		signer = private
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &private.PublicKey, signer)
	require.NoError(a.t, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(a.t, err)
	cert, key = filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	require.NoError(a.t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644))
	require.NoError(a.t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}), 0o600))
	return cert, key, private
}

// issue makes a certificate for both ends on loopback.
func (a *authority) issue(dir string, serial int64) (cert, key string) {
	a.t.Helper()
	cert, key, _ = a.write(dir, &x509.Certificate{
		SerialNumber: integers.NewInt(serial), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
	return cert, key
}

// client trusts the CA, and shows a certificate if there is one.
func (a *authority) client(cert, key string) *http.Client {
	a.t.Helper()
	config, err := (&tlsFiles{cert: cert, key: key, ca: a.file}).client()
	require.NoError(a.t, err)
	transport := &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}
	return &http.Client{Transport: transport, Timeout: time.Minute}
}

// Requests go to router and engines over TLS alone, with certificates of clients where these are asked for.
func TestTLS(t *testing.T) {
	ca, dir := newAuthority(t), t.TempDir()
	cert, key := ca.issue(dir, 2)
	engine := start(t, "serve", "--model", "sim", "--port", "0", "--tls-cert-file", cert, "--tls-key-file", key, "--tls-client-ca-file", ca.file)
	require.True(t, strings.HasPrefix(engine.URL, "https://"), engine.URL)
	router := start(t, "route", "--decode", engine.URL, "--port", "0", "--tls-cert-file", cert, "--tls-key-file", key,
		"--upstream-ca-file", ca.file, "--upstream-cert-file", cert, "--upstream-key-file", key)
	ask := func(c *http.Client) (*http.Response, string) {
		resp, err := c.Post(router.URL+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"hi","max_tokens":2}`))
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp, string(body)
	}
	require.Eventually(t, func() bool {
		resp, _ := ask(ca.client("", ""))
		return resp.StatusCode == http.StatusOK
	}, time.Minute, 10*time.Millisecond)

	_, err := ca.client("", "").Get(engine.URL + "/livez")
	require.Error(t, err, "a client without a certificate")
	resp, err := ca.client(cert, key).Get(engine.URL + "/readyz")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 200, resp.StatusCode)
	for _, url := range []string{engine.URL, router.URL} {
		resp, err := ca.client(cert, key).Get(url + "/health")
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Contains(t, string(body), `"tls":true`)
	}
	_, err = http.Get(router.URL + "/livez")
	require.ErrorContains(t, err, "certificate")
	code, _ := do(t, "GET", "http://"+strings.TrimPrefix(router.URL, "https://")+"/livez", "")
	require.Equal(t, 400, code, "the port speaks HTTPS alone")

	ca.issue(dir, 3)
	require.NoError(t, router.Signal(syscall.SIGHUP))
	require.NoError(t, router.Logged(t.Context(), `"action":"reload","key":"","remote":"","result":"ok","file":"`+cert))
	require.Eventually(t, func() bool {
		resp, _ := ask(ca.client("", ""))
		return resp.TLS.PeerCertificates[0].SerialNumber.Int64() == 3
	}, time.Minute, 10*time.Millisecond)
	require.NoError(t, os.WriteFile(cert, nil, 0o600))
	require.NoError(t, router.Signal(syscall.SIGHUP))
	require.NoError(t, router.Logged(t.Context(), "the certificate stays as it is"))
	resp, _ = ask(ca.client("", ""))
	require.Equal(t, int64(3), resp.TLS.PeerCertificates[0].SerialNumber.Int64())
}

// One who listens beyond loopback with keys and without TLS is told what that means.
func TestKeysInClearText(t *testing.T) {
	ca, dir := newAuthority(t), t.TempDir()
	cert, key := ca.issue(dir, 2)
	args := []string{"route", "--decode", "http://127.0.0.1:1", "--host", "0.0.0.0", "--port", "0", "--api-key-file", clientLines(t, "alice")}
	require.NoError(t, start(t, args...).Logged(t.Context(), "--tls-cert-file and --tls-key-file do"))
	require.NotContains(t, start(t, append(args, "--tls-cert-file", cert, "--tls-key-file", key)...).Logs(), "clear text")
}

// Flags of TLS that cannot work are refused with their names.
func TestTLSFlags(t *testing.T) {
	ca, dir := newAuthority(t), t.TempDir()
	cert, key := ca.issue(dir, 2)
	open := filepath.Join(dir, "open")
	data, err := os.ReadFile(key)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(open, data, 0o644))
	for want, args := range map[string][]string{
		"--tls-cert-file and --tls-key-file go together":           {"--tls-cert-file", cert},
		"--upstream-cert-file and --upstream-key-file go together": {"--upstream-key-file", key},
		"--tls-client-ca-file is for --tls-cert-file":              {"--tls-client-ca-file", ca.file},
		"open: mode 0644 lets others read it, use chmod 600":       {"--tls-cert-file", cert, "--tls-key-file", open},
		"key has no certificate in PEM":                            {"--upstream-ca-file", key},
		"--tls-cert-file: ":                                        {"--tls-cert-file", ca.file, "--tls-key-file", key},
	} {
		var errs strings.Builder
		require.Equal(t, 2, run(append([]string{"route", "--decode", "http://127.0.0.1:1", "--port", "0"}, args...), io.Discard, &errs), want)
		require.Contains(t, errs.String(), want)
	}
	_, err = tls.LoadX509KeyPair(cert, key)
	require.NoError(t, err)
}

// Engines that serve HTTPS register over TLS, or at a socket that only this user reaches, and are then reached over HTTPS.
func TestRegisterOverTLSAndSocket(t *testing.T) {
	ca, dir := newAuthority(t), t.TempDir()
	cert, key := ca.issue(dir, 2)
	own := []string{"--port", "0", "--tls-cert-file", cert, "--tls-key-file", key}
	short, err := os.MkdirTemp("/tmp", "kvport") //nolint:usetesting // short: unix sockets lie below it
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(short)) })
	t.Setenv("XDG_STATE_HOME", filepath.Join(short, "state"))
	socket := "unix://" + filepath.Join(short, "register")
	for _, at := range []string{"https://127.0.0.1:0", socket, socket} { // the second time it is there already
		router := start(t, append([]string{"route", "--register", at, "--upstream-ca-file", ca.file}, own...)...)
		if at != socket {
			at = "https://" + strings.TrimPrefix(registrarOf(t, router), "http://")
			plain, err := http.Post("http://"+strings.TrimPrefix(at, "https://")+"/register", "application/json", strings.NewReader("{}"))
			require.NoError(t, err)
			require.NoError(t, plain.Body.Close())
			require.Equal(t, 400, plain.StatusCode, "it speaks HTTPS alone")
		} else {
			info, err := os.Stat(strings.TrimPrefix(socket, "unix://"))
			require.NoError(t, err)
			require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
		}
		engine := start(t, append([]string{"serve", "--model", "sim", "--register", at, "--register-ca-file", ca.file}, own...)...)
		require.NoError(t, router.Logged(t.Context(), `"action":"register","key":"`))
		require.Eventually(t, func() bool {
			resp, err := ca.client("", "").Post(router.URL+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"hi","max_tokens":2}`))
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			return resp.StatusCode == http.StatusOK
		}, time.Minute, 10*time.Millisecond, engine.Logs())
		require.NoError(t, router.Stop(t.Context()))
	}
}

// kvport doctor says whether the port will speak HTTPS, with the flags that serve gets.
func TestDoctorTLS(t *testing.T) {
	ca, dir := newAuthority(t), t.TempDir()
	cert, key := ca.issue(dir, 2)
	for _, tt := range []struct {
		host   string
		files  tlsFiles
		after  time.Duration
		status status
		want   string
	}{
		{"127.0.0.1", tlsFiles{}, 0, statusOK, "off: "},
		{"0.0.0.0", tlsFiles{}, 0, statusWarn, "in clear text"},
		{"0.0.0.0", tlsFiles{cert: cert, key: key}, 0, statusOK, "on: " + cert + " is valid until "},
		{"0.0.0.0", tlsFiles{cert: cert, key: key, ca: ca.file}, 0, statusOK, ", and clients need a certificate"},
		{"0.0.0.0", tlsFiles{cert: cert, key: key}, 48 * time.Hour, statusFail, "is valid from "},
		{"0.0.0.0", tlsFiles{cert: cert}, 0, statusFail, "--tls-cert-file and --tls-key-file go together"},
		{"0.0.0.0", tlsFiles{cert: cert, key: cert}, 0, statusFail, "mode 0644 lets others read it"},
	} {
		got := (&doctorFlags{host: tt.host, tls: tt.files}).checkTLS(time.Now().Add(tt.after))
		require.Equal(t, tt.status, got.Status, "%+v", got)
		require.Contains(t, got.Detail, tt.want)
		require.Equal(t, tt.status == statusOK, got.Mend == "")
	}
}
