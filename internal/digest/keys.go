package digest

import (
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/mac"
)

// The editions of digests.
const (
	editionXXH3  = 1 // XXH3-128, no key
	editionKeyed = 2 // AEGIS-128X2 as a MAC
)

// purpose is what subkeys of digests are for.
const purpose = "digest/2"

// tenantPurpose is what a key of the ring and a tenant's secret are made one key for.
const tenantPurpose = "kvport/digest-tenant/1"

// Keys are what digests are made and checked with.
type Keys struct {
	ring   *keyring.File // nil: no key
	tenant []byte        // nil: no secret
}

// Keyed makes digests of edition 2 with the first key of a ring and checks them with the key of the ring that has made
// them; what changes in the ring holds from then on. A tenant's secret, if there is one, becomes part of every key.
func Keyed(ring *keyring.File, tenant []byte) Keys { return Keys{ring: ring, tenant: tenant} }

// XXH3 makes and checks digests of edition 1, which find damage and which everybody can make.
func XXH3() Keys { return Keys{} }

// Edition is the edition that is made, and the only one that is read.
func (k Keys) Edition() int {
	if k.ring == nil {
		return editionXXH3
	}
	return editionKeyed
}

// ForeignKeyError says that a block's digests were made with a key that is not in the ring. Whether the block is whole is
// not known, so it counts as a miss.
type ForeignKeyError struct {
	ID string // of the key, as in a ring
}

// Error implements error.
func (e *ForeignKeyError) Error() string {
	return fmt.Sprintf("its digests were made with key %s, which is not in the ring", e.ID)
}

// Unwrap says that the block is as good as gone.
func (e *ForeignKeyError) Unwrap() error { return connector.ErrGone }

// EditionError says that a block's digests are of an edition that is not read here. Whether the block is whole is not known,
// so it counts as a miss.
type EditionError struct {
	Edition int
}

// Error implements error.
func (e *EditionError) Error() string {
	return fmt.Sprintf("its digests are of edition %d, which is not read here", e.Edition)
}

// Unwrap says that another edition has stored the block.
func (e *EditionError) Unwrap() error { return connector.ErrOutdated }

// keyID names a key in the header of a digest segment.
type keyID [8]byte

func (id keyID) String() string { return hex.EncodeToString(id[:]) }

// subkey is a key of the ring as one hasher uses it.
type subkey struct {
	id  keyID
	mac *mac.MAC
}

// subkeys are those of a whole ring, in its order.
type subkeys struct {
	ring *keyring.Ring
	keys []subkey
}

// derive makes the subkeys of a ring for a scope.
func derive(ring *keyring.Ring, tenant []byte, scope *mac.Scope) (*subkeys, error) {
	all := &subkeys{ring: ring}
	for i := range ring.Keys {
		k := &ring.Keys[i]
		secret := []byte(k.Secret)
		if tenant != nil {
			salt := sha256.Sum256(tenant)
			var err error
			if secret, err = hkdf.Key(sha256.New, secret, salt[:], tenantPurpose, sha256.Size); err != nil {
				return nil, fmt.Errorf("key %s: %w", k.ID, err)
			}
		}
		key, err := mac.Subkey(secret, *scope)
		if err != nil {
			return nil, fmt.Errorf("key %s: %w", k.ID, err)
		}
		id, err := hex.DecodeString(k.ID)
		if err != nil || len(id) != len(keyID{}) {
			return nil, fmt.Errorf("%q is not the id of a key: %w", k.ID, connector.ErrIncompatible)
		}
		all.keys = append(all.keys, subkey{id: keyID(id), mac: mac.New(&key)})
	}
	return all, nil
}

// find is the subkey with an id; nil if there is none.
func (s *subkeys) find(id keyID) *subkey {
	for i := range s.keys {
		if s.keys[i].id == id {
			return &s.keys[i]
		}
	}
	return nil
}
