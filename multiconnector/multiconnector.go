// Package multiconnector makes one connector of several.
//
// The order of the children is their rank: a block is loaded from the first child that has it, and a
// prefix may come from several, the first blocks from one and the next from another. What one child
// fails to load the next one is asked for. What is saved goes to every child whose role saves. A child
// whose Match fetches (connector.Info) is asked only for what follows the prefix that the others have.
// What a ticket names as being in a shared store comes from there, wherever that store is in the list: its
// producer has loaded it from there or saved it there, and need not pass it on.
//
// A [Multi] is a pure composite over the interfaces of package connector. It does not know what its
// children are: package host hands it supervised plugin processes, a test hands it anything.
package multiconnector

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvport/kvport/connector"
)

// MaxChildren is the most children of one composite.
const MaxChildren = 16

// ErrFail marks the blocks that a child with Fail set could not load.
var ErrFail = errors.New("the child's load failure policy is fail")

// Child is what a composite knows of one child.
type Child struct {
	Name     string         // tags its tickets and errors; unique among its siblings
	Label    string         // names its numbers, after its place; empty: Name
	Role     connector.Role // what it takes part in
	Info     connector.Info
	Fail     bool          // what it fails to load is asked of no other child, its error wraps ErrFail
	Patience time.Duration // how long one answer of its scheduler side is waited for, and a save that no ticket promises; 0: DefaultPatience
	Later    time.Duration // how long its Later is believed for one request; 0: as long as it says so
}

// keeps reports whether the child keeps finished blocks for consumers.
func (c *Child) keeps() bool { return c.Info.Capabilities&connector.CanHold != 0 }

// isSharedStore reports whether other engines can find in the child what this one saves, without a ticket.
func (c *Child) isSharedStore() bool { return c.Info.Scope == connector.ScopeShared && !c.keeps() }

// fetches reports whether blocks are sent to the child as soon as it is asked about them.
func (c *Child) fetches() bool { return c.Info.MatchFetches && c.Role.Loads() }

// reshapes reports whether the child can load from engines of other shapes.
func (c *Child) reshapes() bool { return c.Info.Reshapes() && c.Role.Loads() }

// powers are those of the child that the composite passes on, for its role.
func (c *Child) powers() connector.Capability {
	powers := c.Info.Capabilities & Powers
	if !c.Role.Loads() {
		powers &^= connector.CanOverlap
	}
	if !c.Role.Saves() {
		powers &^= connector.CanLayers
	}
	return powers
}

// mayHave reports whether the child can be asked for a block: only one that keeps finished blocks can
// have a partial one, which has no key.
func (c *Child) mayHave(b *connector.Block) bool {
	return b.Key != (connector.BlockKey{}) || c.keeps()
}

// Powers are the optional interfaces that a composite passes on.
const Powers = connector.CanPlan | connector.CanHold | connector.CanReset | connector.CanStat | connector.CanEvents | connector.CanLayers | connector.CanLease | connector.CanReshape | connector.CanOverlap

// Masked lists the powers of the child that the composite does not pass on, as its Info says, each with what that costs.
// Powers that a child's role has no use for are left out.
func (c *Child) Masked(composite connector.Info) []string {
	var out []string
	for _, m := range []struct {
		power connector.Capability
		used  bool
		cost  string
	}{
		{connector.CanLayers, c.Role.Saves(), "another child decides about blocks that were computed, so all are saved when the step is"},
		{connector.CanPlace, c.Role.Loads(), "each block is matched and loaded by a call of the plugin"},
	} {
		if c.Info.Capabilities&^composite.Capabilities&m.power != 0 && m.used {
			out = append(out, fmt.Sprintf("%v: %s", m.power, m.cost))
		}
	}
	return out
}

// DefaultPatience is how long a child may take over one answer before the others go on without it.
const DefaultPatience = 100 * time.Millisecond

// Multi is a composite. Both sides of all ranks of one engine share it.
type Multi struct {
	children []Child
	info     connector.Info
	run      Runner
	routes   routes
	stored   seen // what was loaded from or saved to shared stores, or found there: tickets name it
}

