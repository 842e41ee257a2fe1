package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/fault"
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
	started  func(pid, pidfd int) error
	held     func(bytes int64) // told how large the arena is; may be nil
	promised *promised         // shared with the other plugins of the host
	violated func(what string)
	hurry    <-chan struct{}         // closed when the host closes
	left     *plugin.AbandonedMemory // by former lives
	reland   func() error            // replaces landing memory that is this plugin's alone; nil: there is none
	keys     keyring

	sides   sides
	sched   int   // the host's own sides: see openAll
	workers []int // by rank
	prog    *plugin.Program
	arena   *Arena   // empty if the connector asks for none
	env     []string // names of environment variables of the plugin
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
	prog, manifest, err := resolve(ctx, s.cfg, paths)
	if err != nil {
		return nil, err
	}
	s.cfg.adopt(manifest, s.log)
	s.prog, s.env, s.name = prog, manifest.Environment, manifest.Name
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

// launch starts a process without opening anything.
func (s *source) launch(ctx context.Context) (*plugin.Process, error) {
	return launch(ctx, s.prog, LaunchOptions{
		Regions: s.regions, Arena: s.arena, Started: s.started, Log: s.log, Environment: s.env, Handshake: s.cfg.Settings.Deadlines.Handshake,
		Heartbeat: s.cfg.Settings.Heartbeat, Violated: s.violated, NoRing: !s.cfg.Settings.Ring, Fence: s.cfg.Settings.Deadlines.Fence, hurry: s.hurry, abandon: s.abandon,
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
	return s.openSides(ctx, l)
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
	s.info = info
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
	if now.Name == was.Name && slices.Equal(now.Layouts, was.Layouts) && now.Groups == was.Groups &&
		now.Lossy == was.Lossy && now.Scope == was.Scope && now.ArenaBytes == was.ArenaBytes && now.ArenaBlocks == was.ArenaBlocks && now.ArenaBlockTokens == was.ArenaBlockTokens &&
		slices.EqualFunc(now.Stats, was.Stats, sameStat) {
		return nil
	}
	return fmt.Errorf("%s has become another plugin, restart the engine or put the old binary back: %w", s.prog.Path, connector.ErrIncompatible)
}
