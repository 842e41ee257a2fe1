package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// blame completes the error of a phase that a plugin did not live through or did not answer in: with
// how its process ended and the last line that it wrote to standard error. The process must be reaped.
func (r *runner) blame(phase string, err error) error {
	if phase != "" {
		err = fmt.Errorf("%s: %w", phase, err)
	}
	if how := r.ending(); how != "" {
		err = fmt.Errorf("%w; its process ended: %s", err, how)
	}
	if line := r.lines.lastLine(); line != "" {
		err = fmt.Errorf("%w; its last line on standard error: %s", err, quote(line))
	}
	return err
}

// ending is how the process ended; empty if it was we who killed it, or it never ran.
func (r *runner) ending() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.gone {
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

// silent reports whether an error says that the plugin gave no answer, rather than a bad one.
func silent(err error) bool {
	return errors.Is(err, errLost) || errors.Is(err, errUnanswered) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// outOfTime reports whether a call has failed because of its deadline. The other side counts too, and
// may be a little ahead.
func outOfTime(ctx context.Context) bool {
	const ahead = 100 * time.Millisecond
	d, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && time.Until(d) < ahead
}

// note remembers a line for the message about a plugin that failed. What a panic says of itself is
// not replaced by its trace.
func (p *plainLines) note(line string) {
	var log struct {
		Message string `json:"@message"`
	}
	if json.Unmarshal([]byte(line), &log) == nil && log.Message != "" {
		line = log.Message
	}
	line = strings.TrimSpace(line)
	p.mu.Lock()
	defer p.mu.Unlock()
	if line != "" && !strings.HasPrefix(p.last, "panic: ") && !strings.HasPrefix(p.last, "fatal error: ") {
		p.last = line
	}
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
