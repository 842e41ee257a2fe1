package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"

	"github.com/kvport/kvport/connector"
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
	hurry    <-chan struct{}  // closed when the host closes
	left     *abandonedMemory // by former lives
	reland   func() error     // replaces landing memory that is this plugin's alone; nil: there is none
	keys     keyring

	sides   sides
	sched   int   // the host's own sides: see openAll
	workers []int // by rank
	prog    *program
	arena   *Arena   // empty if the connector asks for none
	env     []string // names of environment variables of the plugin
	info    connector.Info
	name    string // of the connector, as its manifest has it
}

// life is one process of a plugin with all its sides open.
type life struct {
	n     uint64
	proc  *Process
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
		return nil, errors.Join(err, prog.close())
	}
	return manifest, nil
}

// close lets go of the program and its arena. No process may be at work. s may be nil.
func (s *source) close() error {
	if s == nil || s.prog == nil {
		return nil
	}
	s.left.close()
	return errors.Join(s.prog.close(), s.arena.Close())
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
	ctx, cancel := patient(ctx, d.Handshake, proc.waits())
	defer cancel()
	if err := s.open(ctx, l); err != nil {
		proc.Kill()
		if silent(err) {
			if ranOut(ctx) {
				err = longer(err, d.Handshake)
			}
			err = fmt.Errorf("%w: plugin %s: %w", ErrConfig, proc.path, proc.run.blame("", err))
		}
		return nil, err
	}
	if n == 1 {
		s.fillArena()
	}
	return l, nil
}

// launch starts a process without opening anything.
func (s *source) launch(ctx context.Context) (*Process, error) {
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
	case !silent(err):
		return fmt.Errorf("%w: %s: %w", ErrConfig, name, plainError{err})
	case outOfTime(ctx):
		return fmt.Errorf("open: no answer in time: %w", err)
	}
	return fmt.Errorf("open: %w", err)
}

// describe asks the connector what it would do with its config and checks that the engine can live
// with that.
func (s *source) describe(ctx context.Context, r *Remote) error {
	info, err := r.Describe(ctx, s.cfg.Extra)
	if silent(err) {
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

// describeAgain checks that a plugin that was started anew is what the first one was: its binary may
// have been replaced, and the engine is built for what the first one said.
func (s *source) describeAgain(ctx context.Context, r *Remote) error {
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
	return fmt.Errorf("%s has become another plugin, start the engine anew or put the old binary back: %w", s.prog.path, connector.ErrIncompatible)
}
