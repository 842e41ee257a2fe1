package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sync/singleflight"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/meter"
	"github.com/kvport/kvport/internal/sandbox"
	"github.com/kvport/kvport/internal/strictjson"
	"github.com/kvport/kvport/multiconnector"
)

// pluginPathKey names folders with plugins.
const pluginPathKey = "KVPORT_PLUGIN_PATH"

// multiSchema is the JSON Schema of a MultiConnector's config.
const multiSchema = `{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "properties": {
    "connectors": {
      "type": "array", "minItems": 1, "maxItems": 16,
      "description": "transfer configs of the children, the one to load from first first; without engine_id",
      "items": {"type": "object", "required": ["kv_connector", "kv_role"]}
    }
  },
  "required": ["connectors"],
  "additionalProperties": false
}`

// MultiPlugin is the MultiConnector as a plugin: the same composite that a host makes itself, for
// engines whose host knows none. It looks for its children on KVPORT_PLUGIN_PATH and beside its own
// binary. Its host's fence covers them: they hold it too. It must be made at the start of the
// process, for the regions that the process inherits, and since children are put into a sandbox by it.
func MultiPlugin(version string) connector.Plugin {
	sandbox.Main()
	m := &multiPlugin{regions: inheritedRegions(), sessions: map[string]*session{}}
	return connector.Plugin{
		Name: MultiName, Version: version, Environment: []string{pluginPathKey, "HOME", "TMPDIR"},
		Capabilities: multiconnector.Powers &^ connector.CanReshape, Schema: json.RawMessage(multiSchema),
		Describe: m.describe,
		Scheduler: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
			return openMulti(ctx, m, env, raw, (*composite).openScheduler)
		},
		Worker: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
			return openMulti(ctx, m, env, raw, (*composite).openWorker)
		},
	}
}

// multiPlugin is the sessions of one process.
type multiPlugin struct {
	regions []*Region
	asking  singleflight.Group

	mu       sync.Mutex
	sessions map[string]*session // by engine, life and config
}

// session is the children of one engine with one config. It lasts as long as a side is open.
type session struct {
	composite *composite
	users     int
}

// incompatible makes a config error one of the contract. Line and column are left out: the operator wrote a larger text.
func incompatible(err error) error {
	text := strings.TrimPrefix(err.Error(), ErrConfig.Error()+": ")
	if wrong, is := errors.AsType[*strictjson.Error](err); is {
		text = wrong.Field()
	}
	return fmt.Errorf("%s: %w", strings.TrimPrefix(text, "kv_connector_extra_config."), connector.ErrIncompatible)
}

func multiConfigOf(raw json.RawMessage) (*Config, error) {
	c := &Config{Connector: MultiName, Role: connector.RoleBoth, Extra: raw, Settings: DefaultSettings()}
	v, err := strictjson.Parse(raw)
	if err != nil {
		return nil, incompatible(err)
	}
	if c.Children, err = parseChildren(v, c, 1); err != nil {
		return nil, incompatible(err)
	}
	c.SandboxedBy(Self)
	return c, nil
}

// pluginFolders are where the children's binaries are looked for.
func pluginFolders() (folders []string) {
	for _, folder := range filepath.SplitList(os.Getenv(pluginPathKey)) {
		if folder != "" {
			folders = append(folders, folder)
		}
	}
	if self, err := os.Executable(); err == nil {
		folders = append(folders, filepath.Dir(self))
	}
	return folders
}

func (m *multiPlugin) describe(ctx context.Context, raw json.RawMessage) (connector.Info, error) {
	c, err := multiConfigOf(raw)
	if err != nil {
		return connector.Info{}, err
	}
	// Those who ask at once share an answer: each would start all the children.
	answer, err, _ := m.asking.Do(string(raw), func() (any, error) {
		return inspectChildren(ctx, c, Options{PluginPath: pluginFolders()}, &promised{})
	})
	info, ok := answer.(connector.Info)
	info.Capabilities &^= connector.CanReshape // its children do not map what this host would have it read into
	if err != nil || !ok {
		return connector.Info{}, incompatible(err)
	}
	return info, nil
}

