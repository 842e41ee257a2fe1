// Package keyring reads the keys that a deployment shares.
//
// A ring is a text file: its first line is [Head], and each other line is a key, as "ID KEY", or a comment. The first
// key signs, and what any of them has signed is accepted, so that a key can be replaced while engines run. A file
// without that first line is of the old form: it is one key, whatever its bytes are.
package keyring

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvport/kvport/connector"
)

// Head is the first line of a ring.
const Head = "# kvport key ring v1"

// Limits of a ring and of its keys, in keys and bytes.
const (
	MaxKeys = 16
	MinKey  = 16
	MaxKey  = 64

	newKey  = 32       // what is made here
	minOld  = 32       // of a file of the old form
	maxOld  = 4 << 10  // likewise
	maxFile = 32 << 10 // of a ring
)

// mark begins the first line of every version of a ring. A file that has it elsewhere is no old key but a damaged ring.
const mark = "# kvport key ring"

// added begins the comment that says when the key below it was made.
const added = "# added "

// Key is one key of a ring.
type Key struct {
	ID     string // 16 hexadecimal digits that follow from the bytes and do not reveal them
	Secret connector.Secret
	Added  time.Time // zero: not known

	above []string // the comments above it, without the one that says Added
}

// Ring is what a file of keys says. Nobody changes it.
type Ring struct {
	// Keys are at least one and at most MaxKeys, all different. The first one signs.
	Keys []Key
	// Old is set for a file of the old form. Engines of earlier versions may have the same one, which know nothing of ids.
	Old bool

	below []string // comments behind the last key
}

// ID names a key, so that the keys of two engines can be compared without being shown.
func ID(key []byte) string {
	h := hmac.New(sha256.New, key)
	h.Write([]byte("kvport/key-id/1\x00"))
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// Of is the ring of one key that is in no file.
func Of(key []byte) *Ring { return &Ring{Keys: []Key{{ID: ID(key), Secret: key}}, Old: true} }

// New is a ring with one random key.
func New(now time.Time) *Ring { return &Ring{Keys: []Key{random(now)}} }

func random(now time.Time) Key {
	secret := make([]byte, newKey)
	_, _ = rand.Read(secret) // never fails
	return Key{ID: ID(secret), Secret: secret, Added: now.UTC().Truncate(time.Second)}
}

// First is the key that signs.
func (r *Ring) First() Key { return r.Keys[0] }

// Has reports whether the ring has a key.
func (r *Ring) Has(id string) bool { return r.find(id) >= 0 }

func (r *Ring) find(id string) int {
	for i := range r.Keys {
		if r.Keys[i].ID == id {
			return i
		}
	}
	return -1
}

// IDs names all keys, the one that signs first.
func (r *Ring) IDs() []string {
	ids := make([]string, len(r.Keys))
	for i := range r.Keys {
		ids[i] = r.Keys[i].ID
	}
	return ids
}

// IsRing reports whether a file is a ring, or the remains of one, and not of the old form.
func IsRing(data []byte) bool {
	if bytes.Contains(data, []byte(mark)) {
		return true
	}
	_, err := parse(string(data))
	return err == nil
}

// Parse reads what is in a file. Errors say in which line and what to do, and wrap connector.ErrIncompatible.
func Parse(data []byte) (*Ring, error) {
	if len(data) > maxFile {
		return nil, refuse("it is larger than %d bytes", maxFile)
	}
	first, rest, _ := strings.Cut(string(data), "\n")
	if strings.TrimRight(first, " \t\r") == Head {
		return parse(rest)
	}
	if before, _, damaged := bytes.Cut(data, []byte(mark)); damaged {
		return nil, refuse("line %d: %q must be the first line, alone and in this form, or this version cannot read the ring",
			1+bytes.Count(before, []byte("\n")), Head)
	}
	if bare, err := parse(string(data)); err == nil && len(bare.Keys) > 0 {
		return nil, refuse("line 1: these are the keys of a ring, whose first line must be %q", Head)
	}
	return parseOld(data)
}

// parseOld reads a file of the old form.
func parseOld(data []byte) (*Ring, error) {
	if len(data) > maxOld {
		return nil, refuse("it is larger than %d bytes", maxOld)
	}
	data = bytes.TrimSpace(data)
	if len(data) < minOld {
		return nil, refuse("it holds %d bytes, want at least %d: kvport keys init makes one", len(data), minOld)
	}
	key := sha256.Sum256(append([]byte("kvport/ticket-key\x00"), data...))
	return Of(key[:]), nil
}

// parse reads what follows the first line of a ring.
func parse(text string) (*Ring, error) {
	r, above, since := &Ring{}, []string(nil), time.Time{}
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		if when, is := strings.CutPrefix(line, added); is {
			if t, err := time.Parse(time.RFC3339, when); err == nil {
				since = t
				continue
			}
		}
		if strings.HasPrefix(line, "#") {
			above = append(above, line)
			continue
		}
		key, err := parseKey(line)
		if err == nil && r.Has(key.ID) {
			err = fmt.Errorf("key %s is in the ring already, remove one of them", key.ID)
		}
		if err == nil && len(r.Keys) == MaxKeys {
			err = fmt.Errorf("a ring has at most %d keys, drop old ones", MaxKeys)
		}
		if err != nil {
			return nil, refuse("line %d: %w", i+2, err)
		}
		key.above, key.Added = above, since
		r.Keys, above, since = append(r.Keys, key), nil, time.Time{}
	}
	if len(r.Keys) == 0 {
		return nil, refuse("line 1: the ring has no key: kvport keys init makes one with a key")
	}
	r.below = above
	return r, nil
}

