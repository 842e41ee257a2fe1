package ticket

import (
	"bytes"
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
