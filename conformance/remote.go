package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/sdk"
)

// regions makes the caches of an engine's ranks in memory that a connector can map.
func regions(ranks int, size int64) (made []*host.Region, views [][]byte, err error) {
	for range ranks {
		r, err := host.NewRegion(size)
		if err != nil {
			return nil, nil, errors.Join(err, closeRegions(made))
		}
		made, views = append(made, r), append(views, r.Bytes())
	}
	return made, views, nil
}

func closeRegions(rs []*host.Region) error {
	var errs []error
	for _, r := range rs {
		errs = append(errs, r.Close())
	}
	return errors.Join(errs...)
}

// Wire runs the connector in this process, but behind the protocol: everything but the process
// boundary is as in production. For the words of the config see InProcess.
func Wire(p connector.Plugin, config json.RawMessage) Maker {
	return func() (Harness, error) {
		b, err := newBase(config)
		return &loopback{base: b, plugin: p}, err
	}
}

type loopback struct {
	base
	plugin connector.Plugin
	staged bool
}

// Manifest implements Manifester.
func (h *loopback) Manifest(context.Context) (*host.Manifest, error) {
	return manifestOf(&h.plugin), nil
}

// engineMemory is what a host has for one life of an engine.
type engineMemory struct {
	regions []*host.Region
	views   [][]byte
	arena   *host.Arena
}

func newEngineMemory(ranks int, size int64) (*engineMemory, error) {
	made, views, err := regions(ranks, size)
	if err != nil {
		return nil, err
	}
	arena, err := host.NewArena()
	if err != nil {
		return nil, errors.Join(err, closeRegions(made))
	}
	return &engineMemory{made, views, arena}, nil
}

func (m *engineMemory) close() error {
	return errors.Join(closeRegions(m.regions), m.arena.Close())
}

// owned makes the instance of an engine's first plugin, which gives the memory back.
func (m *engineMemory) owned(ctx context.Context, start func(context.Context) (*Instance, error)) (*Instance, error) {
	i, err := start(ctx)
	if err != nil {
		return nil, errors.Join(err, m.close())
	}
	end := i.Close
	i.Close = func() error { return errors.Join(end(), m.close()) }
	i.Fit = func(size int64) error {
		err := m.arena.Fit(size)
		i.Arena = m.arena.Bytes()
		return err
	}
	i.Again = func(ctx context.Context) (*Instance, error) {
		again, err := start(ctx)
		if err == nil {
			again.Arena, again.Again = i.Arena, i.Again
		}
		return again, err
	}
	return i, nil
}

// Start implements Harness.
func (h *loopback) Start(ctx context.Context, ranks int, size int64) (*Instance, error) {
	m, err := newEngineMemory(ranks, size)
	if err != nil {
		return nil, err
	}
	return m.owned(ctx, func(context.Context) (*Instance, error) { return h.instance(m) })
}

func (h *loopback) instance(m *engineMemory) (*Instance, error) {
	conn, stop, err := sdk.Loopback(h.plugin, nil)
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	var remotes []*host.Remote
	connect := func(regions []*host.Region) *host.Remote {
		remote := host.Connect(conn, regions)
		remote.UseArena(m.arena)
		mu.Lock()
		defer mu.Unlock()
		remotes = append(remotes, remote)
		return remote
	}
	remote := connect(m.regions)
	i := &Instance{
		Describe: remote.Describe, Scheduler: remote.OpenScheduler, Worker: remote.OpenWorker, Memory: m.views,
		Close: func() error {
			err := stop()
			mu.Lock()
			defer mu.Unlock()
			for _, r := range remotes {
				if n := r.Violations(); n > 0 {
					err = errors.Join(err, fmt.Errorf("%d answers broke the protocol", n))
				}
			}
			return err
		},
	}
	if h.staged {
		i.Worker = func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Worker, error) {
			return m.openStaged(ctx, connect, env, config)
		}
	}
	return i, nil
}

// Binary runs the plugin binary at path as a process of its own for each engine, as production
// does. For the words of the config see InProcess.
func Binary(path string, config json.RawMessage) Maker {
	if abs, err := filepath.Abs(path); err == nil {
		path = abs // a bare name means a file here, not one on PATH
	}
	// All cases need it, so a plugin that a busy machine delays has more than one chance. Nobody waits for long for one
	// that hangs on a machine that does nothing else.
	const hangs = 8 * time.Second
	manifest := sync.OnceValues(func() (m *host.Manifest, err error) {
		for range 1 + repeats {
			began := time.Now()
			if m, err = host.ReadManifest(context.Background(), path); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) < hangs {
				break
			}
		}
		return m, err
	})
	return func() (Harness, error) {
		b, err := newBase(config)
		return &process{base: b, path: path, manifest: manifest}, err
	}
}

// Sandboxed runs the plugins that Binary makes in the sandbox that a host has for them at trust level staged. trampoline
// is what host.Config.SandboxedBy takes. Their workers map the cache all the same.
func Sandboxed(inner Maker, trampoline string) Maker {
	return func() (Harness, error) {
		h, err := inner()
		if err != nil {
			return nil, err
		}
		p, ok := h.(*process)
		if !ok {
			return nil, errors.Join(errors.New("only a plugin that is a process of its own can run in a sandbox"), h.Close())
		}
		p.trampoline = trampoline
		return p, nil
	}
}

type process struct {
	base
	path       string
	manifest   func() (*host.Manifest, error)
	trampoline string // empty: no sandbox
	log        *slog.Logger
	hung       *hung // nil: nobody asks

	mu      sync.Mutex
	running []*startedProcess
}

