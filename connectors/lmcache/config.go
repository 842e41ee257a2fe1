// Package lmcache keeps KV blocks in tiers of memory, disk and a remote store, set up by the names of LMCache's
// configuration (0.5.6): its file, its environment variables, and lmcache.* in the transfer config. The remote
// store is Redis or Valkey, or LMCache's own cache server (lm://), whose protocol it speaks.
package lmcache

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/remote"
	"github.com/kvport/kvport/connectors/internal/tier"
	"github.com/kvport/kvport/internal/strictjson"
)

// Scope says that only the engine that stored a block is sure to find it: what is below memory is written
// behind. With a remote store alone it is another, see [Config.Scope].
const Scope = connector.ScopeEngine

// Config is the kv_connector_extra_config of this connector. What is empty here comes from the environment
// (LMCACHE_CHUNK_SIZE and so on), then from the file that LMCACHE_CONFIG_FILE names, then from LMCache's defaults.
type Config struct {
	ChunkSize json.RawMessage `json:"lmcache.chunk_size,omitempty" jsonschema:"description=Tokens of a chunk: hits come in whole chunks. A multiple of the engine's block size; default 256."`
	LocalCPU  json.RawMessage `json:"lmcache.local_cpu,omitempty" jsonschema:"description=Memory tier: true (default) or false."`
	CPUSize   json.RawMessage `json:"lmcache.max_local_cpu_size,omitempty" jsonschema:"description=Its size in GiB; default 5."`
	LocalDisk json.RawMessage `json:"lmcache.local_disk,omitempty" jsonschema:"description=Folder of the disk tier as a path or file:// URL; empty: none."`
	DiskSize  json.RawMessage `json:"lmcache.max_local_disk_size,omitempty" jsonschema:"description=Its size in GiB."`
	RemoteURL json.RawMessage `json:"lmcache.remote_url,omitempty" jsonschema:"description=Remote store: redis:// rediss:// redis-cluster:// resp:// unix:// or lm:// (LMCache's server); empty: none."`
	Serde     json.RawMessage `json:"lmcache.remote_serde,omitempty" jsonschema:"description=naive: blocks are stored as they are."`
	Policy    json.RawMessage `json:"lmcache.cache_policy,omitempty" jsonschema:"description=Which block goes when memory is full: LRU (default) or FIFO; kvport adds ARC and S3FIFO."`
	Timeout   json.RawMessage `json:"lmcache.blocking_timeout_secs,omitempty" jsonschema:"description=Longest time of an exchange with the remote store in seconds; default 10."`

	// What else LMCache's connector knows, without a prefix.
	UseNative       json.RawMessage `json:"use_native,omitempty" jsonschema:"description=Of vLLM; no effect."`
	DiscardPartial  json.RawMessage `json:"discard_partial_chunks,omitempty" jsonschema:"description=Of vLLM; no effect."`
	RPCPort         json.RawMessage `json:"lmcache_rpc_port,omitempty" jsonschema:"description=Of vLLM; no effect."`
	SkipLastNTokens json.RawMessage `json:"skip_last_n_tokens,omitempty" jsonschema:"description=Of vLLM; no effect."`
	Unused
}

// idle are the names that are set and have no effect.
func (c *Config) idle() []string {
	names := c.set()
	for _, f := range []struct {
		name string
		raw  json.RawMessage
	}{
		{"use_native", c.UseNative}, {"discard_partial_chunks", c.DiscardPartial}, {"lmcache_rpc_port", c.RPCPort}, {"skip_last_n_tokens", c.SkipLastNTokens},
	} {
		if len(f.raw) > 0 && string(f.raw) != "null" {
			names = append(names, f.name)
		}
	}
	return names
}

// The environment variables that are no names of the configuration. LMCache reads user and password of
// resp:// from these too.
const (
	fileVariable     = "LMCACHE_CONFIG_FILE"
	usernameVariable = "LMCACHE_RESP_USERNAME"
	passwordVariable = "LMCACHE_RESP_PASSWORD"
)

// variable is the environment variable of a name.
func variable(name string) string { return "LMCACHE_" + strings.ToUpper(name) }

// fields are the names that matter to us and the values that the config has for them.
func (c *Config) fields() map[string]string {
	fields := map[string]string{}
	for name, raw := range map[string]json.RawMessage{
		"chunk_size": c.ChunkSize, "local_cpu": c.LocalCPU, "max_local_cpu_size": c.CPUSize, "local_disk": c.LocalDisk, "max_local_disk_size": c.DiskSize,
		"remote_url": c.RemoteURL, "remote_serde": c.Serde, "cache_policy": c.Policy, "blocking_timeout_secs": c.Timeout,
	} {
		fields[name] = strings.TrimPrefix(strings.Trim(string(raw), `"`), "null")
	}
	return fields
}

