package offload

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk/tier"
)

// Scope says that only the engine that stored a block finds it again: the tiers are its own.
const Scope = connector.ScopeEngine

// DefaultBytes is the size of the memory tier if the config names none.
const DefaultBytes = 1 << 30

// Config is the kv_connector_extra_config of this connector. Names that vLLM has too mean what they
// mean there.
type Config struct {
	BlockSize      int    `json:"block_size,omitempty" jsonschema:"minimum=0,default=0,description=Tokens of an offered piece: hits come in whole pieces. A multiple of the engine's block size; 0: that size."`
	CPUBytes       int64  `json:"cpu_bytes_to_use,omitempty" jsonschema:"minimum=0,description=Size of the memory tier in bytes. 0: num_cpu_blocks decides or else 1 GiB." jsonschema_extras:"bounds=bytes"`
	CPUBlocks      int    `json:"num_cpu_blocks,omitempty" jsonschema:"minimum=0,maximum=268435456,description=Size of the memory tier in blocks of block_size tokens. Not together with cpu_bytes_to_use." jsonschema_extras:"bounds=blocks"`
	Policy         string `json:"eviction_policy,omitempty" jsonschema:"enum=lru,enum=arc,enum=s3fifo,enum=LRU,enum=S3FIFO,default=lru,description=Which block goes when a tier is full."`
	StoreThreshold int    `json:"store_threshold,omitempty" jsonschema:"minimum=0,maximum=255,default=0,description=How often a block is offered before it is stored. 0: at once."`
	Tracker        int    `json:"max_tracker_size,omitempty" jsonschema:"minimum=1,default=64000,description=Keys that store_threshold tells apart."`
	TTL            int    `json:"ttl_seconds,omitempty" jsonschema:"minimum=0,default=0,description=How long a block may be loaded after it was stored; 0: for ever." jsonschema_extras:"bounds=seconds"`
	PinAfter       int    `json:"pin_after_loads,omitempty" jsonschema:"minimum=0,maximum=255,default=0,description=Loads after which a block is kept from eviction; 0: never."`
	PinPercent     int    `json:"pin_percent,omitempty" jsonschema:"minimum=1,maximum=50,default=10,description=The most memory that blocks kept so may take in percent."`
	TenantBytes    int64  `json:"tenant_bytes,omitempty" jsonschema:"minimum=0,default=0,description=The most memory that blocks of one cache_salt may take in bytes; 0: no limit." jsonschema_extras:"bounds=tenant_bytes"`
	Workers        int    `json:"workers,omitempty" jsonschema:"minimum=1,maximum=64,default=2,description=Goroutines that copy the blocks of one call."`

	DiskPath   string `json:"disk_path,omitempty" jsonschema:"description=Folder of the disk tier; made when it is missing. Empty: no disk tier."`
	DiskBytes  int64  `json:"disk_bytes,omitempty" jsonschema:"minimum=0,description=Size of the disk tier in bytes; with disk_path." jsonschema_extras:"bounds=bytes"`
	DiskAdmit  int    `json:"disk_admit_after,omitempty" jsonschema:"minimum=1,maximum=255,default=2,description=How often a block is stored or loaded before it is written to disk. 1: every block."`
	DiskAhead  int    `json:"disk_prefetch_blocks,omitempty" jsonschema:"minimum=0,maximum=4096,default=16,description=Blocks of a matched prompt that are read from disk before they are asked for."`
	DiskBehind int    `json:"disk_write_queue,omitempty" jsonschema:"minimum=1,maximum=1048576,default=1024,description=Blocks that may wait to be written to disk; more are not."`

	// Fields that only vLLM uses. They are accepted so that its configs work here, and have no effect.
	SpecName       string `json:"spec_name,omitempty" jsonschema:"description=Of vLLM; no effect."`
	SpecModulePath string `json:"spec_module_path,omitempty" jsonschema:"description=Of vLLM; no effect."`
	PolicyModule   string `json:"cache_policy_module_path,omitempty" jsonschema:"description=Of vLLM; no effect."`
	BlocksPerChunk int    `json:"blocks_per_chunk,omitempty" jsonschema:"minimum=0,description=Of vLLM: block_size in blocks of the engine."`
	PromptOnly     bool   `json:"offload_prompt_only,omitempty" jsonschema:"description=Of vLLM; no effect."`
	Canonical      bool   `json:"canonical_layout,omitempty" jsonschema:"description=Of vLLM; no effect."`
	SelfDescribing bool   `json:"self_describing_kv_events,omitempty" jsonschema:"description=Of vLLM; no effect."`
}

// Needs names the folder that the plugin writes, for its manifest.
func Needs() connector.Needs { return connector.Needs{Writes: []string{"disk_path"}} }

