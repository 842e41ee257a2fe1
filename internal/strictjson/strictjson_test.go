package strictjson_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/strictjson"
)

type shared struct {
	Path string `json:"path"`
	Mode string `json:"mode" jsonschema:"enum=fast,enum=safe"`
}

type config struct {
	shared
	*Limits
	Name  string              `json:"name" jsonschema:"required,minLength=1"`
	Size  int                 `json:"size" jsonschema_extras:"unit=bytes" jsonschema:"minimum=1"`
	Cap   *int64              `json:"cap_bytes" jsonschema:"nullable"`
	Rate  float32             `json:"rate"`
	Small uint8               `json:"small"`
	Wait  time.Duration       `json:"wait"`
	Flags map[string]bool     `json:"flags"`
	Text  []byte              `json:"text"`
	Rest  strictjson.Value    `json:"rest" jsonschema:"type=object"`
	Each  []*strictjson.Value `json:"each"`
	Mode  string              `json:"mode" jsonschema:"enum=slow,enum=safe"` // hides the embedded one
	none  int
}

type Limits struct {
	Most int `json:"most"`
}

func TestDecode(t *testing.T) {
	v, err := strictjson.Parse([]byte(`{"path": "/p", "most": "1e1", "name": "n", "size": "10KiB", "cap_bytes": "1GB", "rate": "0.5", "small": 7,
		"wait": "250ms", "flags": {"a": true}, "text": "AAE=", "rest": {"x": [1, {"y": 2}]}, "each": [1, null], "mode": "slow", "theirs.x": {}}`))
	require.NoError(t, err)
	var c config
	o := strictjson.Options{Seconds: true, Foreign: func(name string) bool { return strings.HasPrefix(name, "theirs.") }}
	require.NoError(t, o.Decode(v, &c))
	require.Equal(t, "/p", c.Path)
	require.Equal(t, 10, c.Most)
	require.Equal(t, 10<<10, c.Size)
	require.EqualValues(t, 1e9, *c.Cap)
	require.EqualValues(t, 0.5, c.Rate)
	require.EqualValues(t, 7, c.Small)
	require.Equal(t, 250*time.Millisecond, c.Wait)
	require.Equal(t, map[string]bool{"a": true}, c.Flags)
	require.Equal(t, []byte{0, 1}, c.Text)
	require.Equal(t, "slow", c.Mode)
	require.Empty(t, c.shared.Mode)
	require.Zero(t, c.none)
	require.JSONEq(t, `{"x": [1, {"y": 2}]}`, string(c.Rest.Raw()))
	require.Len(t, c.Each, 2)
	require.EqualError(t, c.Rest.Field("x").Errorf("is %s", "wrong"), "line 2, column 72: rest.x: is wrong")

	// What is absent stays, and a null takes a pointer back.
	v, err = strictjson.Parse([]byte(`{"name": "m", "cap_bytes": null, "wait": 1.5}`))
	require.NoError(t, err)
	require.NoError(t, o.Decode(v, &c))
	require.Equal(t, "m", c.Name)
	require.Equal(t, "/p", c.Path)
	require.Nil(t, c.Cap)
	require.Equal(t, 1500*time.Millisecond, c.Wait)
}

