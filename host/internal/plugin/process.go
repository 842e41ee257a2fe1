// Package plugin is the process plane of a host: it finds a connector's plugin, starts its process, watches it, reaps
// it with all that it has started, and speaks to it. A [Process] is one life of a plugin and is not restarted; a
// [Remote] is a plugin at the other end of any connection. What a life is for, and what comes after it, is the host's.
package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	pluginrunner "github.com/hashicorp/go-plugin/runner"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/kvport/kvport/host/internal/config"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/sandbox"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/strictjson"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// Region is the paged cache of one rank, as a plugin process is given it.
type Region struct {
	File *os.File // a sealed memfd; it stays the host's
	Size int64
}

// Arena is memory that a connector asked for, as a plugin process is given it.
type Arena struct {
	File  *os.File      // a memfd; it stays the host's
	Bytes func() []byte // as this process sees it; nil before it has its size
}

// Heartbeat says how a hung plugin is noticed.
type Heartbeat struct {
	Interval time.Duration
	Limit    time.Duration // a plugin that could have answered for so long and did not is killed
}

// Options say what a plugin process gets. Durations must be positive.
type Options struct {
	Regions     []Region // the paged cache of each rank
	Arena       *Arena   // what sides may have as Env.Arena; nil: none
	Log         *slog.Logger
	Environment []string // names of environment variables that are passed on, if set; nothing else is
	Handshake   time.Duration
	Heartbeat   Heartbeat
	NoRing      bool              // all messages go over the stream
	Sandbox     *sandbox.Spec     // in which the process runs, and gets its socket's folder; nil: outside
	Violated    func(what string) // may be nil

	// Where gets what a process that hangs writes to standard error when SIGQUIT asks it where, before it is killed, or lines that begin with
	// OfKernel if it writes nothing; nil: it is killed without being asked.
	Where func(said []string)

	// Started, unless nil, gets the process before one of its sides is opened. pidfd is only lent for
	// the call. An error ends the process, and its start with that error.
	Started func(pid, pidfd int) error

	Fence   time.Duration   // how long those are waited for that may write the memory of a plugin which is dead
	Hurry   <-chan struct{} // closed when the host closes: then they are waited for only shortly; may be nil
	Abandon func(*Fence)    // gets a Fence that does not come back, which is its own then; may be nil
}

// FirstRegionFD is the descriptor number of the first region in the plugin.
const FirstRegionFD = 3

// Process is one life of a plugin. It is watched, and killed when it hangs, but not restarted.
type Process struct {
	*Remote
	client *plugin.Client
	run    *runner
	board  *shm.Board
	dir    string   // of its socket; empty once the connection stands
	lock   *os.File // of dir, held as long as that exists
	path   string   // of its binary
	mem    ringsRef // its rings
	where  func(said []string)
	asked  sync.Once // where it hangs

	mu     sync.Mutex
	reason error // why we killed it
	end    error

	beats   sync.WaitGroup
	beating context.Context //nolint:containedctx // done when no more heartbeats are asked for
	silence context.CancelFunc
	done    chan struct{}
}

// Launch starts a program and waits until it answers. ctx bounds the start only. Errors wrap
// config.Err and name the binary; nothing of a failed start is left behind.
func Launch(ctx context.Context, prog *Program, opts *Options) (*Process, error) {
	p := &Process{done: make(chan struct{}), path: prog.Path, where: opts.Where}
	p.beating, p.silence = context.WithCancel(context.Background())
	err := fault.Point("host.handshake.start")
	if err == nil {
		err = p.prepare(prog, opts)
	}
	if err == nil {
		err = p.start(ctx, opts)
	}
	if err != nil {
		p.cleanup()
		if p.run != nil {
			err = p.Blame(err)
		}
		return nil, fmt.Errorf("%w: plugin %s: %w", config.Err, prog.Path, err)
	}
	fault.Crash("host.handshake.done")
	p.violated, p.waits = opts.Violated, p.Waits
	go p.watch()
	p.beats.Go(func() { p.beat(opts.Heartbeat) })
	return p, nil
}

