package host

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/config"
	"github.com/kvport/kvport/internal/strictjson"
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

// decode fills c, whose settings have their defaults. depth counts the MultiConnectors around it.
func (c *Config) decode(v *strictjson.Value, depth int) error {
	t := transferConfig{FailurePolicy: PolicyRecompute, Settings: c.Settings}
	if err := strict().Decode(v, &t); err != nil {
		return err
	}
	if t.ModulePath == shimModule || strings.HasPrefix(t.ModulePath, shimModule+".") {
		return v.Field("kv_connector_module_path").Errorf("%s is kvport's module for vLLM, so this is the outer object of vLLM's config: give the inner object, its kv_connector_extra_config", strictjson.Quote(t.ModulePath))
	}
	if t.BufferDevice == "cuda" {
		return v.Field("kv_buffer_device").Errorf(`is "cuda", but caches are in host memory here and transfers of a GPU's memory were never run; want "cpu": %w`, connector.ErrIncompatible)
	}
	var err error
	if c.Role, err = connector.ParseRole(t.Role); err != nil {
		return v.Field("kv_role").Errorf("%w", err)
	}
	t.Settings.PluginSHA256 = strings.ToLower(t.Settings.PluginSHA256)
	c.Connector, c.EngineID, c.BufferDevice, c.FailurePolicy = t.Connector, t.EngineID, t.BufferDevice, t.FailurePolicy
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
