package host

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/invopop/jsonschema"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/config"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/strictjson"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/multiconnector"
)

// ErrConfig is wrapped by every error that a changed config, binary or flag could cure. Commands
// exit with code 2 on it.
var ErrConfig = config.Err

// FailurePolicy says what becomes of a request whose blocks could not be loaded.
type FailurePolicy string

// The values of kv_load_failure_policy.
const (
	PolicyRecompute FailurePolicy = "recompute"
	PolicyFail      FailurePolicy = "fail"
)

// shimModule is the Python module by which vLLM finds kvport.
const shimModule = "kvport_vllm"

// Config is a decoded --kv-transfer-config.
type Config struct {
	Connector     string // name or alias of the plugin
	Role          connector.Role
	EngineID      string // empty: the host makes one
	BufferDevice  string // empty: where the region is
	FailurePolicy FailurePolicy
	Extra         json.RawMessage // kv_connector_extra_config, the plugin's own; "{}" when absent
	ModulePath    string          // a plugin binary to use instead of searching for one
	Children      []*Config       // of a MultiConnector that the host composes, in order
	Settings      Settings
	trampoline    string        // see SandboxedBy
	tag           string        // of a child: its name in tickets
	at            string        // of a child: where it stands, with a dot behind it
	beside        config.Beside // vLLM's own keys, for connectors that have a field for them: see Adopt
	Warnings      []string      // keys of other systems that were accepted and have no effect; the caller logs them
}

// ParseConfig reads the argument of --kv-transfer-config: JSON, or @FILE with JSON in it. Decoding
// is strict. Errors wrap ErrConfig and name the field, its line and column.
func ParseConfig(arg string) (*Config, error) {
	data, where := []byte(arg), "kv-transfer-config"
	if path, isFile := strings.CutPrefix(arg, "@"); isFile {
		var err error
		if data, err = ReadFile(path, maxConfigBytes); err != nil {
			return nil, fmt.Errorf("%w: kv-transfer-config: %w", ErrConfig, err)
		}
		where = path
	}
	c, err := parseConfig(data)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrConfig, where, err)
	}
	return c, nil
}

func parseConfig(data []byte) (*Config, error) {
	v, err := strictjson.Parse(data)
	if err != nil {
		return nil, err
	}
	c := &Config{Settings: DefaultSettings()}
	if err := c.decode(v, 0); err != nil {
		return nil, err
	}
	return c, nil
}

// transferConfig is a transfer config as JSON has it. The schema of the tags is checked, and printed by kvport schema.
type transferConfig struct {
	Connector     string            `json:"kv_connector" jsonschema:"required,minLength=1,description=The name of the plugin's connector or one of its aliases."`
	Role          string            `json:"kv_role" jsonschema:"required,enum=kv_producer,enum=kv_consumer,enum=kv_both,description=kv_producer saves; kv_consumer loads; kv_both does both."`
	Extra         *strictjson.Value `json:"kv_connector_extra_config" jsonschema:"type=object,description=The connector's own config."`
	FailurePolicy FailurePolicy     `json:"kv_load_failure_policy" jsonschema:"enum=recompute,enum=fail,description=What becomes of a request whose blocks could not be loaded."`
	EngineID      string            `json:"engine_id" jsonschema:"description=How other engines know this one; two engines must not share one. Without it the engine makes one."`
	ModulePath    string            `json:"kv_connector_module_path" jsonschema:"description=A plugin binary to use instead of looking for one by name."`
	BufferDevice  string            `json:"kv_buffer_device" jsonschema:"enum=cpu,enum=cuda,description=Where the cache is; cuda is refused until caches can lie there."`
	Settings      Settings          `json:"kvport" jsonschema:"description=The settings of kvport itself."`

	// These of vLLM are given to a connector that has a field for them: see Adopt.
	IP           string `json:"kv_ip" jsonschema:"description=Of vLLM; it is given to a connector whose config has this field."`
	Port         *int64 `json:"kv_port" jsonschema:"nullable,description=As kv_ip."`
	Rank         *int64 `json:"kv_rank" jsonschema:"nullable,description=As kv_ip."`
	ParallelSize *int64 `json:"kv_parallel_size" jsonschema:"nullable,description=As kv_ip."`
	BufferSize   *int64 `json:"kv_buffer_size" jsonschema:"nullable,description=As kv_ip." jsonschema_extras:"unit=bytes"`

	Permute bool `json:"enable_permute_local_kv" jsonschema:"description=Of vLLM; it has no effect."`
}

