package acceptance

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/fixture"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/testkit"
)

// kvport schema takes every pasted config that serves, alone and as the child of a MultiConnector, and none with a mistake.
func TestPastedConfigsFitTheSchema(t *testing.T) {
	if testing.Short() {
		t.Skip("runs processes: left out with -short, which the race stage uses")
	}
	schema := printedSchema(t)
	data, err := os.ReadFile("testdata/pasted.json")
	require.NoError(t, err)
	var rows []pasted
	require.NoError(t, json.Unmarshal(data, &rows))
	fits := 0
	for _, row := range rows {
		config := strings.ReplaceAll(row.Config, "@PORT@", "14579")
		if row.Lacks == "" {
			fits++
			require.NoError(t, validate(schema, config), "%s: %s", row.Source, config)
			if !strings.Contains(config, `"engine_id"`) {
				require.NoError(t, validate(schema, fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both","kv_connector_extra_config":{"connectors":[%s]}}`, host.MultiName, config)))
			}
		}
		for _, mistake := range []string{`"kv_conector": "X"`, `"kvport": {"deadlines": {"save": true}}`, `"kvport": {"landing_bytes": "10 apples"}`, `"kvport": {"trus": "staged"}`, `"kv_rank": {}`} {
			require.Error(t, validate(schema, strings.TrimSuffix(strings.TrimSpace(config), "}")+`,`+mistake+`}`), "%s with %s", row.Source, mistake)
		}
	}
	require.Greater(t, fits, 10)
}

func TestSchemaOfConnectors(t *testing.T) {
	if testing.Short() {
		t.Skip("runs processes: left out with -short, which the race stage uses")
	}
	schema := printedSchema(t)
	data, err := os.ReadFile("testdata/schema.json")
	require.NoError(t, err)
	var rows []struct {
		Of     string          `json:"of"` // the connector's own config, instead of the whole
		Config json.RawMessage `json:"config"`
		Fits   bool            `json:"fits"`
	}
	require.NoError(t, json.Unmarshal(data, &rows))
	for _, row := range rows {
		against := schema
		if row.Of != "" {
			against = printedSchema(t, row.Of)
		}
		if row.Fits {
			require.NoError(t, validate(against, string(row.Config)), "%+v", row)
		} else {
			require.Error(t, validate(against, string(row.Config)), "%+v", row)
		}
	}
	out, err := exec.CommandContext(t.Context(), rig.Binary(t), "schema", "NoSuchConnector").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), testkit.Typical(t, fixture.Store).Connector)
}

// printedSchema is what kvport schema prints.
func printedSchema(t *testing.T, args ...string) *jsonschema.Schema {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), rig.Binary(t), append([]string{"schema"}, args...)...).Output()
	require.NoError(t, err)
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(out))
	require.NoError(t, err)
	compiler := jsonschema.NewCompiler()
	require.NoError(t, compiler.AddResource("schema.json", doc))
	schema, err := compiler.Compile("schema.json")
	require.NoError(t, err)
	return schema
}

func validate(schema *jsonschema.Schema, config string) error {
	instance, err := jsonschema.UnmarshalJSON(strings.NewReader(config))
	if err != nil {
		return err
	}
	return schema.Validate(instance)
}
