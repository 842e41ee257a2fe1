package host

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/invopop/jsonschema"

	"github.com/kvport/kvport/host/internal/config"
	"github.com/kvport/kvport/internal/strictjson"
	"github.com/kvport/kvport/multiconnector"
)

// configName is the definition of a transfer config in a [ConfigSchema].
const configName = "transfer_config"

// ConfigSchema is the JSON Schema of a transfer config with any of some plugins' connectors, or the children of a
// MultiConnector. If only is a connector's name or alias, it is the schema of that connector's kv_connector_extra_config.
func ConfigSchema(plugins []*Manifest, only string) (json.RawMessage, error) {
	defaults := &transferConfig{FailurePolicy: PolicyRecompute, Settings: DefaultSettings()}
	whole := strict().Schema(defaults)
	strictjson.AcceptTexts(whole)
	whole.PatternProperties = map[string]*jsonschema.Schema{`^lmcache[._]`: {Description: "Of LMCache; it has no effect here."}}
	root := &jsonschema.Schema{
		Version: jsonschema.Version, Title: "The argument of --kv-transfer-config", Ref: reference(configName),
		Definitions: jsonschema.Definitions{configName: whole, MultiName: childrenSchema()},
	}
	var known []any
	add := func(name string, aliases []string, extra *jsonschema.Schema) {
		names := []any{name}
		for _, alias := range aliases {
			names = append(names, alias)
		}
		known = append(known, names...)
		if slices.Contains(names, any(only)) {
			root.Title, root.Ref = "The kv_connector_extra_config of "+name, reference(name)
		}
		whole.AllOf = append(whole.AllOf, whenNamed(names, name, extra))
	}
	add(MultiName, nil, root.Definitions[MultiName])
	for _, m := range plugins {
		if m.Name == MultiName {
			continue // the host composes it itself
		}
		extra := extraSchema(m)
		root.Definitions[m.Name] = extra
		add(m.Name, m.Aliases, extra)
	}
	if only != "" && !slices.Contains(known, any(only)) {
		return nil, fmt.Errorf("%w: no plugin that is found is called %s; there are %s", ErrConfig, strictjson.Quote(only), strings.Trim(fmt.Sprint(known), "[]"))
	}
	if only != "" && root.Ref != reference(MultiName) {
		one := root.Definitions[root.Ref[len(reference("")):]]
		one.Version, one.Title = root.Version, root.Title
		return json.MarshalIndent(one, "", "  ")
	}
	whole.AllOf = append(whole.AllOf, &jsonschema.Schema{If: searched(), Then: property("kv_connector", &jsonschema.Schema{Enum: known})})
	return json.MarshalIndent(root, "", "  ")
}

func reference(definition string) string { return "#/$defs/" + definition }

// property is the schema of objects in which a property has a schema.
func property(name string, schema *jsonschema.Schema) *jsonschema.Schema {
	s := &jsonschema.Schema{Properties: jsonschema.NewProperties()}
	s.Properties.Set(name, schema)
	return s
}

// searched is the schema of configs whose plugin is found by name.
func searched() *jsonschema.Schema {
	return &jsonschema.Schema{Not: &jsonschema.Schema{Required: []string{"kv_connector_module_path"}}}
}

// whenNamed says what the kv_connector_extra_config of a connector is.
func whenNamed(names []any, definition string, extra *jsonschema.Schema) *jsonschema.Schema {
	s := &jsonschema.Schema{If: property("kv_connector", &jsonschema.Schema{Enum: names}), Then: property("kv_connector_extra_config", &jsonschema.Schema{Ref: reference(definition)})}
	s.If.Required, s.If.Not = []string{"kv_connector"}, searched().Not
	if len(extra.Required) > 0 {
		s.Then.Required = []string{"kv_connector_extra_config"}
	}
	return s
}

// childrenSchema is what a MultiConnector has in its kv_connector_extra_config.
func childrenSchema() *jsonschema.Schema {
	least, most := uint64(1), uint64(multiconnector.MaxChildren)
	child := property("engine_id", jsonschema.FalseSchema)
	child.AllOf = []*jsonschema.Schema{{Ref: reference(configName)}}
	s := property("connectors", &jsonschema.Schema{
		Type: "array", MinItems: &least, MaxItems: &most, Items: child, Description: "The transfer configs of the children, in order.",
	})
	s.Type, s.Required, s.AdditionalProperties = "object", []string{"connectors"}, jsonschema.FalseSchema
	return s
}

// extraSchema is what a plugin has in its kv_connector_extra_config. A key that may be next to kv_connector is not required.
func extraSchema(m *Manifest) *jsonschema.Schema {
	extra := &jsonschema.Schema{}
	if json.Unmarshal(m.ConfigSchema, extra) != nil {
		return &jsonschema.Schema{Description: "The plugin does not say."}
	}
	if len(extra.Definitions) > 0 && extra.ID == "" {
		extra.ID = jsonschema.ID("kvport:" + m.Name) // its references are to itself
	}
	extra.Version = ""
	extra.Required = slices.DeleteFunc(extra.Required, func(name string) bool { return slices.Contains(config.BesideNames(), name) })
	strictjson.AcceptTexts(extra)
	return extra
}
