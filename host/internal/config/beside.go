package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/kvport/kvport/internal/strictjson"
)

// Beside are keys of vLLM's KVTransferConfig next to kv_connector, for connectors that have a field for them.
type Beside []option

// option is a key of vLLM's KVTransferConfig next to kv_connector.
type option struct {
	name  string
	value json.RawMessage
}

// BesideNames are the names of those keys.
func BesideNames() []string {
	return []string{"kv_ip", "kv_port", "kv_rank", "kv_parallel_size", "kv_buffer_size"}
}

// BesideOf keeps those keys of a transfer config that was decoded. Null is as good as absent.
func BesideOf(v *strictjson.Value) (b Beside) {
	for _, name := range v.Names() {
		if value := v.Field(name); slices.Contains(BesideNames(), name) && !value.IsNull() {
			b = append(b, option{name, value.Raw()})
		}
	}
	return b
}

// Adopt adds to extra, a connector's kv_connector_extra_config, those keys for which schema has a field of that name;
// what is there already wins. The sentences that it returns are warnings about keys without effect. name is the
// connector's, and at the place of its config, with a dot behind it.
func (b Beside) Adopt(extra, schema json.RawMessage, name, at string) (adopted json.RawMessage, warnings []string) {
	if len(b) == 0 {
		return extra, nil
	}
	var known struct {
		Properties map[string]json.RawMessage `json:"properties"`
	}
	_ = json.Unmarshal(schema, &known) // a plugin without a schema has no such fields
	fields := map[string]json.RawMessage{}
	if json.Unmarshal(extra, &fields) != nil {
		return extra, nil // the plugin says what is wrong with it
	}
	more := false
	for _, o := range b {
		_, has := known.Properties[o.name]
		own, given := fields[o.name]
		switch {
		case !has:
			warnings = append(warnings, fmt.Sprintf("%s%s: accepted for compatibility, has no effect on %s", at, o.name, name))
		case given && !SameJSON(own, o.value):
			warnings = append(warnings, fmt.Sprintf("%s%s: has no effect, since kv_connector_extra_config has another one", at, o.name))
		case !given:
			fields[o.name], more = o.value, true
		}
	}
	if more {
		if whole, err := json.Marshal(fields); err == nil { // it was just decoded, so it can be written
			extra = whole
		}
	}
	return extra, warnings
}

// Equal reports whether two configs have the same keys with the same values.
func (b Beside) Equal(other Beside) bool {
	return slices.EqualFunc(b, other, func(a, b option) bool { return a.name == b.name && SameJSON(a.value, b.value) })
}

// SameJSON reports whether two JSON texts differ at most in white space.
func SameJSON(a, b json.RawMessage) bool { return bytes.Equal(compacted(a), compacted(b)) }

func compacted(raw json.RawMessage) []byte {
	var out bytes.Buffer
	if json.Compact(&out, raw) != nil {
		return raw
	}
	return out.Bytes()
}

// Foreign reports keys that LMCache's users have in their configs and that mean nothing here.
func Foreign(key string) bool {
	return strings.HasPrefix(key, "lmcache.") || strings.HasPrefix(key, "lmcache_")
}
