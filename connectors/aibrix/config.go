// Package aibrix keeps KV blocks in tiers of memory and a remote store, set up by the names and the
// environment variables of AIBrix's KV cache offloading (aibrix-kvcache 0.8.0), so that a deployment of it can
// be taken over. The tiers are ours; nothing of AIBrix is linked or spoken to.
package aibrix

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/remote"
)

// Scope says that only the engine that stored a block is sure to find it: L2 is written behind. Without L1
// it is another, see [Config.Scope].
const Scope = connector.ScopeEngine

// Config is the kv_connector_extra_config of this connector: AIBrix's environment variables, which may be
// written here too and then win. Values are texts as in an environment, or plain numbers and booleans.
type Config struct {
	L1Enabled  json.RawMessage `json:"AIBRIX_KV_CACHE_OL_L1_CACHE_ENABLED,omitempty" jsonschema:"description=Memory tier: 1 (default) or 0."`
	L1Policy   json.RawMessage `json:"AIBRIX_KV_CACHE_OL_L1_CACHE_EVICTION_POLICY,omitempty" jsonschema:"description=S3FIFO (default) or LRU or FIFO."`
	L1Capacity json.RawMessage `json:"AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB,omitempty" jsonschema:"description=Size of the memory tier in GiB; default 10."`
	Device     json.RawMessage `json:"AIBRIX_KV_CACHE_OL_DEVICE,omitempty" jsonschema:"description=Where the memory tier is: cpu."`

	L2Backend   json.RawMessage `json:"AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND,omitempty" jsonschema:"description=Empty (default): none. REDIS: a Redis or Valkey server."`
	L2Namespace json.RawMessage `json:"AIBRIX_KV_CACHE_OL_L2_CACHE_NAMESPACE,omitempty" jsonschema:"description=Begins every key; default aibrix."`
	L2Ingestion json.RawMessage `json:"AIBRIX_KV_CACHE_OL_L2_CACHE_INGESTION_TYPE,omitempty" jsonschema:"description=What goes from L1 to L2: HOT (default) what is used twice; ALL; EVICTED: the same as ALL."`
	L2Workers   json.RawMessage `json:"AIBRIX_KV_CACHE_OL_L2_CACHE_NUM_ASYNC_WORKERS,omitempty" jsonschema:"description=Connections to L2; default 8."`
	L2Timeout   json.RawMessage `json:"AIBRIX_KV_CACHE_OL_L2_CACHE_PER_TOKEN_TIMEOUT_MS,omitempty" jsonschema:"description=Longest time of an exchange for each token of a chunk in milliseconds; default 20."`
	L2Inflight  json.RawMessage `json:"AIBRIX_KV_CACHE_OL_L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS,omitempty" jsonschema:"description=Tokens that may wait to be written to L2; more are not. 0 (default): 1024 blocks."`
	Chunk       json.RawMessage `json:"AIBRIX_KV_CACHE_OL_CHUNK_SIZE,omitempty" jsonschema:"description=Tokens of a chunk: with the time of a token the time-out of an exchange; default 512."`

	RedisURL      json.RawMessage `json:"AIBRIX_KV_CACHE_OL_REDIS_URL,omitempty" jsonschema:"description=Ours: the server of L2 (redis:// rediss:// redis-cluster:// unix://)."`
	RedisUsername json.RawMessage `json:"AIBRIX_KV_CACHE_OL_REDIS_USERNAME,omitempty" jsonschema:"description=Ours: its ACL user."`

	AllowPlain bool `json:"allow_plaintext,omitempty" jsonschema:"default=false,description=Ours and no variable: talk without TLS to a server on another machine."`
}

// prefix begins every variable.
const prefix = "AIBRIX_KV_CACHE_OL_"

// The variables that matter to us.
const (
	l1Enabled     = prefix + "L1_CACHE_ENABLED"
	l1Policy      = prefix + "L1_CACHE_EVICTION_POLICY"
	l1Capacity    = prefix + "L1_CACHE_CAPACITY_GB"
	device        = prefix + "DEVICE"
	l2Backend     = prefix + "L2_CACHE_BACKEND"
	l2Namespace   = prefix + "L2_CACHE_NAMESPACE"
	l2Ingestion   = prefix + "L2_CACHE_INGESTION_TYPE"
	l2Workers     = prefix + "L2_CACHE_NUM_ASYNC_WORKERS"
	l2Timeout     = prefix + "L2_CACHE_PER_TOKEN_TIMEOUT_MS"
	l2Inflight    = prefix + "L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS"
	chunkSize     = prefix + "CHUNK_SIZE"
	redisURL      = prefix + "REDIS_URL"
	redisUsername = prefix + "REDIS_USERNAME"
	redisPassword = prefix + "REDIS_PASSWORD"
)