// strict is how transfer configs are read.
func strict() strictjson.Options { return strictjson.Options{Seconds: true, Foreign: config.Foreign} }

// refuse says what cannot be so, although it can be read.
func (t *transferConfig) refuse(v *strictjson.Value) error {
	if t.ModulePath == shimModule || strings.HasPrefix(t.ModulePath, shimModule+".") {
		return v.Field("kv_connector_module_path").Errorf("%s is kvport's module for vLLM, so this is the outer object of vLLM's config: give the inner object, its kv_connector_extra_config", strictjson.Quote(t.ModulePath))
	}
	if t.BufferDevice == "cuda" {
		return v.Field("kv_buffer_device").Errorf(`is "cuda", but caches are in host memory here and transfers of a GPU's memory were never run; want "cpu": %w`, connector.ErrIncompatible)
	}
	if t.Settings.Digest == DigestXXH3 && t.Settings.TenantSecretFile != "" {
		return v.Field("kvport").Errorf("digest is %q, which has no key, but tenant_secret_file adds a secret to the keys of digests: leave out one of them", DigestXXH3)
	}
	return nil
}

// decode fills c, whose settings have their defaults. depth counts the MultiConnectors around it.
func (c *Config) decode(v *strictjson.Value, depth int) error {
	t := transferConfig{FailurePolicy: PolicyRecompute, Settings: c.Settings}
	if err := strict().Decode(v, &t); err != nil {
		return err
	}
	if err := t.refuse(v); err != nil {
		return err
	}
	var err error
	if c.Role, err = connector.ParseRole(t.Role); err != nil {
		return v.Field("kv_role").Errorf("%w", err)
	}
	t.Settings.PluginSHA256 = strings.ToLower(t.Settings.PluginSHA256)
	c.Connector, c.EngineID, c.BufferDevice, c.FailurePolicy = t.Connector, t.EngineID, t.BufferDevice, t.FailurePolicy
	if t.Settings.Unverified && !c.Settings.Unverified { // not inherited
		c.Warnings = append(c.Warnings, "kvport.unverified: is not needed and has no effect: blocks of engines with another block size or other ranks are verified; for a connector that may change bytes set kvport.allow_lossy")
	}
	c.ModulePath, c.Settings, c.Extra, c.beside = t.ModulePath, t.Settings, json.RawMessage("{}"), config.BesideOf(v)
	for _, name := range v.Names() {
		if config.Foreign(name) || name == "enable_permute_local_kv" {
			c.Warnings = append(c.Warnings, name+": accepted for compatibility, has no effect")
		}
	}
	if t.Extra != nil {
		c.Extra = t.Extra.Raw()
	}
	if c.Connector != MultiName || c.ModulePath != "" {
		return nil
	}
	if t.Extra == nil {
		return v.Errorf("kv_connector_extra_config is required: its connectors are the transfer configs of the children, in order")
	}
	c.Children, err = parseChildren(t.Extra, c, depth+1)
	return err
}

// Adopt gives a plugin those of kv_ip, kv_port, kv_rank, kv_parallel_size and kv_buffer_size next to kv_connector
// for which its config has a field of that name, as if they were in kv_connector_extra_config; what is there
// already wins. The sentences that it returns are warnings about keys without effect.
func (c *Config) Adopt(m *Manifest) (warnings []string) {
	c.Extra, warnings = c.beside.Adopt(c.Extra, m.ConfigSchema, m.Name, c.at)
	return warnings
}

// adopt is Adopt with its warnings logged.
func (c *Config) adopt(m *Manifest, log *slog.Logger) {
	for _, w := range c.Adopt(m) {
		if log != nil {
			log.Warn("kv-transfer-config: " + w)
		}
	}
}

