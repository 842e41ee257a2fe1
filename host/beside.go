package host

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
)

// option is a key of vLLM's KVTransferConfig that stands beside kv_connector.
type option struct {
	name  string
	value json.RawMessage
}

// decodeBeside keeps the keys that vLLM has for the connectors that need an address or a buffer.
func (c *Config) decodeBeside(key string, value json.RawMessage) (known bool, err error) {
	null := bytes.Equal(bytes.TrimSpace(value), []byte("null"))
	switch key {
	case "kv_ip":
		_, err = decodeAs[string](value, "a string", `"`)
	case "kv_buffer_size":
		_, err = whole(value, true)
	case "kv_port", "kv_rank", "kv_parallel_size":
		_, err = whole(value, false)
	default:
		return false, nil
	}
	if null && key != "kv_ip" {
		return true, nil
	}
	if err == nil {
		c.beside = append(c.beside, option{key, bytes.Clone(value)})
	}
	return true, err
}

// Adopt gives a plugin those of kv_ip, kv_port, kv_rank, kv_parallel_size and kv_buffer_size beside kv_connector
// for which its config has a field of that name, as if they stood in kv_connector_extra_config; what stands there
// already wins. The sentences that it returns are warnings about keys without effect.
func (c *Config) Adopt(m *Manifest) (warnings []string) {
	if len(c.beside) == 0 {
		return nil
	}
	var schema struct {
		Properties map[string]json.RawMessage `json:"properties"`
	}
	_ = json.Unmarshal(m.ConfigSchema, &schema) // a plugin without a schema has no such fields
	extra := map[string]json.RawMessage{}
	if json.Unmarshal(c.Extra, &extra) != nil {
		return nil // the plugin says what is wrong with it
	}
	adopted := false
	for _, o := range c.beside {
		_, has := schema.Properties[o.name]
		own, given := extra[o.name]
		switch {
		case !has:
			warnings = append(warnings, fmt.Sprintf("%s%s: accepted for compatibility, has no effect on %s", c.at, o.name, m.Name))
		case given && !bytes.Equal(compacted(own), compacted(o.value)):
			warnings = append(warnings, fmt.Sprintf("%s%s: has no effect, since kv_connector_extra_config has another one", c.at, o.name))
		case !given:
			extra[o.name], adopted = o.value, true
		}
	}
	if adopted {
		if whole, err := json.Marshal(extra); err == nil { // it was just decoded, so it can be written
			c.Extra = whole
		}
	}
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
