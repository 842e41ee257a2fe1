package router

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/testkit"
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

// TestTurnsWaitForInstances: also answers on instances survive a restart that the router's next life finds only later, by DNS or
// because they register. Nothing of them is lost if that life ends before they come.
func TestTurnsWaitForInstances(t *testing.T) {
	p, d := serveInstance(t, ticket("of P")), serveInstance(t, held("of D", false))
	host := strings.TrimPrefix(d.URL, "http://")
	_, port, err := net.SplitHostPort(host)
	require.NoError(t, err)
	for name, come := range map[string]func(c *Config) (found func(r *Router)){
		"DNS": func(c *Config) func(*Router) {
			fake := &fakeResolver{names: map[string][]string{}}
			c.Decode, c.DNS = []string{"dns://decode:" + port}, DNS{Resolver: fake, Interval: time.Millisecond}
			return func(*Router) { fake.set(nil, "decode", "127.0.0.1") }
		},
		"registration": func(c *Config) func(*Router) {
			c.Register = signer(time.Minute)
			return func(r *Router) {
				code, text := say(t, r, true, old("D", host, "", time.Now().UnixNano()))
				require.Equal(t, 200, code, text)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "turns")
			live := func(comes bool, body fields) {
				c := Config{Prefill: []string{p.URL}, Turns: 10, TurnsFile: path}
				found := come(&c)
				f := serveRouter(t, c)
				stop := running(t, f.router)
				defer stop()
				if !comes {
					return
				}
				found(f.router)
				require.Eventually(t, func() bool { return f.router.Ready() == "" }, waitLimit, waitTick)
				f.ask(t, body)
			}
			long := strings.Repeat("long ", 20)
			live(true, chat(long))
			live(false, nil)
			before := len(p.requests())
			live(true, chat(long, "answer", "next"))
			told := ""
			for _, s := range p.requests()[before:] { // probes are among them
				told += string(s.body["kv_transfer_params"])
			}
			require.Contains(t, told, `"kvport_ticket":"of D"`)
		})
	}
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

// TestTurnsOfBothPartsAreRestored: an instance that is given as prefill and as decode instance has its answers in the file
// as the latter.
func TestTurnsOfBothPartsAreRestored(t *testing.T) {
	path := filepath.Join(t.TempDir(), "turns")
	require.NoError(t, os.WriteFile(path, []byte(`{"version":1,"seed":"1","turns":[{"mark":"7","instance":"http://a:1","params":{"kvport_ticket":"T"}}]}`), 0o600))
	list := []string{"http://a:1", "http://b:1"}
	r, err := New(Config{Prefill: list, Decode: list, Turns: 10, TurnsFile: path})
	require.NoError(t, err)
	defer r.Close()
	c := &call{router: r, marks: []uint64{7}}
	params := c.lastTurn(target{index: r.pool.find(prefill, at(t, list[1]))})
	require.Contains(t, string(params), `"kvport_ticket":"T"`)
}

// TestTurnsFileFits: a file has as many turns as fit, those that were used last, and none that serves once.
func TestTurnsFileFits(t *testing.T) {
	turns := newTurns(100)
	for i := range uint64(100) {
		turns.keep([]uint64{i}, 0, "http://a", fmt.Appendf(nil, `{"kvport_ticket":"%s"}`, strings.Repeat("<", int(i)))) // which is longer in the file
	}
	turns.keep([]uint64{50}, 0, "http://a", json.RawMessage(`{"remote_block_ids":[1]}`))
	whole := turns.snapshot()
	require.Len(t, whole.Turns, 99)
	before := 0
	for limit := 200; limit < 40000; limit += 100 {
		data, err := whole.encode(limit)
		require.NoError(t, err)
		require.LessOrEqual(t, len(data), limit)
		f := &turnsFile{}
		require.NoError(t, json.Unmarshal(data, f))
		require.Equal(t, whole.Seed, f.Seed)
		n := len(f.Turns)
		require.GreaterOrEqual(t, n, before)
		if before = n; n == len(whole.Turns) {
			continue
		}
		for i, s := range f.Turns {
			require.Equal(t, whole.Turns[len(whole.Turns)-n+i].Mark, s.Mark)
		}
		next, err := json.Marshal(whole.Turns[len(whole.Turns)-n-1])
		require.NoError(t, err)
		require.Greater(t, len(data)+len(next)+turnsFileHead, limit, "one more would fit")
	}
	require.Equal(t, len(whole.Turns), before)
}

// TestTurnsAreWrittenLater: what could not be written is tried again, though nothing has changed meanwhile.
func TestTurnsAreWrittenLater(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gone", "turns")
	synctest.Test(t, func(t *testing.T) {
		p := newTestPool(t)
		defer p.close()
		require.NoError(t, p.set(byFlag, []spec{{role: decode, url: at(t, "http://a")}}))
		var log testkit.Log
		r := &Router{config: Config{TurnsFile: path, Log: logTo(&log)}, pool: p, turns: newTurns(1)}
		r.turns.keep([]uint64{7}, 0, "http://a", json.RawMessage(`{"kvport_ticket":"T"}`))
		ctx, stop := context.WithCancel(t.Context())
		over := make(chan struct{})
		go func() {
			r.saveTurns(ctx)
			close(over)
		}()
		<-time.After(saveTurnsEvery + time.Second)
		require.Contains(t, log.String(), "could not be written")
		require.NoError(t, os.Mkdir(filepath.Dir(path), 0o700))
		<-time.After(saveTurnsEvery)
		f, err := readTurns(path, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		require.Len(t, f.Turns, 1)
		stop()
		<-over
	})
}