// startedProcess is a process that a case started.
type startedProcess struct {
	*host.Process
	instance *Instance
}

// Manifest implements Manifester.
func (h *process) Manifest(context.Context) (*host.Manifest, error) { return h.manifest() }

// logTo has what the processes log, and write to standard error, written to the log of a run, and hung be told where they are when they
// have to be killed.
func (h *process) logTo(log *slog.Logger, hung *hung) { h.log, h.hung = log, hung }

// Program implements Runner.
func (h *process) Program() string { return h.path }

// Start implements Harness.
func (h *process) Start(ctx context.Context, ranks int, size int64) (*Instance, error) {
	manifest, err := h.manifest()
	if err != nil {
		return nil, err
	}
	m, err := newEngineMemory(ranks, size)
	if err != nil {
		return nil, err
	}
	return m.owned(ctx, func(ctx context.Context) (*Instance, error) { return h.instance(ctx, m, manifest) })
}

func (h *process) instance(ctx context.Context, m *engineMemory, manifest *host.Manifest) (*Instance, error) {
	lines := &lineCounter{count: new(atomic.Int64)}
	if h.log != nil {
		lines.next = h.log.Handler()
	}
	box, err := h.sandbox(manifest)
	if err != nil {
		return nil, err
	}
	var p *host.Process
	options := host.LaunchOptions{
		Sandbox: box,
		Regions: m.regions, Arena: m.arena, Environment: manifest.Environment, Log: slog.New(lines),
		// The case's deadline says when a plugin hangs, so that a slow machine cannot.
		Heartbeat: host.Heartbeat{Interval: time.Hour, Limit: time.Hour},
	}
	if h.hung != nil {
		options.Where = func(said []string) { h.hung.tell(h.path, p.PID(), said) }
	}
	if p, err = host.Launch(ctx, h.path, options); err != nil {
		return nil, lateStart(err)
	}
	i := &Instance{
		Describe: p.Describe, Scheduler: p.OpenScheduler, Worker: p.OpenWorker, Memory: m.views,
		PID: p.PID(), Process: p, Logged: lines.count.Load,
		Close: func() error {
			err := p.Close(context.Background())
			if n := p.Violations(); n > 0 {
				err = errors.Join(err, fmt.Errorf("%d answers broke the protocol", n))
			}
			return err
		},
	}
	h.mu.Lock()
	h.running = append(h.running, &startedProcess{p, i})
	h.mu.Unlock()
	return i, nil
}

// lateStart is the error of a start, without the setting by which an engine would wait for longer: a run has none. What a host has waited
// beyond its limit shows whether the machine was busy.
func lateStart(err error) error {
	late, is := errors.AsType[*host.LateError](err)
	if !is {
		return err
	}
	err = fmt.Errorf("no handshake within %s, it was killed after %s", late.Limit, late.Waited)
	if late.Waited-late.Limit >= late.Waited/busyShare {
		return busyError{err}
	}
	return err
}

// sandbox is the one in which the process runs; nil: none.
func (h *process) sandbox(manifest *host.Manifest) (*host.Sandbox, error) {
	if h.trampoline == "" {
		return nil, nil
	}
	cfg := &host.Config{Connector: manifest.Name, Extra: h.config, Settings: host.DefaultSettings()}
	cfg.Settings.Sandbox = host.SandboxOn
	cfg.SandboxedBy(h.trampoline)
	return host.NewSandbox(cfg, manifest)
}

// lastWords is how the processes ended that did so by themselves, and what they wrote last.
func (h *process) lastWords() (out []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.running {
		select {
		case <-c.Done():
		default:
			continue // it lives
		}
		ended, lines := c.LastWords()
		if c.instance.killed || ended == "" || ended == "exit status 0" {
			continue
		}
		out = append(out, fmt.Sprintf("the plugin's process %d ended by itself: %s; the last lines of its standard error:", c.PID(), ended))
		for _, line := range lines {
			out = append(out, "  "+line)
		}
		if len(lines) == 0 {
			out = append(out, "  (none)")
		}
	}
	return out
}

// Close implements Harness. It also ends the processes that a case which hangs has left running.
func (h *process) Close() error {
	h.mu.Lock()
	running := h.running
	h.mu.Unlock()
	var errs []error
	for _, p := range running {
		p.Kill()
		select {
		case <-p.Done():
		case <-time.After(controlLimit):
			errs = append(errs, fmt.Errorf("the plugin's process %d does not end %v after SIGKILL", p.PID(), controlLimit))
		}
	}
	return errors.Join(append(errs, h.base.Close())...)
}

// lineCounter is a slog.Handler that counts what an operator would see, and passes everything on.
type lineCounter struct {
	count *atomic.Int64
	next  slog.Handler // nil: there is none
}

// Enabled implements slog.Handler.
func (c *lineCounter) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelInfo || c.next != nil && c.next.Enabled(ctx, l)
}

// Handle implements slog.Handler.
func (c *lineCounter) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo {
		c.count.Add(1)
	}
	if c.next == nil || !c.next.Enabled(ctx, r.Level) {
		return nil
	}
	return c.next.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (c *lineCounter) WithAttrs(attrs []slog.Attr) slog.Handler {
	if c.next == nil {
		return c
	}
	return &lineCounter{c.count, c.next.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (c *lineCounter) WithGroup(name string) slog.Handler {
	if c.next == nil {
		return c
	}
	return &lineCounter{c.count, c.next.WithGroup(name)}
}
