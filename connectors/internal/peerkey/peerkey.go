// Package peerkey finds the key that a connector's peers must have.
package peerkey

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"os"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/pipe"
)

// Limits of key files, in bytes.
const (
	maxKey  = 4 << 10  // of one key
	maxRing = 32 << 10 // of a ring, with its comments
)

// TLS is mutual TLS of the key file at a path. Without a path it is nil, and peers prove the link key, which the host must
// have given then. Errors name the field key_file.
func TLS(path string, link connector.Secret) (*tls.Config, error) {
	switch {
	case path != "":
	case link != nil:
		return nil, nil
	default:
		return nil, fmt.Errorf("key_file: it is needed, since this engine's host gives its plugins no link key (it is older than this plugin), "+
			"and every user of the machine reaches loopback: %w", connector.ErrIncompatible)
	}
	info, err := os.Stat(path)
	if err == nil && (!info.Mode().IsRegular() || info.Size() > maxRing || info.Mode().Perm()&0o077 != 0) {
		err = fmt.Errorf("%s must be a file of at most %d bytes that only its owner can read: %w", path, maxRing, connector.ErrIncompatible)
	}
	var key []byte
	if err == nil {
		key, err = os.ReadFile(path)
	}
	var keyed *tls.Config
	switch {
	case err != nil:
	case keyring.IsRing(key):
		keyed, err = ofRing(key)
	case len(key) > maxKey:
		err = fmt.Errorf("%s is no ring and must have at most %d bytes: %w", path, maxKey, connector.ErrIncompatible)
	default:
		keyed, err = pipe.KeyTLS(bytes.TrimSpace(key))
	}
	if err != nil {
		return nil, fmt.Errorf("key_file: %w", err)
	}
	return keyed, nil
}

// ofRing is mutual TLS of a ring of keys: peers may have any of them.
func ofRing(data []byte) (*tls.Config, error) {
	ring, err := keyring.Parse(data)
	if err != nil {
		return nil, err
	}
	links, err := ticket.OfRing(ring, ticket.LinkRoot)
	if err != nil {
		return nil, err
	}
	return OfKeys(links)
}

// OfKeys is mutual TLS of one or more keys, of which peers may have any.
func OfKeys(keys []connector.Secret) (*tls.Config, error) {
	var more [][]byte
	for _, key := range keys[1:] {
		more = append(more, key)
	}
	return pipe.KeyTLS(keys[0], more...)
}
