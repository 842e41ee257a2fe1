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

// Env is what a host gives a side when the side opens. It holds everything that a side needs: no side is
// ever half open.
type Env struct {
	Engine      string // id of the engine, unique in the deployment
	Epoch       uint64 // differs each time the engine starts
	Role        Role
	Rank, World int         // place in the tensor-parallel group; the scheduler side has rank 0
	Model       Fingerprint // both fingerprints must be equal on both ends of a transfer
	Shape       Fingerprint
	// Base covers everything that Shape covers except block size and ranks. Engines with an equal Base can
	// load from each other through a connector with CanReshape. Zero means that this engine's blocks cannot
	// be cut.
	Base   Fingerprint
	Layout Layout
	// Arena is the memory that Info.ArenaBytes asked for, of exactly that size, or nil if it asked for
	// none. It belongs to the host: it is zero when the engine starts, all sides and ranks see the same
	// bytes until the engine ends, though each process at its own address, and it is kept when the plugin
	// dies or is replaced. Whoever wrote it before may have died in the middle of a write, so a plugin must
	// verify what it finds there (rules ARENA-01 to ARENA-04). It may be used until the side's Close
	// returns.
	Arena []byte
	// Placement says how the host expects blocks in the arena, if the connector has CanPlace and the host places; else it is
	// nil, and the connector keeps the arena as it likes. The host writes the first page of the arena before each life then,
	// except the first one with this arena, in which all of it is zero.
	Placement *Placement
	// LinkKey protects what plugins of this connector say to each other. It has 32 bytes, is the same for
	// all engines of the deployment, and no other connector gets it. A plugin must neither take anything
	// from nor give anything to a peer that has not proved that it has the key, not even on loopback, which
	// other users of the machine can reach (rule LINK-01). The host derives it from the key that signs
	// tickets, which no plugin gets. It is nil if the host is too old to give one.
	LinkKey Secret
	// MoreLinkKeys are further link keys that peers may have while an operator replaces the deployment's key: at
	// most 15, usually none. A plugin accepts peers with any of them and uses LinkKey where it has the choice
	// (see pipe.Prove). A side has the keys with which it opened; later ones come with the plugin's next start.
	MoreLinkKeys []Secret
	// RouterKey is the key with which the deployment's routers sign. Connectors that hand blocks over by
	// tickets (Info.Scope ScopeEngine and CanHold) get it; for all others it is nil.
	RouterKey Secret
	// MoreRouterKeys are further keys with which routers may sign meanwhile.
	MoreRouterKeys []Secret
	Log            *slog.Logger // never nil
}

// LinkKeys are LinkKey and MoreLinkKeys together; none if there is no LinkKey.
func (e *Env) LinkKeys() []Secret { return together(e.LinkKey, e.MoreLinkKeys) }

// RouterKeys are RouterKey and MoreRouterKeys together; none if there is no RouterKey.
func (e *Env) RouterKeys() []Secret { return together(e.RouterKey, e.MoreRouterKeys) }

func together(first Secret, more []Secret) []Secret {
	if first == nil {
		return nil
	}
	return append([]Secret{first}, more...)
}

// Validate reports the first field with an invalid value. NewKV checks whether the layout fits the memory.
// Errors name the field and wrap ErrIncompatible (rule LIFE-02).
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

// ArenaBlockHead is the room, in bytes, that each of Info.ArenaBlocks has in addition to the bytes of a
// block.
const ArenaBlockHead = 256

// Reshapes reports whether engines of other shapes can load from each other through the connector: it keeps finished blocks
// for consumers, and reads those of another engine whole.
func (i *Info) Reshapes() bool {
	const powers = CanHold | CanReshape
	return i.Capabilities&powers == powers
}

// ArenaSize is the size in bytes of the arena for an engine with that layout and world ranks. To ArenaBytes
// it adds, for each of ArenaBlocks and each rank, the bytes of the largest group's block and
// ArenaBlockHead, times the number of the engine's blocks that hold ArenaBlockTokens. A size beyond the
// range of int64 is given as math.MaxInt64.
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

// blocksOf is how many of the engine's blocks hold as much as n blocks of the given number of tokens. If
// tokens is 0, it is n.
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

// CheckArena returns an error if the host did not give a side the arena that Info.ArenaBytes asked for. The
// error wraps ErrIncompatible (rule ARENA-01).
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
	ScopeEngine Scope = 1 + iota // this engine only, as long as the plugin lives or longer: what its next life finds is used
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

