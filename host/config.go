package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/config"
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
	tag           string        // of a child: its name in tickets
	at            string        // of a child: where it stands, with a dot behind it
	beside        config.Beside // vLLM's own keys, for connectors that have a field for them: see Adopt
	Warnings      []string      // keys of other systems that were accepted and have no effect; the caller logs them
}

// ParseConfig reads the argument of --kv-transfer-config: JSON, or @FILE with JSON in it. Decoding
// is strict. Errors wrap ErrConfig and name the field, or line and column.
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
	if err := config.Check(data); err != nil {
		return nil, err
	}
	c := &Config{
		FailurePolicy: PolicyRecompute,
		Extra:         json.RawMessage("{}"),
		Settings:      DefaultSettings(),
	}
	if err := c.decode(data, 0); err != nil {
		return nil, err
	}
	return c, nil
}

// decode fills c, whose fields have their defaults, from a JSON object. depth counts the
// MultiConnectors around it.
func (c *Config) decode(data json.RawMessage, depth int) error {
	var role string
	fields := []config.Field{
		{Name: "kv_connector", Set: config.Text(&c.Connector)},
		{Name: "kv_role", Set: config.Text(&role)},
		{Name: "engine_id", Set: config.Text(&c.EngineID)},
		{Name: "kv_buffer_device", Set: c.decodeDevice},
		{Name: "kv_load_failure_policy", Set: config.OneOf(&c.FailurePolicy, PolicyRecompute, PolicyFail)},
		{Name: "kv_connector_extra_config", Set: config.RawObject(&c.Extra)},
		{Name: "kv_connector_module_path", Set: config.Text(&c.ModulePath)},
		{Name: "kvport", Set: func(raw json.RawMessage) error { return c.Settings.decode(raw) }},
	}
	warn := func(key string, value json.RawMessage) (bool, error) {
		if known, err := c.beside.Decode(key, value); known {
			return known, err
		}
		known, err := config.Foreign(key, value)
		if known {
			c.Warnings = append(c.Warnings, fmt.Sprintf("%s: accepted for compatibility, has no effect", key))
		}
		return known, err
	}
	if err := config.Object(data, fields, warn); err != nil {
		return err
	}
	if c.ModulePath == shimModule || strings.HasPrefix(c.ModulePath, shimModule+".") {
		return fmt.Errorf("kv_connector_module_path: %s is kvport's module for vLLM, so this is the outer object of vLLM's config: give the inner object, its kv_connector_extra_config", config.Quote(c.ModulePath))
	}
	if c.Connector == "" {
		return errors.New("kv_connector is required")
	}
	if role == "" {
		return errors.New("kv_role is required: kv_producer, kv_consumer or kv_both")
	}
	var err error
	if c.Role, err = connector.ParseRole(role); err != nil {
		return fmt.Errorf("kv_role: %s is none of kv_producer, kv_consumer, kv_both", config.Quote(role))
	}
	if c.Connector == MultiName && c.ModulePath == "" {
		if c.Children, err = parseChildren(c.Extra, c, depth+1); err != nil {
			return config.FieldError("kv_connector_extra_config", err)
		}
	}
	return nil
}

// Adopt gives a plugin those of kv_ip, kv_port, kv_rank, kv_parallel_size and kv_buffer_size beside kv_connector
// for which its config has a field of that name, as if they stood in kv_connector_extra_config; what stands there
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

func (s *Settings) decode(raw json.RawMessage) error { return config.Object(raw, s.fields(), nil) }