// Settings are the host's own settings: the object "kvport" of the transfer config.
type Settings struct {
	// TicketKeyFile has the keys that sign tickets; empty: one that this user's engines on this machine share.
	TicketKeyFile string `json:"ticket_key_file" jsonschema:"description=The ring of keys of which the first signs tickets or a file with one key; without it this user's engines on this machine share one."`
	// Peers are the ids of the engines whose tickets are accepted; empty: all that have the key.
	Peers []string `json:"peers" jsonschema:"description=The ids of the engines whose tickets are accepted; without it all that have the key."`
	Trust Trust    `json:"trust" jsonschema:"enum=in-place,enum=staged,description=in-place: the plugin maps the paged cache. staged: it maps landing memory."`
	// LandingBytes is the landing memory of each rank at trust level staged, and at any level as much for the blocks that
	// come from engines of other shapes.
	LandingBytes int `json:"landing_bytes" jsonschema:"minimum=1,description=Landing memory of each rank at trust level staged; at any level as much for blocks of engines with another block size or other ranks."`
	// ArenaLimit is the most bytes that a connector may have as its arena; 0: seven eighths of what the machine has free.
	ArenaLimit int `json:"arena_limit" jsonschema:"minimum=1,description=The most bytes that a connector may have as memory that outlives it; without it seven eighths of what the machine has free." jsonschema_extras:"unit=bytes"`
	// Sandbox says whether the plugin runs in a sandbox.
	Sandbox SandboxMode `json:"sandbox" jsonschema:"enum=auto,enum=on,enum=off,description=auto: the plugin runs in a sandbox at trust level staged if the machine has one. on: it does at every trust level or does not start if the kernel cannot keep files and memory from it. off: it does not."`
	// SandboxAllow is what a plugin in a sandbox may do.
	SandboxAllow SandboxAllow `json:"sandbox_allow" jsonschema:"description=What a plugin in a sandbox may do in addition to what its config names."`
	// CrossMemory takes the plugin out of the sandbox: nothing in one can read another process's memory.
	CrossMemory bool `json:"cross_memory" jsonschema:"description=The plugin reads and writes the memory of other plugins directly and therefore runs outside the sandbox."`
	// Environment are the names of variables that the plugin may have; nil: those that its manifest names.
	Environment []string `json:"environment" jsonschema:"description=Names of the environment variables that the plugin may have if its manifest names them; without it all those."`
	// PluginSHA256 is the hash that the plugin binary must have, in hex; empty: any.
	PluginSHA256 string `json:"plugin_sha256" jsonschema:"pattern=^[0-9a-fA-F]{64}$,description=The SHA-256 of the plugin binary in hex; without it any binary is run."`
	// Digest says how blocks are protected against damage and forgery.
	Digest Digest `json:"digest" jsonschema:"enum=keyed,enum=xxh3,description=keyed: digests are made with the first key of ticket_key_file and checked with all of them. xxh3: they have no key, so whoever can write a store can forge them."`
	// TenantSecretFile makes keys keyed hashes, and a part of the keys of digests.
	TenantSecretFile string `json:"tenant_secret_file" jsonschema:"description=Adds a secret to keys and digests, so that whoever lacks it can neither find nor forge a tenant's blocks."`
	// AllowLossy accepts a connector whose loaded bytes may differ from the saved ones.
	AllowLossy bool `json:"allow_lossy" jsonschema:"description=Accepts a connector whose loaded bytes may differ from the saved ones."`
	// Unverified has no effect: blocks of engines of other shapes are verified.
	Unverified bool `json:"unverified" jsonschema:"description=Of earlier releases; it has no effect: blocks of engines with another block size or other ranks are verified."`
	// Ring: small messages go through shared memory, if the plugin can; false: all over the stream.
	Ring bool `json:"ring" jsonschema:"description=Small messages go through shared memory, if the plugin can; false: all over the stream."`
	// AllowWeakHashes is the agent's: it accepts an engine whose block hashes could collide or differ between processes.
	AllowWeakHashes bool `json:"allow_weak_hashes" jsonschema:"description=agent: accepts an engine whose block hashes could collide or differ between processes."`
	// RecomputeThreshold is how many tokens an earlier turn's blocks must hold to be loaded: fewer are computed.
	RecomputeThreshold int       `json:"recompute_threshold" jsonschema:"minimum=1,description=Blocks of an earlier turn are loaded if they hold at least that many tokens that the engine lacks; else they are computed."`
	Deadlines          Deadlines `json:"deadlines"`
	Heartbeat          Heartbeat `json:"heartbeat"`
	Breaker            Breaker   `json:"breaker"`
}

// Trust says what a plugin may touch.
type Trust string

// The levels.
const (
	TrustInPlace Trust = "in-place" // the plugin maps the paged cache
	TrustStaged  Trust = "staged"   // it maps landing memory: the host copies saves out and verified loads in
)

// Digest is a kind of digests.
type Digest string

// The kinds.
const (
	DigestKeyed Digest = "keyed" // edition 2: a MAC, by the ring of the ticket key file
	DigestXXH3  Digest = "xxh3"  // edition 1: against damage only
)

