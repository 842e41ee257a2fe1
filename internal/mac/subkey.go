package mac

import (
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/kvport/kvport/connector"
)

// minSecret is the least length of a secret in bytes.
const minSecret = 16

// Scope is what a subkey is for. No two scopes have the same one.
type Scope struct {
	Purpose      string // with the edition, such as "digest/2"
	Model, Shape connector.Fingerprint
	Shard        connector.Shard
}

// Subkey derives the key of a scope from a secret, by HKDF-SHA256. So codes of another model, shape, shard or purpose never
// fit, and a key that leaks opens nothing else. An error says that the secret is too short.
func Subkey(secret []byte, s Scope) (Key, error) {
	if len(secret) < minSecret {
		return Key{}, fmt.Errorf("the secret has %d bytes, want at least %d", len(secret), minSecret)
	}
	info := binary.LittleEndian.AppendUint64([]byte("kvport/mac/1"), uint64(len(s.Purpose)))
	info = append(append(append(info, s.Purpose...), s.Model[:]...), s.Shape[:]...)
	for _, n := range []int{s.Shard.Rank, s.Shard.World, s.Shard.First, s.Shard.Count} {
		info = binary.LittleEndian.AppendUint64(info, uint64(n))
	}
	key, err := hkdf.Key(sha256.New, secret, nil, string(info), KeySize)
	if err != nil {
		return Key{}, fmt.Errorf("deriving a subkey: %w", err)
	}
	return Key(key), nil
}
