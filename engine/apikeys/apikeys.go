// Package apikeys knows who the clients of the HTTP servers are: their keys, tenants and limits.
//
// The file of keys is text. Its first line is [Head], and each other line is a comment or a client:
//
//	NAME sha256:HASH [salt=TENANT] [router] [admin] [metrics] [max_in_flight=N] [requests_per_minute=N] [tokens_per_minute=N]
//
// Whoever can write it can let anybody in. Whoever can read it finds no key that was made at random, but can try others until a hash
// is right. A file without that first line is of the old
// form: each line is a key as clients send it.
package apikeys

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/router/admission"
)

// MaxSalt bounds a salt, in bytes, together with what names the tenant in it: engines publish it with each prompt's
// first block.
const MaxSalt = 1 << 10

// Key is the line of a client: who it is and what it may do.
type Key struct {
	Name   string // of its line; for a file of the old form, the beginning of ID
	ID     string // the SHA-256 of the key, 64 hexadecimal digits
	Tenant string // the requests' KV blocks are this tenant's; empty: the client's cache_salt alone separates them
	Router bool   // it may say which tenant a request is of, by its salt
	Admin  bool   // it may empty the cache, which all tenants share, and do what Metrics says
	// Metrics lets it read /metrics and the details of /health, which are about all tenants.
	Metrics bool
	Limits  admission.Limits

	hash [sha256.Size]byte
}

// Keys are those of one file. Nobody changes them.
type Keys struct {
	// Old is set for a file of the old form.
	Old bool

	list []Key
}

// Len is how many keys there are.
func (k *Keys) Len() int { return len(k.list) }

// All lists them in the order of the file.
func (k *Keys) All() []Key { return append([]Key(nil), k.list...) }

// Shared is how many of the keys have no tenant: what these compute without a cache_salt, all of them find.
func (k *Keys) Shared() (n int) {
	for i := range k.list {
		if k.list[i].Tenant == "" {
			n++
		}
	}
	return n
}

// Find is the key of an Authorization header; nil if it has none of them. It compares with every key in constant time.
func (k *Keys) Find(authorization string) *Key {
	scheme, key, _ := strings.Cut(authorization, " ")
	hash := sha256.Sum256([]byte(strings.TrimSpace(key)))
	found := -1
	for i := range k.list {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(hash[:], k.list[i].hash[:]), i, found)
	}
	if found < 0 || !strings.EqualFold(scheme, "Bearer") {
		return nil
	}
	return &k.list[found]
}

// WantKey says why a client is not served at all.
const WantKey = "the Authorization header has no valid API key: want Bearer KEY"

// WantMetrics says why a client gets no metrics.
const WantMetrics = "/metrics is about all tenants, and only for clients whose line in the file of API keys says metrics, admin or router"

// Watches reports whether the client may read /metrics and the details of /health. Routers read them of their instances. A nil key
// is that of a server that lets everybody in.
func (k *Key) Watches() bool { return k == nil || k.Admin || k.Metrics || k.Router }

// ErrSalt is wrapped by the errors of Salt.
var ErrSalt = errors.New("cache_salt")

// Salt is the salt of a request whose client gave one, or an empty one. A client's salt lies inside its tenant's: what one
// tenant has cached, no other one finds. A nil key is that of a server that lets everybody in.
func (k *Key) Salt(given string) (string, error) {
	salt := given
	switch {
	case k == nil || k.Router:
	case k.Tenant != "":
		salt = connector.TenantSalt(k.Tenant, given)
	case connector.IsTenantSalt(given):
		return "", fmt.Errorf("%w: it names a tenant, which only a client may whose line in the file of API keys says router. If the client is a kvport route whose own file has tenants, the server behind it needs a file with names, too, and in it the router's key, that of --upstream-api-key-file, with this option (%s)", ErrSalt, Head)
	}
	if len(salt) > MaxSalt {
		return "", fmt.Errorf("%w: has %d bytes, want at most %d", ErrSalt, len(given), MaxSalt-(len(salt)-len(given)))
	}
	return salt, nil
}

// keyOf is the key with a hash.
func keyOf(name string, hash [sha256.Size]byte) Key {
	return Key{Name: name, ID: hex.EncodeToString(hash[:]), hash: hash}
}
