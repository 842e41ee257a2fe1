package sdk

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/strictjson"
)

func newDecode[C any](raw json.RawMessage) (C, error) {
	var c C
	if err := newDecodeInto(raw, &c); err != nil {
		return c, &configError{err}
	}
	return c, nil
}

func newDecodeInto(raw json.RawMessage, c any) error {
	var o strictjson.Options
	if err := o.SetDefaults(c); err != nil {
		return err
	}
	if len(bytes.TrimSpace(raw)) == 0 {
		raw = json.RawMessage("{}")
	}
	v, err := strictjson.Parse(raw)
	if err != nil {
		return err
	}
	err = o.Decode(v, c)
	var wrong *strictjson.Error
	if errors.As(err, &wrong) {
		return errors.New(wrong.Field())
	}
	if err != nil {
		return err
	}
	if v, ok := c.(interface{ Validate() error }); ok {
		return v.Validate()
	}
	return nil
}

type bigConfig struct {
	testConfig
	Wait  time.Duration   `json:"wait,omitempty" jsonschema:"default=250ms,description=How long."`
	Steps []time.Duration `json:"steps,omitempty"`
	Ptr   *int            `json:"ptr"`
	Map   map[string]int  `json:"map"`
	Any   any             `json:"any"`
	Raw   json.RawMessage `json:"raw"`
	U8    uint8           `json:"u8" jsonschema:"maximum=9"`
	List  []string        `json:"list" jsonschema:"minItems=1"`
}

func compareBoth(t *testing.T, raw []byte) {
	was, errWas := DecodeConfig[bigConfig](raw)
	is, errIs := newDecode[bigConfig](raw)
	if errWas == nil && errIs != nil {
		require.ErrorContains(t, errIs, "given twice", "%s", raw)
		return
	}
	if errWas != nil && errIs == nil {
		require.ErrorContains(t, errWas, "wait", "%s", raw)
		return
	}
	if errWas == nil {
		was.Raw, is.Raw = nil, nil
		require.True(t, reflect.DeepEqual(was, is), "%s\n%+v\n%+v", raw, was, is)
	} else {
		require.NotContains(t, errIs.Error(), "\n")
		t.Logf("%-60.60s\n   %v\n   %v", raw, errWas, errIs)
	}
}

func FuzzBoth(f *testing.F) {
	for _, raw := range []string{
		``, `{}`, `null`, `[]`, `"x"`, `{"shared_storage_path": "/d",}`, `{"shared_storage_path": "/d"`, `{"shared_storage_path": "/d"} {}`,
		`{"shared_storage_path": "/d", "shared_storag_path": 1}`, `{"shared_storage_path": "/d", "Max_Bytes": 1}`, `{"shared_storage_path": "/d", "zzzzzzzz": 1}`,
		`{"shared_storage_path": "/d", "limit": {"rat": 1}}`, `{"shared_storage_path": "/d", "peers": [{}, {"nam": "a"}]}`, `{"shared_storage_pth": "/d"}`,
		`{"limit": {"rat": 1}}`, `{"zzz": 1, "aaa": 2, "mmm": 3}`, `{"shared_storage_path": 7}`, `{"shared_storage_path": "/d", "max_bytes": "1.5"}`,
		`{"shared_storage_path": "/d", "max_bytes": "10 apples"}`, `{"shared_storage_path": "/d", "max_bytes": "1e19"}`, `{"shared_storage_path": "/d", "max_bytes": true}`,
		`{"shared_storage_path": "/d", "max_bytes": 1.5}`, `{"shared_storage_path": "/d", "limit": {"rate": "x"}}`, `{"shared_storage_path": "/d", "max_bytes": -1}`,
		`{"shared_storage_path": "/d", "mode": "slow"}`, `{"shared_storage_path": "/"}`, `{"limit": null}`,
		`{"shared_storage_path": "/d", "max_bytes": 3, "peers": [{"name": "a"}]}`, `{"shared_storage_path": "/d", "max_bytes": "10GiB"}`,
		`{"shared_storage_path": "/d", "wait": "5s", "steps": ["1s", 7, "8"], "ptr": 7, "map": {"a": 1}, "any": [1, {}], "raw": [1 , 2], "u8": 7, "list": ["x"]}`,
		`{"shared_storage_path": "/d", "wait": true, "steps": null}`, `{"shared_storage_path": "/d", "ptr": null}`, `{"shared_storage_path": "/d", "map": {"a":"1"}}`,
		`{"shared_storage_path": "/d", "u8": 256}`, `{"shared_storage_path": "/d", "u8": 12}`, `{"shared_storage_path": "/d", "u8": -1}`, `{"shared_storage_path": "/d", "list": []}`, `{"shared_storage_path": "/d", "list": [null]}`,
		`{"shared_storage_path": "/d", "list": "x"}`, `{"shared_storage_path": "/d", "raw": null, "any": null}`, `{"shared_storage_path": null}`, `{"shared_storage_path": "/d", "sync": 1}`, `{"shared_storage_path": "/d", "sync": null}`,
		`{"shared_storage_path": "/d", "wait": "soon"}`, `{"shared_storage_path": "/d", "steps": ["1s", "x"]}`, `{"shared_storage_path": "/d", "wait": 1.5}`, `{"shared_storage_path": "/d", "peers": [null]}`,
		`{"shared_storage_path": "/d", "limit": {"rate": 1e999}}`, `{"shared_storage_path": "/d", "max_bytes": 1e999}`, "{\"shared_storage_path\": \"/d\", \"a\\nb\": 1}", strings.Repeat("[", 20000), `{"any":` + strings.Repeat("[", 9000) + strings.Repeat("]", 9000) + `}`,
	} {
		f.Add([]byte(raw))
	}
	f.Fuzz(func(t *testing.T, raw []byte) { compareBoth(t, raw) })
}
