package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// registrarOf is where instances register with a router.
func registrarOf(t *testing.T, r *cluster.Process) string {
	t.Helper()
	require.NoError(t, r.Logged(t.Context(), "instances can register"))
	found := regexp.MustCompile(`instances can register".*?"?address"?[=:]"?([0-9.:]+)`).FindStringSubmatch(r.Logs())
	require.NotNil(t, found, r.Logs())
	return "http://" + found[1]
}

// Engines of a connector that cannot register by itself do so with the deployment's key, serve as a pair, and are taken
// out as soon as they end. Without the key nobody gets in.
func TestServeRegisters(t *testing.T) {
	dir := t.TempDir()
	key := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(strings.Repeat(text, 40)), 0o600))
		return path
	}
	right, wrong := key("right", "a"), key("wrong", "b")
	r := start(t, "route", "--port", "0", "--register", "127.0.0.1:0", "--ticket-key-file", right, "--log-level", "debug")
	at := registrarOf(t, r)
	transfer := func(role, id, key string) string {
		return fmt.Sprintf(`{"kv_connector":"Demo","kv_role":%q,"engine_id":%q,"kv_ip":"127.0.0.1","kv_connector_extra_config":{"dir":%q},"kvport":{"ticket_key_file":%q}}`,
			role, id, filepath.Join(dir, "blocks"), key)
	}
	serve := func(role, id, key string) *cluster.Process {
		return startAny(t, "serve", "--model", "sim", "--port", "0", "--register", at, "--kv-transfer-config", transfer(role, id, key))
	}
	p, d := serve("kv_producer", "p", right), serve("kv_consumer", "d", right)
	stranger := serve("kv_consumer", "x", wrong)
	require.NoError(t, stranger.Logged(t.Context(), "not signed with this deployment's key"))
	health := func() string {
		_, text := do(t, "GET", r.URL+"/health", "")
		return text
	}
	require.Eventually(t, func() bool { return strings.Contains(health(), p.URL) && strings.Contains(health(), d.URL) }, time.Minute, 20*time.Millisecond)
	require.NotContains(t, health(), stranger.URL)
	code, text := do(t, "POST", r.URL+"/v1/completions", `{"prompt":"`+strings.Repeat("words of a prompt ", 9)+`","max_tokens":4}`)
	require.Equal(t, 200, code, text)
	require.Eventually(t, func() bool {
		_, text := do(t, "GET", r.URL+"/metrics", "")
		return strings.Contains(text, `kvport_router_requests_total{outcome="disaggregated"} 1`)
	}, time.Minute, 10*time.Millisecond)
	require.NoError(t, p.Stop(t.Context()))
	require.NotContains(t, health(), p.URL, "it has said that it ends")
	code, text = do(t, "POST", r.URL+"/v1/completions", `{"prompt":"x","max_tokens":4}`)
	require.Equal(t, 200, code, text)
	require.NoError(t, d.Stop(t.Context()))
	require.Contains(t, health(), `"status":"unavailable"`)
}

// With --mode replica engines say to which group they belong.
func TestServeRegistersItsGroup(t *testing.T) {
	r := start(t, "route", "--port", "0", "--mode", "replica", "--register", "127.0.0.1:0")
	at := registrarOf(t, r)
	for _, group := range []string{"a", "b"} {
		startAny(t, "serve", "--model", "sim", "--port", "0", "--register", at, "--register-group", group)
	}
	require.Eventually(t, func() bool {
		_, text := do(t, "GET", r.URL+"/health", "")
		return strings.Contains(text, `"group":"a"`) && strings.Contains(text, `"group":"b"`)
	}, time.Minute, 20*time.Millisecond)
	pool := start(t, "route", "--port", "0", "--register", "127.0.0.1:0")
	engine := startAny(t, "serve", "--model", "sim", "--port", "0", "--register", registrarOf(t, pool), "--register-group", "a")
	require.NoError(t, engine.Logged(t.Context(), "group is for a router with --mode replica"))
}

func TestServeRegisterFlags(t *testing.T) {
	for args, want := range map[string]string{
		"--register-group a": "--register-group is for --register",
		"--register http://127.0.0.1:1 --register-group \"":           `--register-group is "\"", want visible ASCII`,
		"--register 127.0.0.1:1":                                      `--register: "127.0.0.1:1" is no URL, want http://HOST:PORT`,
		"--register http://x?y":                                       `is no URL`,
		"--register-address 127.0.0.1:1":                              "--register-address is for --register",
		"--register http://127.0.0.1:1 --register-address 127.0.0.1":  `--register-address is "127.0.0.1", want HOST:PORT`,
		"--register http://127.0.0.1:1 --register-address 10.0.0.1:0": `want HOST:PORT`,
	} {
		var errs strings.Builder
		require.Equal(t, 2, run(append([]string{"serve", "--model", "sim", "--port", "0"}, strings.Fields(args)...), io.Discard, &errs), args)
		require.Contains(t, errs.String(), want)
	}
}
