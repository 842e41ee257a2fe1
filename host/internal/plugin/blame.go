package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvport/kvport/internal/strictjson"
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
		err = fmt.Errorf("%w; its last line on standard error: %s", err, strictjson.Quote(line))
	}
	return err
}

// Blame completes the error of a phase that the plugin did not live through or did not answer in: with how
// its process ended and the last line that it wrote to standard error.
func (p *Process) Blame(err error) error { return p.run.blame("", err) }

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
