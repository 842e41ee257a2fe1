package host

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/internal/sandbox"
	"github.com/kvport/kvport/internal/wire"
)

// source is where the processes of one plugin come from: the program and what each of its processes
// is given.
type source struct {
	cfg      *Config
	eng      Engine
	epoch    uint64
	log      *slog.Logger
	regions  []*Region        // that the plugin maps, by rank
	layout   connector.Layout // of those
	sources  *Region          // where blocks of engines of other shapes are read to, for all ranks; nil: none come
	started  func(pid, pidfd int) error
	held     func(bytes int64) // told how large the arena is; may be nil
	filled   func(bytes int64) // told how much of it has been allocated since; may be nil
	promised *promised         // shared with the other plugins of the host
	violated func(what string)
	hurry    <-chan struct{}         // closed when the host closes
	left     *plugin.AbandonedMemory // by former lives
	reland   func() error            // replaces landing memory and memory for source blocks that are this plugin's alone; nil: others have them, too
	keys     *pluginKeys

	sides   sides
	sched   int   // the host's own sides: see openAll
	workers []int // by rank
	prog    *plugin.Program
	arena   *Arena               // empty if the connector asks for none
	place   *placement           // nil: this plugin's blocks are not placed
	placed  *connector.Placement // of the life that opens
	whole   bool                 // what it places is all that it has, says that life
	env     []string             // names of environment variables of the plugin
	needs   connector.Needs
	box     box
	info    connector.Info
	name    string // of the connector, as its manifest has it
}

// life is one process of a plugin with all its sides open.
type life struct {
	n     uint64
	proc  *plugin.Process
	sides map[int]io.Closer
}

// find looks for the program.
func (s *source) find(ctx context.Context, paths []string) (*Manifest, error) {
	var err error
	if s.box, err = s.cfg.box(sandbox.Probe()); err != nil {
		return nil, err
	}
	prog, manifest, err := resolve(ctx, s.cfg, paths, &s.box)
	if err != nil {
		return nil, err
	}
	s.cfg.adopt(manifest, s.log)
	s.prog, s.name, s.needs = prog, manifest.Name, manifest.Needs
	var withheld []string
	s.env, withheld = s.cfg.environment(manifest, &s.box)
	s.box.settle(s.cfg, &s.needs)
	s.box.tell(s.log, manifest.Name, withheld)
	if s.arena, err = NewArena(); err != nil {
		return nil, errors.Join(err, prog.Close())
	}
	return manifest, nil
}

// close lets go of the program and its arena. No process may be at work. s may be nil.
func (s *source) close() error {
	if s == nil || s.prog == nil {
		return nil
	}
	s.place.close()
	s.left.Close()
	return errors.Join(s.prog.Close(), s.arena.Close())
}

// start launches the plugin and opens its sides. n counts its lives, from 1.
func (s *source) start(ctx context.Context, n uint64) (*life, error) {
	d := &s.cfg.Settings.Deadlines
	if err := s.renew(); err != nil {
		return nil, err
	}
	proc, err := s.launch(ctx)
	if err != nil {
		return nil, err
	}
	l := &life{n: n, proc: proc}
	ctx, cancel := plugin.Patient(ctx, d.Handshake, proc.Waits())
	defer cancel()
	if err := s.open(ctx, l); err != nil {
		proc.Kill()
		if plugin.Silent(err) {
			if plugin.RanOut(ctx) {
				err = plugin.Longer(err, d.Handshake)
			}
			err = fmt.Errorf("%w: plugin %s: %w", ErrConfig, proc.Path(), proc.Blame(err))
		}
		return nil, err
	}
	if n == 1 {
		s.fillArena()
	}
	return l, nil
}

// mapped is what the plugin maps.
func (s *source) mapped() []*Region {
	if s.sources == nil {
		return s.regions
	}
	return append(slices.Clip(s.regions), s.sources)
}

