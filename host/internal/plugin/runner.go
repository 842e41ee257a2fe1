package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// runner starts a plugin process, notices its death and reaps it. It takes the place of go-plugin's
// own runner, which passes on our standard input and waits for the pipes before it waits for the
// process.
type runner struct {
	cmd            *exec.Cmd
	stdout, stderr *os.File
	lines          *plainLines // of stderr
	childEnds      []*os.File  // closed once the child has them
	fence          *Fence
	patience       patience
	abandon        func(*Fence) // gets a fence that does not come back, and owns it then; may be nil

	mu     sync.Mutex
	pid    int  // 0 until started
	gone   bool // reaped: the pid may belong to somebody else
	killed bool // by us
	left   bool // the fence did not come back
	err    error
	reaped chan struct{}

	// connected is closed when go-plugin has made its connection or given up. If it learned about the death
	// while it connects, it would forget the connection without closing it.
	connected chan struct{}

	pidfd    int                        // -1 until started
	announce func(pid, pidfd int) error // may be nil
}

// drainWait is how long a dead plugin's last output is read. A child of the plugin that got away
// could hold the pipes open for ever.
const drainWait = 200 * time.Millisecond

// newRunner takes a command whose output is not set. It owns what the child inherits, and the fence.
func newRunner(cmd *exec.Cmd, inherit []*os.File, f *Fence) (*runner, error) {
	r := &runner{cmd: cmd, childEnds: inherit, fence: f, reaped: make(chan struct{}), connected: make(chan struct{}), pidfd: -1}
	outR, outW, err := os.Pipe()
	if err != nil {
		r.closeFiles()
		return nil, err
	}
	r.stdout, r.childEnds = outR, append(r.childEnds, outW)
	errR, errW, err := os.Pipe()
	if err != nil {
		r.closeFiles()
		return nil, err
	}
	r.stderr, r.childEnds = errR, append(r.childEnds, errW)
	r.lines = newPlainLines(errR)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = outW, errW, inherit
	cmd.SysProcAttr.PidFD = &r.pidfd
	return r, nil
}

func (r *runner) closeFiles() {
	for _, f := range append(r.childEnds, r.stdout, r.stderr) {
		if f != nil {
			_ = f.Close()
		}
	}
	r.fence.close()
}

// Start implements go-plugin's runner.Runner.
func (r *runner) Start(context.Context) error {
	started := make(chan error)
	go r.keep(started)
	err := <-started
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(r.pidfd) }()
	if r.announce == nil {
		return nil
	}
	if r.pidfd < 0 {
		err = errors.New("this kernel has no pidfds")
	} else {
		err = r.announce(r.id(), r.pidfd)
	}
	if err != nil {
		r.kill()
		<-r.reaped
		_, _ = r.stdout.Close(), r.stderr.Close() // Wait will not be called
		return fmt.Errorf("the plugin's start could not be announced: %w", err)
	}
	return nil
}

// keep starts the process, waits for its death and reaps it. The kernel kills a child with
// Pdeathsig when the thread that started it ends, so this goroutine keeps its thread as long as the
// child lives. Waiting on that thread with WNOWAIT shows the death as early as a pidfd would; the
// dead process still keeps its number then, so that its group can be killed safely.
func (r *runner) keep(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := r.cmd.Start()
	for _, f := range r.childEnds {
		_ = f.Close()
	}
	r.childEnds = nil
	if err != nil {
		r.closeFiles()
		started <- err
		return
	}
	pid := r.cmd.Process.Pid
	r.mu.Lock()
	r.pid = pid
	r.mu.Unlock()
	started <- nil
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	r.mu.Lock()
	_ = unix.Kill(-pid, unix.SIGKILL)
	r.err = r.cmd.Wait()
	r.gone = true
	r.mu.Unlock()
	r.letGo()
	deadline := time.Now().Add(drainWait)
	_ = r.stdout.SetReadDeadline(deadline)
	_ = r.stderr.SetReadDeadline(deadline)
	close(r.reaped)
}

// letGo waits until nobody can write the plugin's memory any more, or gives up.
func (r *runner) letGo() {
	if r.fence.wait(r.patience) {
		r.fence.close()
		return
	}
	r.mu.Lock()
	r.left = true
	r.mu.Unlock()
	if r.abandon == nil {
		r.fence.close()
		return
	}
	r.abandon(r.fence)
}

// waiting says that the process is dead, and that its fence is waited for.
func (r *runner) waiting() bool {
	select {
	case <-r.reaped:
		return false
	default:
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.gone
}

// abandoned says that the process is dead and its fence will not be waited for any longer.
func (r *runner) abandoned() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.left
}

// kill ends the process and its group with SIGKILL. It does not wait.
func (r *runner) kill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pid != 0 && !r.gone {
		r.killed = true
		_ = unix.Kill(-r.pid, unix.SIGKILL)
	}
}

// status is how the process ended; nil before and after a clean exit.
func (r *runner) status() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

func (r *runner) id() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pid
}

// Wait implements go-plugin's runner.AttachedRunner. It is called once, when the output is read.
func (r *runner) Wait(context.Context) error {
	<-r.reaped
	<-r.connected
	return errors.Join(r.status(), r.stdout.Close(), r.stderr.Close())
}

// Kill implements go-plugin's runner.AttachedRunner.
func (r *runner) Kill(context.Context) error {
	r.kill()
	return nil
}

// ID implements go-plugin's runner.AttachedRunner.
func (r *runner) ID() string {
	if pid := r.id(); pid != 0 {
		return strconv.Itoa(pid)
	}
	return ""
}

// Stdout implements go-plugin's runner.Runner.
func (r *runner) Stdout() io.ReadCloser { return r.stdout }

// Stderr implements go-plugin's runner.Runner.
func (r *runner) Stderr() io.ReadCloser { return r.lines }

// Name implements go-plugin's runner.Runner.
func (r *runner) Name() string { return r.cmd.Args[0] }

// Diagnose implements go-plugin's runner.Runner.
func (r *runner) Diagnose(context.Context) string {
	return "it must call sdk.Serve and print nothing before"
}

// PluginToHost implements go-plugin's runner.AddrTranslator.
func (r *runner) PluginToHost(network, addr string) (string, string, error) {
	return network, addr, nil
}

// HostToPlugin implements go-plugin's runner.AddrTranslator.
func (r *runner) HostToPlugin(network, addr string) (string, string, error) {
	return network, addr, nil
}
