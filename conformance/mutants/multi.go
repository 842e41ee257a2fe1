package mutants

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

// MultiConfig is a config of MultiReference with two children.
const MultiConfig = `{"connectors": [
	{"kv_connector": "ShelfA", "kv_role": "kv_both"},
	{"kv_connector": "ShelfB", "kv_role": "kv_both"}
]}`

// MultiStoreConfig is one whose second child is a shared store.
const MultiStoreConfig = `{"connectors": [
	{"kv_connector": "ShelfA", "kv_role": "kv_both"},
	{"kv_connector": "Store", "kv_role": "kv_both"}
]}`

const multiDepth = 4

// shelfPowers are those of a child.
const shelfPowers = connector.CanHold | connector.CanReset | connector.CanLease | connector.CanLayers

// MultiReference is a correct connector made of others: shelves in memory, one for each name.
func MultiReference() connector.Plugin { return multiPlugin(multiKnobs{}) }

// multiKnobs change what the reference does. A nil field changes nothing.
type multiKnobs struct {
	check     func(config []shelfConfig, err error, depth int) error
	children  func([]multiconnector.Child)                                    // what the composite knows of them
	order     func(n int) []int                                               // in which the composite has their sides
	scheduler func(i int, s connector.Scheduler) connector.Scheduler          // a child's side
	worker    func(i int, w connector.Worker) connector.Worker                // a child's side
	joint     func(s connector.Scheduler) connector.Scheduler                 // the composite's side
	jointWork func(w connector.Worker, _ []connector.Worker) connector.Worker // the composite's side
}

// shelfConfig is the transfer config of a child.
type shelfConfig struct {
	Connector string          `json:"kv_connector"`
	Role      string          `json:"kv_role"`
	Engine    *string         `json:"engine_id"`
	Extra     json.RawMessage `json:"kv_connector_extra_config"`

	role  connector.Role
	inner []shelfConfig
}

func parseShelves(raw json.RawMessage, knobs *multiKnobs, depth int) ([]shelfConfig, error) {
	var c struct {
		Connectors []shelfConfig `json:"connectors"`
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	err := d.Decode(&c)
	if err == nil {
		err = checkShelves(c.Connectors, knobs, depth)
	}
	if knobs.check != nil {
		err = knobs.check(c.Connectors, err, depth)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, connector.ErrIncompatible)
	}
	return c.Connectors, nil
}

func checkShelves(list []shelfConfig, knobs *multiKnobs, depth int) error {
	if len(list) == 0 {
		return errors.New("connectors is empty")
	}
	seen := map[string]int{}
	for i := range list {
		s := &list[i]
		var err error
		id := s.Connector + string(s.Extra)
		first, twice := seen[id]
		switch s.role, err = connector.ParseRole(s.Role); {
		case err != nil:
		case s.Engine != nil:
			err = errors.New("engine_id: belongs to the engine")
		case twice:
			err = fmt.Errorf("is connectors[%d] again", first)
		case s.Connector == "MultiReference" && depth >= multiDepth:
			err = errors.New("nested too deep")
		case s.Connector == "MultiReference":
			s.inner, err = parseShelves(s.Extra, knobs, depth+1)
		}
		if err != nil {
			return fmt.Errorf("connectors[%d]: %w", i, err)
		}
		seen[id] = i
	}
	return nil
}

// shelves are the backends of one plugin value.
type shelves struct {
	mu     sync.Mutex
	byName map[string]*backend
	joint  map[engineLife]*multiconnector.Multi // both sides of an engine share one
	knobs  multiKnobs
}

// engineLife is one life of an engine with its config.
type engineLife struct {
	engine string
	epoch  uint64
	config string
}

func multiPlugin(knobs multiKnobs) connector.Plugin {
	s := &shelves{byName: map[string]*backend{}, joint: map[engineLife]*multiconnector.Multi{}, knobs: knobs}
	return connector.Plugin{
		Name: "MultiReference", Version: "1", Capabilities: shelfPowers,
		Schema: json.RawMessage(`{"type": "object", "properties": {"connectors": {"type": "array"}}, "required": ["connectors"]}`),
		Describe: func(_ context.Context, raw json.RawMessage) (connector.Info, error) {
			list, err := parseShelves(raw, &s.knobs, 1)
			if err != nil {
				return connector.Info{}, err
			}
			return multiconnector.Fold("MultiReference", s.childrenOf(list))
		},
		Scheduler: func(_ context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
			list, m, err := s.open(&env, raw)
			if err != nil {
				return nil, err
			}
			side := s.scheduler(m, list, &env)
			if s.knobs.joint != nil {
				side = s.knobs.joint(side)
			}
			return side, nil
		},
		Worker: func(_ context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
			list, m, err := s.open(&env, raw)
			if err != nil {
				return nil, err
			}
			return s.worker(m, list, &env), nil
		},
	}
}

