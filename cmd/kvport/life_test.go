package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
	"github.com/kvport/kvport/verify/cluster"
)

// slowPlugin is a demo connector that opens when somebody writes to the FIFO beside its folder.
func slowPlugin() {
	type config struct {
		Dir string `json:"dir" jsonschema:"required,minLength=1"`
	}
	sdk.Serve(sdk.FromStore(sdk.Definition{Name: "SlowConnector", Version: "1", Scope: connector.ScopeShared},
		func(_ context.Context, _ connector.Env, c config) (connector.Store, error) {
			if _, err := os.ReadFile(filepath.Join(c.Dir, "go")); err != nil {
				return nil, err
			}
			return &folder{dir: c.Dir}, nil
		}))
}

// launch runs kvport without waiting for its ready line; stderr is passed on line by line.
func launch(t *testing.T, args ...string) (cmd *exec.Cmd, stderr <-chan string) {
	t.Helper()
	cmd = exec.CommandContext(t.Context(), "kvport", args...)
	pipe, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := make(chan string, 1000)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(pipe); s.Scan(); {
			lines <- s.Text()
		}
	}()
	return cmd, lines
}

// urlIn waits for a line of the log that has a URL.
func urlIn(t *testing.T, lines <-chan string) string {
	t.Helper()
	for line := range lines {
		if m := regexp.MustCompile(`"url":"(http://[^"]+)"`).FindStringSubmatch(line); m != nil {
			return m[1]
		}
	}
	t.Fatal("no line of the log has a URL")
	return ""
}

// While a model loads, or a plugin starts, the port says so.
func TestLoading(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "go")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	cmd, lines := launch(t, "serve", "--model", "sim", "--port", "0", "--log-level", "debug", "--kv-transfer-config",
		fmt.Sprintf(`{"kv_connector":"SlowConnector","kv_role":"kv_both","kv_connector_extra_config":{"dir":%q},"kvport":{"deadlines":{"handshake":"1m"}}}`, dir))
	url := urlIn(t, lines)
	for path, want := range map[string]string{
		"GET /livez": `200 {"status":"ok"}`, "GET /readyz": `503 {"status":"loading"}`, "GET /health": `503 {"status":"loading"}`,
		"GET /v1/models": `"code":"loading"`, "POST /v1/completions": `"code":"loading"`,
	} {
		method, path, _ := strings.Cut(path, " ")
		code, body := do(t, method, url+path, "")
		require.Contains(t, fmt.Sprint(code, " ", body), want, path)
	}
	w, err := os.OpenFile(fifo, os.O_WRONLY, 0) // waits for the scheduler side
	require.NoError(t, err)
	require.NoError(t, os.Remove(fifo))
	require.NoError(t, os.WriteFile(fifo, nil, 0o600)) // for the worker side
	require.NoError(t, w.Close())
	require.Eventually(t, func() bool {
		code, _ := do(t, "GET", url+"/readyz", "")
		return code == 200
	}, time.Minute, 10*time.Millisecond)
	code, _ := do(t, "POST", url+"/v1/completions", `{"prompt":"hi"}`)
	require.Equal(t, 200, code)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	for range lines { // until it has ended
	}
	require.NoError(t, cmd.Wait())
}

