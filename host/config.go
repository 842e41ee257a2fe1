package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/kvport/kvport/connector"
)

// ErrConfig is wrapped by every error that a changed config, binary or flag could cure. Commands
// exit with code 2 on it.
var ErrConfig = errors.New("config")

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
	tag           string   // of a child: its name in tickets
	at            string   // of a child: where it stands, with a dot behind it
	beside        []option // vLLM's own keys, for connectors that have a field for them: see Adopt
	Warnings      []string // keys of other systems that were accepted and have no effect; the caller logs them
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
	if err := checkJSON(data); err != nil {
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
	fields := []field{
		{"kv_connector", text(&c.Connector)},
		{"kv_role", text(&role)},
		{"engine_id", text(&c.EngineID)},
		{"kv_buffer_device", c.decodeDevice},
		{"kv_load_failure_policy", oneOf(&c.FailurePolicy, PolicyRecompute, PolicyFail)},
		{"kv_connector_extra_config", object(&c.Extra)},
		{"kv_connector_module_path", text(&c.ModulePath)},
		{"kvport", func(raw json.RawMessage) error { return c.Settings.decode(raw) }},
	}
	warn := func(key string, value json.RawMessage) (bool, error) {
		if known, err := c.decodeBeside(key, value); known {
			return known, err
		}
		known, err := foreign(key, value)
		if known {
			c.Warnings = append(c.Warnings, fmt.Sprintf("%s: accepted for compatibility, has no effect", key))
		}
		return known, err
	}
	if err := decodeObject(data, fields, warn); err != nil {
		return err
	}
	if c.ModulePath == shimModule || strings.HasPrefix(c.ModulePath, shimModule+".") {
		return fmt.Errorf("kv_connector_module_path: %s is kvport's module for vLLM, so this is the outer object of vLLM's config: give the inner object, its kv_connector_extra_config", quote(c.ModulePath))
	}
	if c.Connector == "" {
		return errors.New("kv_connector is required")
	}
	if role == "" {
		return errors.New("kv_role is required: kv_producer, kv_consumer or kv_both")
	}
	var err error
	if c.Role, err = connector.ParseRole(role); err != nil {
		return fmt.Errorf("kv_role: %s is none of kv_producer, kv_consumer, kv_both", quote(role))
	}
	if c.Connector == MultiName && c.ModulePath == "" {
		if c.Children, err = parseChildren(c.Extra, c, depth+1); err != nil {
			return fieldError("kv_connector_extra_config", err)
		}
	}
	return nil
}

// foreign reports keys that vLLM's and LMCache's users have in their configs and that mean nothing
// here. A value that could not be theirs is an error: it is a mistake that those systems refuse.
func foreign(key string, value json.RawMessage) (known bool, err error) {
	if key == "enable_permute_local_kv" {
		_, err = decodeAs[bool](value, "true or false", "tf")
		return true, err
	}
	return strings.HasPrefix(key, "lmcache.") || strings.HasPrefix(key, "lmcache_"), nil
}

func (s *Settings) decode(raw json.RawMessage) error { return decodeObject(raw, s.fields(), nil) }

func (s *Settings) fields() []field {
	return []field{
		{"ticket_key_file", text(&s.TicketKeyFile)},
		{"peers", texts(&s.Peers)},
		{"trust", s.decodeTrust},
		{"landing_bytes", size(&s.LandingBytes)},
		{"arena_limit", size(&s.ArenaLimit)},
		{"plugin_sha256", s.decodeHash},
		{"tenant_secret_file", text(&s.TenantSecretFile)},
		{"allow_lossy", boolean(&s.AllowLossy)},
		{"unverified", boolean(&s.Unverified)},
		{"ring", boolean(&s.Ring)},
		{"recompute_threshold", positive(&s.RecomputeThreshold)},
		{"allow_weak_hashes", boolean(&s.AllowWeakHashes)},
		{"deadlines", func(raw json.RawMessage) error { return decodeObject(raw, s.Deadlines.fields(), nil) }},
		{"heartbeat", func(raw json.RawMessage) error {
			return decodeObject(raw, []field{
				{"interval", duration(&s.Heartbeat.Interval)},
				{"limit", duration(&s.Heartbeat.Limit)},
			}, nil)
		}},
		{"breaker", func(raw json.RawMessage) error {
			return decodeObject(raw, []field{
				{"deaths", positive(&s.Breaker.Deaths)},
				{"window", duration(&s.Breaker.Window)},
				{"cooldown", duration(&s.Breaker.Cooldown)},
				{"backoff_min", duration(&s.Breaker.BackoffMin)},
				{"backoff_max", duration(&s.Breaker.BackoffMax)},
			}, nil)
		}},
	}
}

func (d *Deadlines) fields() []field {
	return []field{
		{"handshake", duration(&d.Handshake)},
		{"match", duration(&d.Match)},
		{"later", duration(&d.Later)},
		{"transfer", duration(&d.Transfer)},
		{"transfer_per_gib", duration(&d.TransferPerGiB)},
		{"save", duration(&d.Save)},
		{"plan", duration(&d.Plan)},
		{"finish", duration(&d.Finish)},
		{"grace", duration(&d.Grace)},
		{"hold", duration(&d.Hold)},
		{"hold_max", duration(&d.HoldMax)},
		{"fence", duration(&d.Fence)},
		{"drain", duration(&d.Drain)},
	}
}

func (s *Settings) decodeTrust(raw json.RawMessage) error {
	var v string
	if err := text(&v)(raw); err != nil {
		return err
	}
	switch Trust(v) {
	case TrustInPlace, TrustStaged:
		s.Trust = Trust(v)
		return nil
	case "read-only":
		return fmt.Errorf("%q is not built yet, only %q and %q", v, TrustInPlace, TrustStaged)
	}
	return fmt.Errorf("%s is not a trust level, use %q or %q", quote(v), TrustInPlace, TrustStaged)
}

func (s *Settings) decodeHash(raw json.RawMessage) error {
	var v string
	if err := text(&v)(raw); err != nil {
		return err
	}
	v = strings.ToLower(v)
	if len(v) != 64 || strings.Trim(v, "0123456789abcdef") != "" {
		return fmt.Errorf("%s is not a SHA-256 in hex (64 digits)", quote(v))
	}
	s.PluginSHA256 = v
	return nil
}

// decodeDevice reads kv_buffer_device. That it is not to be had wraps connector.ErrIncompatible.
func (c *Config) decodeDevice(raw json.RawMessage) error {
	err := oneOf(&c.BufferDevice, "cpu", "cuda")(raw)
	if err == nil && c.BufferDevice == "cuda" {
		err = fmt.Errorf(`is "cuda", but caches are in host memory here and transfers of a GPU's memory were never run; want "cpu": %w`, connector.ErrIncompatible)
	}
	return err
}