// prepare makes the socket folder, the runner and go-plugin's client.
func (p *Process) prepare(prog *Program, opts *Options) (err error) {
	if p.dir, err = SocketDir(); err != nil {
		return err
	}
	if p.lock, err = lockDir(p.dir); err != nil {
		return err
	}
	cmd, err := prog.command(context.Background())
	if err != nil {
		return err
	}
	for _, name := range slices.Concat(opts.Environment, fault.Environment()) {
		if v, set := os.LookupEnv(name); set {
			cmd.Env = append(cmd.Env, name+"="+v)
		}
	}
	if p.board, err = shm.NewBoard(); err != nil {
		return err
	}
	inherit, own, err := fencedMemory(opts, p.board)
	if err != nil {
		return err
	}
	n := memoryOf(opts)
	cmd.Env = append(cmd.Env, fenceVariable(FirstRegionFD+n, len(inherit)-n), own.variable())
	if !opts.NoRing {
		p.mem.fd, p.mem.bell = FirstRegionFD+len(inherit), FirstRegionFD+len(inherit)+1
		var ends []*os.File
		if p.mem.rings, ends, err = ringsToInherit(); err != nil {
			closeAll(inherit)
			own.close()
			return err
		}
		inherit = append(inherit, ends...)
	}
	if inherit, err = prog.confine(cmd, opts.Sandbox.And(p.dir), inherit); err != nil {
		closeAll(inherit)
		own.close()
		return err
	}
	if p.run, err = newRunner(cmd, inherit, own); err != nil {
		return err
	}
	p.run.announce, p.run.abandon, p.run.patience = opts.Started, opts.Abandon, patience{opts.Fence, opts.Hurry}
	clientTLS, certificate, err := newClientTLS()
	if err != nil {
		return err
	}
	cmd.Env = append(cmd.Env, clientCertKey+"="+string(certificate))
	log := newPluginLog(opts.Log.With("plugin", filepath.Base(prog.Path)), filepath.Base(prog.Path))
	p.client = plugin.NewClient(&plugin.ClientConfig{
		HandshakeConfig:  wire.Handshake(),
		Plugins:          plugin.PluginSet{wire.PluginName: &wire.Plugin{}},
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC},
		TLSConfig:        clientTLS,
		SkipHostEnv:      true,
		StartTimeout:     2 * heartbeatStretch * opts.Handshake, // ours is shorter and kills
		UnixSocketConfig: &plugin.UnixSocketConfig{TempDir: p.dir},
		Logger:           log.hclog(),
		SyncStdout:       log,
		SyncStderr:       io.MultiWriter(log, p.run.lines),
		GRPCDialOptions:  wire.DialOptions(),
		RunnerFunc: func(_ hclog.Logger, spec *exec.Cmd, _ string) (pluginrunner.Runner, error) {
			cmd.Env = append(cmd.Env, spec.Env...)
			return p.run, nil
		},
	})
	return nil
}

// fencedMemory is what the plugin inherits: the regions, the arena, the board, and the fences, of which the
// first is its own. All are descriptors of the plugin's, so that the engine's stay the engine's.
func fencedMemory(opts *Options, board *shm.Board) ([]*os.File, *Fence, error) {
	var memory []*os.File
	for _, r := range opts.Regions {
		memory = append(memory, r.File)
	}
	if opts.Arena != nil {
		memory = append(memory, opts.Arena.File)
	}
	fences, err := inheritedFences()
	if err != nil {
		return nil, nil, err
	}
	own, end, err := newFence()
	if err != nil {
		closeAll(fences)
		return nil, nil, err
	}
	fences = append([]*os.File{end}, fences...)
	inherit, err := own.lend(memory, fences[1:])
	var boards []*os.File
	if err == nil {
		boards, err = dupAll([]*os.File{board.Region().File()})
	}
	if err != nil {
		closeAll(append(inherit, fences...))
		own.close()
		return nil, nil, err
	}
	return slices.Concat(inherit, boards, fences), own, nil
}

