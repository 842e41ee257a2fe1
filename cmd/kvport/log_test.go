package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/verify/cluster"
)

// readLine checks one line of a log and gives its keys and values. Decoding into a map would hide a key that
// appears twice.
func readLine(t *testing.T, line string) map[string]any {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(line))
	open, err := d.Token()
	require.NoError(t, err, line)
	require.Equal(t, json.Delim('{'), open, line)
	out := map[string]any{}
	for d.More() {
		key, err := d.Token()
		require.NoError(t, err, line)
		name, ok := key.(string)
		require.True(t, ok, line)
		require.NotContains(t, out, name, "a key appears twice: %s", line)
		var value any
		require.NoError(t, d.Decode(&value), line)
		if list, is := value.([]any); is && len(list) > 0 {
			_, number := list[0].(float64)
			require.False(t, number, "bytes as numbers: %s", line)
		}
		out[name] = value
	}
	for _, name := range []string{"err", "timestamp"} {
		require.NotContains(t, out, name, "another name for what has one: %s", line)
	}
	return out
}

func TestLogValues(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{ReplaceAttr: plainAttr}))
	hash := connector.NewFingerprint("test")
	log.Warn("m", "pause", 30*time.Second, "base", hash, "key", connector.BlockKey{1, 2}, "raw", []byte{1, 255}, "err", io.EOF,
		"sum", [2]byte{3, 4}, "nothing", nil, "joined", errors.Join(io.EOF))
	got := readLine(t, out.String())
	for key, want := range map[string]any{
		"pause": "30s", "base": hash.String(), "key": connector.BlockKey{1, 2}.String(), "raw": "01ff", "error": "EOF", "sum": "0304", "nothing": nil, "joined": "EOF",
	} {
		require.Equal(t, want, got[key], key)
	}
}

// Every line of an engine with a plugin, at the most talkative level, can be read by a machine: each key is
// there once, and bytes and durations are text. The plugin is killed, since its end has most to say.
func TestLogLines(t *testing.T) {
	path, err := exec.LookPath("kvport")
	require.NoError(t, err)
	var log bytes.Buffer
	transfer := fmt.Sprintf(`{"kv_connector":"Demo","kv_role":"kv_both","kvport":{"breaker":{"deaths":1,"cooldown":"50ms"}},"kv_connector_extra_config":{"dir":%q}}`, t.TempDir())
	p, err := cluster.Start(t.Context(), &log, "serve", path, "serve", "--model", "sim", "--port", "0", "--log-level", "debug", "--kv-transfer-config", transfer)
	require.NoError(t, err)
	var client cluster.Client
	_, err = client.Complete(t.Context(), p.URL, cluster.Request{Prompt: strings.Repeat("a prompt ", 20), MaxTokens: 4, IgnoreEOS: true})
	require.NoError(t, err)
	h, err := client.Health(t.Context(), p.URL)
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(h.Connector.PID, syscall.SIGKILL))
	require.Eventually(t, func() bool {
		now, err := client.Health(t.Context(), p.URL)
		return err == nil && now.Connector.State == "ready" && now.Connector.PID != h.Connector.PID
	}, time.Minute, 5*time.Millisecond)
	require.NoError(t, p.Stop(t.Context()))
	said := map[string]map[string]any{}
	for line := range strings.Lines(log.String()) {
		if _, object, ok := strings.Cut(line, "{"); ok {
			one := readLine(t, "{"+object)
			said[fmt.Sprint(one["msg"])] = one
		}
	}
	for _, message := range []string{"opened", "plugin is gone", "plugin keeps dying, it is left alone for a while", "plugin process exited", "request", "draining"} {
		require.Contains(t, said, message)
	}
	require.Equal(t, "50ms", said["plugin keeps dying, it is left alone for a while"]["pause"])
	opened := said["opened"]
	require.Equal(t, "mine", opened["own_plugin"])
	require.Equal(t, "kvport-demo", opened["plugin"])
	require.Equal(t, "1m0s", opened["pause"])
	require.Len(t, opened["base"], 16)
	require.Len(t, opened["key"], 64)
}
