// Package cluster runs kvport processes from the outside, as an operator would: it starts engines
// and routers, talks to them over HTTP, reads their metrics and looks at them through /proc. The
// demo, the acceptance tests and the benchmarks use it.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// readyLine is what `kvport serve` and `kvport route` print once they accept requests.
var readyLine = regexp.MustCompile(`^[^{]*\bready\b.*\burl=(https?://\S+)`)

// startTimeout covers reading and packing the real model's weights on a busy machine.
const startTimeout = 2 * time.Minute

// Process is a running kvport.
type Process struct {
	Name string
	URL  string // base URL, without a trailing slash
	cmd  *exec.Cmd
	logs *tail
	done chan struct{} // closed once the process is reaped
	err  error         // result of Wait, valid after done
}

// Start runs binary with args and waits until it prints its ready line. Output goes to log line by
// line, prefixed with name; log may be nil. The process gets SIGKILL if this one dies.
func Start(ctx context.Context, log io.Writer, name, binary string, args ...string) (*Process, error) {
	p := &Process{Name: name, logs: &tail{name: name, out: log, ready: make(chan string, 1)}, done: make(chan struct{})}
	// The process outlives ctx, which only bounds the start.
	p.cmd = exec.CommandContext(context.WithoutCancel(ctx), binary, args...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.cmd.Stdout, p.cmd.Stderr = p.logs, p.logs // one pipe: what was logged before the ready line has come when that has
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()

	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	select {
	case p.URL = <-p.logs.ready:
		return p, nil
	case <-p.done:
		return nil, fmt.Errorf("%s ended before it was ready: %w\n%s", name, errors.Join(p.err, errEnded), p.logs.last())
	case <-ctx.Done():
		p.Kill()
		return nil, fmt.Errorf("%s is not ready: %w\n%s", name, ctx.Err(), p.logs.last())
	}
}

var errEnded = errors.New("process ended")

// PID is the process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed once the process has ended and is reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Logs gives the last lines the process wrote.
func (p *Process) Logs() string { return p.logs.last() }

// logTimeout is how long Logged waits. What a process logs arrives through a pipe, so it may arrive after the
// answer to a request that was sent later.
const logTimeout = time.Minute

// Logged waits until the process has written text, and says what it wrote instead if it does not.
func (p *Process) Logged(ctx context.Context, text string) error {
	ctx, cancel := context.WithTimeout(ctx, logTimeout)
	defer cancel()
	for !strings.Contains(p.Logs(), text) {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s has not logged %q: %w\n%s", p.Name, text, ctx.Err(), p.Logs())
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}

// Signal sends sig to the process.
func (p *Process) Signal(sig syscall.Signal) error { return p.cmd.Process.Signal(sig) }

// Kill ends the process at once and waits until it is gone.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// Stop asks the process to drain and waits until it is gone, or kills it when ctx ends. The error
// says how it ended if not with exit code 0.
func (p *Process) Stop(ctx context.Context) error {
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.Name, err)
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		p.Kill()
		return fmt.Errorf("stop %s: %w", p.Name, ctx.Err())
	}
	if p.err != nil {
		return fmt.Errorf("stop %s: %w\n%s", p.Name, p.err, p.logs.last())
	}
	return nil
}

// tail passes output on and keeps the last lines for error messages.
type tail struct {
	name  string
	out   io.Writer
	ready chan string // gets the URL of the first ready line

	mu    sync.Mutex
	lines []string
	part  string
}

const tailLines = 40

// Write implements io.Writer.
func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.part += string(b)
	for {
		line, rest, found := strings.Cut(t.part, "\n")
		if !found {
			return len(b), nil
		}
		t.part = rest
		if m := readyLine.FindStringSubmatch(line); m != nil {
			select {
			case t.ready <- strings.TrimRight(m[1], "/"):
			default:
			}
			continue
		}
		if t.lines = append(t.lines, line); len(t.lines) > tailLines {
			t.lines = slices.Delete(t.lines, 0, 1)
		}
		if t.out != nil {
			fmt.Fprintf(t.out, "%s | %s\n", t.name, line)
		}
	}
}

func (t *tail) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(t.lines, "\n")
}
