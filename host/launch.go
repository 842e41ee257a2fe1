package host

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
)

// OfKernel begins each line about a process that hangs which comes from the kernel and not from the process.
const OfKernel = plugin.OfKernel

// LaunchOptions say what a plugin process gets. The zero value is usable.
type LaunchOptions struct {
	Regions     []*Region // the paged cache of each rank, and behind them what Reshape reads into, if there is that
	Arena       *Arena    // what sides may have as Env.Arena; nil: none
	Log         *slog.Logger
	Environment []string      // names of environment variables that are passed on, if set and if Sandbox permits them; nothing else is
	Handshake   time.Duration // 0: the default
	Heartbeat   Heartbeat     // zero: the default
	NoRing      bool          // all messages go over the stream
	Sandbox     *Sandbox      // in which the process runs; nil: outside
	Violated    func(what string)
	Started     func(pid, pidfd int) error // see Options

	// Where gets what a process that hangs writes to standard error when SIGQUIT asks it where, which ends it: of a Go program
	// the stacks of all goroutines, at most 1 MiB. Of one that writes nothing it gets lines that begin with OfKernel: what its threads wait
	// for. Nil: it is killed without being asked.
	Where func(said []string)

	// Fence is how long those are waited for that may write the memory of a plugin which is dead; 0: the default.
	Fence time.Duration

	hurry   <-chan struct{} // closed when the host closes
	abandon func(*plugin.Fence)
}

// Process is one life of a plugin. It is watched, and killed when it hangs, but not restarted.
type Process struct {
	*Remote
	proc *plugin.Process
}

// LateError is the error of a start in which the plugin made no handshake within a limit. A host waits beyond the limit only while the plugin
// waits for a processor or a disk.
type LateError struct {
	Limit, Waited time.Duration
	Err           error // what a person reads
}

// Error implements error.
func (e *LateError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *LateError) Unwrap() error { return e.Err }

// Launch starts a plugin binary and waits until it answers. ctx bounds the start only. Errors wrap
// ErrConfig and name the binary; nothing of a failed start is left behind.
func Launch(ctx context.Context, path string, opts LaunchOptions) (*Process, error) {
	prog, err := plugin.Executable(path)
	if err != nil {
		return nil, fmt.Errorf("%w: plugin: %w", ErrConfig, err)
	}
	proc, err := launch(ctx, prog, opts)
	if late, is := errors.AsType[*plugin.LateError](err); is {
		return nil, &LateError{late.Limit, late.Waited, err}
	}
	if err != nil {
		return nil, err
	}
	return &Process{Remote: &Remote{proc.Remote}, proc: proc}, nil
}

// launch is Launch for a program, with the defaults of what opts do not say.
func launch(ctx context.Context, prog *plugin.Program, opts LaunchOptions) (*plugin.Process, error) {
	defaults := DefaultSettings()
	opts.Log = cmp.Or(opts.Log, slog.New(slog.DiscardHandler))
	if opts.Handshake <= 0 {
		opts.Handshake = defaults.Deadlines.Handshake
	}
	if opts.Fence <= 0 {
		opts.Fence = defaults.Deadlines.Fence
	}
	if opts.Heartbeat.Interval <= 0 || opts.Heartbeat.Limit <= 0 {
		opts.Heartbeat = defaults.Heartbeat
	}
	return plugin.Launch(ctx, prog, &plugin.Options{
		Regions: lentRegions(opts.Regions), Arena: opts.Arena.lent(), Log: opts.Log, Environment: opts.Sandbox.permitted(opts.Environment),
		Handshake: opts.Handshake, Heartbeat: plugin.Heartbeat(opts.Heartbeat), NoRing: opts.NoRing,
		Sandbox: opts.Sandbox.spec(), Violated: opts.Violated, Started: opts.Started, Where: opts.Where, Fence: opts.Fence, Hurry: opts.hurry, Abandon: opts.abandon,
	})
}