// launch starts a process without opening anything.
func (s *source) launch(ctx context.Context) (*plugin.Process, error) {
	box := s.cfg.confine(&s.box, s.env, s.needs)
	box.makeFolders()
	return launch(ctx, s.prog, LaunchOptions{
		Regions: s.mapped(), Arena: s.arena, Started: s.started, Log: s.log, Environment: s.env, Handshake: s.cfg.Settings.Deadlines.Handshake,
		Heartbeat: s.cfg.Settings.Heartbeat, Violated: s.violated, NoRing: !s.cfg.Settings.Ring, Sandbox: box, Fence: s.cfg.Settings.Deadlines.Fence, hurry: s.hurry, abandon: s.abandon,
	})
}

func (s *source) open(ctx context.Context, l *life) error {
	if err := fault.Point("host.open"); err != nil {
		return err
	}
	if l.n == 1 {
		if err := s.describe(ctx, l.proc.Remote); err != nil {
			return err
		}
	} else if err := s.describeAgain(ctx, l.proc.Remote); err != nil {
		return err
	}
	s.openPlacement()
	return s.openSides(ctx, l)
}

// openPlacement prepares the arena for a connector that places. One that cannot be placed is used by message alone.
func (s *source) openPlacement() {
	if s.placed = nil; s.info.Capabilities&connector.CanPlace == 0 {
		return
	}
	var err error
	if s.placed, err = s.place.reopen(s.arena.Bytes(), s.whole); err != nil && !errors.Is(err, place.ErrUnsupported) {
		s.log.Warn("blocks are not placed, each is matched and loaded by a call of the plugin", "connector", s.info.Name, "error", err)
	}
}

// openError says that a side did not open. Which plugin it was is said by start if there was no answer.
func openError(ctx context.Context, name string, err error) error {
	switch {
	case !plugin.Silent(err):
		return fmt.Errorf("%w: %s: %w", ErrConfig, name, plainError{err})
	case plugin.OutOfTime(ctx):
		return fmt.Errorf("open: no answer in time: %w", err)
	}
	return fmt.Errorf("open: %w", err)
}

// plainError is an error of a config without the class at its end: the field that it names says more.
type plainError struct{ err error }

func (e plainError) Error() string {
	return strings.TrimSuffix(e.err.Error(), ": "+connector.ErrIncompatible.Error())
}

func (e plainError) Unwrap() error { return e.err }