// without are AIBrix's variables that have no effect here: they are passed on only so that we can say so.
func without() []string {
	names := []string{
		"DOUBLE_GET_THRESHOLD", "BLOCK_SIZE", "MAX_SEQ_LEN", "TIME_MEASUREMENT_ENABLED", "BREAKDOWN_MEASUREMENT_ENABLED",
		"TOKEN_VALIDATION_ENABLED", "S3FIFO_SMALL_TO_MAIN_PROMO_THRESHOLD", "S3FIFO_SMALL_FIFO_CAPACITY_RATIO", "L2_CACHE_OP_BATCH",
		"L2_CACHE_PLACEMENT_POLICY", "L2_CACHE_KEY_BUILDER", "L2_CACHE_COMPRESSION", "META_SERVICE_BACKEND",
		"META_SERVICE_REFRESH_INTERVAL_S", "META_SERVICE_URL", "META_SERVICE_CLUSTER_META_KEY", "PROFILING_ENABLED", "PROFILING_SERVER_ADDRESS",
		"MOCK_USE_RDMA", "MOCK_USE_MPUT_MGET", "MOCK_USE_GDR_PUT", "MOCK_USE_GDR_GET", "MOCK_USE_NOOP", "ROCKSDB_ROOT", "ROCKSDB_TTL_S",
		"ROCKSDB_WRITE_BUFFER_SIZE", "ROCKSDB_TARGET_FILE_SIZE_BASE", "ROCKSDB_MAX_WRITE_BUFFER_NUMBER", "ROCKSDB_MAX_TOTAL_WAL_SIZE",
		"ROCKSDB_MAX_BACKGROUND_JOBS", "INFINISTORE_HOST_ADDR", "INFINISTORE_SERVICE_PORT", "INFINISTORE_CONNECTION_TYPE",
		"INFINISTORE_IB_PORT", "INFINISTORE_LINK_TYPE", "INFINISTORE_VISIBLE_DEV_LIST", "INFINISTORE_USE_GDR", "HPKV_REMOTE_ADDR",
		"HPKV_REMOTE_PORT", "HPKV_LOCAL_ADDR", "HPKV_LOCAL_PORT", "HPKV_USE_GDR", "PRISKV_REMOTE_ADDR", "PRISKV_REMOTE_PORT",
		"PRISKV_USE_MPUT_MGET", "PRISKV_USE_ZERO_COPY", "PRIS_REMOTE_ADDR", "PRIS_REMOTE_PORT", "PRIS_USE_MPUT_MGET", "PRIS_USE_ZERO_COPY",
		"TRANSPORT_RDMA_ADDR_RANGE", "EIC_CONFIG_FILE", "SHFS_ROOT",
	}
	for i := range names {
		names[i] = prefix + names[i]
	}
	return append(names, "VLLM_AIBRIX_SYNC_GRANULARITY")
}

// Environment names the variables that the plugin reads, for its manifest.
func Environment() []string {
	return append([]string{
		l1Enabled, l1Policy, l1Capacity, device, l2Backend, l2Namespace, l2Ingestion, l2Workers, l2Timeout, l2Inflight, chunkSize,
		redisURL, redisUsername, redisPassword,
	}, without()...)
}

// Needs says that the plugin may talk to a server, and names the URL, which may be that of a socket, for its manifest.
func Needs() connector.Needs {
	return connector.Needs{Network: true, Reads: []string{redisURL}}
}

// settings are what config and environment come to.
type settings struct {
	memory int64  // bytes of L1; 0: none
	policy string // of L1
	hot    bool   // L2 gets what is used twice
	behind int    // tokens that may wait to be written to L2; 0: the default
	l2     bool
	remote remote.Options
}

// Validate reports the first variable that cannot work. Errors wrap connector.ErrIncompatible.
func (c Config) Validate() error {
	_, err := c.settings()
	return err
}

// Scope implements what sdk.FromStore asks a config: who sees the blocks.
func (c Config) Scope() connector.Scope {
	if s, err := c.settings(); err == nil && s.memory == 0 {
		return connector.ScopeShared
	}
	return Scope
}

// BeyondMachine implements what sdk.FromStore asks a config: what says that other machines see the blocks.
func (c Config) BeyondMachine() string {
	s, err := c.settings()
	if err != nil || !s.l2 || s.remote.Beyond() == "" {
		return ""
	}
	return redisURL + " has the address " + s.remote.Beyond()
}

// ArenaBytes is how much memory the host is asked for.
func (c *Config) ArenaBytes() int64 {
	s, err := c.settings()
	if err != nil {
		return 0
	}
	return s.memory
}

// Complete says that what is placed is all there is: without L2 there is nothing below L1.
func (c *Config) Complete() bool {
	s, err := c.settings()
	return err == nil && s.memory > 0 && !s.l2
}

// ArenaField is the variable that says how large the memory tier is.
func (*Config) ArenaField() string { return l1Capacity }

// reader reads variables and keeps the first error.
type reader struct{ err error }

func (r *reader) fail(name, format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%s %s: %w", name, fmt.Sprintf(format, args...), connector.ErrIncompatible)
	}
}

// text is a value: of the config, else of the environment, else the default.
func text(name string, raw json.RawMessage, byDefault string) string {
	value := strings.Trim(string(raw), `"`)
	if value == "" || value == "null" {
		value = os.Getenv(name)
	}
	if value = strings.TrimSpace(value); value == "" {
		return byDefault
	}
	return value
}

