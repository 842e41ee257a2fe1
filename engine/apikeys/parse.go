package apikeys

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kvport/kvport/internal/strictjson"
)

// Head is the first line of a file of keys.
const Head = "# kvport api keys v1"

// mark begins the first line of every version of such a file. A file that has it elsewhere is damaged, and not of the old form.
const mark = "# kvport api keys"

// hashMark begins the second word of a line.
const hashMark = "sha256:"

// Limits of a file.
const (
	MaxKeys = 1024
	maxFile = 1 << 20 // bytes
	maxName = 64      // bytes of a name or tenant
	maxRate = 1 << 30
)

// What a key must have: whoever tries keys must not find one.
const (
	minBits      = 128
	minDifferent = 8 // characters
)

// remedy says how to get a key that is good.
const remedy = "kvport keys api add makes one"

// Parse reads what is in a file. Errors say in which line and what to do, and show no key.
func Parse(data []byte) (*Keys, error) {
	if len(data) > maxFile {
		return nil, fmt.Errorf("it is larger than %d bytes", maxFile)
	}
	first, rest, _ := strings.Cut(string(data), "\n")
	switch {
	case strings.TrimRight(first, " \t\r") == Head:
		return parse(rest)
	case strings.Contains(string(data), mark):
		return nil, fmt.Errorf("line 1: %q must be the first line, alone and in this form, or this version cannot read the file", Head)
	}
	return parseOld(string(data))
}

// parse reads what follows the first line.
func parse(text string) (*Keys, error) {
	k := &Keys{}
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, err := parseLine(line)
		if err == nil {
			err = k.add(key)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+2, err)
		}
	}
	return k.complete()
}

// parseOld reads a file whose lines are the keys themselves.
func parseOld(text string) (*Keys, error) {
	k := &Keys{Old: true}
	for i, line := range strings.Split(text, "\n") {
		secret := strings.TrimSpace(line)
		if secret == "" {
			continue
		}
		if words := strings.Fields(secret); len(words) > 1 && strings.HasPrefix(words[1], hashMark) {
			return nil, fmt.Errorf("line %d: this line has a name and a hash: the first line of such a file must be %q", i+1, Head)
		}
		if err := strong(secret); err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		hash := sha256.Sum256([]byte(secret))
		key := keyOf("", hash)
		key.Name, key.Admin = key.ID[:16], true // as before there were others
		if slices.ContainsFunc(k.list, func(other Key) bool { return other.hash == hash }) {
			continue
		}
		if err := k.add(key); err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
	}
	return k.complete()
}

// complete refuses a file without keys.
func (k *Keys) complete() (*Keys, error) {
	if len(k.list) == 0 {
		return nil, errors.New("it has no keys: " + remedy)
	}
	return k, nil
}

func (k *Keys) add(key Key) error {
	for i := range k.list {
		switch {
		case k.list[i].Name == key.Name:
			return fmt.Errorf("the name %s is in the file already", key.Name)
		case k.list[i].hash == key.hash:
			return fmt.Errorf("%s has the same key as %s: %s", key.Name, k.list[i].Name, remedy)
		}
	}
	if len(k.list) == MaxKeys {
		return fmt.Errorf("a file has at most %d keys", MaxKeys)
	}
	k.list = append(k.list, key)
	return nil
}

// strong refuses keys that somebody can find by trying. It takes each character for chosen at random from those of its kind,
// so it lets through what people make up if it is long enough.
func strong(secret string) error {
	kind, different := 6.0, map[rune]bool{} // bits of a character: of base64 and more
	switch {
	case strings.Trim(secret, "0123456789") == "":
		kind = math.Log2(10)
	case strings.Trim(secret, "0123456789abcdefABCDEF") == "":
		kind = 4
	}
	for _, c := range secret {
		different[c] = true
	}
	if bits := int(kind * float64(utf8.RuneCountInString(secret))); bits < minBits {
		return fmt.Errorf("the key has %d bits at most, want %d: %s", bits, minBits, remedy)
	}
	if len(different) < minDifferent {
		return fmt.Errorf("the key has %d different characters, want %d: %s", len(different), minDifferent, remedy)
	}
	return nil
}

// parseLine reads NAME sha256:HASH OPTION...
func parseLine(line string) (Key, error) {
	words := strings.Fields(line)
	if err := checkName("name", words[0]); err != nil {
		return Key{}, err
	}
	if len(words) < 2 || !strings.HasPrefix(words[1], hashMark) {
		return Key{}, fmt.Errorf("the second word is no hash, want NAME %sHASH, with HASH of printf %%s KEY | sha256sum; %s", hashMark, remedy)
	}
	raw, err := hex.DecodeString(words[1][len(hashMark):])
	if err != nil || len(raw) != sha256.Size {
		return Key{}, fmt.Errorf("the hash is not %d hexadecimal digits, as printf %%s KEY | sha256sum prints them", 2*sha256.Size)
	}
	key := keyOf(words[0], [sha256.Size]byte(raw))
	key.Tenant = key.Name
	seen := map[string]bool{}
	for _, word := range words[2:] {
		name, value, _ := strings.Cut(word, "=")
		if seen[name] {
			return Key{}, fmt.Errorf("%s appears twice", name)
		}
		seen[name] = true
		if err := key.option(word, name, value); err != nil {
			return Key{}, err
		}
	}
	if key.Router && seen["salt"] {
		return Key{}, errors.New("router and salt= exclude each other: a router names the tenant of each request")
	}
	return key, nil
}

// option takes one word behind the hash.
func (k *Key) option(word, name, value string) error {
	switch word {
	case "router":
		k.Router, k.Tenant = true, ""
		return nil
	case "admin":
		k.Admin = true
		return nil
	case "metrics":
		k.Metrics = true
		return nil
	}
	if name == "salt" {
		k.Tenant = value
		return checkName("salt", value)
	}
	to := map[string]*int{
		"max_in_flight": &k.Limits.InFlight, "requests_per_minute": &k.Limits.RequestsPerMinute, "tokens_per_minute": &k.Limits.TokensPerMinute,
	}[name]
	if to == nil {
		known := []string{"salt=", "router", "admin", "metrics", "max_in_flight=", "requests_per_minute=", "tokens_per_minute="}
		return strictjson.Unknown(name, known)
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 || n > maxRate {
		return fmt.Errorf("%s is %.20q, want a whole number from 1 to %d; without %s there is no limit", name, value, maxRate, name)
	}
	*to = n
	return nil
}

// checkName refuses what cannot be part of a salt or of a line of the log.
func checkName(what, name string) error {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-", r)
	}
	if name == "" || len(name) > maxName || strings.ContainsFunc(name, func(r rune) bool { return !plain(r) }) {
		return fmt.Errorf("the %s is not 1 to %d letters, digits, dots, underscores and hyphens", what, maxName)
	}
	return nil
}
