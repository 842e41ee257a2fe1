package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// start runs kvport until the test ends, when it must go in good order.
func start(t *testing.T, args ...string) *cluster.Process {
	t.Helper()
	path, err := exec.LookPath("kvport")
	require.NoError(t, err)
	p, err := cluster.Start(t.Context(), nil, args[0], path, args...)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := p.Stop(ctx); err != nil {
			t.Errorf("%v\n%s", err, p.Logs())
		}
	})
	return p
}

func config(role, dir string) string {
	return fmt.Sprintf(`{"kv_connector":"Demo","kv_role":%q,"engine_id":%q,"kv_ip":"127.0.0.1","kv_connector_extra_config":{"dir":%q}}`, role, role, dir)
}

func do(t *testing.T, method, url, body string, header ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	require.NoError(t, err)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(data)
}

// The whole chain as an operator starts it: router, prefill engine, decode engine and a plugin for
// each give the tokens of a single engine, from KV that was loaded.
func TestPrefillDecode(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "blocks")
	single := start(t, "serve", "--model", "sim", "--port", "0")
	p := start(t, "serve", "--model", "sim", "--port", "0", "--kv-transfer-config", config("kv_producer", dir))
	d := start(t, "serve", "--model", "sim", "--port", "0", "--kv-transfer-config", config("kv_consumer", dir))
	r := start(t, "route", "--port", "0", "--prefill", p.URL, "--decode", d.URL)
	var client cluster.Client
	for i := range 8 {
		request := cluster.Request{Prompt: strings.Repeat(fmt.Sprintf("prompt %d says ", i), 10+i), MaxTokens: 32, IgnoreEOS: true}
		want, err := client.Complete(t.Context(), single.URL, request)
		require.NoError(t, err)
		got, err := client.Complete(t.Context(), r.URL, request)
		require.NoError(t, err)
		require.True(t, want.Equal(got), "prompt %d: %v, want %v", i, got.Tokens, want.Tokens)
		require.GreaterOrEqual(t, got.Cached, got.Prompt-16, "prompt %d", i)
	}
	m, err := client.Metrics(t.Context(), d.URL)
	require.NoError(t, err)
	require.Positive(t, m.Sum("kvport_prompt_tokens_total", `source="external"`))
	require.Eventually(t, func() bool { // an answer comes a little before it is counted
		m, err := client.Metrics(t.Context(), r.URL)
		return err == nil && m.Sum("kvport_router_requests_total", `outcome="disaggregated"`) == 8
	}, time.Minute, 10*time.Millisecond)

	code, body := do(t, "GET", d.URL+"/health", "")
	require.Equal(t, 200, code)
	require.Contains(t, body, `"connector":"DemoConnector","state":"ready"`)
}

// A signal lets running requests finish and then ends the process with exit code 0.
func TestDrain(t *testing.T) {
	p := start(t, "serve", "--model", "sim", "--port", "0")
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.URL+"/v1/completions",
		strings.NewReader(`{"prompt":"hello","max_tokens":500,"ignore_eos":true,"stream":true,"return_token_ids":true}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	_, err = lines.ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, p.Signal(syscall.SIGTERM))
	rest, err := io.ReadAll(lines)
	require.NoError(t, err)
	require.True(t, strings.HasSuffix(string(rest), "data: [DONE]\n\n"))
	require.Contains(t, string(rest), `"finish_reason":"length"`)
	<-p.Done()
}

// A second signal does not wait. One that comes right behind the first is the same, unless a busy machine lets the process see it late.
func TestSecondSignal(t *testing.T) {
	same := false
	for try := 0; try < 5 && !same; try++ {
		same = signalTwice(t)
	}
	require.True(t, same, "a signal right behind the first one counts as the second")
}

// signalTwice reports whether a signal right behind the first one changed nothing.
func signalTwice(t *testing.T) (same bool) {
	t.Helper()
	path, err := exec.LookPath("kvport")
	require.NoError(t, err)
	p, err := cluster.Start(t.Context(), nil, "serve", path, "serve", "--model", "sim", "--port", "0", "--max-num-batched-tokens", "1")
	require.NoError(t, err)
	defer p.Kill()
	// A request whose client does not read keeps the process draining.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.URL+"/v1/completions",
		strings.NewReader(`{"prompt":"hello","max_tokens":8000,"ignore_eos":true,"stream":true,"return_token_ids":true}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	_, err = bufio.NewReader(resp.Body).ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, p.Signal(syscall.SIGINT))
	require.NoError(t, p.Logged(t.Context(), "draining"))
	require.NoError(t, p.Signal(syscall.SIGINT)) // the same one, as far as the process can tell
	<-time.After(sameSignal + 100*time.Millisecond)
	if strings.Contains(p.Logs(), "not waiting any longer") {
		return false
	}
	require.NoError(t, p.Signal(syscall.SIGINT))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	select {
	case <-p.Done():
	case <-ctx.Done():
		t.Fatal("still draining after the second signal")
	}
	return true
}

// Keys of the old form that are strong enough.
const (
	alpha = "alpha-0123456789-abcdefgh"
	beta  = "beta-9876543210-hgfedcba"
	gamma = "gamma-abcdefgh-0123456789"
)

func TestAPIKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(file, []byte(alpha+"\n\n  "+beta+" \n"), 0o600))
	p := start(t, "serve", "--model", "sim", "--host", "0.0.0.0", "--port", "0", "--api-key-file", file, "--served-model-name", "m")
	_, port, _ := strings.Cut(strings.TrimPrefix(p.URL, "http://"), "]")
	if port == "" {
		_, port, _ = strings.Cut(strings.TrimPrefix(p.URL, "http://"), ":")
		port = ":" + port
	}
	url := "http://127.0.0.1" + port
	for header, want := range map[string]int{
		"": 401, "Bearer": 401, "Bearer gamma": 401, "Basic " + alpha: 401, alpha: 401, "Bearer " + alpha[1:]: 401,
		"Bearer " + alpha: 200, "bearer " + beta: 200,
	} {
		code, body := do(t, "GET", url+"/v1/models", "", "Authorization", header)
		require.Equal(t, want, code, header)
		if want == 401 {
			var e struct{ Error struct{ Code string } }
			require.NoError(t, json.Unmarshal([]byte(body), &e))
			require.Equal(t, "invalid_api_key", e.Error.Code)
		} else {
			require.Contains(t, body, `"id":"m"`)
		}
		code, _ = do(t, "GET", url+"/metrics", "", "Authorization", header)
		require.Equal(t, want, code)
		code, _ = do(t, "GET", url+"/health", "", "Authorization", header)
		require.Equal(t, 200, code, "a load balancer needs no key")
	}
}

// TestCacheQueryOfKeys: a cache query needs an API key as all requests do, and sees what a request of its salt would find.
func TestCacheQueryOfKeys(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(file, []byte(alpha+"\n"+beta+"\n"), 0o600))
	p := start(t, "serve", "--model", "sim", "--port", "0", "--api-key-file", file)
	prompt := strings.Repeat("the quick brown fox ", 10)
	ask := func(key, salt, params string) (int, string) {
		body := fmt.Sprintf(`{"prompt":%q,"cache_salt":%q,"max_tokens":1,"kv_transfer_params":%s}`, prompt, salt, params)
		return do(t, "POST", p.URL+"/v1/completions", body, "Authorization", "Bearer "+key)
	}
	code, body := ask(alpha, "s", "null")
	require.Equal(t, 200, code, body)
	for salt, want := range map[string]string{"s": `"cached_tokens":192`, "other": `"cached_tokens":0`} {
		code, body = ask(alpha, salt, `{"cache_query":true}`)
		require.Equal(t, 200, code, body)
		require.Contains(t, body, `"prompt_tokens_details":{`+want)
	}
	code, _ = ask("gamma", "s", `{"cache_query":true}`)
	require.Equal(t, 401, code)
	code, body = ask(beta, "", `{"cache_query":true}`)
	require.Equal(t, 403, code, "what alpha has asked is not told to beta")
	require.Contains(t, body, "cache_salt: a cache query needs one, since several API keys share the cache")
	one := filepath.Join(t.TempDir(), "one")
	require.NoError(t, os.WriteFile(one, []byte(strings.Repeat(alpha+"\n", 2)), 0o600))
	for _, args := range [][]string{{"--api-key-file", one}, {"--api-key-file", file, "--cache-query-unsalted"}} {
		p = start(t, append([]string{"serve", "--model", "sim", "--port", "0"}, args...)...)
		code, body = ask(alpha, "", `{"cache_query":true}`)
		require.Equal(t, 200, code, body)
	}

	off := start(t, "serve", "--model", "sim", "--port", "0", "--cache-query-rate", "0")
	code, body = do(t, "POST", off.URL+"/v1/completions", `{"prompt":"x","kv_transfer_params":{"cache_query":true}}`)
	require.Equal(t, 400, code)
	require.Contains(t, body, "turned off on this server")
	_, body = do(t, "GET", off.URL+"/health", "")
	require.NotContains(t, body, "cache_query")
}

func TestBrief(t *testing.T) {
	require.Equal(t, "a\nb", brief("a\nb\nc\n"))
	require.Len(t, brief(strings.Repeat("é", 5000)), 1003)
}

func TestReadObject(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.json")
	require.NoError(t, os.WriteFile(file, []byte(" {\"a\":1}\n"), 0o600))
	got, err := readObject("@" + file)
	require.NoError(t, err)
	require.JSONEq(t, `{"a":1}`, string(got))
	for _, bad := range []string{"", "null", "[]", "{", "@nowhere", "@" + filepath.Dir(file)} {
		_, err := readObject(bad)
		require.Error(t, err, bad)
	}
}

// A port that is taken is a flag that can be changed: exit code 2, and the flag is named.
func TestPortTaken(t *testing.T) {
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	path, err := exec.LookPath("kvport")
	require.NoError(t, err)
	for _, args := range [][]string{{"serve", "--model", "sim"}, {"route", "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"}} {
		out, err := exec.CommandContext(t.Context(), path, append(args, "--port", port)...).CombinedOutput()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit, "%s", out)
		require.Equal(t, 2, exit.ExitCode(), "%s", out)
		require.Contains(t, string(out), "--port: "+port+" is taken, another process listens there; give another one, or 0 for a free one")
	}
}
