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
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/remote"
	"github.com/kvport/kvport/internal/strictjson"
	"github.com/kvport/kvport/sdk/tier"
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

	AllowPlain bool `json:"allow_plaintext,omitempty" jsonschema:"default=false,description=Ours: talk without TLS to a remote store on another machine; an lm:// server has neither TLS nor a password."`

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

// Needs says that the plugin may talk to a server, and names what it reads and writes, for its manifest.
func Needs() connector.Needs {
	const disk = "local_disk"
	return connector.Needs{Network: true, Reads: []string{fileVariable}, Writes: []string{"lmcache." + disk, variable(disk)}}
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

// BeyondMachine implements what sdk.FromStore asks a config: what says that other machines see the blocks.
func (c Config) BeyondMachine() string {
	s, err := c.settings()
	if err != nil || s.remote == nil || s.remote.Beyond() == "" {
		return ""
	}
	return field("remote_url") + " has the address " + s.remote.Beyond()
}

// ArenaBytes is how much memory the host is asked for.
func (c *Config) ArenaBytes() int64 {
	s, err := c.settings()
	if err != nil {
		return 0
	}
	return s.memory
}

// Complete says that what is placed is all there is: with neither disk nor server there is nothing below memory.
func (c *Config) Complete() bool {
	s, err := c.settings()
	return err == nil && s.memory > 0 && s.disk == "" && s.remote == nil
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
	plain        bool // a remote store may be spoken to without TLS
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
	src := &source{config: c.fields(), plain: c.AllowPlain}
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
	if err := o.Private(); err != nil && !src.plain {
		way := "write rediss:// for TLS"
		if out.lm {
			way = "LMCache's server has neither TLS nor a password: use rediss://, or a tunnel that begins at 127.0.0.1 and the same kvport.ticket_key_file on all machines"
		}
		src.fail("remote_url", "has the address %v; %s, or set allow_plaintext in kv_connector_extra_config", err, way)
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
	o := tier.OptionsFor(env)
	o.Lend = true
	o.MemoryBytes, o.Policy, o.AdmitAfter, o.Prefetch = out.memory, out.policy, 1, 16
	return o
}

// Unused are the names of LMCache 0.5.6 (lmcache/v1/config.py, with its deprecated ones) and of the earlier versions whose
// examples are still published, that have no effect here. They are accepted with any value, so that a deployment of it can be taken over, and named in the log when they are set.
type Unused struct {
	LocalCPUUseHugepages                      json.RawMessage `json:"lmcache.local_cpu_use_hugepages,omitempty" jsonschema:"description=No effect."`
	ReserveLocalCPUSize                       json.RawMessage `json:"lmcache.reserve_local_cpu_size,omitempty" jsonschema:"description=No effect."`
	LocalDiskPathSharding                     json.RawMessage `json:"lmcache.local_disk_path_sharding,omitempty" jsonschema:"description=No effect."`
	UseLayerwise                              json.RawMessage `json:"lmcache.use_layerwise,omitempty" jsonschema:"description=No effect."`
	SaveDecodeCache                           json.RawMessage `json:"lmcache.save_decode_cache,omitempty" jsonschema:"description=No effect."`
	PreCachingHashAlgorithm                   json.RawMessage `json:"lmcache.pre_caching_hash_algorithm,omitempty" jsonschema:"description=No effect."`
	EnableBlending                            json.RawMessage `json:"lmcache.enable_blending,omitempty" jsonschema:"description=No effect."`
	BlendRecomputeRatios                      json.RawMessage `json:"lmcache.blend_recompute_ratios,omitempty" jsonschema:"description=No effect."`
	BlendThresholds                           json.RawMessage `json:"lmcache.blend_thresholds,omitempty" jsonschema:"description=No effect."`
	BlendCheckLayers                          json.RawMessage `json:"lmcache.blend_check_layers,omitempty" jsonschema:"description=No effect."`
	BlendMinTokens                            json.RawMessage `json:"lmcache.blend_min_tokens,omitempty" jsonschema:"description=No effect."`
	BlendSpecialStr                           json.RawMessage `json:"lmcache.blend_special_str,omitempty" jsonschema:"description=No effect."`
	RetrieveLocations                         json.RawMessage `json:"lmcache.retrieve_locations,omitempty" jsonschema:"description=No effect."`
	StoreLocation                             json.RawMessage `json:"lmcache.store_location,omitempty" jsonschema:"description=No effect."`
	EnableP2p                                 json.RawMessage `json:"lmcache.enable_p2p,omitempty" jsonschema:"description=No effect."`
	P2pHost                                   json.RawMessage `json:"lmcache.p2p_host,omitempty" jsonschema:"description=No effect."`
	P2pInitPorts                              json.RawMessage `json:"lmcache.p2p_init_ports,omitempty" jsonschema:"description=No effect."`
	P2pLookupPorts                            json.RawMessage `json:"lmcache.p2p_lookup_ports,omitempty" jsonschema:"description=No effect."`
	MpHost                                    json.RawMessage `json:"lmcache.mp_host,omitempty" jsonschema:"description=No effect."`
	MpPort                                    json.RawMessage `json:"lmcache.mp_port,omitempty" jsonschema:"description=No effect."`
	EnableController                          json.RawMessage `json:"lmcache.enable_controller,omitempty" jsonschema:"description=No effect."`
	LmcacheInstanceID                         json.RawMessage `json:"lmcache.lmcache_instance_id,omitempty" jsonschema:"description=No effect."`
	ControllerPullURL                         json.RawMessage `json:"lmcache.controller_pull_url,omitempty" jsonschema:"description=No effect."`
	ControllerReplyURL                        json.RawMessage `json:"lmcache.controller_reply_url,omitempty" jsonschema:"description=No effect."`
	LmcacheWorkerPorts                        json.RawMessage `json:"lmcache.lmcache_worker_ports,omitempty" jsonschema:"description=No effect."`
	LmcacheWorkerIDs                          json.RawMessage `json:"lmcache.lmcache_worker_ids,omitempty" jsonschema:"description=No effect."`
	LmcacheWorkerHeartbeatDelayTime           json.RawMessage `json:"lmcache.lmcache_worker_heartbeat_delay_time,omitempty" jsonschema:"description=No effect."`
	LmcacheWorkerHeartbeatTime                json.RawMessage `json:"lmcache.lmcache_worker_heartbeat_time,omitempty" jsonschema:"description=No effect."`
	EnablePd                                  json.RawMessage `json:"lmcache.enable_pd,omitempty" jsonschema:"description=No effect."`
	PdRole                                    json.RawMessage `json:"lmcache.pd_role,omitempty" jsonschema:"description=No effect."`
	PdBufferSize                              json.RawMessage `json:"lmcache.pd_buffer_size,omitempty" jsonschema:"description=No effect."`
	PdBufferDevice                            json.RawMessage `json:"lmcache.pd_buffer_device,omitempty" jsonschema:"description=No effect."`
	PdPeerHost                                json.RawMessage `json:"lmcache.pd_peer_host,omitempty" jsonschema:"description=No effect."`
	PdPeerInitPort                            json.RawMessage `json:"lmcache.pd_peer_init_port,omitempty" jsonschema:"description=No effect."`
	PdPeerAllocPort                           json.RawMessage `json:"lmcache.pd_peer_alloc_port,omitempty" jsonschema:"description=No effect."`
	PdPeerQueryPort                           json.RawMessage `json:"lmcache.pd_peer_query_port,omitempty" jsonschema:"description=No effect."`
	PdProxyHost                               json.RawMessage `json:"lmcache.pd_proxy_host,omitempty" jsonschema:"description=No effect."`
	PdProxyPort                               json.RawMessage `json:"lmcache.pd_proxy_port,omitempty" jsonschema:"description=No effect."`
	PdAllocationTimeoutSec                    json.RawMessage `json:"lmcache.pd_allocation_timeout_sec,omitempty" jsonschema:"description=No effect."`
	PdShutdownTimeoutSec                      json.RawMessage `json:"lmcache.pd_shutdown_timeout_sec,omitempty" jsonschema:"description=No effect."`
	PdConditionPollIntervalSec                json.RawMessage `json:"lmcache.pd_condition_poll_interval_sec,omitempty" jsonschema:"description=No effect."`
	PdMaxPrefillLen                           json.RawMessage `json:"lmcache.pd_max_prefill_len,omitempty" jsonschema:"description=No effect."`
	PdBackendMode                             json.RawMessage `json:"lmcache.pd_backend_mode,omitempty" jsonschema:"description=No effect."`
	PdSkipProxyNotification                   json.RawMessage `json:"lmcache.pd_skip_proxy_notification,omitempty" jsonschema:"description=No effect."`
	PdBidirectional                           json.RawMessage `json:"lmcache.pd_bidirectional,omitempty" jsonschema:"description=No effect."`
	TransferChannel                           json.RawMessage `json:"lmcache.transfer_channel,omitempty" jsonschema:"description=No effect."`
	NixlBackends                              json.RawMessage `json:"lmcache.nixl_backends,omitempty" jsonschema:"description=No effect."`
	NixlBufferSize                            json.RawMessage `json:"lmcache.nixl_buffer_size,omitempty" jsonschema:"description=No effect."`
	NixlBufferDevice                          json.RawMessage `json:"lmcache.nixl_buffer_device,omitempty" jsonschema:"description=No effect."`
	GdsPath                                   json.RawMessage `json:"lmcache.gds_path,omitempty" jsonschema:"description=No effect."`
	GdsPathSharding                           json.RawMessage `json:"lmcache.gds_path_sharding,omitempty" jsonschema:"description=No effect."`
	GdsBufferSize                             json.RawMessage `json:"lmcache.gds_buffer_size,omitempty" jsonschema:"description=No effect."`
	MaruPath                                  json.RawMessage `json:"lmcache.maru_path,omitempty" jsonschema:"description=No effect."`
	MaruPoolSize                              json.RawMessage `json:"lmcache.maru_pool_size,omitempty" jsonschema:"description=No effect."`
	UseGds                                    json.RawMessage `json:"lmcache.use_gds,omitempty" jsonschema:"description=No effect."`
	GdsBackend                                json.RawMessage `json:"lmcache.gds_backend,omitempty" jsonschema:"description=No effect."`
	AuditActualRemoteURL                      json.RawMessage `json:"lmcache.audit_actual_remote_url,omitempty" jsonschema:"description=No effect."`
	InternalAPIServerHost                     json.RawMessage `json:"lmcache.internal_api_server_host,omitempty" jsonschema:"description=No effect."`
	ExtraConfig                               json.RawMessage `json:"lmcache.extra_config,omitempty" jsonschema:"description=No effect."`
	SaveUnfullChunk                           json.RawMessage `json:"lmcache.save_unfull_chunk,omitempty" jsonschema:"description=No effect."`
	ExternalLookupClient                      json.RawMessage `json:"lmcache.external_lookup_client,omitempty" jsonschema:"description=No effect."`
	PyEnableGC                                json.RawMessage `json:"lmcache.py_enable_gc,omitempty" jsonschema:"description=No effect."`
	NumaMode                                  json.RawMessage `json:"lmcache.numa_mode,omitempty" jsonschema:"description=No effect."`
	EnableAsyncLoading                        json.RawMessage `json:"lmcache.enable_async_loading,omitempty" jsonschema:"description=No effect."`
	InternalAPIServerEnabled                  json.RawMessage `json:"lmcache.internal_api_server_enabled,omitempty" jsonschema:"description=No effect."`
	InternalAPIServerPortStart                json.RawMessage `json:"lmcache.internal_api_server_port_start,omitempty" jsonschema:"description=No effect."`
	PriorityLimit                             json.RawMessage `json:"lmcache.priority_limit,omitempty" jsonschema:"description=No effect."`
	InternalAPIServerIncludeIndexList         json.RawMessage `json:"lmcache.internal_api_server_include_index_list,omitempty" jsonschema:"description=No effect."`
	InternalAPIServerSocketPathPrefix         json.RawMessage `json:"lmcache.internal_api_server_socket_path_prefix,omitempty" jsonschema:"description=No effect."`
	RuntimePluginLocations                    json.RawMessage `json:"lmcache.runtime_plugin_locations,omitempty" jsonschema:"description=No effect."`
	StoragePlugins                            json.RawMessage `json:"lmcache.storage_plugins,omitempty" jsonschema:"description=No effect."`
	RemoteStoragePlugins                      json.RawMessage `json:"lmcache.remote_storage_plugins,omitempty" jsonschema:"description=No effect."`
	LookupTimeoutMs                           json.RawMessage `json:"lmcache.lookup_timeout_ms,omitempty" jsonschema:"description=No effect."`
	MinRetrieveTokens                         json.RawMessage `json:"lmcache.min_retrieve_tokens,omitempty" jsonschema:"description=No effect."`
	HitMissRatio                              json.RawMessage `json:"lmcache.hit_miss_ratio,omitempty" jsonschema:"description=No effect."`
	LookupServerWorkerIDs                     json.RawMessage `json:"lmcache.lookup_server_worker_ids,omitempty" jsonschema:"description=No effect."`
	EnableSchedulerBypassLookup               json.RawMessage `json:"lmcache.enable_scheduler_bypass_lookup,omitempty" jsonschema:"description=No effect."`
	ScriptAllowedImports                      json.RawMessage `json:"lmcache.script_allowed_imports,omitempty" jsonschema:"description=No effect."`
	RunScriptAPIEnabled                       json.RawMessage `json:"lmcache.run_script_api_enabled,omitempty" jsonschema:"description=No effect."`
	EnableLazyMemoryAllocator                 json.RawMessage `json:"lmcache.enable_lazy_memory_allocator,omitempty" jsonschema:"description=No effect."`
	LazyMemoryInitialRatio                    json.RawMessage `json:"lmcache.lazy_memory_initial_ratio,omitempty" jsonschema:"description=No effect."`
	LazyMemoryExpandTriggerRatio              json.RawMessage `json:"lmcache.lazy_memory_expand_trigger_ratio,omitempty" jsonschema:"description=No effect."`
	LazyMemoryStepRatio                       json.RawMessage `json:"lmcache.lazy_memory_step_ratio,omitempty" jsonschema:"description=No effect."`
	LazyMemorySafeSize                        json.RawMessage `json:"lmcache.lazy_memory_safe_size,omitempty" jsonschema:"description=No effect."`
	EnableChunkStatistics                     json.RawMessage `json:"lmcache.enable_chunk_statistics,omitempty" jsonschema:"description=No effect."`
	ChunkStatisticsAutoStartStatistics        json.RawMessage `json:"lmcache.chunk_statistics_auto_start_statistics,omitempty" jsonschema:"description=No effect."`
	ChunkStatisticsAutoExitTimeoutHours       json.RawMessage `json:"lmcache.chunk_statistics_auto_exit_timeout_hours,omitempty" jsonschema:"description=No effect."`
	ChunkStatisticsAutoExitTargetUniqueChunks json.RawMessage `json:"lmcache.chunk_statistics_auto_exit_target_unique_chunks,omitempty" jsonschema:"description=No effect."`
	ChunkStatisticsStrategy                   json.RawMessage `json:"lmcache.chunk_statistics_strategy,omitempty" jsonschema:"description=No effect."`
	EnableKvEvents                            json.RawMessage `json:"lmcache.enable_kv_events,omitempty" jsonschema:"description=No effect."`
	UseGpuConnectorV3                         json.RawMessage `json:"lmcache.use_gpu_connector_v3,omitempty" jsonschema:"description=No effect."`
	PinTimeoutSec                             json.RawMessage `json:"lmcache.pin_timeout_sec,omitempty" jsonschema:"description=No effect."`
	PinCheckIntervalSec                       json.RawMessage `json:"lmcache.pin_check_interval_sec,omitempty" jsonschema:"description=No effect."`
	RemoteConfigURL                           json.RawMessage `json:"lmcache.remote_config_url,omitempty" jsonschema:"description=No effect."`
	AppID                                     json.RawMessage `json:"lmcache.app_id,omitempty" jsonschema:"description=No effect."`
	EnableHiddenStateCache                    json.RawMessage `json:"lmcache.enable_hidden_state_cache,omitempty" jsonschema:"description=No effect."`
	MaxHiddenStateCPUSize                     json.RawMessage `json:"lmcache.max_hidden_state_cpu_size,omitempty" jsonschema:"description=No effect."`
	HiddenStateLayers                         json.RawMessage `json:"lmcache.hidden_state_layers,omitempty" jsonschema:"description=No effect."`
	HiddenStatesRetrieveMode                  json.RawMessage `json:"lmcache.hidden_states_retrieve_mode,omitempty" jsonschema:"description=No effect."`
	EnableXpyd                                json.RawMessage `json:"lmcache.enable_xpyd,omitempty" jsonschema:"description=No effect."`
	NixlPeerHost                              json.RawMessage `json:"lmcache.nixl_peer_host,omitempty" jsonschema:"description=No effect."`
	NixlPeerInitPort                          json.RawMessage `json:"lmcache.nixl_peer_init_port,omitempty" jsonschema:"description=No effect."`
	NixlPeerAllocPort                         json.RawMessage `json:"lmcache.nixl_peer_alloc_port,omitempty" jsonschema:"description=No effect."`
	NixlProxyHost                             json.RawMessage `json:"lmcache.nixl_proxy_host,omitempty" jsonschema:"description=No effect."`
	NixlProxyPort                             json.RawMessage `json:"lmcache.nixl_proxy_port,omitempty" jsonschema:"description=No effect."`
	NixlRole                                  json.RawMessage `json:"lmcache.nixl_role,omitempty" jsonschema:"description=No effect."`
	ControllerURL                             json.RawMessage `json:"lmcache.controller_url,omitempty" jsonschema:"description=No effect."`
	LmcacheWorkerPort                         json.RawMessage `json:"lmcache.lmcache_worker_port,omitempty" jsonschema:"description=No effect."`
	PluginLocations                           json.RawMessage `json:"lmcache.plugin_locations,omitempty" jsonschema:"description=No effect."`
	ExternalBackends                          json.RawMessage `json:"lmcache.external_backends,omitempty" jsonschema:"description=No effect."`
	NixlPeerPort                              json.RawMessage `json:"lmcache.nixl_peer_port,omitempty" jsonschema:"description=No effect."`

	// Names of earlier versions, in their published examples.
	EnableNixl          json.RawMessage `json:"lmcache.enable_nixl,omitempty" jsonschema:"description=No effect."`
	NixlEnableGC        json.RawMessage `json:"lmcache.nixl_enable_gc,omitempty" jsonschema:"description=No effect."`
	NixlReceiverHost    json.RawMessage `json:"lmcache.nixl_receiver_host,omitempty" jsonschema:"description=No effect."`
	NixlReceiverPort    json.RawMessage `json:"lmcache.nixl_receiver_port,omitempty" jsonschema:"description=No effect."`
	LookupURL           json.RawMessage `json:"lmcache.lookup_url,omitempty" jsonschema:"description=No effect."`
	DistributedURL      json.RawMessage `json:"lmcache.distributed_url,omitempty" jsonschema:"description=No effect."`
	ErrorHandling       json.RawMessage `json:"lmcache.error_handling,omitempty" jsonschema:"description=No effect."`
	WekaPath            json.RawMessage `json:"lmcache.weka_path,omitempty" jsonschema:"description=No effect."`
	CufileBufferSize    json.RawMessage `json:"lmcache.cufile_buffer_size,omitempty" jsonschema:"description=No effect."`
	BlendRecomputeRatio json.RawMessage `json:"lmcache.blend_recompute_ratio,omitempty" jsonschema:"description=No effect."`
	LocalDevice         json.RawMessage `json:"lmcache.local_device,omitempty" jsonschema:"description=No effect."`
	PipelinedBackend    json.RawMessage `json:"lmcache.pipelined_backend,omitempty" jsonschema:"description=No effect."`
}

// without are the names of Unused, without the prefix that they have in a transfer config.
func without() []string {
	fields := reflect.VisibleFields(reflect.TypeFor[Unused]())
	names := make([]string, len(fields))
	for i, f := range fields {
		tag, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		names[i] = strings.TrimPrefix(tag, "lmcache.")
	}
	return names
}

// set are the names that have a value here.
func (u *Unused) set() (names []string) {
	value := reflect.ValueOf(u).Elem()
	for i, name := range without() {
		if raw, _ := reflect.TypeAssert[json.RawMessage](value.Field(i)); len(raw) > 0 && string(raw) != "null" && !switchedOff(name, string(raw)) {
			names = append(names, "lmcache."+name)
		}
	}
	return names
}
