package ticket

import (
	"bytes"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/kvport/kvport/connector"
)

// maxKeyFile is the largest key file in bytes.
const maxKeyFile = 4 << 10

// LoadKey reads a key file: at least 32 bytes of any form, white space around them ignored, readable
// by its owner only. Errors name the file and wrap ErrIncompatible unless it cannot be read.
func LoadKey(path string) ([]byte, error) {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("ticket key file %s: %s: %w", path, fmt.Sprintf(format, args...), connector.ErrIncompatible)
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO must not block us
	if err != nil {
		return nil, fmt.Errorf("ticket key file: %w", err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, fmt.Errorf("ticket key file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, refuse("it is no regular file")
	}
	if perm := info.Mode().Perm(); perm&0o077 != 0 {
		return nil, refuse("mode %#o lets others read it, use chmod 600", perm)
	}
	data, err := io.ReadAll(io.LimitReader(file, maxKeyFile+1))
	if err != nil {
		return nil, fmt.Errorf("ticket key file: %w", err)
	}
	if len(data) > maxKeyFile {
		return nil, refuse("it is larger than %d bytes", maxKeyFile)
	}
	data = bytes.TrimSpace(data)
	if len(data) < minKey {
		return nil, refuse("it holds %d bytes, want at least %d", len(data), minKey)
	}
	key := sha256.Sum256(append([]byte("kvport/ticket-key\x00"), data...))
	return key[:], nil
}

// SharedKey is the key that all engines of one user on one host share. The first to ask makes it, in
// a folder that only the user can enter.
func SharedKey() ([]byte, error) {
	dir, err := privateDir()
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "ticket.key")
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		if err := createKey(dir, path); err != nil {
			return nil, fmt.Errorf("ticket key: %w", err)
		}
	}
	return LoadKey(path)
}

// privateDir makes the user's folder and checks that nobody else made it first.
func privateDir() (string, error) {
	dir := filepath.Join(os.TempDir(), "kvport-"+strconv.Itoa(os.Getuid()))
	if runtime := os.Getenv("XDG_RUNTIME_DIR"); runtime != "" {
		dir = filepath.Join(runtime, "kvport")
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("private folder: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return "", fmt.Errorf("private folder: %w", err)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || info.Mode().Perm()&0o077 != 0 || !ok || int(stat.Uid) != os.Getuid() {
		return "", fmt.Errorf("private folder %s is not a folder of ours with mode 0700; remove it, or set ticket_key_file: %w", dir, connector.ErrIncompatible)
	}
	return dir, nil
}

// createKey writes a random key under a temporary name and links it to path, so that a reader never
// sees half of one and of several makers one wins.
func createKey(dir, path string) (err error) {
	file, err := os.CreateTemp(dir, ".key-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(file.Name())) }()
	var key [minKey]byte
	if _, err := rand.Read(key[:]); err != nil {
		return errors.Join(err, file.Close())
	}
	_, err = file.WriteString(hex.EncodeToString(key[:]) + "\n")
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	if err := os.Link(file.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// KeyID names a key, so that the keys of two engines can be compared without being shown: 16 hexadecimal
// digits, from which nobody can tell the key.
func KeyID(key []byte) string { return SignText(key, keyIDText, "")[:16] }

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

// What texts are signed for. A signature for one is none for another.
const (
	RequestIDText = "request-id"   // the addresses of a request's two engines
	RegisterText  = "registration" // an engine's registration with a router
	keyIDText     = "key-id"
)

// SignText signs a text for a purpose: 32 hexadecimal digits.
func SignText(key []byte, purpose, text string) string {
	h := hmac.New(sha256.New, key)
	h.Write([]byte("kvport/" + purpose + "/1\x00" + text))
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// VerifyText reports whether SignText made a signature.
func VerifyText(key []byte, purpose, text, signature string) bool {
	return hmac.Equal([]byte(SignText(key, purpose, text)), []byte(signature))
}
