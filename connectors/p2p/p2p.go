// Package p2p connects producers and consumers directly, over TCP or, on one machine, through shared
// memory: the config of packages pipe/tcp and pipe/shm.
package p2p

import (
	"context"
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/peerkey"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/shm"
	"github.com/kvport/kvport/pipe/tcp"
)

// Needs says that the plugin talks to others, and names what it reads and writes, for its manifest.
func Needs() connector.Needs {
	return connector.Needs{Network: true, Reads: []string{"key_file"}, Writes: []string{"socket_dir"}}
}

// Config is the kv_connector_extra_config.
type Config struct {
	Transport string   `json:"transport,omitempty"    jsonschema:"default=tcp,enum=tcp,enum=shm,description=tcp or shm; shm is for engines of one user on one machine"`
	Listen    string   `json:"listen,omitempty"       jsonschema:"default=127.0.0.1:0,description=address at which a producer listens; port 0 takes a free one"`
	Advertise string   `json:"advertise,omitempty"    jsonschema:"description=what tickets name instead of the address listened at; port 0 stands for the one taken"`
	Peers     []string `json:"peers,omitempty"        jsonschema:"description=producers to ask for prompts that come without a ticket"`
	Subscribe []string `json:"subscribe,omitempty" jsonschema:"description=producers whose blocks a consumer takes over while they are computed, layer by layer"`
	KeyFile   string   `json:"key_file,omitempty"     jsonschema:"description=key that all peers share; needed beyond loopback; makes mutual TLS of it. Without it peers prove a key that their hosts derive from the ticket key"`
	Bytes     int64    `json:"buffer_bytes,omitempty" jsonschema:"default=1073741824,minimum=1048576,description=memory for blocks that wait to be fetched or have arrived"`
	SocketDir string   `json:"socket_dir,omitempty"   jsonschema:"description=shm: folder of the listeners' sockets; empty: one of its own for each"`
	Digest    bool     `json:"digest,omitempty"       jsonschema:"default=true,description=digest over every frame apart from the host's own over every block"`
}

// Open makes the peers of a config, for sdk.FromPipe.
func Open(_ context.Context, env connector.Env, c Config) (pipe.Peers, error) {
	network, err := c.open(&env)
	return pipe.Peers{Network: network, Addresses: c.Peers, Subscribe: c.Subscribe, Bytes: c.Bytes}, err
}

// Validate refuses fields of one transport in the config of the other. Errors name the field.
func (c *Config) Validate() error {
	if c.Transport == "shm" {
		for field, value := range map[string]string{"listen": c.Listen, "advertise": c.Advertise, "key_file": c.KeyFile} {
			if value != "" && (field != "listen" || value != defaultListen) {
				return fmt.Errorf("%s is for transport tcp, this is shm: %w", field, connector.ErrIncompatible)
			}
		}
		return nil
	}
	if c.Transport != "" && c.Transport != "tcp" {
		return fmt.Errorf("transport is %q, want tcp or shm: %w", c.Transport, connector.ErrIncompatible)
	}
	if c.SocketDir != "" {
		return fmt.Errorf("socket_dir is for transport shm, this is tcp: %w", connector.ErrIncompatible)
	}
	return nil
}

// defaultListen is what the default tag of Config.Listen says.
const defaultListen = "127.0.0.1:0"

func (c *Config) open(env *connector.Env) (pipe.Network, error) {
	if c.Transport == "shm" {
		return &shm.Network{Dir: c.SocketDir}, nil
	}
	return c.network(env)
}

// network makes the network of a config. Without a key file its peers prove the link key to each other.
// Errors name the field.
func (c *Config) network(env *connector.Env) (*tcp.Network, error) {
	keyed, err := peerkey.TLS(c.KeyFile, env.LinkKey)
	if err != nil {
		return nil, err
	}
	return &tcp.Network{Address: c.Listen, Advertise: c.Advertise, NoDigest: !c.Digest, Key: env.LinkKey, More: env.MoreLinkKeys, TLS: keyed}, nil
}
