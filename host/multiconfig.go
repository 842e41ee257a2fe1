package host

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/config"
	"github.com/kvport/kvport/multiconnector"
)

// MultiName is the kv_connector that the host composes itself of the children in
// kv_connector_extra_config, unless kv_connector_module_path names a plugin for it.
const MultiName = "MultiConnector"

// maxNesting is how deep MultiConnectors may be nested.
const maxNesting = 4

// parseChildren reads the kv_connector_extra_config of a MultiConnector. The settings of parent are
// the defaults of its children. Errors name the field.
func parseChildren(raw json.RawMessage, parent *Config, depth int) (children []*Config, err error) {
	if depth > maxNesting {
		return nil, fmt.Errorf("MultiConnectors are nested more than %d deep", maxNesting)
	}
	list := []json.RawMessage(nil)
	fields := []config.Field{{Name: "connectors", Set: func(raw json.RawMessage) error {
		list, err = config.As[[]json.RawMessage](raw, "an array of transfer configs", "[")
		switch {
		case err != nil:
		case len(list) == 0:
			err = errors.New("is empty, must name at least one connector")
		case len(list) > multiconnector.MaxChildren:
			err = fmt.Errorf("names %d connectors, at most %d", len(list), multiconnector.MaxChildren)
		}
		return err
	}}}
	if err := config.Object(raw, fields, nil); err != nil {
		return nil, err
	}
	if list == nil {
		return nil, errors.New("connectors is required: the transfer configs of the children, in order")
	}
	for i, item := range list {
		at := fmt.Sprintf("connectors[%d]", i)
		c, err := parseChild(item, parent, parent.at+"kv_connector_extra_config."+at+".", depth)
		if err != nil {
			return nil, config.FieldError(at, err)
		}
		for k, other := range children {
			if sameChild(c, other) {
				return nil, config.FieldError(at, fmt.Errorf("is the same as connectors[%d]", k))
			}
		}
		for _, w := range c.Warnings {
			parent.Warnings = append(parent.Warnings, "kv_connector_extra_config."+at+"."+w)
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

func parseChild(raw json.RawMessage, parent *Config, at string, depth int) (*Config, error) {
	c := &Config{FailurePolicy: PolicyRecompute, Extra: json.RawMessage("{}"), Settings: parent.Settings, at: at}
	c.Settings.PluginSHA256 = ""
	if err := c.decode(raw, depth); err != nil {
		return nil, err
	}
	was, is := &parent.Settings, &c.Settings
	switch {
	case c.EngineID != "":
		return nil, config.FieldError("engine_id", errors.New("belongs to the engine: give it to the MultiConnector, not to a child"))
	case !subset(c.Role, parent.Role):
		return nil, config.FieldError("kv_role", fmt.Errorf("%s is more than the %s of its MultiConnector", c.Role, parent.Role))
	case is.Trust != was.Trust || is.LandingBytes != was.LandingBytes:
		return nil, config.FieldError("kvport", errors.New("trust and landing_bytes are the same for all children: set them at the MultiConnector"))
	case is.TicketKeyFile != was.TicketKeyFile || is.TenantSecretFile != was.TenantSecretFile || len(is.Peers) != len(was.Peers):
		return nil, config.FieldError("kvport", errors.New("ticket_key_file, tenant_secret_file and peers are the engine's: set them at the MultiConnector"))
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
