// Package p2p connects producers and consumers directly, over TCP: the config of package pipe/tcp.
package p2p

import (
	"bytes"
	"context"
	"fmt"
	"os"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/tcp"
)

// Config is the kv_connector_extra_config.
type Config struct {
	Listen    string   `json:"listen,omitempty"       jsonschema:"default=127.0.0.1:0,description=address at which a producer listens; port 0 takes a free one"`
	Advertise string   `json:"advertise,omitempty"    jsonschema:"description=what tickets name instead of the address listened at; port 0 stands for the one taken"`
	Peers     []string `json:"peers,omitempty"        jsonschema:"description=producers to ask for prompts that come without a ticket"`
	KeyFile   string   `json:"key_file,omitempty"     jsonschema:"description=key that all peers share; wanted beyond loopback; makes mutual TLS of it"`
	Bytes     int64    `json:"buffer_bytes,omitempty" jsonschema:"default=1073741824,minimum=1048576,description=memory for blocks that wait to be fetched or have arrived"`
	Digest    bool     `json:"digest,omitempty"       jsonschema:"default=true,description=digest over every frame besides the host's own over every block"`
}

// Open makes the peers of a config, for sdk.FromPipe.
func Open(_ context.Context, _ connector.Env, c Config) (pipe.Peers, error) {
	network, err := c.network()
	return pipe.Peers{Network: network, Addresses: c.Peers, Bytes: c.Bytes}, err
}

const maxKeyFile = 4 << 10

// network makes the network of a config. Errors name the field.
func (c *Config) network() (*tcp.Network, error) {
	n := &tcp.Network{Address: c.Listen, Advertise: c.Advertise, NoDigest: !c.Digest}
	if c.KeyFile == "" {
		return n, nil
	}
	info, err := os.Stat(c.KeyFile)
	switch {
	case err != nil:
		return nil, fmt.Errorf("key_file: %w", err)
	case !info.Mode().IsRegular() || info.Size() > maxKeyFile || info.Mode().Perm()&0o077 != 0:
		return nil, fmt.Errorf("key_file: %s wants to be a file of at most %d bytes that only its owner can read: %w", c.KeyFile, maxKeyFile, connector.ErrIncompatible)
	}
	key, err := os.ReadFile(c.KeyFile)
	if err == nil {
		n.TLS, err = tcp.KeyTLS(bytes.TrimSpace(key))
	}
	if err != nil {
		return nil, fmt.Errorf("key_file: %w", err)
	}
	return n, nil
}
