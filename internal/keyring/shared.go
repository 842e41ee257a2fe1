package keyring

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/kvport/kvport/connector"
)

// sharedName is the name of the file with the key that engines share of themselves.
const sharedName = "ticket.key"

// OpenAt opens the file at a path, or, if path is empty, the one that all engines of this user on this machine share,
// which the first to ask makes. log may be nil.
func OpenAt(path string, log *slog.Logger) (*File, error) {
	if path != "" {
		return Open(path)
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	path, err := shared(log)
	if err != nil {
		return nil, err
	}
	return Open(path)
}

// SharedPath is where the file is that all engines of this user on this machine share, or will be.
func SharedPath() (string, error) {
	dir, err := stateDir()
	if err != nil {
		if dir, err = runtimeDir(); err != nil {
			return "", err
		}
	}
	return filepath.Join(dir, sharedName), nil
}

// shared makes the file that all engines of this user on this machine share, if it is not there. It is in the state
// folder, which outlives the machine's next start. Earlier versions, and engines without a state folder, look into the
// runtime folder: a key that is there becomes the one of the state folder, and one that is not there is copied to it.
func shared(log *slog.Logger) (string, error) {
	state, err := stateDir()
	runtime, runtimeErr := runtimeDir()
	switch {
	case err != nil && runtimeErr != nil:
		return "", runtimeErr
	case err != nil:
		log.Warn("the key that this user's engines share is only in the runtime folder, which the machine's next start may empty", "folder", runtime, "error", err)
		return create(runtime, nil)
	case runtimeErr != nil:
		return create(state, nil)
	}
	path, err := create(state, oldKey(filepath.Join(runtime, sharedName)))
	if err != nil {
		return "", err
	}
	data := oldKey(path)
	if data == nil { // it is a ring, or damaged
		return path, nil
	}
	former, err := create(runtime, data)
	if err != nil {
		log.Debug("engines of earlier versions do not find the key that this user's engines share", "folder", runtime, "error", err)
	} else if other := oldKey(former); other != nil && !bytes.Equal(bytes.TrimSpace(other), bytes.TrimSpace(data)) {
		log.Warn("engines of earlier versions have another key than this user's engines share now: end them, remove it, or copy one over the other",
			"theirs", former, "ours", path)
	}
	return path, nil
}

// oldKey is a file of the old form; nil if there is none that may be used.
func oldKey(path string) []byte {
	if ring, err := Load(path); err != nil || !ring.Old {
		return nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	return data
}

// create makes the file in a folder if it is not there, of the given text or else with a random key of the old form, which
// earlier versions can read. Of several that do so at once one wins.
func create(dir string, data []byte) (string, error) {
	path := filepath.Join(dir, sharedName)
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	if data == nil {
		var key [newKey]byte
		_, _ = rand.Read(key[:]) // never fails
		data = []byte(hex.EncodeToString(key[:]) + "\n")
	}
	if err := place(path, data, os.Link); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	return path, nil
}

// stateDir is kvport's folder in the user's state folder.
func stateDir() (string, error) {
	base := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(base) {
		home := os.Getenv("HOME")
		if !filepath.IsAbs(home) {
			return "", errors.New("neither XDG_STATE_HOME nor HOME is set")
		}
		base = filepath.Join(home, ".local", "state")
	}
	if err := os.MkdirAll(base, 0o700); err != nil {
		return "", fmt.Errorf("state folder: %w", err)
	}
	return private(filepath.Join(base, "kvport"))
}

// runtimeDir is kvport's folder in the user's runtime folder, or among the temporary files.
func runtimeDir() (string, error) {
	if runtime := os.Getenv("XDG_RUNTIME_DIR"); runtime != "" {
		return private(filepath.Join(runtime, "kvport"))
	}
	return private(filepath.Join(os.TempDir(), "kvport-"+strconv.Itoa(os.Getuid())))
}

// private makes a folder of the user's own and checks that nobody else made it first.
func private(dir string) (string, error) {
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
	if err := syscall.Access(dir, 2|1); err != nil { // to write and to enter
		return "", fmt.Errorf("private folder %s: %w", dir, err)
	}
	return dir, nil
}