func (s *shelves) open(env *connector.Env, raw json.RawMessage) ([]shelfConfig, *multiconnector.Multi, error) {
	if err := env.Validate(); err != nil {
		return nil, nil, err
	}
	list, err := parseShelves(raw, &s.knobs, 1)
	if err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	life := engineLife{env.Engine, env.Epoch, string(raw)}
	m := s.joint[life]
	if m == nil {
		if m, err = multiconnector.New("MultiReference", s.childrenOf(list)); err != nil {
			return nil, nil, err
		}
		s.joint[life] = m
	}
	return list, m, nil
}

func (s *shelves) childrenOf(list []shelfConfig) []multiconnector.Child {
	names := make([]string, len(list))
	for i := range list {
		names[i] = list[i].Connector
	}
	out := make([]multiconnector.Child, len(list))
	for i, tag := range multiconnector.Tags(names) {
		info := connector.Info{Name: tag, Groups: true, Scope: connector.ScopeNode, Capabilities: shelfPowers}
		// A child that a busy machine holds up is not the subject here, so nobody gives it up.
		if isStore(tag) {
			info.Scope, info.Capabilities = connector.ScopeShared, connector.CanReset
		}
		out[i] = multiconnector.Child{Name: tag, Role: list[i].role, Info: info, Patience: time.Minute}
	}
	if s.knobs.children != nil {
		s.knobs.children(out)
	}
	return out
}

// shelf is a child's backend. Those of different names number their holds differently.
func (s *shelves) shelf(name string) *backend {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.byName[name]
	if b == nil {
		b = newBackend()
		b.last = connector.HoldID(1000 * len(s.byName))
		s.byName[name] = b
	}
	return b
}

// shelfSide is a reference that is no Planner.
type shelfSide struct{ *scheduler }

// storeSide is one that keeps nothing for consumers.
type storeSide struct{ *scheduler }

// Capabilities implements connector.Partial.
func (storeSide) Capabilities() connector.Capability { return connector.CanReset }

// isStore reports whether a child is a shared store, by its name.
func isStore(name string) bool { return strings.HasPrefix(name, "Store") }

// Capabilities implements connector.Partial.
func (shelfSide) Capabilities() connector.Capability { return shelfPowers }

func (s *shelves) scheduler(m *multiconnector.Multi, list []shelfConfig, env *connector.Env) connector.Scheduler {
	sides := make([]connector.Scheduler, len(list))
	for i, at := range s.order(len(list)) {
		c := &list[at]
		if c.inner != nil {
			inner, _ := multiconnector.New("MultiReference", s.childrenOf(c.inner)) // Describe has seen it
			sides[i] = s.scheduler(inner, c.inner, env)
		} else {
			b := s.shelf(c.Connector)
			side := &scheduler{backend: b, env: *env, life: b.join(nil)}
			sides[i] = shelfSide{side}
			if isStore(c.Connector) {
				sides[i] = storeSide{side}
			}
		}
		if s.knobs.scheduler != nil {
			sides[i] = s.knobs.scheduler(i, sides[i])
		}
	}
	return m.Scheduler(sides, env.Layout.Groups, nil)
}

func (s *shelves) worker(m *multiconnector.Multi, list []shelfConfig, env *connector.Env) connector.Worker {
	sides := make([]connector.Worker, len(list))
	for i, at := range s.order(len(list)) {
		c := &list[at]
		if c.inner != nil {
			inner, _ := multiconnector.New("MultiReference", s.childrenOf(c.inner)) // Describe has seen it
			sides[i] = s.worker(inner, c.inner, env)
		} else {
			b := s.shelf(c.Connector)
			sides[i] = &worker{backend: b, env: *env, life: b.join(nil)}
		}
		if s.knobs.worker != nil {
			sides[i] = s.knobs.worker(i, sides[i])
		}
	}
	w := m.Worker(sides, env.Layout.Groups, nil)
	if s.knobs.jointWork != nil {
		w = s.knobs.jointWork(w, sides)
	}
	return w
}

func (s *shelves) order(n int) []int {
	if s.knobs.order != nil {
		return s.knobs.order(n)
	}
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}
