package connector

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"math/bits"
)

// Role is the part an engine plays: kv_role of the transfer config.
type Role uint8

// The roles. The numbers are part of the wire protocol and never reused.
const (
	RoleProducer Role = 1 + iota // computes and saves, never loads
	RoleConsumer                 // loads, never saves
	RoleBoth
)

// ParseRole reads kv_producer, kv_consumer or kv_both.
func ParseRole(s string) (Role, error) {
	for r := RoleProducer; r <= RoleBoth; r++ {
		if r.String() == s {
			return r, nil
		}
	}
	return 0, fmt.Errorf("%q is none of kv_producer, kv_consumer, kv_both: %w", s, ErrIncompatible)
}

// String is the role as the transfer config spells it.
func (r Role) String() string {
	switch r {
	case RoleProducer:
		return "kv_producer"
	case RoleConsumer:
		return "kv_consumer"
	case RoleBoth:
		return "kv_both"
	}
	return fmt.Sprintf("role %d", uint8(r))
}

// Loads reports whether the role may load.
func (r Role) Loads() bool { return r == RoleConsumer || r == RoleBoth }

// Saves reports whether the role may save.
func (r Role) Saves() bool { return r == RoleProducer || r == RoleBoth }

// Env is what a host gives a side when it opens it. Everything a side needs is known by then: no
// side is ever half open.
type Env struct {
	Engine      string // id of the engine, unique in the deployment
	Epoch       uint64 // differs in every life of the engine
	Role        Role
	Rank, World int         // place in the tensor-parallel group; the scheduler side has rank 0
	Model       Fingerprint // both fingerprints must be equal on both ends of a transfer
	Shape       Fingerprint
	// Base is what Shape is made of but for block size and ranks. Engines whose Base is equal can load from
	// each other by a connector with CanReshape. Zero: this engine's blocks cannot be cut.
	Base   Fingerprint
	Layout Layout
	// Arena is the memory that Info.ArenaBytes asked for, of exactly that size; nil if it asked for
	// none. It belongs to the host: zeroed at the engine's start, the same bytes for all sides and
	// ranks of one engine life, at another address in every process, and kept when the plugin dies
	// or is replaced. Whoever wrote it before may have died in mid-write: nothing in it is to be
	// trusted unverified (rules ARENA-01 to ARENA-04). It may be used until the side's Close returns.
	Arena []byte
	// LinkKey is for what plugins of this connector say to each other: 32 bytes, the same for all engines of
	// the deployment and for no other connector. A plugin must not take anything from, nor give anything to,
	// a peer that has not shown that it has the key, on loopback either: other users of the machine reach it
	// (rule LINK-01). The host derives it from the key that signs tickets, which no plugin is given. Nil: the
	// host is older than that.
	LinkKey Secret
	// RouterKey is what the deployment's routers sign with, for connectors that hand blocks over by tickets
	// (Info.Scope ScopeEngine and CanHold); nil for all others.
	RouterKey Secret
	Log       *slog.Logger // never nil
}

// Validate reports the first field that no engine could mean. That the layout fits the memory is for
// NewKV to check. Errors name the field and wrap ErrIncompatible (rule LIFE-02).
func (e *Env) Validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrIncompatible)
	}
	switch {
	case e.Engine == "":
		return bad("engine is empty")
	case e.Role < RoleProducer || e.Role > RoleBoth:
		return bad("role is %d", uint8(e.Role))
	case e.World < 1 || e.Rank < 0 || e.Rank >= e.World:
		return bad("rank %d of %d", e.Rank, e.World)
	}
	regions := 1
	for _, s := range e.Layout.Segments {
		regions = max(regions, int(s.Region)+1)
	}
	sizes := make([]int64, regions)
	for i := range sizes {
		sizes[i] = math.MaxInt64
	}
	return e.Layout.Validate(sizes)
}

// ArenaBlockHead is what each of Info.ArenaBlocks has besides the bytes of a block, in bytes.
const ArenaBlockHead = 256

