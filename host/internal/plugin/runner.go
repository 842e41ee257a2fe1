package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/internal/strictjson"
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
	asked  bool // by us, where it is: it ends for that
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

// pipeRoom is the most that a pipe holds.
const pipeRoom = 64 << 10

// pipe is our end of what a plugin writes. Its deadline ends the wait for more: what is in the pipe by then is read
// all the same, however late a busy machine runs us.
type pipe struct {
	*os.File
	late int // bytes that were read after the deadline
}

// Read implements io.Reader.
func (p *pipe) Read(b []byte) (int, error) {
	n, err := p.File.Read(b)
	if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) || p.late >= pipeRoom {
		return n, err
	}
	raw, closed := p.SyscallConn()
	if closed != nil {
		return 0, err
	}
	n = -1
	_ = raw.Control(func(fd uintptr) { n, _ = unix.Read(int(fd), b) })
	switch {
	case n < 0: // nothing is there
		return 0, err
	case n == 0:
		return 0, io.EOF
	}
	p.late += n
	return n, nil
}

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
	r.lines = newPlainLines(&pipe{File: errR})
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

// A process that hangs may take answerLooks times answerPause to say where: on a busy machine it takes a while until it runs.
const (
	answerPause = time.Second
	answerLooks = 10
)

// ask has a process that hangs say where, by SIGQUIT: a Go program writes the stacks of its goroutines to standard error and
// ends. It gives what the process has written since, or else what the kernel said of its threads before, and reports whether it lived.
func (r *runner) ask() (said []string, lived bool) {
	var known []string
	r.mu.Lock()
	pid := r.pid
	if lived = pid != 0 && !r.gone; lived {
		r.asked = true
		known = threads(pid)
		r.lines.ask()
		_ = unix.Prlimit(pid, unix.RLIMIT_CORE, &unix.Rlimit{}, nil) // a program that does not know the signal leaves no file
		_ = unix.Kill(pid, unix.SIGQUIT)
	}
	r.mu.Unlock()
	if !lived {
		return nil, false
	}
	said = r.answer(pid)
	if !slices.ContainsFunc(said, func(line string) bool { return strings.TrimSpace(line) != "" }) {
		said = known
	}
	return said, true
}

// answer waits until a process that was asked where it is has said all, and gives that.
func (r *runner) answer(pid int) []string {
	for looks, before := 0, 0; looks < answerLooks; looks++ {
		select {
		case <-r.lines.ended:
			return r.lines.answer()
		case <-time.After(answerPause):
		}
		n := len(r.lines.answer())
		if n > 0 && n == before || isStopped(pid) {
			break // it has said all and goes on, or says nothing
		}
		before = n
	}
	return r.lines.answer()
}

// isStopped reports whether a process is stopped, as by SIGSTOP.
func isStopped(pid int) bool { return stateOf(fmt.Sprintf("/proc/%d/stat", pid)) == 'T' }

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
func (r *runner) Stdout() io.ReadCloser { return &pipe{File: r.stdout} }

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

// Blame completes the error of a phase that the plugin did not live through or did not answer in: with how
// its process ended and the last line that it wrote to standard error. The process must be reaped.
func (p *Process) Blame(err error) error {
	if how := p.run.ending(); how != "" {
		err = fmt.Errorf("%w; its process ended: %s", err, how)
	}
	if line := p.run.lines.lastLine(); line != "" {
		err = fmt.Errorf("%w; its last line on standard error: %s", err, strictjson.Quote(line))
	}
	return err
}

// ending is how the process ended; empty if it was we who killed it, or it never ran.
func (r *runner) ending() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.gone || r.asked {
		return ""
	}
	exit, failed := errors.AsType[*exec.ExitError](r.err)
	switch {
	case r.err == nil:
		return "exit status 0"
	case !failed:
		return r.err.Error()
	}
	if ws, ok := exit.Sys().(syscall.WaitStatus); ok && r.killed && ws.Signaled() && ws.Signal() == syscall.SIGKILL {
		return ""
	}
	return exit.Error()
}

// Silent reports whether an error says that the plugin gave no answer, rather than a bad one.
func Silent(err error) bool {
	return errors.Is(err, ErrLost) || errors.Is(err, ErrUnanswered) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// OutOfTime reports whether a call has failed because of its deadline. The other side counts too, and
// may be a little ahead.
func OutOfTime(ctx context.Context) bool {
	const ahead = 100 * time.Millisecond
	d, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && time.Until(d) < ahead
}

// note remembers a line for the message about a plugin that failed. The message of a panic is
// not replaced by its trace.
func (p *plainLines) note(line string) {
	var log struct {
		Message string `json:"@message"`
	}
	if json.Unmarshal([]byte(line), &log) == nil && log.Message != "" {
		line = log.Message
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keep(strings.TrimRight(line, " \r\n"))
	line = strings.TrimSpace(line)
	if line != "" && !crashed(p.last) {
		p.last = line
	}
}

// tailLines and tailLine bound what is kept of a plugin's last lines.
const tailLines, tailLine = 12, 300

// keep keeps the last lines. A panic begins with what it is and where, so that of its trace the first lines are
// kept.
func (p *plainLines) keep(line string) {
	died := len(p.tail) > 0 && crashed(p.tail[0])
	switch {
	case line == "" || died && len(p.tail) == tailLines:
		return
	case !died && crashed(line):
		p.tail = nil
	case len(p.tail) == tailLines:
		p.tail = p.tail[1:]
	}
	if len(line) > tailLine {
		line = strings.ToValidUTF8(line[:tailLine], "") + "..."
	}
	p.tail = append(p.tail, line)
}

// crashed reports whether a line is the first of the Go runtime's last words.
func crashed(line string) bool {
	return strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ")
}

// lastLines is what keep keeps.
func (p *plainLines) lastLines() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.tail)
}

// LastWords says how the process ended, if it did so by itself, and which lines it wrote to standard error last.
// Of the trace of a panic they are the first lines.
func (p *Process) LastWords() (ended string, lines []string) {
	return p.run.ending(), p.run.lines.lastLines()
}

// Write implements io.Writer for what a plugin that serves prints: it comes over its connection.
func (p *plainLines) Write(b []byte) (int, error) {
	for line := range strings.Lines(string(b)) {
		p.note(line)
	}
	return len(b), nil
}

// lastLine is what note remembers.
func (p *plainLines) lastLine() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last
}
