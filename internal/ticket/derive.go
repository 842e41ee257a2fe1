package ticket

import (
	"crypto/hkdf"
	"crypto/sha256"
	"fmt"

	"github.com/kvport/kvport/connector"
)

// What keys are derived for. A key for one says nothing of another, nor of the key that signs tickets.
const (
	linkPurpose   = "kvport/link/1"   // what the plugins of a deployment know each other by
	routerPurpose = "kvport/router/1" // what its routers sign with
)

// derivedKey is the length of a derived key.
const derivedKey = 32

// LinkRoot derives what all link keys of a deployment come from.
func LinkRoot(key []byte) (connector.Secret, error) { return derive(key, linkPurpose) }

// LinkKey derives the key by which the plugins of one connector know each other, whatever composite they are
// in. name is the connector's in its manifest.
func LinkKey(root connector.Secret, name string) (connector.Secret, error) {
	return derive(root, linkPurpose+"/"+name)
}

// RouterKey derives the key for [SignText] and [VerifyText], which routers and connectors share.
func RouterKey(key []byte) (connector.Secret, error) { return derive(key, routerPurpose) }

func derive(key []byte, purpose string) (connector.Secret, error) {
	if err := checkKey(key); err != nil {
		return nil, err
	}
	out, err := hkdf.Key(sha256.New, key, nil, purpose, derivedKey)
	if err != nil {
		return nil, fmt.Errorf("derive a key: %w", err)
	}
	return out, nil
}
