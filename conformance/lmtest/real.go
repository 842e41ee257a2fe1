package lmtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kvport/kvport/internal/machine"
)

// PythonVariable names a Python that has LMCache 0.5.6 and torch, 2 GB that make deps does not fetch.
const PythonVariable = "KVPORT_LMCACHE_PYTHON"

// ErrNoLMCache says that this machine has no LMCache.
var ErrNoLMCache = errors.New("run scripts/vllm_setup.py, or set " + PythonVariable + " to a Python with lmcache==0.5.6, to run LMCache's server")

// python finds a Python with LMCache: the one that is named, or that of the tests under a real vLLM in the repository at root.
func python(root string) (path string, env []string, err error) {
	if path = os.Getenv(PythonVariable); path != "" {
		return path, nil, nil
	}
	folder := filepath.Join(root, ".deps", "vllm")
	path = filepath.Join(folder, "venv", "bin", "python")
	for _, need := range []string{path, filepath.Join(folder, "lmcache", "lmcache", "v1", "server")} {
		if _, err := os.Stat(need); err != nil {
			return "", nil, ErrNoLMCache
		}
	}
	return path, []string{"PYTHONPATH=" + filepath.Join(folder, "lmcache")}, nil
}

// Real is LMCache's own server, a process.
type Real struct {
	Address string
	cmd     *exec.Cmd
	output  bytes.Buffer
	ended   chan struct{}
}

// StartReal runs LMCache's server on loopback. root is the repository. Errors wrap ErrNoLMCache if there is none. Close ends it.
func StartReal(ctx context.Context, root string) (*Real, error) {
	path, env, err := python(root)
	if err != nil {
		return nil, err
	}
	port, err := machine.FreePort(ctx)
	if err != nil {
		return nil, err
	}
	r := &Real{Address: net.JoinHostPort("127.0.0.1", port), ended: make(chan struct{})}
	r.cmd = exec.CommandContext(ctx, path, "-m", "lmcache.v1.server", "127.0.0.1", port)
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	r.cmd.Env, r.cmd.Stdout, r.cmd.Stderr = append(os.Environ(), env...), &r.output, &r.output
	if err := r.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(r.ended)
		_ = r.cmd.Wait()
	}()
	for { // to import torch takes as long as the machine lets it
		if c, err := Dial(ctx, r.Address); err == nil {
			return r, c.Close()
		}
		select {
		case <-r.ended:
			return nil, fmt.Errorf("LMCache's server has ended: %s", r.output.String())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Close ends the process and gives what it has printed.
func (r *Real) Close() (output string) {
	_ = r.cmd.Process.Kill()
	<-r.ended
	return r.output.String()
}
