package bench

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
)

//go:embed peer.py
var peerScript string

// Peer is a Python interpreter in which other people's software is measured beside ours: llama.cpp if it
// has xllamacpp, safetensors if it has that. What it does not have is reported as absent.
type Peer struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers *bufio.Reader
}

// errAbsent says what a peer lacks.
var errAbsent = errors.New("absent")

// StartPeer starts an interpreter; with 0 threads it gets one for each CPU, and model is the GGUF file that llama.cpp is to load when it is first asked.
// The interpreter is killed when ctx ends.
func StartPeer(ctx context.Context, python, model string, threads int) (*Peer, error) {
	if threads == 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	p := &Peer{cmd: exec.CommandContext(ctx, python, "-c", peerScript, model, strconv.Itoa(threads))}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the peer: %w", err)
	}
	p.answers = bufio.NewReader(out)
	return p, nil
}

// ask sends a command and gives the number that comes back. Errors wrap errAbsent if the peer is not there.
func (p *Peer) ask(command string, args ...any) (float64, error) {
	if p == nil {
		return 0, fmt.Errorf("no --peer-python: %w", errAbsent)
	}
	if _, err := fmt.Fprintln(p.in, append([]any{command}, args...)...); err != nil {
		return 0, fmt.Errorf("peer: %w", err)
	}
	line, err := p.answers.ReadString('\n')
	if err != nil {
		return 0, fmt.Errorf("peer ended at %q: %w", command, err)
	}
	line = strings.TrimSpace(line)
	if why, isAbsent := strings.CutPrefix(line, "absent "); isAbsent {
		return 0, fmt.Errorf("%s: %w", why, errAbsent)
	}
	return strconv.ParseFloat(line, 64)
}

// has asks once whether a command works; if it does not, a row says so.
func (p *Peer) has(emit Emit, name, command string, args ...any) (bool, error) {
	_, err := p.ask(command, args...)
	if errors.Is(err, errAbsent) {
		return false, emit(absent(name, strings.TrimSuffix(err.Error(), ": "+errAbsent.Error())))
	}
	return err == nil, err
}

// Close ends the interpreter. A nil Peer has none.
func (p *Peer) Close() error {
	if p == nil {
		return nil
	}
	return errors.Join(p.in.Close(), p.cmd.Wait())
}