// SandboxMode says whether a plugin runs in a sandbox.
type SandboxMode string

// The modes.
const (
	SandboxAuto SandboxMode = "auto" // at trust level staged, if the machine can; else a warning says why not
	SandboxOn   SandboxMode = "on"   // at every trust level; where files and memory cannot be kept from the plugin it does not start
	SandboxOff  SandboxMode = "off"
)

// SandboxAllow is what a plugin in a sandbox may do. What is said of a folder is said of all below it.
type SandboxAllow struct {
	Network   bool     `json:"network" jsonschema:"description=false: no network even if the plugin's manifest says that it needs one."`
	Read      []string `json:"read" jsonschema:"description=Files and folders that it may read."`
	Run       []string `json:"run" jsonschema:"description=Files and folders that it may read and start as programs."`
	Write     []string `json:"write" jsonschema:"description=Files and folders that it may read and write."`
	DataBytes int      `json:"data_bytes" jsonschema:"minimum=1,description=The most memory of its own that it may have (RLIMIT_DATA); without it there is no limit." jsonschema_extras:"unit=bytes"`
}

// Deadlines bound every call. None may be zero.
type Deadlines struct {
	Handshake      time.Duration `json:"handshake"` // from start to the first answer
	Match          time.Duration `json:"match"`     // how long Match itself waits before it answers Later
	Later          time.Duration `json:"later"`     // how long a match may stay Later before it is a miss
	Transfer       time.Duration `json:"transfer"`  // a load, in addition to TransferPerGiB
	TransferPerGiB time.Duration `json:"transfer_per_gib"`
	Save           time.Duration `json:"save"`
	Plan           time.Duration `json:"plan"`
	Finish         time.Duration `json:"finish"`   // from the end of a request until its Finished
	Grace          time.Duration `json:"grace"`    // from a passed deadline until the plugin is killed
	Hold           time.Duration `json:"hold"`     // TTL of a hold that names none
	HoldMax        time.Duration `json:"hold_max"` // the longest TTL a plugin may ask for
	Fence          time.Duration `json:"fence"`    // how long a dead plugin's blocks wait for those that may still write them, before they are lost
	Drain          time.Duration `json:"drain"`    // how long Close waits for transfers
}

// Heartbeat says how a hung plugin is noticed.
type Heartbeat struct {
	Interval time.Duration `json:"interval"`
	Limit    time.Duration `json:"limit"` // a plugin that could have answered for so long and did not is killed; a busy machine stretches it up to four times
}

// Breaker says when a plugin that keeps dying is left alone.
type Breaker struct {
	Deaths     int           `json:"deaths" jsonschema:"minimum=1"`
	Window     time.Duration `json:"window"`
	Cooldown   time.Duration `json:"cooldown"`    // then one start is tried
	BackoffMin time.Duration `json:"backoff_min"` // wait before the first restart, doubled each time
	BackoffMax time.Duration `json:"backoff_max"`
}

// DefaultSettings are the defaults of every setting: the one place that has them.
func DefaultSettings() Settings {
	return Settings{
		Trust: TrustInPlace, Digest: DigestKeyed, LandingBytes: 64 << 20, Ring: true, RecomputeThreshold: 64,
		Sandbox: SandboxAuto, SandboxAllow: SandboxAllow{Network: true},
		Deadlines: Deadlines{
			Handshake:      5 * time.Second,
			Match:          200 * time.Microsecond,
			Later:          2 * time.Second,
			Transfer:       5 * time.Second,
			TransferPerGiB: time.Second,
			Save:           30 * time.Second,
			Plan:           2 * time.Second,
			Finish:         5 * time.Second,
			Grace:          500 * time.Millisecond,
			Hold:           30 * time.Second,
			HoldMax:        10 * time.Minute,
			Fence:          5 * time.Second,
			Drain:          10 * time.Second,
		},
		Heartbeat: Heartbeat{Interval: 250 * time.Millisecond, Limit: 2 * time.Second},
		Breaker: Breaker{
			Deaths: 5, Window: 30 * time.Second, Cooldown: 30 * time.Second,
			BackoffMin: 10 * time.Millisecond, BackoffMax: time.Second,
		},
	}
}