// long starts a stream that does not end in the time of a test.
func long(t *testing.T, url string) *bufio.Reader {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions",
		strings.NewReader(`{"prompt":"hello","max_tokens":8000,"ignore_eos":true,"stream":true,"return_token_ids":true}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	t.Cleanup(func() { resp.Body.Close() })
	lines := bufio.NewReader(resp.Body)
	_, err = lines.ReadString('\n')
	require.NoError(t, err)
	return lines
}

// slowModel takes minutes for 8,000 tokens.
const slowModel = "sim:layers=64"

// startAny runs kvport however it may end.
func startAny(t *testing.T, args ...string) *cluster.Process {
	t.Helper()
	path, err := exec.LookPath("kvport")
	require.NoError(t, err)
	p, err := cluster.Start(t.Context(), nil, args[0], path, args...)
	require.NoError(t, err)
	t.Cleanup(p.Kill)
	return p
}

// exitCode waits for the end.
func exitCode(t *testing.T, p *cluster.Process) int {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(time.Minute):
		t.Fatal("it has not ended")
	}
	err := p.Stop(t.Context()) // it only says how the end was
	if err == nil {
		return 0
	}
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	return exit.ExitCode()
}

// A signal leaves the port open as long as something runs: new requests are told why they are refused.
// What does not end in time is told, too, and then the exit code is 3.
func TestLameDuck(t *testing.T) {
	for _, name := range []string{"serve", "route"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startAny(t, "serve", "--model", slowModel, "--port", "0", "--drain-timeout", "10s")
			if name == "route" {
				p = startAny(t, "route", "--decode", p.URL, "--port", "0", "--drain-timeout", "10s")
			}
			code, body := do(t, "GET", p.URL+"/readyz", "")
			require.Equal(t, 200, code, body)
			lines := long(t, p.URL)
			require.NoError(t, p.Signal(syscall.SIGTERM))
			require.Eventually(t, func() bool {
				code, body = do(t, "GET", p.URL+"/readyz", "")
				return code == 503
			}, 8*time.Second, time.Millisecond)
			require.Equal(t, `{"status":"draining"}`+"\n", body)
			code, body = do(t, "POST", p.URL+"/v1/completions", `{"prompt":"hi"}`)
			require.Equal(t, 503, code)
			require.Contains(t, body, `"code":"draining"`)
			code, _ = do(t, "GET", p.URL+"/livez", "")
			require.Equal(t, 200, code)
			rest, err := io.ReadAll(lines)
			require.NoError(t, err, "the stream ends properly")
			events := strings.Split(strings.TrimSpace(string(rest)), "\n\n")
			require.Contains(t, events[len(events)-1], `data: {"error":{`)
			require.Contains(t, events[len(events)-1], `"code":"draining"`)
			require.NotContains(t, string(rest), "[DONE]")
			require.Equal(t, 3, exitCode(t, p), p.Logs())
			require.Contains(t, p.Logs(), "requests were cut off: 1 had not ended in --drain-timeout")
		})
	}
}

// An answer that is not streamed and is cut off is a clean 503.
func TestCutOffWhole(t *testing.T) {
	p := startAny(t, "serve", "--model", slowModel, "--port", "0", "--drain-timeout", "500ms")
	answer := make(chan string, 1)
	go func() {
		resp, err := http.Post(p.URL+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"hello","max_tokens":8000,"ignore_eos":true}`))
		if err != nil {
			answer <- err.Error()
			return
		}
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		answer <- fmt.Sprint(resp.StatusCode, string(data), err)
	}()
	require.Eventually(t, func() bool {
		_, body := do(t, "GET", p.URL+"/health", "")
		return strings.Contains(body, `"running":1`)
	}, time.Minute, time.Millisecond)
	require.NoError(t, p.Signal(syscall.SIGTERM))
	got := <-answer
	require.Contains(t, got, `503{"error":{"message":"the server is shutting down`)
	require.Contains(t, got, "<nil>")
	require.Equal(t, 3, exitCode(t, p))
}