// New checks that the children go together and combines what they say about themselves. Errors name the
// child and wrap connector.ErrIncompatible. The slice stays the caller's.
func New(name string, children []Child) (*Multi, error) {
	info, err := Fold(name, children)
	if err != nil {
		return nil, err
	}
	m := &Multi{children: slices.Clone(children), info: info, run: goroutines{}}
	for i := range m.children {
		if m.children[i].Patience <= 0 {
			m.children[i].Patience = DefaultPatience
		}
	}
	m.routes.request = map[connector.RequestID]matched{}
	return m, nil
}

// Info describes the composite.
func (m *Multi) Info() connector.Info { return m.info }

// Fold makes one Info of the children's:
//
//	capabilities   any: a power works as far as the children have it; no layers beside a planner
//	groups         all
//	layouts        those that every child takes
//	scope          the widest of the children that save, else the widest
//	lossy          any that loads
//	match fetches  any that loads
//	stats          all, with a label child: its place and name
//
// Errors name the child and wrap connector.ErrIncompatible.
func Fold(name string, children []Child) (connector.Info, error) {
	info := connector.Info{Name: name, Groups: true, Scope: connector.ScopeEngine}
	bad := func(format string, args ...any) (connector.Info, error) {
		return connector.Info{}, fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), connector.ErrIncompatible)
	}
	switch {
	case len(children) == 0:
		return bad("no children")
	case len(children) > MaxChildren:
		return bad("%d children, at most %d", len(children), MaxChildren)
	}
	saving := slices.ContainsFunc(children, func(c Child) bool { return c.Role.Saves() })
	seen := map[string]bool{}
	for i := range children {
		c := &children[i]
		if seen[c.Name] {
			return bad("two children are called %q", c.Name)
		}
		seen[c.Name] = true
		info.Capabilities |= c.powers()
		info.Groups = info.Groups && c.Info.Groups
		info.Lossy = info.Lossy || c.Info.Lossy && c.Role.Loads()
		info.MatchFetches = info.MatchFetches || c.fetches()
		info.UnsignedPairs = info.UnsignedPairs || c.Info.UnsignedPairs
		if c.Info.BeyondMachine != "" && info.BeyondMachine == "" {
			info.BeyondMachine = fmt.Sprintf("connectors[%d].kv_connector_extra_config.%s", i, c.Info.BeyondMachine)
		}
		if c.Role.Saves() || !saving {
			info.Scope = max(info.Scope, c.Info.Scope)
		}
		both, ok := commonLayouts(info.Layouts, c.Info.Layouts)
		if !ok {
			return bad("%s needs one of the layouts %q, its siblings before it %q", c.Name, c.Info.Layouts, info.Layouts)
		}
		info.Layouts = both
	}
	info.Stats = foldStats(children)
	info.Capabilities &^= unused(&info)
	return info, nil
}

// unused are powers of children that a composite has no use for: numbers that are not shown, and layers beside a planner, which decides
// about what was computed.
func unused(info *connector.Info) (powers connector.Capability) {
	if len(info.Stats) == 0 {
		powers |= connector.CanStat
	}
	if info.Capabilities&connector.CanPlan != 0 {
		powers |= connector.CanLayers
	}
	return powers
}

// commonLayouts intersects two lists of which an empty one means any.
func commonLayouts(a, b []string) (both []string, ok bool) {
	switch {
	case len(a) == 0:
		return b, true
	case len(b) == 0:
		return a, true
	}
	both = slices.DeleteFunc(slices.Clone(a), func(l string) bool { return !slices.Contains(b, l) })
	return both, len(both) > 0
}

// Tags gives children of the given connectors names that both ends of a ticket agree on: the
// connector's, with a number from the second of its kind on.
func Tags(connectors []string) []string {
	count := map[string]int{}
	tags := make([]string, len(connectors))
	for i, name := range connectors {
		tags[i] = strings.ReplaceAll(name, "/", "_")
		if count[name]++; count[name] > 1 {
			tags[i] = fmt.Sprintf("%s#%d", tags[i], count[name])
		}
	}
	return tags
}

// named puts a child's name before its error.
func (c *Child) named(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", c.Name, err)
}