// Bounds that are not settings.
const (
	maxConfigBytes = 4 << 20                // of a transfer config
	maxCorruptKeys = 1 << 16                // damaged keys remembered until they are saved again
	maxAsks        = 64                     // queries of one Match call
	matchFresh     = 250 * time.Millisecond // an answer may be used again this long
	firstRetry     = 5 * time.Millisecond   // after ErrBusy and Later, doubled each time
	slowestRetry   = 200 * time.Millisecond
	betweenEvents  = time.Millisecond // a plugin that always has events takes no processor for itself
	readerWait     = time.Second      // for the last events to be read
	missedEvery    = 10 * time.Second // a warning about matches that stayed undecided
	statsEvery     = time.Second      // a connector is asked for its numbers
	statsWait      = time.Second      // for them
)

// configName is the definition of a transfer config in a [ConfigSchema].
const configName = "transfer_config"

// ConfigSchema is the JSON Schema of a transfer config with any of some plugins' connectors, or the children of a
// MultiConnector. If only is a connector's name or alias, it is the schema of that connector's kv_connector_extra_config.
func ConfigSchema(plugins []*Manifest, only string) (json.RawMessage, error) {
	defaults := &transferConfig{FailurePolicy: PolicyRecompute, Settings: DefaultSettings()}
	whole := strict().Schema(defaults)
	strictjson.AcceptTexts(whole)
	whole.PatternProperties = map[string]*jsonschema.Schema{`^lmcache[._]`: {Description: "Of LMCache; it has no effect here."}}
	root := &jsonschema.Schema{
		Version: jsonschema.Version, Title: "The argument of --kv-transfer-config", Ref: reference(configName),
		Definitions: jsonschema.Definitions{configName: whole, MultiName: childrenSchema()},
	}
	var known []any
	add := func(name string, aliases []string, extra *jsonschema.Schema) {
		names := []any{name}
		for _, alias := range aliases {
			names = append(names, alias)
		}
		known = append(known, names...)
		if slices.Contains(names, any(only)) {
			root.Title, root.Ref = "The kv_connector_extra_config of "+name, reference(name)
		}
		whole.AllOf = append(whole.AllOf, whenNamed(names, name, extra))
	}
	add(MultiName, nil, root.Definitions[MultiName])
	for _, m := range plugins {
		if m.Name == MultiName {
			continue // the host composes it itself
		}
		extra := extraSchema(m)
		root.Definitions[m.Name] = extra
		add(m.Name, m.Aliases, extra)
	}
	if only != "" && !slices.Contains(known, any(only)) {
		return nil, fmt.Errorf("%w: no plugin that is found is called %s; there are %s", ErrConfig, strictjson.Quote(only), strings.Trim(fmt.Sprint(known), "[]"))
	}
	if only != "" && root.Ref != reference(MultiName) {
		one := root.Definitions[root.Ref[len(reference("")):]]
		one.Version, one.Title = root.Version, root.Title
		return json.MarshalIndent(one, "", "  ")
	}
	whole.AllOf = append(whole.AllOf, &jsonschema.Schema{If: searched(), Then: property("kv_connector", &jsonschema.Schema{Enum: known})})
	return json.MarshalIndent(root, "", "  ")
}

func reference(definition string) string { return "#/$defs/" + definition }

// property is the schema of objects in which a property has a schema.
func property(name string, schema *jsonschema.Schema) *jsonschema.Schema {
	s := &jsonschema.Schema{Properties: jsonschema.NewProperties()}
	s.Properties.Set(name, schema)
	return s
}

// searched is the schema of configs whose plugin is found by name.
func searched() *jsonschema.Schema {
	return &jsonschema.Schema{Not: &jsonschema.Schema{Required: []string{"kv_connector_module_path"}}}
}

// whenNamed says what the kv_connector_extra_config of a connector is.
func whenNamed(names []any, definition string, extra *jsonschema.Schema) *jsonschema.Schema {
	s := &jsonschema.Schema{If: property("kv_connector", &jsonschema.Schema{Enum: names}), Then: property("kv_connector_extra_config", &jsonschema.Schema{Ref: reference(definition)})}
	s.If.Required, s.If.Not = []string{"kv_connector"}, searched().Not
	if len(extra.Required) > 0 {
		s.Then.Required = []string{"kv_connector_extra_config"}
	}
	return s
}

