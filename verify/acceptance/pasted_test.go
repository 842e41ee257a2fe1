package acceptance

import (
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// pasted is a config as its source has it: testdata/pasted.json holds every one of the documents that kvport is built from
// and of the scripts that they cite. An engine serves with it, or ends with exit code 2 and the name of what is lacking.
type pasted struct {
	Source  string            `json:"source"` // file and line
	Config  string            `json:"config"` // @PORT@ is a free port
	Env     map[string]string `json:"env"`
	YAML    string            `json:"yaml"`    // for LMCACHE_CONFIG_FILE
	Lacks   string            `json:"lacks"`   // in the message of an engine that does not start; empty: it serves
	Warns   string            `json:"warns"`   // in the log of one that does
	Folder  string            `json:"folder"`  // that it makes, below the working folder
	Listens bool              `json:"listens"` // at @PORT@
}

// prepare makes a working folder and an environment for a row, and gives the config.
func (p *pasted) prepare(t *testing.T) (config, port string) {
	t.Helper()
	dir := t.TempDir()
	t.Chdir(dir)
	t.Setenv("XDG_CACHE_HOME", filepath.Join(dir, "cache"))
	port = rig.FreePort(t)
	for name, value := range p.Env {
		t.Setenv(name, strings.ReplaceAll(value, "@PORT@", port))
	}
	if p.YAML != "" {
		path := filepath.Join(dir, "lmcache.yaml")
		require.NoError(t, os.WriteFile(path, []byte(p.YAML), 0o600))
		t.Setenv("LMCACHE_CONFIG_FILE", path)
	}
	return strings.ReplaceAll(p.Config, "@PORT@", port), port
}

// Every config that people paste serves, or ends the start with the name of what this machine lacks.
func TestPastedConfigs(t *testing.T) {
	if testing.Short() {
		t.Skip("runs processes: left out with -short, which the race stage uses")
	}
	data, err := os.ReadFile("testdata/pasted.json")
	require.NoError(t, err)
	var rows []pasted
	require.NoError(t, json.Unmarshal(data, &rows))
	require.Greater(t, len(rows), 20)
	kvport := rig.Binary(t)
	for _, row := range rows {
		t.Run(row.Source, func(t *testing.T) {
			config, port := row.prepare(t)
			p, err := cluster.Start(t.Context(), nil, "engine", kvport, "serve", "--model", "sim", "--port", "0", "--kv-transfer-config", config)
			if row.Lacks != "" {
				requireUsage(t, p, err, row.Lacks)
				return
			}
			require.NoError(t, err)
			t.Cleanup(func() { rig.KillAll(t, p) })
			var client cluster.Client
			c, err := client.Complete(t.Context(), p.URL, cluster.Request{Prompt: strings.Repeat("as pasted ", 20), MaxTokens: 4, IgnoreEOS: true})
			require.NoError(t, err)
			require.Len(t, c.Tokens, 4)
			require.NoError(t, p.Logged(t.Context(), row.Warns))
			if row.Folder != "" {
				require.DirExists(t, row.Folder)
			}
			if row.Listens {
				conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", "127.0.0.1:"+port)
				require.NoError(t, err, p.Logs())
				require.NoError(t, conn.Close())
			}
		})
	}
}

// requireUsage checks that a start ended with exit code 2 and a message that contains some words.
func requireUsage(t *testing.T, p *cluster.Process, err error, words string) {
	t.Helper()
	if err == nil {
		p.Kill()
	}
	require.Error(t, err, "it serves")
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, 2, exit.ExitCode(), "%v", err)
	require.ErrorContains(t, err, words)
}

// The check that vLLM's start makes has the same opinion of every config, as far as it can without an engine.
func TestPastedConfigsAreChecked(t *testing.T) {
	if testing.Short() {
		t.Skip("runs processes: left out with -short, which the race stage uses")
	}
	data, err := os.ReadFile("testdata/pasted.json")
	require.NoError(t, err)
	var rows []pasted
	require.NoError(t, json.Unmarshal(data, &rows))
	kvport := rig.Binary(t)
	for _, row := range rows {
		if row.Lacks != "" {
			continue
		}
		t.Run(row.Source, func(t *testing.T) {
			config, _ := row.prepare(t)
			out, err := exec.CommandContext(t.Context(), kvport, "agent", "--check", "--kv-transfer-config", config).CombinedOutput()
			require.NoError(t, err, "%s", out)
		})
	}
}