// Environment names the variables that the plugin reads, for its manifest.
func Environment() []string {
	names := []string{fileVariable, usernameVariable, passwordVariable}
	for name := range (&Config{}).fields() {
		names = append(names, variable(name))
	}
	for _, name := range without() {
		names = append(names, variable(name))
	}
	slices.Sort(names)
	return names
}

// maxFile bounds the configuration file, in bytes.
const maxFile = 1 << 20

// readFile reads the configuration file: a YAML mapping of names to plain values. It gives the values that
// matter, and the names that have no effect.
func readFile(path string) (values map[string]string, idle []string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("%s is larger than %d bytes", path, maxFile)
	}
	if err != nil {
		return nil, nil, err
	}
	var nodes map[string]yaml.Node
	if err := yaml.Unmarshal(data, &nodes); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	known := (&Config{}).fields()
	values = map[string]string{}
	for name, node := range nodes {
		_, ours := known[name]
		switch {
		case slices.Contains(without(), name):
			if !switchedOff(name, node.Value) {
				idle = append(idle, name)
			}
		case !ours:
			return nil, nil, fmt.Errorf("%s: unknown name %q%s", path, name, didYouMean(name))
		case node.Kind != yaml.ScalarNode:
			return nil, nil, fmt.Errorf("%s: %s is no plain value", path, name)
		case node.Tag != "!!null":
			values[name] = node.Value
		}
	}
	slices.Sort(idle)
	return values, idle, nil
}

// switchedOff reports that a feature without effect here is not asked for.
func switchedOff(name, value string) bool {
	return strings.HasPrefix(name, "enable_") && strings.EqualFold(strings.Trim(value, `"`), "false")
}

// didYouMean suggests the nearest name, if one is near.
func didYouMean(name string) string {
	known := slices.Concat(slices.Sorted(maps.Keys((&Config{}).fields())), without())
	if near := strictjson.Nearest(name, known, len(name)/3+1); near != "" {
		return fmt.Sprintf(", did you mean %q?", near)
	}
	return ""
}

// settings are what config, environment and file come to.
type settings struct {
	chunk    int
	memory   int64 // bytes; 0: none
	policy   string
	disk     string // folder; "": none
	diskSize int64
	remote   *remote.Options // nil: none
	lm       bool            // remote is LMCache's server
	idle     []string        // names that were set and have no effect
}

// Validate reports the first name that cannot work. Errors wrap connector.ErrIncompatible.
func (c Config) Validate() error {
	_, err := c.settings()
	return err
}

// Scope implements what sdk.FromStore asks a config: who sees the blocks.
func (c Config) Scope() connector.Scope {
	if s, err := c.settings(); err == nil && s.memory == 0 && s.disk == "" {
		return connector.ScopeShared
	}
	return Scope
}

// ArenaBytes is how much memory the host is asked for.
func (c *Config) ArenaBytes() int64 {
	s, err := c.settings()
	if err != nil {
		return 0
	}
	return s.memory
}

// ArenaField is the name that says how large the memory tier is.
func (c *Config) ArenaField() string { return field(cpuSize) }

// cpuSize and diskSize are the names of the tiers' sizes.
const (
	cpuSize  = "max_local_cpu_size"
	diskSize = "max_local_disk_size"
)

// field is how an operator knows a name: in the config and in the environment.
func field(name string) string { return fmt.Sprintf("lmcache.%s (%s)", name, variable(name)) }

// source finds values and keeps the first error.
type source struct {
	config, file map[string]string
	err          error
}

func (s *source) fail(name, format string, args ...any) {
	if s.err == nil {
		s.err = fmt.Errorf("%s %s: %w", field(name), fmt.Sprintf(format, args...), connector.ErrIncompatible)
	}
}

func (s *source) text(name, byDefault string) string {
	for _, v := range []string{s.config[name], os.Getenv(variable(name)), s.file[name]} {
		if v = strings.TrimSpace(v); v != "" {
			return v
		}
	}
	return byDefault
}

func (s *source) number(name, byDefault string, low, high float64) float64 {
	v := s.text(name, byDefault)
	n, err := strconv.ParseFloat(v, 64)
	if err != nil || !(n >= low && n <= high) {
		s.fail(name, "is %q, want %g..%g", v, low, high)
		return low
	}
	return n
}

// gib reads a size in GiB as bytes.
func (s *source) gib(name, byDefault string) int64 {
	return int64(s.number(name, byDefault, 0, 1<<20) * (1 << 30))
}

func (s *source) truth(name string, byDefault bool) bool {
	switch v := strings.ToLower(s.text(name, strconv.FormatBool(byDefault))); v {
	case "true", "1", "yes", "on":
		return true
	case "false", "0", "no", "off":
		return false
	default:
		s.fail(name, "is %q, want true or false", v)
		return byDefault
	}
}

