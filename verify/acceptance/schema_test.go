package acceptance

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"
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
				require.NoError(t, validate(schema, `{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[`+config+`]}}`))
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
	const config = `{"kv_connector": "NAME", "kv_role": "kv_both", "kv_connector_extra_config": EXTRA}`
	multi := func(children string) string { return `{"connectors": [` + children + `]}` }
	child := func(name, extra string) string {
		return strings.NewReplacer("NAME", name, "EXTRA", extra).Replace(config)
	}
	for _, c := range []struct {
		name, extra string
		fits        bool
	}{
		{"SharedStorageConnector", `{"shared_storage_path": "/x"}`, true},
		{"ExampleConnector", `{"shared_storage_path": "/x"}`, true},
		{"ExampleConnector", `{"shared_storage_path": 7}`, false},
		{"SharedStorageConnector", `{"shared_storage_pth": "/x"}`, false},
		{"RedisConnector", `{"max_value_bytes": "10MiB"}`, true},
		{"RedisConnector", `{"max_value_bytes": "10 apples"}`, false},
		{"NoSuchConnector", `{}`, false},
		{"MultiConnector", multi(child("SharedStorageConnector", `{"shared_storage_path": "/x"}`)), true},
		{"MultiConnector", multi(child("SharedStorageConnector", `{"shared_storage_pth": "/x"}`)), false},
		{"MultiConnector", multi(child("MultiConnector", multi(child("SharedStorageConnector", `{}`)))), true},
		{"MultiConnector", multi(child("MultiConnector", multi(child("SharedStorageConnector", `{"x": 1}`)))), false},
		{"MultiConnector", multi(``), false},
		{"MultiConnector", `{}`, false},
	} {
		err := validate(schema, child(c.name, c.extra))
		if c.fits {
			require.NoError(t, err, "%+v", c)
		} else {
			require.Error(t, err, "%+v", c)
		}
	}
	one := printedSchema(t, "ExampleConnector")
	require.NoError(t, validate(one, `{"shared_storage_path": "/x"}`))
	require.Error(t, validate(one, `{"shared_storage_pth": "/x"}`))
	require.NoError(t, validate(printedSchema(t, "MultiConnector"), multi(child("SharedStorageConnector", `{}`))))
	out, err := exec.CommandContext(t.Context(), binary(t), "schema", "NoSuchConnector").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "SharedStorageConnector")
}

// printedSchema is what kvport schema prints.
func printedSchema(t *testing.T, args ...string) *jsonschema.Schema {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), binary(t), append([]string{"schema"}, args...)...).Output()
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