// describe asks the connector what it would do with its config and checks that the engine can live
// with that.
func (s *source) describe(ctx context.Context, r *plugin.Remote) error {
	info, err := r.Describe(ctx, s.cfg.Extra)
	if plugin.Silent(err) {
		return err // start says which plugin it was
	}
	if err != nil {
		return fmt.Errorf("%w: kv_connector_extra_config: %w", ErrConfig, err)
	}
	if err := s.fits(&info); err != nil {
		return fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if err := accepts(s.cfg, &info); err != nil {
		return err
	}
	if s.keys.ring != nil { // else a host above this one has the key, and looks
		if err := cmp.Or(s.cfg.Settings.CheckShared(&info), s.cfg.checkOwnKey(s.keys.ring, &info)); err != nil {
			return err
		}
	}
	s.info, s.whole = info, info.Complete
	return s.fitArena()
}

// fits says why the engine cannot live with a connector.
func (s *source) fits(info *connector.Info) error {
	layout := &s.eng.Layout
	switch {
	case len(info.Layouts) > 0 && !slices.Contains(info.Layouts, layout.Name):
		return fmt.Errorf("%s needs one of the layouts %q, this engine has %q", info.Name, info.Layouts, layout.Name)
	case len(layout.Groups) > 1 && !info.Groups:
		return fmt.Errorf("%s cannot handle a cache of %d groups", info.Name, len(layout.Groups))
	}
	return nil
}

// describeAgain checks that a restarted plugin is what the first one was: its binary may
// have been replaced, and the engine is built for what the first one said.
func (s *source) describeAgain(ctx context.Context, r *plugin.Remote) error {
	now, err := r.Describe(ctx, s.cfg.Extra)
	if err != nil {
		return err
	}
	was := &s.info
	if now.BeyondMachine != was.BeyondMachine && s.keys.ring != nil {
		s.log.Warn("who sees what is stored has changed since the engine started: a folder was mounted later, or is no longer mounted",
			"connector", now.Name, "was", cmp.Or(was.BeyondMachine, "this machine only"), "now", cmp.Or(now.BeyondMachine, "this machine only"),
			"remedy", "mount before the engine starts, and start the engine again, which then says whether it needs kvport.ticket_key_file")
	}
	if now.Name == was.Name && slices.Equal(now.Layouts, was.Layouts) && now.Groups == was.Groups &&
		now.Lossy == was.Lossy && now.MatchFetches == was.MatchFetches && now.Scope == was.Scope && now.ArenaBytes == was.ArenaBytes && now.ArenaBlocks == was.ArenaBlocks && now.ArenaBlockTokens == was.ArenaBlockTokens &&
		slices.EqualFunc(now.Stats, was.Stats, sameStat) {
		s.whole = now.Complete && now.Capabilities&connector.CanPlace != 0 // a newer build may say it, and an older one not any more
		return nil
	}
	return fmt.Errorf("%s has become another plugin, restart the engine or put the old binary back: %w", s.prog.Path, connector.ErrIncompatible)
}

// Manifest is what a plugin says about itself when it is run with --manifest.
type Manifest struct {
	Name             string          `json:"name"`
	Aliases          []string        `json:"aliases"`
	Version          string          `json:"version"`
	ProtocolVersions []int           `json:"protocol_versions"`
	Capabilities     []string        `json:"capabilities"`
	Environment      []string        `json:"environment"` // names of the variables it reads
	Needs            connector.Needs `json:"needs,omitzero"`
	Scope            string          `json:"scope,omitempty"`
	ArenaBytes       int64           `json:"arena_bytes,omitempty"` // memory that it asks the host for, with an empty config
	Stats            []string        `json:"stats,omitempty"`       // names of its metrics, after kvport_connector_
	ConfigSchema     json.RawMessage `json:"config_schema,omitempty"`
}

// Answers reports whether kv_connector may call the plugin by name.
func (m *Manifest) Answers(name string) bool { return (*wire.Manifest)(m).Answers(name) }

// Binary is a plugin on disk.
type Binary struct {
	Path     string
	Manifest Manifest
}

// Find looks for the plugin that answers to name, a connector's name or alias, among the kvport-*
// executables of the given folders. Of several the first in the order of the folders wins, but one
// whose file is called like the connector goes before all others: then nothing else is run. Otherwise it
// asks only those that have the name in them, as an engine does, but outside a sandbox. Errors wrap
// ErrConfig and say where it looked, what it found, and which known name is nearest.
func Find(paths []string, name string) (*Binary, error) {
	b, err := plugin.Find(context.Background(), &plugin.Wanted{Connector: name, Paths: paths, Composed: []string{MultiName}})
	if err != nil {
		return nil, err
	}
	return &Binary{Path: b.Path, Manifest: Manifest(*b.Manifest)}, nil
}

// resolve finds the program that a config asks for. The caller closes it.
func resolve(ctx context.Context, cfg *Config, paths []string, b *box) (*plugin.Program, *Manifest, error) {
	prog, m, err := plugin.Resolve(ctx, &plugin.Wanted{
		Connector: cfg.Connector, Paths: paths, Module: cfg.ModulePath, SHA256: cfg.Settings.PluginSHA256, Composed: []string{MultiName},
		Handshake: cfg.Settings.Deadlines.Handshake, Sandbox: cfg.confine(b, nil, connector.Needs{}).spec(), Search: cfg.search(&b.kernel),
	})
	return prog, (*Manifest)(m), err
}

// Found is a file that is called like a plugin: Manifest is what it says about itself, or Err says why
// it is none.
type Found struct {
	Path     string
	Manifest *Manifest
	Err      error
}

// List asks every kvport-* executable of the given folders for its manifest, in order.
func List(ctx context.Context, paths []string) []Found {
	list := plugin.List(ctx, paths)
	found := make([]Found, len(list))
	for i, f := range list {
		found[i] = Found{Path: f.Path, Manifest: (*Manifest)(f.Manifest), Err: f.Err}
	}
	return found
}

// ReadManifest runs a plugin with --manifest and reads what it prints. It gives the plugin a few
// seconds, more on a busy machine, no environment and nothing to read. Errors name the binary.
func ReadManifest(ctx context.Context, path string) (*Manifest, error) {
	m, err := plugin.ReadManifest(ctx, path)
	return (*Manifest)(m), err
}

// sides are those that every life of a plugin has open, by a number of their own.
type sides struct {
	mu   sync.Mutex
	last int
	open map[int]opening
}

// opening is one side that is open.
type opening struct {
	worker bool
	env    connector.Env
}

func (s *sides) add(o opening) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		s.open = map[int]opening{}
	}
	s.last++
	s.open[s.last] = o
	return s.last
}