// settings reads config, environment and file.
func (c Config) settings() (*settings, error) {
	src := &source{config: c.fields()}
	out := &settings{idle: c.idle()}
	if path := os.Getenv(fileVariable); path != "" {
		values, idle, err := readFile(path)
		if err != nil {
			return nil, fmt.Errorf("%s: %w: %w", fileVariable, err, connector.ErrIncompatible)
		}
		src.file, out.idle = values, append(out.idle, idle...)
	}
	for _, name := range without() {
		if v := os.Getenv(variable(name)); v != "" && !switchedOff(name, v) {
			out.idle = append(out.idle, variable(name))
		}
	}
	out.read(src)
	if src.err == nil && out.memory == 0 && out.disk == "" && out.remote == nil {
		src.fail("local_cpu", "is false, and neither local_disk nor remote_url is set: there is nowhere to keep blocks%s", out.transfers())
	}
	return out, src.err
}

// transfers says that LMCache's own way from engine to engine is missing, if it was asked for.
func (out *settings) transfers() string {
	for _, name := range out.idle {
		switch strings.ToLower(strings.TrimPrefix(strings.TrimPrefix(name, "lmcache."), "LMCACHE_")) {
		case "enable_pd", "enable_nixl", "enable_p2p":
			return fmt.Sprintf("; LMCache's own transfer between engines (%s) is not built, use a connector that transfers", name)
		}
	}
	return ""
}

func (out *settings) read(src *source) {
	chunk := src.number("chunk_size", "256", 1, 1<<20)
	if out.chunk = int(chunk); float64(out.chunk) != chunk {
		src.fail("chunk_size", "is %g, want a whole number", chunk)
	}
	if src.truth("local_cpu", true) {
		if out.memory = src.gib(cpuSize, "5"); out.memory == 0 {
			src.fail(cpuSize, "is 0, but local_cpu is true")
		}
	}
	switch v := strings.ToUpper(src.text("cache_policy", "LRU")); v {
	case "LRU", "ARC", "S3FIFO", "FIFO":
		out.policy = strings.ToLower(v)
	default:
		src.fail("cache_policy", "is %q, want LRU, FIFO, ARC or S3FIFO", v)
	}
	if v := src.text("remote_serde", "naive"); v != "naive" {
		src.fail("remote_serde", "is %q, want naive: blocks are stored as they are", v)
	}
	if out.disk = strings.TrimPrefix(src.text("local_disk", ""), "file://"); out.disk != "" && !filepath.IsAbs(out.disk) {
		var err error
		if out.disk, err = filepath.Abs(out.disk); err != nil { // as in LMCache's examples: from the engine's working folder
			src.fail("local_disk", "%v", err)
		}
	}
	out.diskSize = src.gib(diskSize, "0")
	switch {
	case out.disk == "":
	case strings.Contains(out.disk, ","):
		src.fail("local_disk", "names several folders, want one")
	case out.diskSize == 0:
		src.fail(diskSize, "is 0, but local_disk is set")
	}
	timeout := src.number("blocking_timeout_secs", "10", 0.01, 600)
	if url := src.text("remote_url", ""); url != "" {
		out.readRemote(src, url, time.Duration(timeout*float64(time.Second)))
	}
}

func (out *settings) readRemote(src *source, url string, timeout time.Duration) {
	scheme, rest, _ := strings.Cut(url, "://")
	out.lm = scheme == "lm"
	if out.lm || scheme == "resp" {
		if out.lm && !strings.Contains(rest, ":") {
			src.fail("remote_url", "names no port, want lm://HOST:PORT")
			return
		}
		url = "redis://" + strings.TrimSuffix(rest, "/")
	}
	o, err := remote.ParseURL(url)
	if err != nil {
		src.fail("remote_url", "%v; LMCache's other remote stores are not spoken, lm://HOST:PORT is", err)
		return
	}
	o.Username, o.Password, o.CredentialField = os.Getenv(usernameVariable), os.Getenv(passwordVariable), passwordVariable
	o.Prefix, o.Timeout = "kvport-lmcache:", timeout
	out.remote = &o
}

// warn says what was set and has no effect, and what travels in plain text.
func (out *settings) warn(log *slog.Logger) {
	if len(out.idle) > 0 {
		log.Warn("names of LMCache that have no effect here", "names", out.idle)
	}
	if missing := out.transfers(); missing != "" {
		log.Warn("blocks are kept for this engine alone" + missing)
	}
	if out.remote == nil {
		return
	}
	if err := out.remote.Private(); err != nil {
		log.Warn("blocks travel without TLS", "name", "remote_url", "error", err)
	}
}

// options are those of the memory tier for one engine.
func (out *settings) options(env *connector.Env) tier.Options {
	sizes := make([]int64, len(env.Layout.Groups))
	for g := range sizes {
		sizes[g] = env.Layout.BlockBytes(uint16(g))
	}
	return tier.Options{
		SlotBytes: slices.Max(sizes), SameSize: slices.Min(sizes) == slices.Max(sizes), Policy: out.policy, AdmitAfter: 1, Prefetch: 16,
		Memory: env.Arena, MemoryBytes: out.memory, Log: env.Log,
	}
}
