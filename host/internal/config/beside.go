// Package config reads a transfer config: strictly, and with messages that say where a mistake is. What the keys mean
// stands with the types that they fill, in package host.
package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

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

// Err is wrapped by every error that a changed config, binary or flag could cure: it is host.ErrConfig.
var Err = errors.New("config")

// OpenFile opens a regular file for reading. Whatever else has the path is an error, and opening it
// does not wait: a FIFO may never get a writer. The caller closes the file.
func OpenFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ENXIO) { // a socket
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// ReadFile reads a regular file of at most limit bytes. The caller owns the slice.
func ReadFile(path string, limit int64) ([]byte, error) {
	f, err := OpenFile(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, limit)
	}
	return data, nil
}
