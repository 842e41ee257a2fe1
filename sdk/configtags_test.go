package sdk

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// A tag has an effect, or the config is refused with the reason.
func TestTagsThatMeanNothing(t *testing.T) {
	type misspelt struct {
		Max int `json:"max" jsonschema:"minimun=5"`
	}
	type number struct {
		Max int `json:"max" jsonschema:"minimum=five"`
	}
	type otherType struct {
		Name string `json:"name" jsonschema:"minimum=5"`
	}
	type length struct {
		Name string `json:"name" jsonschema:"minLength=-1"`
	}
	type truth struct {
		Sync bool `json:"sync" jsonschema:"default=yes"`
	}
	type nested struct {
		Peers []misspelt `json:"peers"`
	}
	type behind struct {
		Max int `json:"max" jsonschema:"description=Most blocks.,minimun=5"`
	}
	type wait struct {
		Wait time.Duration `json:"wait" jsonschema:"default=soon"`
	}
	for want, decode := range map[string]func(json.RawMessage) error{
		`jsonschema tag of field max: "minimun=5": unknown field "minimun", did you mean "minimum"?`: decoding[misspelt](),
		`jsonschema tag of field max: "minimum=five": must be a number`:                              decoding[number](),
		`jsonschema tag of field name: "minimum=5": minimum is not for a field of type string`:       decoding[otherType](),
		`"minLength=-1": must be a number of 0 or more`:                                              decoding[length](),
		`"default=yes": must be true or false`:                                                       decoding[truth](),
		`jsonschema tag of field peers.max: "minimun=5"`:                                             decoding[nested](),
		`field max: "minimun=5": unknown`:                                                            decoding[behind](),
		`"default=soon": must be a duration such as 250ms`:                                           decoding[wait](),
	} {
		err := decode(json.RawMessage(`{}`))
		require.ErrorContains(t, err, want)
		require.ErrorIs(t, err, connector.ErrIncompatible)
	}
}

func decoding[C any]() func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		_, err := DecodeConfig[C](raw)
		return err
	}
}

func TestDescriptionsWithCommas(t *testing.T) {
	type config struct {
		TTL  string `json:"ttl" jsonschema:"required,description=When blocks are gone, such as 24h, or never,minLength=2"`
		Path string `json:"path" jsonschema:"description=One\\, two"`
	}
	var schema struct {
		Required   []string `json:"required"`
		Properties map[string]struct {
			Description string `json:"description"`
			MinLength   int    `json:"minLength"`
		} `json:"properties"`
	}
	require.NoError(t, json.Unmarshal(SchemaOf[config](), &schema))
	require.Equal(t, "When blocks are gone, such as 24h, or never", schema.Properties["ttl"].Description)
	require.Equal(t, 2, schema.Properties["ttl"].MinLength)
	require.Equal(t, "One, two", schema.Properties["path"].Description)
	require.Equal(t, []string{"ttl"}, schema.Required)
	require.NoError(t, decoding[config]()(json.RawMessage(`{"ttl":"1h","path":"x"}`)))
}

func TestDurations(t *testing.T) {
	type inner struct {
		Retry time.Duration `json:"retry" jsonschema:"default=1m"`
	}
	type config struct {
		Wait  time.Duration   `json:"wait,omitempty" jsonschema:"default=250ms,description=How long."`
		Off   time.Duration   `json:"off,omitempty"`
		Steps []time.Duration `json:"steps,omitempty"`
		Inner inner           `json:"inner"`
		Name  string          `json:"name,omitempty" jsonschema:"default=5s"`
	}
	c, err := DecodeConfig[config](nil)
	require.NoError(t, err)
	require.Equal(t, config{Wait: 250 * time.Millisecond, Inner: inner{time.Minute}, Name: "5s"}, c)
	c, err = DecodeConfig[config](json.RawMessage(`{"wait": "5s", "off": 1000, "steps": ["1s", 7], "inner": {"retry": "1h"}}`))
	require.NoError(t, err)
	require.Equal(t, config{Wait: 5 * time.Second, Off: time.Microsecond, Steps: []time.Duration{time.Second, 7}, Inner: inner{time.Hour}, Name: "5s"}, c)
	for raw, want := range map[string]string{
		`{"wait": "soon"}`:              `wait: must be a duration such as "250ms": "soon" is none`,
		`{"wait": true}`:                `wait: must be a duration such as "250ms", not a boolean`,
		`{"steps": ["1s", "x"]}`:        `steps[1]: must be a duration such as "250ms": "x" is none`,
		`{"inner": {"retry": "5"}}`:     "",
		`{"inner": {"retry": "later"}}`: `inner.retry: must be a duration`,
	} {
		err := decoding[config]()(json.RawMessage(raw))
		if want == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, want)
	}
}
