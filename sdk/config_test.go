package sdk

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

type testConfig struct {
	Path  string `json:"shared_storage_path" jsonschema:"required,description=folder of the blocks"`
	Max   int64  `json:"max_bytes" jsonschema:"default=1024,minimum=0,description=size cap in bytes"`
	Mode  string `json:"mode" jsonschema:"default=fast,enum=fast,enum=safe"`
	Sync  bool   `json:"sync" jsonschema:"default=true"`
	Limit struct {
		Rate float64 `json:"rate" jsonschema:"default=0.5"`
	} `json:"limit"`
	Peers []struct {
		Name string `json:"name"`
	} `json:"peers"`
	validated bool
}

func (c *testConfig) Validate() error {
	c.validated = true
	if c.Path == "/" {
		return fmt.Errorf("shared_storage_path must not be the root: %w", connector.ErrIncompatible)
	}
	return nil
}

func TestDecodeConfig(t *testing.T) {
	c, err := DecodeConfig[testConfig](json.RawMessage(`{"shared_storage_path": "/d"}`))
	require.NoError(t, err)
	want := testConfig{Path: "/d", Max: 1024, Mode: "fast", Sync: true, validated: true}
	want.Limit.Rate = 0.5
	require.Equal(t, want, c)

	c, err = DecodeConfig[testConfig](json.RawMessage(` {"shared_storage_path": "/d", "max_bytes": 0, "sync": false, "mode": "safe",
		"limit": {"rate": 2}, "peers": [{"name": "a"}]} `))
	require.NoError(t, err)
	require.Equal(t, "a", c.Peers[0].Name)
	require.True(t, c.Max == 0 && !c.Sync && c.Mode == "safe" && c.Limit.Rate == 2)
}

// Numbers may be strings, as people paste them; none is rounded.
func TestDecodeConfigNumbers(t *testing.T) {
	for raw, want := range map[string]int64{
		`7`: 7, `"7"`: 7, `1e1`: 10, `"1e1"`: 10, `"9007199254740993"`: 1<<53 + 1, `"10GB"`: 1e10, `"10GiB"`: 10 << 30,
	} {
		c, err := DecodeConfig[testConfig](json.RawMessage(`{"shared_storage_path": "/d", "max_bytes": ` + raw + `, "limit": {"rate": "0.25"}}`))
		require.NoError(t, err, raw)
		require.Equal(t, want, c.Max, raw)
		require.InDelta(t, 0.25, c.Limit.Rate, 0)
	}
}

func TestDecodeConfigRefuses(t *testing.T) {
	for _, c := range []struct{ raw, want string }{
		{``, `shared_storage_path: is missing`},
		{`{}`, `shared_storage_path: is missing`},
		{`null`, `must be an object, not null`},
		{`[]`, `must be an object, not an array`},
		{`"x"`, `must be an object, not a string`},
		{`{"shared_storage_path": "/d",}`, `line 1, column 29: bad JSON: JSON has no comma behind the last item`},
		{`{"shared_storage_path": "/d"`, `unexpected end`},
		{`{"shared_storage_path": "/d"} {}`, `line 1, column 31: bad JSON`},
		{`{"shared_storage_path": "/d", "shared_storag_path": 1}`, `unknown field "shared_storag_path", did you mean "shared_storage_path"?`},
		{`{"shared_storage_path": "/d", "Max_Bytes": 1}`, `unknown field "Max_Bytes", did you mean "max_bytes"?`},
		{`{"shared_storage_path": "/d", "zzzzzzzz": 1}`, `unknown field "zzzzzzzz", known are shared_storage_path, max_bytes`},
		{`{"shared_storage_path": "/d", "limit": {"rat": 1}}`, `limit: unknown field "rat", did you mean "rate"?`},
		{`{"shared_storage_path": "/d", "peers": [{}, {"nam": "a"}]}`, `peers[1]: unknown field "nam"`},
		{`{"shared_storage_pth": "/d"}`, `unknown field "shared_storage_pth", did you mean "shared_storage_path"?`},
		{`{"limit": {"rat": 1}}`, `limit: unknown field "rat"`},
		{`{"zzz": 1, "aaa": 2, "mmm": 3}`, `unknown field "zzz"`},
		{`{"shared_storage_path": 7}`, `shared_storage_path: must be a string, not a number`},
		{`{"shared_storage_path": "/d", "max_bytes": "1.5"}`, `max_bytes: must be a number of bytes: "1.5" is no whole number`},
		{`{"shared_storage_path": "/d", "max_bytes": "10 apples"}`, `max_bytes: must be a number of bytes: "10 apples" is no whole number and no size such as "10GiB"`},
		{`{"shared_storage_path": "/d", "max_bytes": "1e19"}`, `max_bytes: must be a number of bytes: "1e19" is too large`},
		{`{"shared_storage_path": "/d", "max_bytes": true}`, `max_bytes: must be a number of bytes, not a boolean`},
		{`{"shared_storage_path": "/d", "max_bytes": 1.5}`, `max_bytes`},
		{`{"shared_storage_path": "/d", "limit": {"rate": "x"}}`, `limit.rate: must be a number: "x" is none`},
		{`{"shared_storage_path": "/d", "max_bytes": -1}`, `max_bytes: is -1, must be at least 0`},
		{`{"shared_storage_path": "/d", "mode": "slow"}`, `mode: is "slow", must be "fast" or "safe"`},
		{`{"shared_storage_path": "/d", "mode": "safe", "mode": "fast"}`, `field "mode" is given twice`},
		{`{"shared_storage_path": "/"}`, `must not be the root`},
	} {
		_, err := DecodeConfig[testConfig](json.RawMessage(c.raw))
		require.ErrorIs(t, err, connector.ErrIncompatible, c.raw)
		require.ErrorContains(t, err, c.want, c.raw)
		require.NotContains(t, err.Error(), "\n", c.raw)
		require.NotContains(t, err.Error(), "incompatible", "the field says more")
	}
}

func TestSchemaOf(t *testing.T) {
	raw := SchemaOf[testConfig]()
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(string(raw)))
	require.NoError(t, err)
	compiler := jsonschema.NewCompiler()
	require.NoError(t, compiler.AddResource("s.json", doc))
	_, err = compiler.Compile("s.json")
	require.NoError(t, err, "a schema that validators accept")
	for _, want := range []string{`"description":"folder of the blocks"`, `"default":1024`, `"required":["shared_storage_path"]`, `"enum":["fast","safe"]`} {
		require.Contains(t, string(raw), want)
	}
	require.NotContains(t, string(raw), "$ref")
	require.NotContains(t, string(raw), "validated")
}

func FuzzDecodeConfig(f *testing.F) {
	f.Add([]byte(`{"shared_storage_path": "/d", "max_bytes": 3, "peers": [{"name": "a"}]}`))
	f.Add([]byte(`{"limit": null}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := DecodeConfig[testConfig](raw)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrIncompatible)
			require.NotContains(t, err.Error(), "\n", "a message is a line")
			return
		}
		require.True(t, c.Max >= 0 && c.validated)
		require.Contains(t, []string{"fast", "safe"}, c.Mode)
		require.NotEqual(t, "/", c.Path)
		require.True(t, json.Valid(raw))
	})
}