// enter returns the session of an engine, and builds it if it is new. leave must follow.
func (m *multiPlugin) enter(ctx context.Context, env *connector.Env, raw json.RawMessage) (h *session, leave func() error, err error) {
	c, err := multiConfigOf(raw)
	if err != nil {
		return nil, nil, err
	}
	if err := env.Validate(); err != nil {
		return nil, nil, err
	}
	narrow(c, env.Role)
	if len(c.Children) == 0 {
		return nil, nil, fmt.Errorf("connectors: none has a part in %s: %w", env.Role, connector.ErrIncompatible)
	}
	if env.World > len(m.regions) {
		return nil, nil, fmt.Errorf("%d ranks, but %d regions: %w", env.World, len(m.regions), connector.ErrIncompatible)
	}
	key := fmt.Sprintf("%q %d %v %d %s", env.Engine, env.Epoch, env.Role, env.World, raw)
	m.mu.Lock()
	defer m.mu.Unlock()
	h = m.sessions[key]
	if h == nil {
		if h, err = m.build(ctx, env, c); err != nil {
			return nil, nil, incompatible(err)
		}
		m.sessions[key] = h
	}
	h.users++
	return h, func() error { return m.leave(key, h) }, nil
}

func (m *multiPlugin) build(ctx context.Context, env *connector.Env, c *Config) (*session, error) {
	unshown := meter.New()
	n := &childStarter{
		eng:   Engine{ID: env.Engine, Model: env.Model, Shape: env.Shape, Layout: env.Layout},
		epoch: env.Epoch, log: env.Log, regions: m.regions[:env.World], layout: env.Layout, paths: pluginFolders(),
		metrics: newChildMetrics(unshown), vitals: newVitals(unshown), keys: &pluginKeys{links: env.LinkKeys(), routers: env.RouterKeys()},
	}
	f, err := n.open(ctx, c, "", "")
	return &session{composite: f}, err
}

// leave ends the children when the last side of their engine has closed.
func (m *multiPlugin) leave(key string, h *session) error {
	m.mu.Lock()
	h.users--
	last := h.users == 0
	if last {
		delete(m.sessions, key)
	}
	m.mu.Unlock()
	if !last {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), plugin.ClosePatience)
	defer cancel()
	return h.composite.Close(ctx)
}

// narrow leaves the children only those of their roles that the engine has.
func narrow(c *Config, role connector.Role) {
	var kept []*Config
	for _, child := range c.Children {
		loads, saves := child.Role.Loads() && role.Loads(), child.Role.Saves() && role.Saves()
		switch {
		case loads && saves:
			child.Role = connector.RoleBoth
		case loads:
			child.Role = connector.RoleConsumer
		case saves:
			child.Role = connector.RoleProducer
		default:
			continue
		}
		if len(child.Children) > 0 {
			if narrow(child, child.Role); len(child.Children) == 0 {
				continue
			}
		}
		kept = append(kept, child)
	}
	c.Children = kept
}

// openMulti opens a side of the session of an engine.
func openMulti[S any](ctx context.Context, m *multiPlugin, env connector.Env, raw json.RawMessage,
	open func(*composite, context.Context, connector.Env, func() error) (S, error),
) (side S, err error) {
	h, leave, err := m.enter(ctx, &env, raw)
	if err != nil {
		return side, err
	}
	if side, err = open(h.composite, ctx, env, leave); err != nil {
		err = errors.Join(incompatible(err), leave())
	}
	return side, err
}

// openScheduler opens the scheduler sides of all children and joins them; after is
// called when they are closed.
func (f *composite) openScheduler(ctx context.Context, env connector.Env, after func() error) (connector.Scheduler, error) {
	list, err := openSides(f.members, func(m member) (connector.Scheduler, error) { return m.openScheduler(ctx, env) })
	if err != nil {
		return nil, err
	}
	return f.multi.Scheduler(list, f.groups, after), nil
}

// openWorker opens the worker sides of one rank of all children and joins them.
func (f *composite) openWorker(ctx context.Context, env connector.Env, after func() error) (connector.Worker, error) {
	list, err := openSides(f.members, func(m member) (connector.Worker, error) { return m.openWorker(ctx, env) })
	if err != nil {
		return nil, err
	}
	return f.multi.Worker(list, f.groups, after), nil
}

// openSides opens one side of each child, or of none.
func openSides[S io.Closer](members []member, open func(member) (S, error)) ([]S, error) {
	list := make([]S, len(members))
	for i, m := range members {
		var err error
		if list[i], err = open(m); err != nil {
			for _, side := range list[:i] {
				_ = side.Close()
			}
			return nil, under(fmt.Sprintf("connectors[%d]", i), err)
		}
	}
	return list, nil
}

// openScheduler opens the scheduler side of a child, or of the composite that it is.
func (m member) openScheduler(ctx context.Context, env connector.Env) (connector.Scheduler, error) {
	if m.composite != nil {
		return m.composite.openScheduler(ctx, env, nil)
	}
	return m.child.openScheduler(ctx, env)
}

// openWorker is openScheduler for the worker side of a rank.
func (m member) openWorker(ctx context.Context, env connector.Env) (connector.Worker, error) {
	if m.composite != nil {
		return m.composite.openWorker(ctx, env, nil)
	}
	return m.child.openWorker(ctx, env)
}
