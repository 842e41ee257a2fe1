package apikeys

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/kvport/kvport/internal/keyring"
)

// Load reads a file that only its owner can read. Errors name the file.
func Load(path string) (*Keys, error) {
	data, err := keyring.ReadOwn(path, maxFile)
	if err != nil {
		return nil, fmt.Errorf("API key file %s: %w", path, err)
	}
	keys, err := Parse(data)
	if err != nil {
		return nil, fmt.Errorf("API key file %s: %w", path, err)
	}
	return keys, nil
}

// newKey is how many random bytes a key that is made here has.
const newKey = 32

// Add makes a key, and a line for it at the end of a file, which is made too if there is none. options are the words behind
// the hash. The key is in no file: only its client may have it.
func Add(path, name string, options ...string) (secret string, err error) {
	random := make([]byte, newKey)
	_, _ = rand.Read(random) // never fails
	secret = "kvport-" + base64.RawURLEncoding.EncodeToString(random)
	hash := sha256.Sum256([]byte(secret))
	line := strings.Join(append([]string{name, hashMark + hex.EncodeToString(hash[:])}, options...), " ") + "\n"
	if _, err := parse(line); err != nil {
		return "", errors.New(strings.TrimPrefix(err.Error(), "line 2: ")) // of no file
	}
	if strings.Count(line, "\n") > 1 {
		return "", errors.New("an option has several lines")
	}
	err = keyring.CreateOwn(path, []byte(Head+"\n"+line))
	if errors.Is(err, fs.ErrExist) {
		err = keyring.RewriteOwn(path, maxFile, func(data []byte) ([]byte, error) { return with(data, line) })
	}
	if err != nil {
		return "", err
	}
	return secret, nil
}

// with is a file with one more line.
func with(data []byte, line string) ([]byte, error) {
	first, _, _ := strings.Cut(string(data), "\n")
	if strings.TrimRight(first, " \t\r") != Head {
		return nil, fmt.Errorf("it is of the old form, whose lines have no names: make a new file with the first line %q, and a line NAME %sHASH for each key that is good enough for the old form (a server that reads it says which are not), with HASH of printf %%s KEY | sha256sum; the others are replaced", Head, hashMark)
	}
	text := []byte(strings.TrimRight(string(data), "\n") + "\n" + line)
	_, err := Parse(text)
	return text, err
}

// ReadUpstream reads the key that a router sends to its instances: the first line of a file that only its owner can read.
func ReadUpstream(path string) (string, error) {
	data, err := keyring.ReadOwn(path, maxFile)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(data)), "\n")
	key := strings.TrimSpace(line)
	if key == "" || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("the first line of %s is no API key: it must be visible ASCII without spaces", path)
	}
	return key, nil
}
