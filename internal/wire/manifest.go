package wire

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/kvport/kvport/connector"
)

// Manifest is what `kvport-NAME --manifest` prints: what a host knows of a plugin before it starts
// it.
type Manifest struct {
	Name             string          `json:"name"`
	Aliases          []string        `json:"aliases"`
	Version          string          `json:"version"`
	ProtocolVersions []int           `json:"protocol_versions"`
	Capabilities     []string        `json:"capabilities"`
	Environment      []string        `json:"environment"`
	Scope            string          `json:"scope,omitempty"` // empty where it depends on the config
	ArenaBytes       int64           `json:"arena_bytes,omitempty"`
	Stats            []string        `json:"stats,omitempty"` // names of its metrics, after kvport_connector_
	ConfigSchema     json.RawMessage `json:"config_schema,omitempty"`
}

// NewManifest is the manifest of p. info describes p for one config, or is nil.
func NewManifest(p *connector.Plugin, info *connector.Info) *Manifest {
	m := &Manifest{
		Name: p.Name, Aliases: list0(p.Aliases), Version: p.Version, ProtocolVersions: []int{ProtocolVersion},
		Capabilities: p.Capabilities.Names(), Environment: list0(p.Environment), ConfigSchema: p.Schema,
	}
	if info != nil {
		m.Capabilities, m.Scope = info.Capabilities.Names(), info.Scope.String()
		m.ArenaBytes = info.ArenaBytes
		for _, s := range info.Stats {
			m.Stats = append(m.Stats, s.Name)
		}
	}
	return m
}

// ParseManifest reads what a plugin printed. Unknown fields are a newer plugin's and ignored.
// Errors wrap ErrMalformed.
func ParseManifest(data []byte) (*Manifest, error) {
	if err := short("manifest", data, MaxConfig); err != nil {
		return nil, err
	}
	var m Manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, fmt.Errorf("manifest is no JSON object of the right form: %w: %w", err, ErrMalformed)
	}
	if m.Name == "" || len(m.Name) > MaxName || strings.ContainsAny(m.Name, "\x00/\n") {
		return nil, malformed("manifest: name %q", text(m.Name))
	}
	if len(m.Aliases) > MaxQueries || len(m.Environment) > MaxQueries {
		return nil, malformed("manifest: too many aliases or environment variables")
	}
	return &m, nil
}

// Speaks reports whether the plugin knows a protocol version.
func (m *Manifest) Speaks(version int) bool { return slices.Contains(m.ProtocolVersions, version) }

// Answers reports whether kv_connector may call the plugin by name.
func (m *Manifest) Answers(name string) bool {
	return m.Name == name || slices.Contains(m.Aliases, name)
}

// list0 prints as [] and not as null.
func list0(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}
