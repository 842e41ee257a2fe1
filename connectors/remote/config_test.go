package remote_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/remote"
	"github.com/kvport/kvport/sdk"
)

func decode(t *testing.T, config string) (remote.Config, error) {
	t.Helper()
	return sdk.DecodeConfig[remote.Config](json.RawMessage(config))
}

func env(log *strings.Builder) connector.Env {
	return connector.Env{Log: slog.New(slog.NewTextHandler(log, nil))}
}

func TestConfigErrorsNameTheField(t *testing.T) {
	for config, want := range map[string]string{
		`{"url":"redis://user:hunter2@h:1"}`:              "url has a user or a password in it",
		`{"url":"ftp://h"}`:                               `url has the scheme "ftp"`,
		`{"url":"redis://10.0.0.1:6379"}`:                 "url: 10.0.0.1:6379: plain text beyond this machine; write rediss:// for TLS, or set allow_plaintext",
		`{"url":"redis://127.0.0.1","tls_ca_file":"/x"}`:  "url: has no TLS, but tls_ fields are set",
		`{"url":"rediss://h","tls_cert_file":"/x"}`:       "tls_cert_file and tls_key_file: want both or neither",
		`{"url":"rediss://h","tls_ca_file":"x"}`:          `tls_ca_file: is "x", want an absolute path`,
		`{"url":"redis://127.0.0.1","password_file":"x"}`: `password_file: is "x", want an absolute path`,
		`{"password_file":"/x"}`:                          "password_file: is set, but url is not",
		`{"ttl_ms":-1}`:                                   "ttl_ms",
		`{"connections":65}`:                              "connections",
		`{"timeout_ms":1}`:                                "timeout_ms",
		`{"password":"x"}`:                                `unknown field "password", known are url`,
		`{"url":"redis://127.0.0.1","key_prefix":"` + strings.Repeat("x", 300) + `"}`: "key_prefix",
	} {
		_, err := decode(t, config)
		require.ErrorIs(t, err, connector.ErrIncompatible, config)
		require.ErrorContains(t, err, want, config)
		require.NotContains(t, err.Error(), "hunter2")
	}
	for _, config := range []string{
		``, `{"url":"redis://10.0.0.1","allow_plaintext":true}`, `{"url":"rediss://10.0.0.1"}`, `{"url":"unix:///x"}`, `{"url":"redis-cluster://127.0.0.1:1,127.0.0.1:2"}`,
	} {
		_, err := decode(t, config)
		require.NoError(t, err, config)
	}
}

// Without a server blocks are this engine's alone, and both Describe and the log say so.
func TestEmbedded(t *testing.T) {
	p := sdk.FromStore(sdk.Definition{Name: "remote in a test", Version: "1", Scope: remote.Scope}, remote.Open)
	for config, want := range map[string]connector.Scope{`{}`: connector.ScopeEngine, `{"url":"redis://127.0.0.1:1"}`: connector.ScopeShared} {
		info, err := p.Describe(t.Context(), json.RawMessage(config))
		require.NoError(t, err)
		require.Equal(t, want, info.Scope, config)
	}
	c, err := decode(t, `{"memory_bytes":2000}`)
	require.NoError(t, err)
	var log strings.Builder
	s, err := remote.Open(t.Context(), env(&log), c)
	require.NoError(t, err)
	require.Contains(t, log.String(), "url is empty")
	stored := func(n byte) int {
		found, err := s.Lookup(t.Context(), [][]connector.StoreKey{{{n}}})
		require.NoError(t, err)
		return found[0]
	}
	for n := range byte(4) { // each 548 bytes: three have room
		require.NoError(t, s.Put(t.Context(), []connector.Item{{Key: connector.StoreKey{n}, Spans: [][]byte{make([]byte, 500)}}}))
	}
	require.Equal(t, []int{0, 1, 1, 1}, []int{stored(0), stored(1), stored(2), stored(3)})
	require.NoError(t, s.Get(t.Context(), []connector.Item{{Key: connector.StoreKey{1}, Spans: [][]byte{make([]byte, 500)}}}))
	require.NoError(t, s.Put(t.Context(), []connector.Item{{Key: connector.StoreKey{9}, Spans: [][]byte{make([]byte, 500)}}}))
	require.Equal(t, []int{1, 0, 1, 1}, []int{stored(1), stored(2), stored(3), stored(9)}, "the one used last stays")
	require.ErrorIs(t, s.Put(t.Context(), []connector.Item{{Spans: [][]byte{make([]byte, 2000)}}}), connector.ErrIncompatible)
	require.ErrorIs(t, s.Get(t.Context(), []connector.Item{{Spans: [][]byte{nil}}}), connector.ErrGone)
	require.ErrorIs(t, s.Get(t.Context(), []connector.Item{{Key: connector.StoreKey{9}, Spans: [][]byte{make([]byte, 499)}}}), connector.ErrCorrupt)
	require.NoError(t, s.Close())
}

// The password comes from a file or the environment; a wrong one is an error of its field, and neither the error
// nor the log shows it.
func TestPasswords(t *testing.T) {
	const right, wrong = "right-password", "wrong-password"
	srv, err := redistest.Start("--requirepass", right)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, srv.Close()) })
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "password")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	for name, test := range map[string]struct {
		file, variable, user string
		want                 string
	}{
		"file":              {file: right + "\n"},
		"variable":          {variable: right},
		"file wins":         {file: right, variable: wrong},
		"user by variable":  {file: right, user: "default"},
		"wrong file":        {file: wrong, want: "password_file: server " + srv.Address + ` refuses user "default"`},
		"wrong variable":    {variable: wrong, want: remote.PasswordVariable + ": server"},
		"none":              {want: remote.PasswordVariable + ": server"},
		"unknown user":      {file: right, user: "nobody", want: `refuses user "nobody"`},
		"file without text": {file: " \n", want: "password_file: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(remote.PasswordVariable, test.variable)
			t.Setenv(remote.UsernameVariable, test.user)
			config := remote.Config{URL: "redis://" + srv.Address, Prefix: "p:", Timeout: 3000, Connections: 1, MaxValue: 1 << 20}
			if test.file != "" {
				config.PasswordFile = file(test.file)
			}
			var log strings.Builder
			s, err := remote.Open(context.Background(), env(&log), config)
			if test.want == "" {
				require.NoError(t, err)
				require.NoError(t, s.Close())
			} else {
				require.ErrorIs(t, err, connector.ErrIncompatible)
				require.ErrorContains(t, err, test.want)
				require.NotContains(t, err.Error(), wrong)
				require.NotContains(t, err.Error(), right)
			}
			require.NotContains(t, log.String(), wrong)
			require.NotContains(t, log.String(), right)
		})
	}
	_, err = remote.Open(t.Context(), env(&strings.Builder{}), remote.Config{URL: "redis://" + srv.Address, PasswordFile: "/none/such", Connections: 1})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "password_file: ")
}

// TestBeyondMachine: only what is on loopback or a socket is seen by this machine alone.
func TestBeyondMachine(t *testing.T) {
	for url, want := range map[string]string{
		"": "", "redis://127.0.0.1:6379": "", "redis://localhost": "", "redis://[::1]:1": "", "unix:///run/redis.sock": "",
		"rediss://10.0.0.1": "url has the address 10.0.0.1:6379", "rediss://cache.example:1": "url has the address cache.example:1",
		"rediss-cluster://127.0.0.1:1,10.0.0.1:2": "url has the address 10.0.0.1:2", "nonsense": "",
	} {
		require.Equal(t, want, remote.Config{URL: url}.BeyondMachine(), url)
	}
}
