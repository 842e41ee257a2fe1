package host

import (
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/config"
	"github.com/kvport/kvport/internal/strictjson"
	"github.com/kvport/kvport/multiconnector"
)

// MultiName is the kv_connector that the host composes itself of the children in
// kv_connector_extra_config, unless kv_connector_module_path names a plugin for it.
const MultiName = "MultiConnector"

// maxNesting is how deep MultiConnectors may be nested.
const maxNesting = 4

// parseChildren reads the kv_connector_extra_config of a MultiConnector. The settings of parent are
// the defaults of its children. Errors name the field.
func parseChildren(v *strictjson.Value, parent *Config, depth int) (children []*Config, err error) {
	if depth > maxNesting {
		return nil, v.Errorf("MultiConnectors are nested more than %d deep", maxNesting)
	}
	var extra struct {
		Connectors []strictjson.Value `json:"connectors" jsonschema:"required"`
	}
	if err := strict().Decode(v, &extra); err != nil {
		return nil, err
	}
	switch n, list := len(extra.Connectors), v.Field("connectors"); {
	case n == 0:
		return nil, list.Errorf("is empty, must name at least one connector")
	case n > multiconnector.MaxChildren:
		return nil, list.Errorf("names %d connectors, at most %d", n, multiconnector.MaxChildren)
	}
	for i := range extra.Connectors {
		item := &extra.Connectors[i]
		at := fmt.Sprintf("kv_connector_extra_config.connectors[%d].", i)
		c, err := parseChild(item, parent, parent.at+at, depth)
		if err != nil {
			return nil, err
		}
		for k, other := range children {
			if sameChild(c, other) {
				return nil, item.Errorf("is the same as connectors[%d]", k)
			}
		}
		for _, w := range c.Warnings {
			parent.Warnings = append(parent.Warnings, at+w)
		}
		children = append(children, c)
	}
	names := make([]string, len(children))
	for i, c := range children {
		names[i] = c.Connector
	}
	for i, tag := range multiconnector.Tags(names) {
		children[i].tag = tag
	}
	return children, nil
}

func parseChild(v *strictjson.Value, parent *Config, at string, depth int) (*Config, error) {
	c := &Config{Settings: parent.Settings, at: at}
	c.Settings.PluginSHA256 = ""
	if err := c.decode(v, depth); err != nil {
		return nil, err
	}
	was, is := &parent.Settings, &c.Settings
	if len(is.Peers) == 0 {
		is.Peers = was.Peers
	}
	switch {
	case c.EngineID != "":
		return nil, v.Field("engine_id").Errorf("belongs to the engine: give it to the MultiConnector, not to a child")
	case !subset(c.Role, parent.Role):
		return nil, v.Field("kv_role").Errorf("%s is more than the %s of its MultiConnector", c.Role, parent.Role)
	case is.Trust != was.Trust || is.LandingBytes != was.LandingBytes:
		return nil, v.Field("kvport").Errorf("trust and landing_bytes are the same for all children: set them at the MultiConnector")
	case is.TicketKeyFile != was.TicketKeyFile || is.TenantSecretFile != was.TenantSecretFile || !slices.Equal(is.Peers, was.Peers):
		return nil, v.Field("kvport").Errorf("ticket_key_file, tenant_secret_file and peers are the engine's: set them at the MultiConnector")
	}
	return c, nil
}

// subset reports whether a child may have a role under a parent's.
func subset(child, parent connector.Role) bool {
	return (!child.Loads() || parent.Loads()) && (!child.Saves() || parent.Saves())
}

// sameChild reports whether two children would do the same in the same place.
func sameChild(a, b *Config) bool {
	return a.Connector == b.Connector && config.SameJSON(a.Extra, b.Extra) && a.beside.Equal(b.beside)
}