func (s *sides) remove(side int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, side)
}

func (s *sides) all() map[int]opening {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.open)
}

// match reports whether a life has open what it should.
func (s *sides) match(l *life) bool {
	want := s.all()
	for side := range l.sides {
		if _, ok := want[side]; !ok {
			return false
		}
	}
	return len(want) == len(l.sides)
}

// openAll says that every life has the scheduler side and a worker side for each region.
func (s *source) openAll() {
	env := connector.Env{
		Engine: s.eng.ID, Epoch: s.epoch, Role: s.cfg.Role, World: len(s.regions),
		Model: s.eng.Model, Shape: s.eng.Shape, Base: s.eng.Base, Layout: s.eng.Layout, Log: s.log,
	}
	s.sched = s.sides.add(opening{env: env})
	// The scheduler side gets the layout of the cache, a worker that of the memory it maps.
	env.Layout = s.layout
	s.workers = nil
	for rank := range s.regions {
		env.Rank = rank
		s.workers = append(s.workers, s.sides.add(opening{worker: true, env: env}))
	}
}

// openSides opens in a new life all sides that must be open.
func (s *source) openSides(ctx context.Context, l *life) error {
	want := s.sides.all()
	l.sides = map[int]io.Closer{}
	for _, side := range slices.Sorted(maps.Keys(want)) {
		if side == s.sched+1 {
			fault.Crash("host.open.worker")
		}
		open, err := s.openSide(ctx, l, want[side])
		if err != nil {
			return err
		}
		l.sides[side] = open
	}
	fault.Crash("host.open.done")
	return nil
}

func (s *source) openSide(ctx context.Context, l *life, o opening) (io.Closer, error) {
	o.env.Arena, o.env.Placement = s.arena.Bytes(), s.placed
	err := s.keys.give(&o.env, s.name, &s.info)
	if err != nil {
		return nil, err
	}
	var side io.Closer
	if o.worker {
		side, err = l.proc.OpenWorker(ctx, o.env, s.cfg.Extra)
	} else {
		side, err = l.proc.OpenScheduler(ctx, o.env, s.cfg.Extra)
	}
	if err != nil {
		return nil, openError(ctx, s.info.Name, err)
	}
	return side, nil
}

// scheduler is a side of this life; nil if it is not open.
func (l *life) scheduler(side int) connector.Scheduler {
	s, _ := l.sides[side].(connector.Scheduler)
	return s
}

// worker is a side of this life; nil if it is not open.
func (l *life) worker(side int) connector.Worker {
	w, _ := l.sides[side].(connector.Worker)
	return w
}