// Info is what a connector says about itself for one config, before any side opens.
type Info struct {
	Name         string // the connector's canonical name
	Capabilities Capability
	Layouts      []string // byte layouts it needs; empty means any
	Groups       bool     // whether it handles caches of several groups
	Scope        Scope
	Lossy        bool // loaded bytes may differ from saved ones; the host refuses such a connector by default
	// MatchFetches says that a Match has what it asks for sent here before it is known whether it will be
	// loaded. A MultiConnector asks such a child last, and only for what follows the prefix that the others are
	// known to have (rule MULTI-12).
	MatchFetches bool
	// BeyondMachine is what in the config says that other machines may see what the connector stores: the field and its
	// value, such as an address that is not on loopback or a folder on a network file system. It is empty if nothing
	// does. Engines on several machines must have the same key for digests, so the host then asks for a key file.
	BeyondMachine string
	// ArenaBytes is how much memory the connector asks for as Env.Arena; 0 means none. The host creates the
	// arena once when the engine starts and refuses a size that the machine does not have. Its pages are
	// allocated in the background, or when they are first touched.
	ArenaBytes int64
	// ArenaBlocks asks for room for that many blocks in addition to ArenaBytes. It is for connectors whose
	// config counts blocks, because they do not know the size of the engine's blocks when they are
	// described. ArenaSize says how many bytes that is.
	ArenaBlocks int64
	// ArenaField names the field of the config that determines the size of the arena. The host names it in
	// its error if the machine has no room. It is empty if no field does.
	ArenaField string
	// ArenaBlockTokens is how many tokens each of ArenaBlocks holds; 0 means as many as one block of the
	// engine.
	ArenaBlockTokens int64
	// Complete says that with this config what lies in no slot that an answer has named (see Placer) is stored nowhere, so
	// that the host answers every query itself (rule PLACE-27). A connector whose blocks others can see, of the scope node or
	// shared, must not say it, since another engine may store what this one never learns of. Without CanPlace or an arena it
	// means nothing.
	Complete bool
	// UnsignedPairs says that with this config a request id that names two engines counts although no router has signed it, as where the
	// config trusts a proxy that signs nothing.
	UnsignedPairs bool
	// Stats declares what a StatsSource reports, at most MaxStats entries. StatInfo.Validate says which are
	// valid.
	Stats []StatInfo
}

// Plugin is one connector, ready to be served as a process or opened in process.
type Plugin struct {
	Name         string   // kv_connector value it answers to
	Aliases      []string // further values
	Version      string
	Environment  []string        // names of the environment variables it needs; nothing else is passed
	Needs        Needs           // what it needs beyond that where it runs in a sandbox
	Capabilities Capability      // what it can do with at least one config; Describe answers for one config
	Schema       json.RawMessage // JSON Schema of its kv_connector_extra_config
	// Describe checks a config and reports what the connector would do with it. It has no side effects.
	// Config errors name the field and wrap ErrIncompatible.
	Describe func(ctx context.Context, config json.RawMessage) (Info, error)
	// Scheduler and Worker open one side. Sides open in any order, and each may be opened alone. The context is that of the opening: it ends
	// when the side is open, and what goes on until Close needs one of its own.
	Scheduler func(ctx context.Context, env Env, config json.RawMessage) (Scheduler, error)
	Worker    func(ctx context.Context, env Env, config json.RawMessage) (Worker, error)
}

// Needs says what a connector needs of the machine where a host runs it in a sandbox, as hosts do at trust level staged
// unless their config says otherwise. Without Needs it has its memory, its connection to the host, and the files of its
// program and of shared libraries, for reading (rule SANDBOX-01).
type Needs struct {
	// Network: sockets, other than the one at which it listens for its host.
	Network bool `json:"network,omitempty"`
	// Reads names fields of the config, or variables of Environment, whose values are files or folders, Writes such whose values are folders,
	// which are made, with mode 0700, before the plugin starts. So a connector gets only paths that the operator has written. The
	// value may be a file:// URL, and that of a socket to connect to a unix:// URL; other URLs count as no path. A variable counts
	// only if the operator lists it, or if the host knows that it names a path.
	Reads  []string `json:"reads,omitempty"`
	Writes []string `json:"writes,omitempty"`
}

// Secret is a key. It prints, logs and marshals as a placeholder, on its own and inside other values.
// Convert it to []byte to get its bytes.
type Secret []byte

// hidden is shown instead of a Secret.
const hidden = "[secret]"

// Format implements fmt.Formatter, for all verbs.
func (Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(hidden)) }

// LogValue implements slog.LogValuer.
func (Secret) LogValue() slog.Value { return slog.StringValue(hidden) }

// MarshalText implements encoding.TextMarshaler.
func (Secret) MarshalText() ([]byte, error) { return []byte(hidden), nil }
