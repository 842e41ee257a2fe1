package lmcache_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// pythonVariable names a Python that has LMCache 0.5.6 and torch, 2 GB that make deps does not fetch.
const pythonVariable = "KVPORT_LMCACHE_PYTHON"

// lmcachePython finds a Python with LMCache: the one that is named, or the one of the tests under a real vLLM.
func lmcachePython(t *testing.T) (python string, env []string) {
	t.Helper()
	if python = os.Getenv(pythonVariable); python != "" {
		return python, nil
	}
	folder, err := filepath.Abs("../../.deps/vllm")
	require.NoError(t, err)
	python = filepath.Join(folder, "venv", "bin", "python")
	for _, path := range []string{python, filepath.Join(folder, "lmcache", "lmcache", "v1", "server")} {
		if _, err := os.Stat(path); err != nil {
			return "", nil
		}
	}
	return python, []string{"PYTHONPATH=" + filepath.Join(folder, "lmcache")}
}

// TestRealServer runs LMCache's own cache server and the profile store on it: what it speaks is what the
// client speaks. Without LMCache the test says that it has not run; connectors/internal/remote then has only the
// headers that were recorded from it.
func TestRealServer(t *testing.T) {
	if testing.Short() {
		t.Skip("half a minute of processes: left out with -short")
	}
	python, env := lmcachePython(t)
	if python == "" {
		t.Skipf("NOT RUN: run scripts/vllm_setup.py, or set %s to a Python with lmcache==0.5.6, to run LMCache's server", pythonVariable)
	}
	clean(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	require.NoError(t, l.Close())
	cmd := exec.CommandContext(t.Context(), python, "-m", "lmcache.v1.server", "127.0.0.1", port)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var output bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), env...), &output, &output
	require.NoError(t, cmd.Start())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Logf("LMCache's server:\n%s", output.String())
		}
	})
	for up := false; !up; { // to import torch takes as long as the machine lets it
		if c, err := net.Dial("tcp", "127.0.0.1:"+port); err == nil {
			up = true
			require.NoError(t, c.Close())
		}
		select {
		case <-ended:
			require.FailNow(t, "LMCache's server has ended")
		case <-time.After(100 * time.Millisecond):
		}
	}
	config := fmt.Sprintf(`{"lmcache.chunk_size": 4, "lmcache.local_cpu": false, "lmcache.remote_url": "lm://127.0.0.1:%s"}`, port)
	conformance.Run(t, conformance.InProcess(plugin(), json.RawMessage(config)))
	conformance.Run(t, conformance.Wire(plugin(), json.RawMessage(config)), conformance.Store, conformance.MultiRank, conformance.Groups)
}
