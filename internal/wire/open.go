package wire

import (
	"encoding/json"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"

	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// Open is the first message of a session. Env.Log is not carried.
type Open struct {
	Side    kvportv1.Side
	Env     connector.Env
	Regions []Region // worker side only
	Arena   Region   // of size 0: none. Env.Arena is not carried either
	// Progress is the board with the counters of SaveLayers, worker side only; of size 0: none.
	Progress Region
	Config   json.RawMessage
	Ring     *Ring // nil: none
}

// Ring is memory for the rings of a session: descriptor numbers in the plugin process, of the memory and
// of the socket that wakes it, and where the session's area begins.
type Ring struct {
	FD     int
	Bell   int
	Offset int64
}

// Region is memory of the paged cache: a descriptor number in the plugin process and its size.
type Region struct {
	FD   int
	Size int64
}

// OpenToProto converts an Open.
func OpenToProto(o *Open) *kvportv1.Open {
	m := &kvportv1.Open{
		Side: o.Side, Engine: o.Env.Engine, Epoch: o.Env.Epoch, Role: kvportv1.Role(o.Env.Role),
		Rank: count(o.Env.Rank), World: count(o.Env.World), Model: o.Env.Model[:], Shape: o.Env.Shape[:],
		Layout: LayoutToProto(&o.Env.Layout), Config: o.Config,
		Regions: each(o.Regions, regionToProto), LinkKey: o.Env.LinkKey, RouterKey: o.Env.RouterKey,
		MoreLinkKeys: secretsToProto(o.Env.MoreLinkKeys), MoreRouterKeys: secretsToProto(o.Env.MoreRouterKeys),
	}
	if o.Env.Base != (connector.Fingerprint{}) {
		m.Base = o.Env.Base[:]
	}
	if o.Arena.Size > 0 {
		m.Arena = regionToProto(&o.Arena)
	}
	if p := o.Env.Placement; p != nil {
		m.Placement = &kvportv1.Placement{Slots: count(p.Slots), SlotBytes: uint64(p.SlotBytes), Epoch: p.Epoch, Serial: p.Serial}
	}
	if o.Progress.Size > 0 {
		m.Progress = regionToProto(&o.Progress)
	}
	if o.Ring != nil {
		m.Ring = &kvportv1.Ring{Fd: count(o.Ring.FD), Bell: count(o.Ring.Bell), Offset: uint64(o.Ring.Offset)}
	}
	return m
}

func regionToProto(r *Region) *kvportv1.Region {
	return &kvportv1.Region{Fd: count(r.FD), Size: uint64(r.Size)}
}

// OpenFromProto converts an Open and checks that its parts fit each other: a worker's layout lies
// within its regions, a scheduler has none.
func OpenFromProto(m *kvportv1.Open) (*Open, error) {
	if m.GetSide() != kvportv1.Side_SIDE_SCHEDULER && m.GetSide() != kvportv1.Side_SIDE_WORKER {
		return nil, malformed("open.side is %d", m.GetSide())
	}
	env, err := envFromProto(m)
	if err != nil {
		return nil, err
	}
	if err := short("open.config", m.GetConfig(), MaxConfig); err != nil {
		return nil, err
	}
	o := &Open{Side: m.GetSide(), Env: *env, Config: m.GetConfig()}
	if o.Regions, err = list("open.regions", m.GetRegions(), MaxRegions, regionFromProto); err != nil {
		return nil, err
	}
	if err := o.memoryFromProto(m); err != nil {
		return nil, err
	}
	if o.Side == kvportv1.Side_SIDE_SCHEDULER {
		if len(o.Regions) > 0 || env.Rank != 0 || o.Progress.Size > 0 {
			return nil, malformed("open: a scheduler side with %d regions and rank %d", len(o.Regions), env.Rank)
		}
		return o, nil
	}
	sizes := make([]int64, len(o.Regions))
	for i, r := range o.Regions {
		sizes[i] = r.Size
	}
	return o, env.Layout.Validate(sizes)
}

// memoryFromProto converts the memory that a side may have in addition to its regions.
func (o *Open) memoryFromProto(m *kvportv1.Open) (err error) {
	if m.GetArena() != nil {
		if o.Arena, err = regionFromProto(m.GetArena()); err != nil {
			return fmt.Errorf("open.arena: %w", err)
		}
	}
	if p := m.GetPlacement(); p != nil {
		o.Env.Placement = &connector.Placement{Slots: int(p.GetSlots()), SlotBytes: int64(p.GetSlotBytes()), Epoch: p.GetEpoch(), Serial: p.GetSerial()}
		if err := o.Env.Placement.Validate(); err != nil {
			return malformed("open.placement: %v", err)
		}
		if o.Arena.Size == 0 {
			return malformed("open.placement: there is no arena")
		}
	}
	if m.GetProgress() != nil {
		if o.Progress, err = regionFromProto(m.GetProgress()); err != nil {
			return fmt.Errorf("open.progress: %w", err)
		}
	}
	o.Ring, err = ringFromProto(m.GetRing())
	return err
}

func ringFromProto(m *kvportv1.Ring) (*Ring, error) {
	switch {
	case m == nil:
		return nil, nil
	case max(m.GetFd(), m.GetBell()) > math.MaxInt32 || m.GetOffset() > math.MaxInt64:
		return nil, malformed("open.ring: fd %d, bell %d, offset %d", m.GetFd(), m.GetBell(), m.GetOffset())
	}
	return &Ring{FD: int(m.GetFd()), Bell: int(m.GetBell()), Offset: int64(m.GetOffset())}, nil
}

func envFromProto(m *kvportv1.Open) (*connector.Env, error) {
	if m.GetEngine() == "" {
		return nil, malformed("open.engine is empty")
	}
	if err := short("open.engine", m.GetEngine(), MaxName); err != nil {
		return nil, err
	}
	if m.GetRole() < kvportv1.Role_ROLE_PRODUCER || m.GetRole() > kvportv1.Role_ROLE_BOTH {
		return nil, malformed("open.role is %d", m.GetRole())
	}
	if m.GetWorld() == 0 || m.GetWorld() > MaxWorld || m.GetRank() >= m.GetWorld() {
		return nil, malformed("open: rank %d of %d, limit %d", m.GetRank(), m.GetWorld(), MaxWorld)
	}
	env := &connector.Env{
		Engine: m.GetEngine(), Epoch: m.GetEpoch(), Role: connector.Role(m.GetRole()),
		Rank: int(m.GetRank()), World: int(m.GetWorld()),
	}
	for _, f := range []struct {
		name string
		from []byte
		to   *connector.Fingerprint
	}{{"open.model", m.GetModel(), &env.Model}, {"open.shape", m.GetShape(), &env.Shape}, {"open.base", m.GetBase(), &env.Base}} {
		if len(f.from) == 0 && f.to == &env.Base {
			continue
		}
		if len(f.from) != len(f.to) {
			return nil, malformed("%s has %d bytes, want %d", f.name, len(f.from), len(f.to))
		}
		copy(f.to[:], f.from)
	}
	if err := secretsFromProto(m, env); err != nil {
		return nil, err
	}
	layout, err := LayoutFromProto(m.GetLayout())
	if err != nil {
		return nil, err
	}
	env.Layout = *layout
	return env, nil
}

// linkKeySize is the length of the keys that a host hands out.
const linkKeySize = 32

// secretsFromProto reads the keys of an Open. Errors say nothing of their bytes.
func secretsFromProto(m *kvportv1.Open, env *connector.Env) error {
	for _, k := range []struct {
		name string
		from []byte
		to   *connector.Secret
	}{{"open.link_key", m.GetLinkKey(), &env.LinkKey}, {"open.router_key", m.GetRouterKey(), &env.RouterKey}} {
		switch len(k.from) {
		case 0:
		case linkKeySize:
			*k.to = k.from
		default:
			return malformed("%s has %d bytes, want %d", k.name, len(k.from), linkKeySize)
		}
	}
	var err error
	if env.MoreLinkKeys, err = moreSecrets("open.more_link_keys", m.GetMoreLinkKeys()); err != nil {
		return err
	}
	env.MoreRouterKeys, err = moreSecrets("open.more_router_keys", m.GetMoreRouterKeys())
	return err
}

// maxMoreKeys bounds the further keys of each kind.
const maxMoreKeys = 15

func moreSecrets(name string, from [][]byte) ([]connector.Secret, error) {
	if len(from) > maxMoreKeys {
		return nil, malformed("%s has %d keys, limit %d", name, len(from), maxMoreKeys)
	}
	var out []connector.Secret
	for _, k := range from {
		if len(k) != linkKeySize {
			return nil, malformed("%s has a key of %d bytes, want %d", name, len(k), linkKeySize)
		}
		out = append(out, k)
	}
	return out, nil
}

func secretsToProto(keys []connector.Secret) (out [][]byte) {
	for _, k := range keys {
		out = append(out, k)
	}
	return out
}

func regionFromProto(m *kvportv1.Region) (Region, error) {
	if m.GetFd() > math.MaxInt32 || m.GetSize() == 0 || m.GetSize() > math.MaxInt64 {
		return Region{}, malformed("fd %d of %d bytes", m.GetFd(), m.GetSize())
	}
	return Region{FD: int(m.GetFd()), Size: int64(m.GetSize())}, nil
}

// LayoutToProto converts a Layout.
func LayoutToProto(l *connector.Layout) *kvportv1.Layout {
	return &kvportv1.Layout{
		Name: l.Name, Blocks: count(l.Blocks),
		Groups: each(l.Groups, func(g *connector.Group) *kvportv1.Group {
			return &kvportv1.Group{BlockTokens: count(g.BlockTokens), Policy: kvportv1.Policy(g.Policy), Trailing: count(g.Trailing)}
		}),
		Segments: each(l.Segments, func(s *connector.Segment) *kvportv1.Segment {
			return &kvportv1.Segment{
				Layer: int32(s.Layer), Group: uint32(s.Group), Region: uint32(s.Region),
				Offset: uint64(s.Offset), BlockStride: uint64(s.BlockStride), Bytes: uint64(s.Bytes),
				Planes: count(s.Planes), Heads: count(s.Heads),
			}
		}),
	}
}

// LayoutFromProto converts a Layout. That it fits its regions is for Layout.Validate to check.
func LayoutFromProto(m *kvportv1.Layout) (*connector.Layout, error) {
	if m.GetBlocks() == 0 || m.GetBlocks() > connector.MaxBlocks {
		return nil, malformed("layout.blocks is %d, limit %d", m.GetBlocks(), connector.MaxBlocks)
	}
	if err := short("layout.name", m.GetName(), MaxName); err != nil {
		return nil, err
	}
	l := &connector.Layout{Name: m.GetName(), Blocks: int(m.GetBlocks())}
	var err error
	if l.Groups, err = list("layout.groups", m.GetGroups(), connector.MaxGroups, groupFromProto); err != nil {
		return nil, err
	}
	l.Segments, err = list("layout.segments", m.GetSegments(), connector.MaxSegments, segmentFromProto)
	return l, err
}

func groupFromProto(m *kvportv1.Group) (connector.Group, error) {
	if m.GetBlockTokens() == 0 || m.GetBlockTokens() > MaxTokens || m.GetTrailing() > connector.MaxBlocks {
		return connector.Group{}, malformed("block_tokens is %d, trailing %d", m.GetBlockTokens(), m.GetTrailing())
	}
	if p := m.GetPolicy(); p < kvportv1.Policy_POLICY_ALL || p > kvportv1.Policy_POLICY_TRAILING {
		return connector.Group{}, malformed("policy is %d", p)
	}
	return connector.Group{BlockTokens: int(m.GetBlockTokens()), Policy: connector.Policy(m.GetPolicy()), Trailing: int(m.GetTrailing())}, nil
}

func segmentFromProto(m *kvportv1.Segment) (connector.Segment, error) {
	if m.GetGroup() >= connector.MaxGroups || m.GetRegion() >= MaxRegions {
		return connector.Segment{}, malformed("group %d, region %d", m.GetGroup(), m.GetRegion())
	}
	if max(m.GetOffset(), m.GetBlockStride(), m.GetBytes()) > math.MaxInt64 {
		return connector.Segment{}, malformed("offset %d, stride %d, bytes %d", m.GetOffset(), m.GetBlockStride(), m.GetBytes())
	}
	if max(m.GetPlanes(), m.GetHeads()) > MaxTokens {
		return connector.Segment{}, malformed("%d planes of %d heads", m.GetPlanes(), m.GetHeads())
	}
	return connector.Segment{
		Layer: int(m.GetLayer()), Group: uint16(m.GetGroup()), Region: uint16(m.GetRegion()),
		Offset: int64(m.GetOffset()), BlockStride: int64(m.GetBlockStride()), Bytes: int64(m.GetBytes()),
		Planes: int(m.GetPlanes()), Heads: int(m.GetHeads()),
	}, nil
}

// CapabilitiesToProto lists the bits of c (rule CAP-01).
func CapabilitiesToProto(c connector.Capability) []kvportv1.Capability {
	var out []kvportv1.Capability
	for ; c != 0; c &= c - 1 {
		out = append(out, kvportv1.Capability(bits.TrailingZeros64(uint64(c))+1))
	}
	return out
}

// CapabilitiesFromProto is the set of all values this build knows. Others belong to a newer peer.
func CapabilitiesFromProto(m []kvportv1.Capability) connector.Capability {
	var c connector.Capability
	for _, v := range m {
		if _, known := kvportv1.Capability_name[int32(v)]; known && v > 0 {
			c |= 1 << (v - 1)
		}
	}
	return c
}

// InfoToProto answers a Describe.
func InfoToProto(info *connector.Info) *kvportv1.DescribeResponse {
	return &kvportv1.DescribeResponse{
		Name: info.Name, Capabilities: CapabilitiesToProto(info.Capabilities), Layouts: info.Layouts,
		Groups: info.Groups, Scope: kvportv1.Scope(info.Scope), Lossy: info.Lossy, MatchFetches: info.MatchFetches,
		ArenaBytes: arenaToProto(info.ArenaBytes), ArenaBlocks: arenaToProto(info.ArenaBlocks), BeyondMachine: text(info.BeyondMachine),
		ArenaField: info.ArenaField, ArenaBlockTokens: arenaToProto(info.ArenaBlockTokens), Stats: each(info.Stats, statInfoToProto),
		Complete: info.Complete, UnsignedPairs: info.UnsignedPairs,
	}
}

// arenaToProto gives what every receiver refuses for a size that cannot be.
func arenaToProto(n int64) uint64 {
	if n < 0 {
		return math.MaxUint64
	}
	return uint64(n)
}

// InfoFromProto is the answer to a Describe. The error may be the plugin's own.
func InfoFromProto(m *kvportv1.DescribeResponse) (connector.Info, error) {
	if m.GetError() != nil {
		return connector.Info{}, ErrorFromProto(m.GetError())
	}
	if m.GetName() == "" {
		return connector.Info{}, malformed("describe: name is empty")
	}
	if err := short("describe: name", m.GetName(), MaxName); err != nil {
		return connector.Info{}, err
	}
	switch s := m.GetScope(); {
	case s < kvportv1.Scope_SCOPE_ENGINE || s > kvportv1.Scope_SCOPE_SHARED:
		return connector.Info{}, malformed("describe: scope is %d", s)
	case m.GetComplete() && s != kvportv1.Scope_SCOPE_ENGINE:
		return connector.Info{}, malformed("describe: complete, though others see the blocks: scope is %d", s)
	}
	for field, n := range map[string]uint64{"bytes": m.GetArenaBytes(), "blocks": m.GetArenaBlocks(), "block_tokens": m.GetArenaBlockTokens()} {
		if n > MaxArena {
			return connector.Info{}, malformed("describe: arena_%s is %d, limit %d", field, n, int64(MaxArena))
		}
	}
	if err := short("describe: arena_field", m.GetArenaField(), MaxName); err != nil {
		return connector.Info{}, err
	}
	if err := short("describe: beyond_machine", m.GetBeyondMachine(), MaxText); err != nil {
		return connector.Info{}, err
	}
	stats, err := statsFromProto(m.GetStats())
	if err != nil {
		return connector.Info{}, err
	}
	layouts, err := list("describe: layouts", m.GetLayouts(), MaxRegions, nameFromProto)
	return connector.Info{
		Name: m.GetName(), Capabilities: CapabilitiesFromProto(m.GetCapabilities()), Layouts: layouts,
		Groups: m.GetGroups(), Scope: connector.Scope(m.GetScope()), Lossy: m.GetLossy(), MatchFetches: m.GetMatchFetches(),
		ArenaBytes: int64(m.GetArenaBytes()), ArenaBlocks: int64(m.GetArenaBlocks()), ArenaField: m.GetArenaField(),
		ArenaBlockTokens: int64(m.GetArenaBlockTokens()), Stats: stats, BeyondMachine: m.GetBeyondMachine(),
		Complete: m.GetComplete(), UnsignedPairs: m.GetUnsignedPairs(),
	}, err
}

func nameFromProto(s string) (string, error) { return s, short("name", s, MaxName) }

// Manifest is what `kvport-NAME --manifest` prints: what a host knows of a plugin before it starts
// it.
type Manifest struct {
	Name             string          `json:"name"`
	Aliases          []string        `json:"aliases"`
	Version          string          `json:"version"`
	ProtocolVersions []int           `json:"protocol_versions"`
	Capabilities     []string        `json:"capabilities"`
	Environment      []string        `json:"environment"`
	Needs            connector.Needs `json:"needs,omitzero"`
	Scope            string          `json:"scope,omitempty"` // empty where it depends on the config
	ArenaBytes       int64           `json:"arena_bytes,omitempty"`
	Stats            []string        `json:"stats,omitempty"` // names of its metrics, after kvport_connector_
	ConfigSchema     json.RawMessage `json:"config_schema,omitempty"`
}

// NewManifest is the manifest of p. info describes p for one config, or is nil.
func NewManifest(p *connector.Plugin, info *connector.Info) *Manifest {
	m := &Manifest{
		Name: p.Name, Aliases: append([]string{}, p.Aliases...), Version: p.Version, ProtocolVersions: []int{ProtocolVersion},
		Capabilities: p.Capabilities.Names(), Environment: append([]string{}, p.Environment...), Needs: p.Needs, ConfigSchema: p.Schema,
	}
	if info != nil {
		m.Capabilities, m.Scope = info.Capabilities.Names(), info.Scope.String()
		m.ArenaBytes = info.ArenaBytes
		for _, s := range info.Stats {
			m.Stats = append(m.Stats, s.Name)
		}
	}
	return m
}

// ParseManifest reads what a plugin printed. Unknown fields are a newer plugin's and ignored.
// Errors wrap ErrMalformed.
func ParseManifest(data []byte) (*Manifest, error) {
	if err := short("manifest", data, MaxConfig); err != nil {
		return nil, err
	}
	var m Manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, fmt.Errorf("manifest is no JSON object of the right form: %w: %w", err, ErrMalformed)
	}
	if m.Name == "" || len(m.Name) > MaxName || strings.ContainsAny(m.Name, "\x00/\n") {
		return nil, malformed("manifest: name %q", text(m.Name))
	}
	if max(len(m.Aliases), len(m.Environment), len(m.Needs.Reads), len(m.Needs.Writes)) > MaxQueries {
		return nil, malformed("manifest: too many aliases, environment variables or paths")
	}
	return &m, nil
}

// Speaks reports whether the plugin knows a protocol version.
func (m *Manifest) Speaks(version int) bool { return slices.Contains(m.ProtocolVersions, version) }

// Answers reports whether kv_connector may call the plugin by name.
func (m *Manifest) Answers(name string) bool {
	return m.Name == name || slices.Contains(m.Aliases, name)
}