// choice reads one of several words, whose case does not matter.
func (r *reader) choice(name string, value json.RawMessage, byDefault string, words ...string) string {
	got := strings.ToUpper(text(name, value, byDefault))
	if slices.Contains(words, got) {
		return got
	}
	r.fail(name, "is %q, want one of %q", got, words)
	return byDefault
}

// backend reads what L2 is. AIBrix's own backends are libraries for its Python process.
func (r *reader) backend(value json.RawMessage) (l2 bool) {
	switch got := strings.ToUpper(text(l2Backend, value, "")); got {
	case "":
	case "REDIS", "VALKEY":
		return true
	case "ROCKSDB", "INFINISTORE", "HPKV", "PRISKV", "PRIS", "EIC", "SHFS", "MOCK":
		r.fail(l2Backend, "is %q, which only AIBrix's own process can use; set REDIS and %s", got, redisURL)
	default:
		r.fail(l2Backend, `is %q, want REDIS (or VALKEY), or nothing`, got)
	}
	return false
}

// number reads a whole number in bounds.
func (r *reader) number(name string, value json.RawMessage, byDefault, low, high int) int {
	s := text(name, value, strconv.Itoa(byDefault))
	f, err := strconv.ParseFloat(s, 64)
	n := int(f)
	if err != nil || float64(n) != f || n < low || n > high {
		r.fail(name, "is %q, want %d..%d", s, low, high)
		return byDefault
	}
	return n
}

// gib reads a size in GiB, which may have a fraction.
func (r *reader) gib(name string, value json.RawMessage, byDefault string) int64 {
	s := text(name, value, byDefault)
	n, err := strconv.ParseFloat(s, 64)
	if err != nil || !(n > 0 && n <= 1<<20) {
		r.fail(name, "is %q, want a size in GiB above 0", s)
		return 0
	}
	return int64(n * (1 << 30))
}

// settings reads config and environment.
func (c Config) settings() (settings, error) {
	r := &reader{}
	s := settings{}
	enabled := r.choice(l1Enabled, c.L1Enabled, "1", "1", "0", "TRUE", "FALSE")
	r.choice(device, c.Device, "CPU", "CPU")
	s.policy = strings.ToLower(r.choice(l1Policy, c.L1Policy, "S3FIFO", "S3FIFO", "LRU", "FIFO"))
	if enabled == "1" || enabled == "TRUE" {
		s.memory = r.gib(l1Capacity, c.L1Capacity, "10")
	}
	s.l2 = r.backend(c.L2Backend)
	s.hot = r.choice(l2Ingestion, c.L2Ingestion, "HOT", "HOT", "ALL", "EVICTED") == "HOT"
	s.behind = r.number(l2Inflight, c.L2Inflight, 0, 0, 1<<30)
	workers := r.number(l2Workers, c.L2Workers, 8, 1, remote.MaxConnections)
	wait := r.number(l2Timeout, c.L2Timeout, 20, 1, 10000) * r.number(chunkSize, c.Chunk, 512, 1, 1<<20)
	url := text(redisURL, c.RedisURL, "")
	switch {
	case r.err != nil:
	case !s.l2 && s.memory == 0:
		r.fail(l2Backend, "is not set and %s is 0: there is nowhere to keep blocks", l1Enabled)
	case s.l2 && url == "":
		r.fail(redisURL, "is not set, and %s is REDIS", l2Backend)
	case !s.l2 && url != "":
		r.fail(redisURL, "is set, but %s is not REDIS", l2Backend)
	}
	if r.err != nil || !s.l2 {
		return s, r.err
	}
	o, err := server(url, c.AllowPlain)
	if err != nil {
		r.fail(redisURL, "%v", err)
		return s, r.err
	}
	o.Username, o.Password, o.CredentialField = text(redisUsername, c.RedisUsername, ""), os.Getenv(redisPassword), redisPassword
	o.Prefix = strings.ToLower(text(l2Namespace, c.L2Namespace, "aibrix")) + ":"
	o.Connections = workers
	o.Timeout = min(time.Duration(wait)*time.Millisecond, 10*time.Minute)
	s.remote = o
	return s, nil
}

// server reads where L2 is. Without plain, others on the way must not be able to read what is sent there.
func server(url string, plain bool) (remote.Options, error) {
	o, err := remote.ParseURL(url)
	if err != nil {
		return o, err
	}
	if err := o.Private(); err != nil && !plain {
		return o, fmt.Errorf("has the address %w; write rediss:// for TLS, or set allow_plaintext in kv_connector_extra_config", err)
	}
	return o, nil
}

// warn says what was set and has no effect, and what travels in plain text.
func (s *settings) warn(log *slog.Logger) {
	for _, name := range without() {
		if os.Getenv(name) != "" {
			log.Warn("a variable of AIBrix has no effect here", "variable", name)
		}
	}
	if s.l2 {
		if err := s.remote.Private(); err != nil {
			log.Warn("blocks and password travel without TLS; write rediss://", "variable", redisURL, "error", err)
		}
	}
}
