package mutants

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// HeldConfig is the config of Held.
type HeldConfig struct {
	Dir string `json:"dir" jsonschema:"description=Folder of the blocks."`
}

// Held is a correct connector with Scope engine, whose folder only one engine can open at a time, as a database that one process holds. What
// it keeps outlives its process all the same.
func Held() connector.Plugin { return held(connector.ScopeEngine, oneFolder) }

func heldMutants() []Mutant {
	return []Mutant{
		{
			Name: "says that engines share what one of them holds", Case: "engines-at-once", Config: `{"dir": "@TMP@/kv"}`,
			Plugin: func() connector.Plugin { return held(connector.ScopeNode, oneFolder) },
		},
		{
			Name: "opens what one process holds once for each life of its engine", Case: "many-sides", Config: `{"dir": "@TMP@/kv"}`,
			Plugin: func() connector.Plugin { return holding(connector.ScopeEngine, folderOf, eachAnew) },
		},
		{
			Name: "ignores the Shape in a folder of one engine", Case: "other-shape", Config: `{"dir": "@TMP@/kv"}`,
			Plugin: func() connector.Plugin { return shapeless(held(connector.ScopeEngine, folderOf)) },
		},
		{
			Name: "offers several ranks what one rank has saved in a folder of one engine", Case: "other-world", Config: `{"dir": "@TMP@/kv"}`,
			Plugin: func() connector.Plugin { return alsoOfOne(held(connector.ScopeEngine, folderOf)) },
		},
	}
}

// oneFolder is the same for all engines.
func oneFolder(dir, _ string) string { return dir }

// folderOf is the folder of one engine.
func folderOf(dir, engine string) string { return filepath.Join(dir, engine) }

// shapeless leaves the Shape out of what a connector derives its keys from.
func shapeless(p connector.Plugin) connector.Plugin {
	scheduler, worker := p.Scheduler, p.Worker
	p.Scheduler = func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Scheduler, error) {
		env.Shape = connector.Fingerprint{}
		return scheduler(ctx, env, config)
	}
	p.Worker = func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Worker, error) {
		env.Shape = connector.Fingerprint{}
		return worker(ctx, env, config)
	}
	return p
}

// alsoOfOne offers an engine of several ranks also what is stored for an engine of one.
func alsoOfOne(p connector.Plugin) connector.Plugin {
	scheduler := p.Scheduler
	p.Scheduler = func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Scheduler, error) {
		own, err := scheduler(ctx, env, config)
		if err != nil || env.World == 1 {
			return own, err
		}
		env.World = 1
		other, err := scheduler(ctx, env, config)
		if err != nil {
			return nil, errors.Join(err, own.Close())
		}
		return &eitherScheduler{own, other}, nil
	}
	return p
}

// eitherScheduler offers what either of two offers.
type eitherScheduler struct{ one, other connector.Scheduler }

// Match implements connector.Scheduler.
func (s *eitherScheduler) Match(ctx context.Context, queries []connector.Query) ([]connector.Match, error) {
	best, err := s.one.Match(ctx, queries)
	if err != nil {
		return nil, err
	}
	more, err := s.other.Match(ctx, queries)
	for i, m := range more {
		if m.Tokens > best[i].Tokens {
			best[i] = m
		}
	}
	return best, err
}

// Close implements connector.Scheduler.
func (s *eitherScheduler) Close() error { return errors.Join(s.one.Close(), s.other.Close()) }

// held keeps its blocks in what folder makes of the configured one.
func held(scope connector.Scope, folder func(dir, engine string) string) connector.Plugin {
	return holding(scope, folder, new(sdk.Shared[*holder]).Open)
}

// opening is how a connector gets the holder of a folder: it opens it, or shares the open one.
type opening func(ctx context.Context, dir string, open func(context.Context) (*holder, error)) (h *holder, release func() error, err error)

// eachAnew opens a holder, whoever has one already.
func eachAnew(ctx context.Context, _ string, open func(context.Context) (*holder, error)) (*holder, func() error, error) {
	h, err := open(ctx)
	if err != nil {
		return nil, nil, err
	}
	return h, h.Close, nil
}

// holding is held with another way to get the holder of a folder.
func holding(scope connector.Scope, folder func(dir, engine string) string, get opening) connector.Plugin {
	d := sdk.Definition{Name: "HeldConnector", Version: "1", Scope: scope, Groups: true}
	return sdk.FromStore(d, func(ctx context.Context, env connector.Env, c HeldConfig) (connector.Store, error) {
		dir := folder(c.Dir, env.Engine)
		h, release, err := get(ctx, dir, func(context.Context) (*holder, error) {
			lock, err := lockFolder(dir)
			return &holder{env.Engine, lock}, err
		})
		if err != nil {
			return nil, err
		}
		if h.engine != env.Engine {
			return nil, errors.Join(fmt.Errorf("dir: engine %s holds %s: %w", h.engine, dir, connector.ErrIncompatible), release())
		}
		return &heldFiles{&files{dir: dir}, release}, nil
	})
}

// holder is the engine that holds a folder, and its lock.
type holder struct {
	engine string
	*os.File
}

// heldFiles is a Store of which the engine that has it open has the lock.
type heldFiles struct {
	*files
	release func() error
}

// Close implements connector.Store.
func (s *heldFiles) Close() error { return s.release() }

// lockFolder makes a folder whose lock no other process has.
func lockFolder(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("dir %s: %w: %w", dir, err, connector.ErrGone)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("dir: another process holds %s: %w", dir, connector.ErrIncompatible), lock.Close())
	}
	return lock, nil
}