// parseKey reads "ID KEY". It shows no byte of the key.
func parseKey(line string) (Key, error) {
	fields := strings.Fields(line)
	if len(fields) != 2 {
		return Key{}, fmt.Errorf("it has %d words, want ID KEY", len(fields))
	}
	id, text := fields[0], fields[1]
	var first []byte
	for _, decode := range []func(string) ([]byte, error){hex.DecodeString, decode64} {
		secret, err := decode(text)
		if err != nil {
			continue
		}
		if ID(secret) == id {
			return Key{ID: id, Secret: secret}, checkSize(secret)
		}
		if first == nil {
			first = secret
		}
	}
	if first == nil {
		return Key{}, errors.New("its second word is not a key: want hexadecimal digits or base64url")
	}
	if err := checkSize(first); err != nil {
		return Key{}, err
	}
	return Key{}, fmt.Errorf("the key is damaged or not the one that its id names: the id of this key is %s", ID(first))
}

func decode64(text string) ([]byte, error) {
	return base64.RawURLEncoding.Strict().DecodeString(strings.TrimRight(text, "="))
}

func checkSize(secret []byte) error {
	if len(secret) < MinKey || len(secret) > MaxKey {
		return fmt.Errorf("the key has %d bits, want %d to %d: kvport keys rotate makes one", 8*len(secret), 8*MinKey, 8*MaxKey)
	}
	return nil
}

func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: %w", fmt.Errorf(format, args...), connector.ErrIncompatible)
}

// Format is the text of a ring.
func (r *Ring) Format() []byte {
	var b bytes.Buffer
	b.WriteString(Head + "\n")
	for _, k := range r.Keys {
		for _, line := range k.above {
			b.WriteString(line + "\n")
		}
		if !k.Added.IsZero() {
			b.WriteString(added + k.Added.UTC().Format(time.RFC3339) + "\n")
		}
		fmt.Fprintf(&b, "%s %s\n", k.ID, hex.EncodeToString(k.Secret))
	}
	for _, line := range r.below {
		b.WriteString(line + "\n")
	}
	return b.Bytes()
}

// with is a ring of these keys with the comments of r.
func (r *Ring) with(keys ...Key) *Ring { return &Ring{Keys: keys, below: r.below} }

// Rotate is the ring with a new key, which all read and none signs with yet.
func (r *Ring) Rotate(now time.Time) (*Ring, error) {
	if len(r.Keys) == MaxKeys {
		return nil, fmt.Errorf("it has %d keys already, which is the limit: drop old ones first", MaxKeys)
	}
	return r.with(append(append([]Key(nil), r.Keys...), random(now))...), nil
}

// Promote is the ring that signs with a key which it has.
func (r *Ring) Promote(id string) (*Ring, error) {
	i := r.find(id)
	if i < 0 {
		return nil, fmt.Errorf("it has no key %s, see kvport keys list", id)
	}
	keys := append([]Key{r.Keys[i]}, r.Keys[:i]...)
	return r.with(append(keys, r.Keys[i+1:]...)...), nil
}

// Drop is the ring without a key. The one that signs cannot be dropped.
func (r *Ring) Drop(id string) (*Ring, error) {
	switch i := r.find(id); {
	case i < 0:
		return nil, fmt.Errorf("it has no key %s, see kvport keys list", id)
	case i == 0:
		return nil, fmt.Errorf("key %s is the one that signs: promote another one first", id)
	default:
		return r.with(append(append([]Key(nil), r.Keys[:i]...), r.Keys[i+1:]...)...), nil
	}
}
