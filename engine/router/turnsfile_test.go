package router

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTurnsSurviveRestart: a router's next life tells prefill instances of the answers that the last one remembered, of
// instances that are still there; and the file is nobody else's to read.
func TestTurnsSurviveRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "turns")
	p, d := serveInstance(t, ticket("of P")), serveInstance(t, held("of D", false))
	live := func(decode string, body fields) {
		f := serveRouter(t, Config{Prefill: []string{p.URL}, Decode: []string{decode}, Turns: 10, TurnsFile: path})
		ctx, stop := context.WithCancel(t.Context())
		over := make(chan struct{})
		go func() {
			f.router.Run(ctx)
			close(over)
		}()
		f.ask(t, body)
		stop()
		<-over
	}
	long := strings.Repeat("long ", 20)
	live(d.URL, chat(long))
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	files, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, files, 1)

	told := func() (params string) {
		for _, s := range p.requests() { // probes are among them
			if s.path == "/v1/chat/completions" {
				params = string(s.body["kv_transfer_params"])
			}
		}
		return params
	}
	for range 2 {
		live(d.URL, chat(long, "answer", "next"))
		require.Contains(t, told(), `"kvport_ticket":"of D"`)
	}
	other := serveInstance(t, held("of another", false))
	live(other.URL, chat(long, "answer", "next"))
	require.NotContains(t, told(), "kvport_ticket", "its instance is gone")
}

func TestTurnsFileRefused(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "none", "turns")
	var log strings.Builder
	open := func() error {
		log.Reset()
		r, err := New(Config{
			Prefill: []string{"http://a:1"}, Decode: []string{"http://a:2"}, Turns: 1, TurnsFile: path,
			Log: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err == nil {
			r.Close()
		}
		return err
	}
	require.ErrorIs(t, open(), os.ErrNotExist, "its folder is not there")
	path = filepath.Join(dir, "turns")
	require.NoError(t, open(), "there is none yet")
	require.Empty(t, log.String())
	for content, want := range map[string]string{
		"{": "unexpected end of JSON input", `{"version":2}`: "version is 2, want 1", "": "unexpected end of JSON input", "\x00\x00": "invalid character",
		`{"version":1,"seed":"1","turns":[{"mark":"-1"}]}`: "cannot unmarshal",
	} {
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		require.NoError(t, open(), "a file that means nothing is no reason not to start")
		require.Contains(t, log.String(), "level=WARN")
		require.Contains(t, log.String(), want)
		require.Contains(t, log.String(), path)
	}
	require.NoError(t, os.WriteFile(path, []byte(`{"version":1,"seed":"18446744073709551615","turns":[{"mark":"7","instance":"http://a:2","params":{}}]}`), 0o600))
	require.NoError(t, open())
	require.Empty(t, log.String())
	require.NoError(t, os.Chmod(path, 0o640))
	require.ErrorContains(t, open(), "chmod 600")
	require.ErrorContains(t, open(), "--bidirectional-file")
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.Mkdir(path, 0o700))
	require.ErrorContains(t, open(), "no regular file")
}