func (s *Settings) fields() []config.Field {
	return []config.Field{
		{Name: "ticket_key_file", Set: config.Text(&s.TicketKeyFile)},
		{Name: "peers", Set: config.Texts(&s.Peers)},
		{Name: "trust", Set: s.decodeTrust},
		{Name: "landing_bytes", Set: config.Size(&s.LandingBytes)},
		{Name: "arena_limit", Set: config.Size(&s.ArenaLimit)},
		{Name: "plugin_sha256", Set: s.decodeHash},
		{Name: "tenant_secret_file", Set: config.Text(&s.TenantSecretFile)},
		{Name: "allow_lossy", Set: config.Bool(&s.AllowLossy)},
		{Name: "unverified", Set: config.Bool(&s.Unverified)},
		{Name: "ring", Set: config.Bool(&s.Ring)},
		{Name: "recompute_threshold", Set: config.Positive(&s.RecomputeThreshold)},
		{Name: "allow_weak_hashes", Set: config.Bool(&s.AllowWeakHashes)},
		{Name: "deadlines", Set: func(raw json.RawMessage) error { return config.Object(raw, s.Deadlines.fields(), nil) }},
		{Name: "heartbeat", Set: func(raw json.RawMessage) error {
			return config.Object(raw, []config.Field{
				{Name: "interval", Set: config.Duration(&s.Heartbeat.Interval)},
				{Name: "limit", Set: config.Duration(&s.Heartbeat.Limit)},
			}, nil)
		}},
		{Name: "breaker", Set: func(raw json.RawMessage) error {
			return config.Object(raw, []config.Field{
				{Name: "deaths", Set: config.Positive(&s.Breaker.Deaths)},
				{Name: "window", Set: config.Duration(&s.Breaker.Window)},
				{Name: "cooldown", Set: config.Duration(&s.Breaker.Cooldown)},
				{Name: "backoff_min", Set: config.Duration(&s.Breaker.BackoffMin)},
				{Name: "backoff_max", Set: config.Duration(&s.Breaker.BackoffMax)},
			}, nil)
		}},
	}
}

func (d *Deadlines) fields() []config.Field {
	return []config.Field{
		{Name: "handshake", Set: config.Duration(&d.Handshake)},
		{Name: "match", Set: config.Duration(&d.Match)},
		{Name: "later", Set: config.Duration(&d.Later)},
		{Name: "transfer", Set: config.Duration(&d.Transfer)},
		{Name: "transfer_per_gib", Set: config.Duration(&d.TransferPerGiB)},
		{Name: "save", Set: config.Duration(&d.Save)},
		{Name: "plan", Set: config.Duration(&d.Plan)},
		{Name: "finish", Set: config.Duration(&d.Finish)},
		{Name: "grace", Set: config.Duration(&d.Grace)},
		{Name: "hold", Set: config.Duration(&d.Hold)},
		{Name: "hold_max", Set: config.Duration(&d.HoldMax)},
		{Name: "fence", Set: config.Duration(&d.Fence)},
		{Name: "drain", Set: config.Duration(&d.Drain)},
	}
}

func (s *Settings) decodeTrust(raw json.RawMessage) error {
	var v string
	if err := config.Text(&v)(raw); err != nil {
		return err
	}
	switch Trust(v) {
	case TrustInPlace, TrustStaged:
		s.Trust = Trust(v)
		return nil
	case "read-only":
		return fmt.Errorf("%q is not built yet, only %q and %q", v, TrustInPlace, TrustStaged)
	}
	return fmt.Errorf("%s is not a trust level, use %q or %q", config.Quote(v), TrustInPlace, TrustStaged)
}

func (s *Settings) decodeHash(raw json.RawMessage) error {
	var v string
	if err := config.Text(&v)(raw); err != nil {
		return err
	}
	v = strings.ToLower(v)
	if len(v) != 64 || strings.Trim(v, "0123456789abcdef") != "" {
		return fmt.Errorf("%s is not a SHA-256 in hex (64 digits)", config.Quote(v))
	}
	s.PluginSHA256 = v
	return nil
}

// decodeDevice reads kv_buffer_device. That it is not to be had wraps connector.ErrIncompatible.
func (c *Config) decodeDevice(raw json.RawMessage) error {
	err := config.OneOf(&c.BufferDevice, "cpu", "cuda")(raw)
	if err == nil && c.BufferDevice == "cuda" {
		err = fmt.Errorf(`is "cuda", but caches are in host memory here and transfers of a GPU's memory were never run; want "cpu": %w`, connector.ErrIncompatible)
	}
	return err
}