// childrenSchema is what a MultiConnector has in its kv_connector_extra_config.
func childrenSchema() *jsonschema.Schema {
	least, most := uint64(1), uint64(multiconnector.MaxChildren)
	child := property("engine_id", jsonschema.FalseSchema)
	child.AllOf = []*jsonschema.Schema{{Ref: reference(configName)}}
	s := property("connectors", &jsonschema.Schema{
		Type: "array", MinItems: &least, MaxItems: &most, Items: child, Description: "The transfer configs of the children, in order.",
	})
	s.Type, s.Required, s.AdditionalProperties = "object", []string{"connectors"}, jsonschema.FalseSchema
	return s
}

// extraSchema is what a plugin has in its kv_connector_extra_config. A key that may be next to kv_connector is not required.
func extraSchema(m *Manifest) *jsonschema.Schema {
	extra := &jsonschema.Schema{}
	if json.Unmarshal(m.ConfigSchema, extra) != nil {
		return &jsonschema.Schema{Description: "The plugin does not say."}
	}
	if len(extra.Definitions) > 0 && extra.ID == "" {
		extra.ID = jsonschema.ID("kvport:" + m.Name) // its references are to itself
	}
	extra.Version = ""
	extra.Required = slices.DeleteFunc(extra.Required, func(name string) bool { return slices.Contains(config.BesideNames(), name) })
	strictjson.AcceptTexts(extra)
	return extra
}

// maxSecret bounds a tenant secret's file, in bytes.
const maxSecret = 64 << 10

// OpenFile opens a regular file for reading. Whatever else has the path is an error, and opening it
// does not wait: a FIFO may never get a writer. The caller closes the file.
func OpenFile(path string) (*os.File, error) { return config.OpenFile(path) }

// ReadFile reads a regular file of at most limit bytes. The caller owns the slice.
func ReadFile(path string, limit int64) ([]byte, error) { return config.ReadFile(path, limit) }

// TenantSecret reads kvport.tenant_secret_file; nil if none is set. White space around the secret
// does not belong to it, so that an editor's newline makes no other tenant. The caller owns the
// slice. Errors wrap ErrConfig.
func (s *Settings) TenantSecret() ([]byte, error) {
	if s.TenantSecretFile == "" {
		return nil, nil
	}
	secret, err := config.ReadFile(s.TenantSecretFile, maxSecret)
	if secret = bytes.TrimSpace(secret); err == nil && len(secret) == 0 {
		err = fmt.Errorf("%s is empty", s.TenantSecretFile)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: kvport.tenant_secret_file: %w", ErrConfig, err)
	}
	return secret, nil
}

// keys opens the file of the keys that sign tickets. log may be nil. Errors wrap ErrConfig.
func (s *Settings) keys(log *slog.Logger) (*keyring.File, error) {
	keys, err := keyring.OpenOrOwn(s.TicketKeyFile, log)
	if err != nil {
		return nil, fmt.Errorf("%w: kvport.ticket_key_file: %w", ErrConfig, err)
	}
	return keys, nil
}

// pluginKeys is what plugins' keys come from. The keys that sign tickets stay with the host.
type pluginKeys struct {
	ring *keyring.File
	// Without a ring: what a host gave this plugin, which has others below it.
	links, routers []connector.Secret
}

// roots are what keys for links are derived from, and the router's keys, in the order of the ring; none: nothing to give.
func (k *pluginKeys) roots() (links, routers []connector.Secret, err error) {
	if k.ring == nil {
		return k.links, k.routers, nil
	}
	ring := k.ring.Ring()
	if links, err = ticket.OfRing(ring, ticket.LinkRoot); err != nil {
		return nil, nil, err
	}
	routers, err = ticket.OfRing(ring, ticket.RouterKey)
	return links, routers, err
}

// give sets the keys of a connector's environment. They depend on its name and not on its place in a MultiConnector, so
// that engines with other composites have the same. Whoever keeps no blocks for others has no business with routers.
func (k *pluginKeys) give(env *connector.Env, name string, info *connector.Info) error {
	env.LinkKey, env.MoreLinkKeys, env.RouterKey, env.MoreRouterKeys = nil, nil, nil, nil
	roots, routers, err := k.roots()
	if err != nil || len(roots) == 0 {
		return err
	}
	links := make([]connector.Secret, len(roots))
	for i, root := range roots {
		if links[i], err = ticket.LinkKey(root, name); err != nil {
			return err
		}
	}
	env.LinkKey, env.MoreLinkKeys = links[0], links[1:]
	if info.Scope == connector.ScopeEngine && info.Capabilities&connector.CanHold != 0 && len(routers) > 0 {
		env.RouterKey, env.MoreRouterKeys = routers[0], routers[1:]
	}
	return nil
}