// A save that never returns is given up with the rest of what runs at a signal: the exit code says so, and a line.
func TestSaveThatNeverReturns(t *testing.T) {
	t.Parallel()
	p := startAny(t, "serve", "--model", "sim", "--port", "0", "--drain-timeout", "1s", "--kv-transfer-config", fmt.Sprintf(
		`{"kv_connector":"SickConnector","kv_role":"kv_both","kv_connector_extra_config":{"dir":%q,"load":"never stores"}}`, t.TempDir()))
	code, body := do(t, "POST", p.URL+"/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":2}`, strings.Repeat("never stored ", 20)))
	require.Equal(t, 200, code, body)
	require.NoError(t, p.Signal(syscall.SIGTERM))
	require.Equal(t, exitCutOff, exitCode(t, p), p.Logs())
	require.Contains(t, p.Logs(), "kvport: transfers of the connector were given up: they had not ended in --drain-timeout 1s")
}

// SIGHUP does not end anything: it makes new API keys known. A file that is no good changes nothing.
func TestHangup(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(file, []byte(alpha+"\n"), 0o600))
	engine := start(t, "serve", "--model", "sim", "--port", "0", "--api-key-file", file)
	router := start(t, "route", "--decode", engine.URL, "--port", "0")
	require.NoError(t, router.Signal(syscall.SIGHUP))
	require.NoError(t, router.Logged(t.Context(), "nothing changes"))
	asks := func(key string) int {
		code, _ := do(t, "GET", engine.URL+"/v1/models", "", "Authorization", "Bearer "+key)
		return code
	}
	require.Equal(t, 200, asks(alpha))
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.NoError(t, engine.Signal(syscall.SIGHUP))
	require.NoError(t, engine.Logged(t.Context(), "stay as they are"))
	require.Equal(t, 200, asks(alpha))
	require.NoError(t, os.WriteFile(file, []byte(beta+"\n"), 0o600))
	require.NoError(t, engine.Signal(syscall.SIGHUP))
	require.Eventually(t, func() bool { return asks(beta) == 200 }, time.Minute, time.Millisecond)
	require.Equal(t, 401, asks(alpha))
	code, _ := do(t, "GET", engine.URL+"/readyz", "")
	require.Equal(t, 200, code, "a load balancer needs no key")
}

// SIGHUP does not end an agent either: its engine does.
func TestHangupOfAgent(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "own", "s")
	agent, lines := launch(t, "agent", "--socket", socket, "--kv-transfer-config", `{"kv_connector":"DemoConnector","kv_role":"kv_both"}`)
	require.Eventually(t, func() bool {
		_, err := os.Stat(socket)
		return err == nil
	}, time.Minute, time.Millisecond)
	require.NoError(t, agent.Process.Signal(syscall.SIGHUP))
	require.NoError(t, agent.Process.Signal(syscall.SIGTERM))
	for range lines {
		continue
	}
	require.NoError(t, agent.Wait(), "the second signal ended it, in good order")
}

// Clients that send a head and one byte keep nobody out, of engine or router, also if there are more of
// them than requests may run.
func TestSlowClientsKeepNobodyOut(t *testing.T) {
	engine := start(t, "serve", "--model", "sim", "--port", "0")
	router := start(t, "route", "--decode", engine.URL, "--port", "0")
	for _, tt := range []struct {
		*cluster.Process
		clients int
	}{{engine, maxRequests + 10}, {router, maxRouted + 10}} {
		for range tt.clients {
			c, err := net.Dial("tcp", strings.TrimPrefix(tt.URL, "http://"))
			require.NoError(t, err)
			defer c.Close()
			_, err = io.WriteString(c, "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n")
			require.NoError(t, err)
			line, err := bufio.NewReader(c).ReadString('\n')
			require.NoError(t, err)
			require.Contains(t, line, "100 Continue", "%s waits for the body", tt.Name)
			_, err = io.WriteString(c, "{")
			require.NoError(t, err)
		}
		code, body := do(t, "POST", tt.URL+"/v1/completions", `{"prompt":"hi"}`)
		require.Equal(t, 200, code, "%s: %s", tt.Name, body)
	}
}

// An engine that is killed leaves nothing in the folder for temporary files.
func TestKilledEngineLeavesNothing(t *testing.T) {
	tmp, err := os.MkdirTemp("/tmp", "kvport") //nolint:usetesting // short: unix sockets lie below it
	require.NoError(t, err)
	defer os.RemoveAll(tmp)
	t.Setenv("TMPDIR", tmp)
	p := startAny(t, "serve", "--model", "sim", "--port", "0", "--kv-transfer-config", config("kv_both", t.TempDir()))
	p.Kill()
	left, err := filepath.Glob(filepath.Join(tmp, "kvport-plugin-*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// Help names the flags of life.
func TestHelpOfLife(t *testing.T) {
	for _, command := range []string{"serve", "route"} {
		var out bytes.Buffer
		require.Zero(t, run([]string{command, "--help"}, &out, io.Discard))
		for _, flag := range []string{"--drain-timeout", "--allowed-host", "--max-connections"} {
			require.Contains(t, out.String(), flag)
		}
	}
}
