package host

import (
	"context"
	"encoding/json"

	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/wire"
)

// Manifest is what a plugin says about itself when it is run with --manifest.
type Manifest struct {
	Name             string          `json:"name"`
	Aliases          []string        `json:"aliases"`
	Version          string          `json:"version"`
	ProtocolVersions []int           `json:"protocol_versions"`
	Capabilities     []string        `json:"capabilities"`
	Environment      []string        `json:"environment"` // names of the variables it reads
	Scope            string          `json:"scope,omitempty"`
	ArenaBytes       int64           `json:"arena_bytes,omitempty"` // memory that it asks the host for, with an empty config
	Stats            []string        `json:"stats,omitempty"`       // names of its metrics, after kvport_connector_
	ConfigSchema     json.RawMessage `json:"config_schema,omitempty"`
}

// Answers reports whether kv_connector may call the plugin by name.
func (m *Manifest) Answers(name string) bool { return (*wire.Manifest)(m).Answers(name) }

// Binary is a plugin on disk.
type Binary struct {
	Path     string
	Manifest Manifest
}

// Find looks for the plugin that answers to name, a connector's name or alias, among the kvport-*
// executables of the given folders. Of several the first in the order of the folders wins, but one
// whose file is called like the connector goes before all others: then nothing else is run. Errors
// wrap ErrConfig and say where it looked, what it found, and which known name is nearest.
func Find(paths []string, name string) (*Binary, error) {
	b, err := plugin.Find(context.Background(), &plugin.Wanted{Connector: name, Paths: paths, Composed: []string{MultiName}})
	if err != nil {
		return nil, err
	}
	return &Binary{Path: b.Path, Manifest: Manifest(*b.Manifest)}, nil
}

// resolve finds the program that a config asks for. The caller closes it.
func resolve(ctx context.Context, cfg *Config, paths []string) (*plugin.Program, *Manifest, error) {
	prog, m, err := plugin.Resolve(ctx, &plugin.Wanted{
		Connector: cfg.Connector, Paths: paths, Module: cfg.ModulePath, SHA256: cfg.Settings.PluginSHA256, Composed: []string{MultiName},
	})
	return prog, (*Manifest)(m), err
}

// Found is a file that is called like a plugin: Manifest is what it says about itself, or Err says why
// it is none.
type Found struct {
	Path     string
	Manifest *Manifest
	Err      error
}

// List asks every kvport-* executable of the given folders for its manifest, in order.
func List(ctx context.Context, paths []string) []Found {
	list := plugin.List(ctx, paths)
	found := make([]Found, len(list))
	for i, f := range list {
		found[i] = Found{Path: f.Path, Manifest: (*Manifest)(f.Manifest), Err: f.Err}
	}
	return found
}

// ReadManifest runs a plugin with --manifest and reads what it prints. It gives the plugin a few
// seconds, no environment and nothing to read. Errors name the binary.
func ReadManifest(ctx context.Context, path string) (*Manifest, error) {
	m, err := plugin.ReadManifest(ctx, path)
	return (*Manifest)(m), err
}