func TestErrorsHaveAPlace(t *testing.T) {
	for raw, want := range map[string]string{
		``:                                   `line 1, column 1: is empty, must be a JSON object`,
		"\xef\xbb\xbf{}":                     `line 1, column 1: begins with a byte order mark`,
		`[1]`:                                `line 1, column 1: must be an object, not an array`,
		"{\n  \"name\": \"n\",\n}":           `line 2, column 14: bad JSON: JSON has no comma behind the last item`,
		`{'name': "n"}`:                      `line 1, column 2: bad JSON: single quotes are not JSON, write double quotes`,
		`{"name": "n"} x`:                    `line 1, column 15: bad JSON: invalid character 'x' after top-level value`,
		"{\"name\": \"n\",\n \"name\": 1}":   `line 2, column 2: field "name" is given twice`,
		`{"rest": {"a": [{"b": 1, "b": 1}]}`: `unexpected end`,
		`{"rest": {"a": [{"b":1, "b":1}]}}`:  `line 1, column 25: rest.a[0]: field "b" is given twice`,
		`{"nam": "n"}`:                       `line 1, column 9: unknown field "nam", did you mean "name"?`,
		`{"qqqqqq": "n"}`:                    `unknown field "qqqqqq", known are path, most, name,`,
		`{"NAME": "n"}`:                      `unknown field "NAME", did you mean "name"?`,
		`{"none": 1}`:                        `unknown field "none"`,
		`{"name": 1}`:                        `line 1, column 10: name: must be a string, not a number`,
		`{"name": null}`:                     `name: must be a string, not null`,
		`{"path": "p"}`:                      `line 1, column 1: name: is missing`,
		`{"name": ""}`:                       `name: is "", must have 1 characters or more`,
		`{"name":"n","size":"1 apple"}`:      `line 1, column 20: size: must be a number of bytes: "1 apple" is no whole number and no size such as "10GiB"`,
		`{"name":"n","size":0}`:              `size: is 0, must be at least 1`,
		`{"name":"n","size":"0"}`:            `size: is "0", must be at least 1`,
		`{"name":"n","cap_bytes":[]}`:        `cap_bytes: must be a number of bytes, not an array`,
		`{"name":"n","most":"10KB"}`:         `most: must be a whole number: "10KB" is no whole number`,
		`{"name":"n","most":null}`:           `most: must be a whole number, not null`,
		`{"name":"n","rate":1e99}`:           `rate: must be a number: 1e99 is too large`,
		`{"name":"n","rate":"x"}`:            `rate: must be a number: "x" is none`,
		`{"name":"n","rate":true}`:           `rate: must be a number, not a boolean`,
		`{"name":"n","small":256}`:           `small: must be a whole number: 256 is too large`,
		`{"name":"n","small":-1}`:            `small: is -1, must not be negative`,
		`{"name":"n","wait":"soon"}`:         `wait: must be a duration such as "250ms", or a number of seconds: "soon" is none`,
		`{"name":"n","wait":{}}`:             `wait: must be a duration such as "250ms", or a number of seconds, not an object`,
		`{"name":"n","wait":-1}`:             `wait: is -1, must be more than 0`,
		`{"name":"n","wait":"25h"}`:          `wait: is "25h", must be at most 86400`,
		`{"name":"n","flags":[]}`:            `flags: must be an object, not an array`,
		`{"name":"n","flags":{"a":1}}`:       `flags: has a JSON number where it must have bool`,
		`{"name":"n","rest":[]}`:             `rest: must be an object, not an array`,
		`{"name":"n","mode":"fast"}`:         `mode: is "fast", must be "slow" or "safe"`,
		`{"name":"n","each":{}}`:             `each: must be an array, not an object`,
		`{"name":"n","theirs.x":1}`:          `unknown field "theirs.x"`,
	} {
		v, err := strictjson.Parse([]byte(raw))
		if err == nil {
			err = strictjson.Options{Seconds: true}.Decode(v, &config{})
		}
		require.ErrorContains(t, err, want, raw)
		require.NotContains(t, err.Error(), "\n", raw)
	}
}

// What a schema says about numbers and durations holds for their texts, too, and its defaults are those of the value.
func TestSchema(t *testing.T) {
	raw, err := json.Marshal(strictjson.Options{Seconds: true}.Schema(&config{Size: 7, Wait: time.Minute, shared: shared{Path: "/p"}}))
	require.NoError(t, err)
	for _, want := range []string{
		`"size":{"type":"integer","minimum":1,"default":7,"unit":"bytes"}`, `"default":"1m0s"`, `"path":{"type":"string","default":"/p"}`, `"required":["name"]`,
		`"rest":{"type":"object"}`, `"each":{"items":true,"type":"array"}`,
	} {
		require.Contains(t, string(raw), want)
	}
}

func TestNearest(t *testing.T) {
	known := []string{"kv_connector", "kv_role", "kvport"}
	require.Equal(t, "kv_role", strictjson.Nearest("KV_Rol", known, 3))
	require.Empty(t, strictjson.Nearest("engine", known, 3))
	require.Empty(t, strictjson.Nearest(strings.Repeat("k", 1000), known, 2000))
}