// Validate reports the first field that cannot work. Errors wrap connector.ErrIncompatible.
func (c Config) Validate() error {
	bad := func(field, format string, args ...any) error {
		return fmt.Errorf("%s %s: %w", field, fmt.Sprintf(format, args...), connector.ErrIncompatible)
	}
	switch {
	case c.CPUBytes > 0 && c.CPUBlocks > 0:
		return bad("num_cpu_blocks", "and cpu_bytes_to_use are both set, leave one out")
	case c.BlockSize > 0 && c.BlocksPerChunk > 0:
		return bad("blocks_per_chunk", "and block_size are both set, leave one out")
	case c.DiskPath == "" && c.DiskBytes > 0:
		return bad("disk_bytes", "is set but not disk_path")
	case c.DiskPath != "" && c.DiskBytes == 0:
		return bad("disk_bytes", "is missing, set it to the size of the disk tier in bytes")
	case c.DiskPath != "" && !filepath.IsAbs(c.DiskPath):
		return bad("disk_path", "is %q, want an absolute path", c.DiskPath)
	}
	return nil
}

// warn names the fields that are accepted and have no effect.
func (c *Config) warn(log *slog.Logger) {
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"spec_name", c.SpecName != ""},
		{"spec_module_path", c.SpecModulePath != ""},
		{"cache_policy_module_path", c.PolicyModule != ""},
		{"offload_prompt_only", c.PromptOnly},
		{"canonical_layout", c.Canonical},
		{"self_describing_kv_events", c.SelfDescribing},
	} {
		if f.set {
			log.Warn("a field of vLLM's connector has no effect here", "field", f.name)
		}
	}
}

// policy is the name that the library has for the policy.
func (c *Config) policy() string {
	switch c.Policy {
	case "LRU", "":
		return tier.LRU
	case "S3FIFO":
		return tier.S3FIFO
	}
	return c.Policy
}

// piece is how many blocks of the engine an offered piece has.
func (c *Config) piece(groups []connector.Group) (int, error) {
	if c.BlocksPerChunk > 0 {
		return c.BlocksPerChunk, nil
	}
	if c.BlockSize == 0 {
		return 1, nil
	}
	own := groups[0].BlockTokens
	if c.BlockSize%own != 0 {
		return 0, fmt.Errorf("block_size is %d, want a multiple of the engine's %d: %w", c.BlockSize, own, connector.ErrIncompatible)
	}
	n := c.BlockSize / own
	if n > 1 && (len(groups) > 1 || groups[0].Policy != connector.PolicyAll) {
		return 0, fmt.Errorf("block_size is %d, a cache of several groups needs the engine's %d: %w", c.BlockSize, own, connector.ErrIncompatible)
	}
	return n, nil
}

// ArenaBytes is how much memory the host is asked for, in addition to ArenaBlocks.
func (c *Config) ArenaBytes() int64 {
	switch {
	case c.CPUBlocks > 0:
		return tier.ArenaHead
	case c.CPUBytes > 0:
		return c.CPUBytes
	}
	return DefaultBytes
}

// Complete says that what is placed is all there is: without a disk tier there is nothing else.
func (c *Config) Complete() bool { return c.DiskPath == "" }

// ArenaField is the field that says how large the memory tier is.
func (c *Config) ArenaField() string {
	if c.CPUBlocks > 0 {
		return "num_cpu_blocks"
	}
	return "cpu_bytes_to_use"
}

// ArenaBlocks is for how many blocks the host is asked to keep memory on each rank.
func (c *Config) ArenaBlocks() int64 { return int64(c.CPUBlocks) * int64(max(1, c.BlocksPerChunk)) }

// ArenaBlockTokens is how many tokens each of them has, as in vLLM; 0: as many as the engine's.
func (c *Config) ArenaBlockTokens() int64 { return int64(c.BlockSize) }

// options are those of the tiers for one engine.
func (c *Config) options(env *connector.Env) tier.Options {
	o := tier.OptionsFor(env)
	o.Lend = true
	o.Slots, o.Policy, o.Workers = c.slots(env), c.policy(), c.Workers
	o.StoreThreshold, o.Tracked, o.TTL, o.TenantBytes = c.StoreThreshold, c.Tracker, time.Duration(c.TTL)*time.Second, c.TenantBytes
	o.PinAfter, o.PinShare = c.PinAfter, float64(c.PinPercent)/100
	o.AdmitAfter, o.WriteBehind, o.Prefetch = c.DiskAdmit, c.DiskBehind, c.DiskAhead
	return o
}

// slots is how many blocks the memory tier keeps, if num_cpu_blocks says so; 0: as many as fit.
func (c *Config) slots(env *connector.Env) int {
	piece, err := c.piece(env.Layout.Groups)
	if err != nil {
		return 0 // Open has refused it
	}
	return c.CPUBlocks * piece * env.World
}