// ArenaSize is the size of the arena for an engine with that cache and so many ranks, in bytes:
// ArenaBytes, and for each of ArenaBlocks and each rank the bytes of the largest group's block and
// ArenaBlockHead, times the engine's blocks that ArenaBlockTokens take. What is more than an int64
// holds is math.MaxInt64.
func (i *Info) ArenaSize(l *Layout, world int) int64 {
	if i.ArenaBlocks <= 0 {
		return i.ArenaBytes
	}
	blocks, block := l.blocksOf(i.ArenaBlocks, i.ArenaBlockTokens), int64(0)
	for g := range l.Groups {
		block = max(block, l.BlockBytes(uint16(g)))
	}
	overflow, size := bits.Mul64(uint64(blocks), uint64(block+ArenaBlockHead))
	more, size := bits.Mul64(size, uint64(max(1, world)))
	size += uint64(i.ArenaBytes)
	if overflow != 0 || more != 0 || size > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(size)
}

// blocksOf is how many of the engine's blocks hold what n blocks of so many tokens do; tokens 0: n.
func (l *Layout) blocksOf(n, tokens int64) int64 {
	if tokens <= 0 || len(l.Groups) == 0 || l.Groups[0].BlockTokens <= 0 {
		return n
	}
	own := int64(l.Groups[0].BlockTokens)
	each := tokens / own
	if tokens%own != 0 {
		each++
	}
	if n > math.MaxInt64/each {
		return math.MaxInt64
	}
	return n * each
}

// CheckArena reports that a side was not given the arena that Info.ArenaBytes asked for. The error
// wraps ErrIncompatible (rule ARENA-01).
func (e *Env) CheckArena(want int64) error {
	if int64(len(e.Arena)) != want {
		return fmt.Errorf("arena of %d bytes, want %d: %w", len(e.Arena), want, ErrIncompatible)
	}
	return nil
}

// Scope says who can see what a connector stores.
type Scope uint8

// The scopes. The numbers are part of the wire protocol and never reused.
const (
	ScopeEngine Scope = 1 + iota // this engine only, as long as the plugin lives
	ScopeNode                    // every engine on this host with the same config
	ScopeShared                  // every engine that reaches the same backend
)

// String is the scope's name.
func (s Scope) String() string {
	switch s {
	case ScopeEngine:
		return "engine"
	case ScopeNode:
		return "node"
	case ScopeShared:
		return "shared"
	}
	return fmt.Sprintf("scope %d", uint8(s))
}

// Info is what a connector says of itself for one config, before any side opens.
type Info struct {
	Name         string // the connector's canonical name
	Capabilities Capability
	Layouts      []string // byte layouts it needs; empty means any
	Groups       bool     // it handles caches of several groups
	Scope        Scope
	Lossy        bool // loaded bytes may differ from saved ones: the host refuses it by default
	// ArenaBytes is how much memory the connector wants to have as Env.Arena, 0: none. The host makes it
	// once for each life of the engine and refuses what the machine does not have. Its pages are allocated
	// in the background, or when they are first touched.
	ArenaBytes int64
	// ArenaBlocks asks for room for so many blocks besides, for connectors whose config counts blocks:
	// they do not know the engine's when they are described. ArenaSize says how much that is.
	ArenaBlocks int64
	// ArenaField names the field of the config that says how large the arena is: the host names it where
	// the machine has no room. Empty: none does.
	ArenaField string
	// ArenaBlockTokens is how many tokens each of ArenaBlocks holds, 0: as many as one of the engine's.
	ArenaBlockTokens int64
	// Stats are what a StatsSource counts, at most MaxStats. Validate says what names are fit.
	Stats []StatInfo
}

// Plugin is one connector, ready to be served as a process or opened in process.
type Plugin struct {
	Name         string   // kv_connector value it answers to
	Aliases      []string // further values
	Version      string
	Environment  []string        // names of environment variables it wants to see; nothing else is passed
	Capabilities Capability      // what it can do with some config; Describe says it for one
	Schema       json.RawMessage // JSON Schema of its kv_connector_extra_config
	// Describe checks a config and says what the connector would do with it. It has no side
	// effects. Config errors name the field and wrap ErrIncompatible.
	Describe func(ctx context.Context, config json.RawMessage) (Info, error)
	// Scheduler and Worker open one side. Sides open in any order, and either may be opened alone.
	Scheduler func(ctx context.Context, env Env, config json.RawMessage) (Scheduler, error)
	Worker    func(ctx context.Context, env Env, config json.RawMessage) (Worker, error)
}