// memoryOf is how many descriptors come before the fences.
func memoryOf(opts *Options) int {
	n := len(opts.Regions) + 1 // and the board
	if opts.Arena != nil {
		n++
	}
	return n
}

func dupAll(from []*os.File) ([]*os.File, error) {
	var files []*os.File
	for _, f := range from {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			closeAll(files)
			return nil, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
		}
		files = append(files, os.NewFile(uintptr(fd), f.Name()))
	}
	return files, nil
}

// ringsToInherit makes the rings of a plugin's life and descriptors of them that are the plugin's.
func ringsToInherit() (*Rings, []*os.File, error) {
	rings, err := NewRings()
	if err != nil {
		return nil, nil, err
	}
	ends, err := dupAll([]*os.File{rings.file, rings.bellEnd})
	if err != nil {
		return nil, nil, errors.Join(err, rings.Close())
	}
	return rings, ends, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// start runs the handshake. Whatever hangs in it is ended by killing the process.
func (p *Process) start(ctx context.Context, opts *Options) error {
	began := time.Now()
	ctx, cancel := Patient(ctx, opts.Handshake, p.Waits())
	defer cancel()
	unhook := context.AfterFunc(ctx, p.run.kill)
	err := p.connect(ctx, opts)
	if !unhook() || ctx.Err() != nil {
		if RanOut(ctx) {
			waited := time.Since(began).Round(time.Millisecond)
			return Longer(&LateError{opts.Handshake, waited}, opts.Handshake)
		}
		return ctx.Err()
	}
	return err
}

func (p *Process) connect(ctx context.Context, opts *Options) error {
	protocol, err := p.client.Client()
	close(p.run.connected)
	if err != nil {
		return fmt.Errorf("handshake: %w", shakeError(err))
	}
	raw, err := protocol.Dispense(wire.PluginName)
	if err != nil {
		return err
	}
	conn, ok := raw.(grpc.ClientConnInterface)
	if !ok {
		return fmt.Errorf("handshake gave a %T", raw)
	}
	p.Remote = &Remote{client: kvportv1.NewPluginClient(conn)}
	for i, r := range opts.Regions {
		p.regions = append(p.regions, wire.Region{FD: FirstRegionFD + i, Size: r.Size})
	}
	p.arena = arenaRef{opts.Arena, FirstRegionFD + len(opts.Regions)}
	p.Remote.board, p.boardFD = p.board, FirstRegionFD+len(opts.Regions)
	if opts.Arena != nil {
		p.boardFD++
	}
	p.rings = p.mem
	fault.Crash("host.handshake.connected")
	if err := p.Heartbeat(ctx); err != nil {
		return fmt.Errorf("first heartbeat: %w", err)
	}
	p.vacate()
	return nil
}

// vacate removes the folder of the socket. The connection that stands needs it no more and there is no
// second one, so an engine that is killed later leaves nothing behind. An engine that is killed before
// leaves a folder whose lock is free: the next one that starts removes it (see SweepSockets).
func (p *Process) vacate() {
	if p.dir != "" && os.RemoveAll(p.dir) == nil {
		p.dir = ""
	}
	if p.lock != nil && p.dir == "" {
		_ = p.lock.Close()
		p.lock = nil
	}
}

// Path is that of the process's binary.
func (p *Process) Path() string { return p.path }

// PID is the process id.
func (p *Process) PID() int { return p.run.id() }

// Done is closed when the process is gone, reaped and cleaned up after: nothing of it can touch a
// block any more.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err says how the process ended. It is nil while it lives and after a Close that it obeyed.
func (p *Process) Err() error {
	select {
	case <-p.done:
		return p.end
	default:
		return nil
	}
}

// Kill ends the process with SIGKILL and waits until it is reaped. With Options.Where it is asked before where it is.
func (p *Process) Kill() {
	p.endHung(errors.New("killed by the host"))
	<-p.done
}

// endHung is KillFor for a process that hangs: it returns when the process has said where, if somebody has asked to be told.
func (p *Process) endHung(reason error) {
	p.giveReason(reason)
	p.asked.Do(func() {
		if p.where == nil {
			return
		}
		if said, lived := p.run.ask(); lived {
			p.where(said)
		}
	})
	p.run.kill()
}

// KillFor ends the process with SIGKILL and does not wait. The first reason counts.
func (p *Process) KillFor(reason error) {
	p.giveReason(reason)
	p.run.kill()
}

func (p *Process) giveReason(reason error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reason = cmp.Or(p.reason, reason)
}

// Close asks the process to end, and kills it when ctx is done first, or when it could have run for ClosePatience.
// Sides must be closed before.
func (p *Process) Close(ctx context.Context) error {
	ctx, cancel := Patient(ctx, ClosePatience, p.Waits())
	defer cancel()
	killed := make(chan struct{})
	unhook := context.AfterFunc(ctx, func() {
		defer close(killed)
		p.endHung(fmt.Errorf("it did not end when asked: %w", context.Cause(ctx)))
	})
	// A heartbeat that the end overtakes would look like one that was missed.
	p.silence()
	p.beats.Wait()
	if protocol, err := p.client.Client(); err == nil {
		// This waits for the plugin without a deadline: the kill above is what bounds it.
		_ = protocol.Close()
	}
	<-p.done
	if !unhook() {
		<-killed // it may still be told where the process was
	}
	return p.end
}

// Waiting says that the process is dead, and that others, which may still write its memory, are waited for.
func (p *Process) Waiting() bool { return p.run.waiting() }

// Abandoned says that the wait for them ended without success.
func (p *Process) Abandoned() bool { return p.run.abandoned() }

// watch waits for the end and cleans up.
func (p *Process) watch() {
	<-p.run.reaped
	p.mu.Lock()
	p.end = p.run.status()
	if p.reason != nil {
		p.end = errors.Join(p.reason, p.end)
	}
	if p.run.abandoned() {
		p.end = errors.Join(p.end, ErrAbandoned)
	}
	p.mu.Unlock()
	p.cleanup()
	close(p.done)
}

// cleanup ends the process, if one was started, and removes all that belonged to it. go-plugin's
// Kill is called only on a dead process: on a hung one it would wait for ever.
func (p *Process) cleanup() {
	if p.run != nil && p.run.id() != 0 {
		p.run.kill()
		<-p.run.reaped
	}
	if p.client != nil {
		p.client.Kill()
	}
	p.silence()
	p.beats.Wait()
	if p.run != nil && p.run.id() == 0 {
		p.run.closeFiles()
	}
	if p.board != nil {
		_ = p.board.Close()
	}
	p.vacate()
	if p.lock != nil { // of a folder that could not be removed
		_ = p.lock.Close()
	}
	if p.mem.rings != nil {
		_ = p.mem.rings.Close()
	}
}

// beat asks for a sign of life again and again, and kills a plugin that gives none.
func (p *Process) beat(h Heartbeat) {
	queue := runQueue{folders: []string{taskFolder(p.PID())}}
	plugin := heartbeat{limit: h.Limit, ask: p.Heartbeat, waited: queue.waited}
	ticker := time.NewTicker(h.Interval)
	defer ticker.Stop()
	for {
		select {
		case <-p.run.reaped:
			return
		case <-p.beating.Done():
			return
		case <-ticker.C:
		}
		if err := plugin.beat(p.beating); err != nil && p.beating.Err() == nil {
			p.endHung(err)
			return
		}
	}
}

// shakeError makes one line of go-plugin's error, which would fill a screen.
func shakeError(err error) error {
	const garbage = "Unrecognized remote plugin message:"
	line, _, _ := strings.Cut(err.Error(), "\n")
	said, ok := strings.CutPrefix(line, garbage)
	said = strings.TrimSpace(said)
	switch {
	case ok && said == "":
		return errors.New("it did not say on standard output where it listens: it must call sdk.Serve")
	case ok:
		return fmt.Errorf("%s %s: it must call sdk.Serve and print nothing before", garbage, strictjson.Quote(said))
	}
	return errors.New(line)
}
