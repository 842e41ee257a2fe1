package conformance

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/kvport/kvport/host"
)

func byHandCases() []Case {
	return []Case{
		lifeCase("by-hand", "LIFE-07", "A plugin that is started by hand ends by itself, and its exit code is not 0.", byHand),
		lifeCase("host-death", "LIFE-08", "A plugin ends within 5 s when the process that started it is killed.", hostDeath),
	}
}

const endWait = 5 * time.Second

// program is the plugin's binary. Without one the case does not apply.
func (r *rig) program() string {
	r.Helper()
	if p, ok := r.harness().(Runner); ok {
		return p.Program()
	}
	r.Skipf("the connector is no program here; kvport conform runs a binary")
	return ""
}

func byHand(r *rig) {
	path := r.program()
	ctx, cancel := context.WithTimeout(r.Context(), endWait)
	defer cancel()
	cmd := exec.CommandContext(ctx, path)
	cmd.WaitDelay = time.Second
	var out bytes.Buffer
	cmd.Stdout = &out
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		r.Errorf("started by hand it still runs after %v", endWait)
	case err == nil:
		r.Errorf("started by hand it ends with success; nothing says that it was started in a wrong way")
	case !errors.As(err, &exit):
		r.must(err, "start %s", path)
	}
	if line, _, _ := strings.Cut(out.String(), "\n"); strings.Count(line, "|") >= 4 {
		r.Errorf("started by hand it prints a handshake: %q", line)
	}
}

// socketDirEnv names the folder in which go-plugin's end in the plugin makes its socket.
const socketDirEnv = "PLUGIN_UNIX_SOCKET_DIR"

// hostDeath starts a second plugin process under a shell, with the environment of the first, waits
// for its handshake and kills the shell.
func hostDeath(r *rig) {
	path := r.program()
	e := r.closed(setup{})
	environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", e.process().PID()))
	r.must(err, "environment of the plugin")
	output, input, err := os.Pipe()
	r.must(err, "pipe")
	defer output.Close()
	cmd := exec.CommandContext(r.Context(), "/bin/sh", "-c", `"$0" & echo $! >&2; wait`, path)
	// The folder of the first plugin's socket is gone since that plugin is connected.
	sockets, err := host.SocketDir()
	r.must(err, "folder of a socket")
	defer os.RemoveAll(sockets)
	cmd.Env = append(strings.FieldsFunc(string(environment), func(c rune) bool { return c == 0 }), socketDirEnv+"="+sockets)
	cmd.Stdout = input
	pids, err := cmd.StderrPipe()
	r.must(err, "pipe")
	r.must(errors.Join(cmd.Start(), input.Close()), "start a shell")
	var pid int
	_, err = fmt.Fscanln(io.LimitReader(pids, 32), &pid)
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		r.must(err, "start the plugin under a shell")
	}
	// What the plugin writes to its log would block it if nobody read it.
	go func() { _, _ = io.Copy(io.Discard, pids) }()
	lines := bufio.NewReader(output)
	_ = output.SetReadDeadline(time.Now().Add(endWait))
	handshake, err := lines.ReadString('\n')
	started := err == nil && strings.Count(handshake, "|") >= 4
	_ = cmd.Process.Kill()
	if started {
		// The plugin's end closes its standard output, whoever reaps it.
		_ = output.SetReadDeadline(time.Now().Add(endWait))
		_, err = io.Copy(io.Discard, lines)
	}
	if !started || err != nil {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	_ = pids.Close()
	_ = cmd.Wait()
	switch {
	case !started:
		r.Errorf("started by a shell it prints %q, want one line of the handshake", handshake)
	case err != nil:
		r.Errorf("it still runs %v after the process that started it was killed", endWait)
	}
}