// PID is the process id.
func (p *Process) PID() int { return p.proc.PID() }

// Done is closed when the process is gone, reaped and cleaned up after: nothing of it can touch a
// block any more.
func (p *Process) Done() <-chan struct{} { return p.proc.Done() }

// Err says how the process ended. It is nil while it lives and after a Close that it obeyed.
func (p *Process) Err() error { return p.proc.Err() }

// Kill ends the process with SIGKILL and waits until it is reaped. With LaunchOptions.Where it is asked before where it is.
func (p *Process) Kill() { p.proc.Kill() }

// Close asks the process to end. It kills it when ctx is done first, or when the process could have run for 2 s and
// has not ended. Sides must be closed before.
func (p *Process) Close(ctx context.Context) error { return p.proc.Close(ctx) }

// LastWords says how the process ended, if it did so by itself, and which lines it wrote to standard error last.
// Of the trace of a panic they are the first lines.
func (p *Process) LastWords() (ended string, lines []string) { return p.proc.LastWords() }

// Remote is a plugin at the other end of a connection. The sides that it opens are the connector's,
// seen through the wire: a Load or Save returns only when the plugin has answered or the connection
// is gone.
type Remote struct{ remote *plugin.Remote }

// Connect makes a Remote of any connection, such as one in memory. The plugin must run in this
// process or have inherited the regions under the same descriptor numbers. regions[r] is the cache
// of rank r.
func Connect(conn grpc.ClientConnInterface, regions []*Region) *Remote {
	return &Remote{plugin.Connect(conn, lentRegions(regions))}
}

// Violations counts answers that broke the protocol so far.
func (r *Remote) Violations() int64 { return r.remote.Violations() }

// Describe asks what the connector would do with a config. It has no side effects. Errors of the
// config name the field.
func (r *Remote) Describe(ctx context.Context, config json.RawMessage) (connector.Info, error) {
	return r.remote.Describe(ctx, config)
}

// Heartbeat asks for a sign of life.
func (r *Remote) Heartbeat(ctx context.Context) error { return r.remote.Heartbeat(ctx) }

// OpenScheduler opens the scheduler side. The result implements connector.Partial; ask it for
// optional interfaces with connector.As.
func (r *Remote) OpenScheduler(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Scheduler, error) {
	return r.remote.OpenScheduler(ctx, env, config)
}

// OpenWorker opens the worker side of rank env.Rank. The plugin maps that rank's region itself, so
// the KV that is passed to Load and Save later is not used.
func (r *Remote) OpenWorker(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Worker, error) {
	return r.remote.OpenWorker(ctx, env, config)
}

// UseArena says which arena Env.Arena is of in the sides that are opened from now on. The plugin
// must run in this process or have inherited the arena under the same descriptor number.
func (r *Remote) UseArena(a *Arena) { r.remote.UseArena(a.lent()) }

// UseRings says that the sides that are opened from now on may have a ring. The plugin must run in
// this process or have inherited the rings under the same descriptor number.
func (r *Remote) UseRings(rings *Rings) { r.remote.UseRings(rings.rings) }

// Rings is memory through which the sessions of one plugin process exchange small messages, beside
// their streams (rule RING-01). It takes no room until sides open.
type Rings struct{ rings *plugin.Rings }

// NewRings makes memory for rings.
func NewRings() (*Rings, error) {
	rings, err := plugin.NewRings()
	if err != nil {
		return nil, err
	}
	return &Rings{rings}, nil
}

// Close lets go of the memory. It waits for the sessions that use it, whose connection must have ended.
func (r *Rings) Close() error { return r.rings.Close() }

// SocketDir makes a private folder (0700) for a plugin's socket. A temporary folder whose path is too
// long for a socket, or that cannot be written to, is passed over for the user's runtime folder, and
// that for /tmp. The caller removes it. Errors name TMPDIR.
func SocketDir() (string, error) { return plugin.SocketDir() }
