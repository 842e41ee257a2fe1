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
	"slices"
	"strconv"
	"syscall"
	"time"

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
	before, err := SharedPath()
	fresh := err != nil || !isThere(before)
	if path, err = shared(log, os.Link); err != nil {
		return nil, err
	}
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	f.fresh = fresh
	return f, nil
}

// errNoPlace says that neither folder can have the key that engines share.
var errNoPlace = errors.New("no folder for the key that this user's engines share")

// OpenOrOwn is OpenAt for whoever may do without other engines. If neither folder can have the key that engines share, for
// example because somebody else has made the one in /tmp first, and this user has none, it gives a key that nobody else has
// and no file has: [File.Own] says why. A key that is there and out of reach remains an error, since other engines may use it.
func OpenOrOwn(path string, log *slog.Logger) (*File, error) {
	f, err := OpenAt(path, log)
	if !errors.Is(err, errNoPlace) || HasShared() {
		return f, err
	}
	f = Fixed(New(time.Now()))
	f.own = err
	return f, nil
}

// HasShared reports whether this user has a file of the key that engines share, which may be out of reach. A file of somebody
// else in its place is none.
func HasShared() bool {
	dirs := []string{runtimeName()}
	if state, err := stateName(); err == nil {
		dirs = append(dirs, state)
	}
	return slices.ContainsFunc(dirs, func(dir string) bool {
		info, err := os.Lstat(filepath.Join(dir, sharedName))
		if err != nil {
			return false
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		return ok && int(stat.Uid) == os.Getuid()
	})
}

// SharedPath is where the file is that all engines of this user on this machine share, or will be. It makes nothing.
func SharedPath() (string, error) {
	var first string
	var last error
	for _, name := range []func() (string, error){stateName, func() (string, error) { return runtimeName(), nil }} {
		dir, err := name()
		if err == nil {
			err = checkPrivate(dir)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			last = err
			continue
		}
		path := filepath.Join(dir, sharedName)
		if isThere(path) {
			return path, nil
		}
		if first == "" {
			first = path
		}
	}
	if first == "" {
		return "", last
	}
	return first, nil
}

// CreateShared makes the file that all engines of this user on this machine share. If they have one, also one that is only
// in the runtime folder, the error wraps fs.ErrExist, and path says where it is.
func CreateShared(ring *Ring) (path string, err error) {
	if path, err = SharedPath(); err != nil {
		return "", err
	}
	if isThere(path) {
		return path, fmt.Errorf("key file %s: %w", path, fs.ErrExist)
	}
	dir, err := stateDir()
	if err != nil {
		if dir, err = runtimeDir(); err != nil {
			return "", err
		}
	}
	path = filepath.Join(dir, sharedName)
	return path, Create(path, ring)
}

// linker gives a file a second name, unless there is a file of that name.
type linker func(from, to string) error

// shared makes the file that all engines of this user on this machine share, if it is not there. It is in the state
// folder, which outlives the machine's next start. Earlier versions, and engines without a state folder, look into the
// runtime folder: a key that is there becomes the one of the state folder, and one that is not there is copied to it.
func shared(log *slog.Logger, link linker) (string, error) {
	state, err := stateDir()
	runtime, runtimeErr := runtimeDir()
	ours, theirs := filepath.Join(state, sharedName), filepath.Join(runtime, sharedName)
	if err == nil && runtimeErr == nil && !isThere(ours) {
		// Engines without a state folder may start at the same time. All of them have the runtime folder, so the key of
		// whoever is first there is the one of all.
		runtimeErr = create(theirs, nil, link)
	}
	if err == nil {
		var data []byte
		if runtimeErr == nil {
			data = usable(theirs)
		}
		err = create(ours, data, link)
	}
	switch {
	case err != nil && runtimeErr != nil:
		return "", fmt.Errorf("%w: %w; %w", errNoPlace, err, runtimeErr)
	case err != nil:
		log.Warn("the key that this user's engines share is only in the runtime folder, which the machine's next start may empty", "folder", runtime, "error", err)
		return theirs, create(theirs, nil, link)
	case runtimeErr == nil:
		copyForEarlier(log, ours, theirs, link)
	}
	return ours, nil
}

// copyForEarlier copies a key of the old form to where engines of earlier versions find it.
func copyForEarlier(log *slog.Logger, ours, theirs string, link linker) {
	data := oldKey(ours)
	if data == nil { // it is a ring, or damaged
		return
	}
	if err := create(theirs, data, link); err != nil {
		log.Debug("engines of earlier versions do not find the key that this user's engines share", "file", theirs, "error", err)
	} else if other := oldKey(theirs); other != nil && !bytes.Equal(bytes.TrimSpace(other), bytes.TrimSpace(data)) {
		log.Warn("engines of earlier versions have another key than this user's engines share now: end them, remove it, or copy one over the other",
			"theirs", theirs, "ours", ours)
	}
}

func isThere(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// oldKey is what is in a file of the old form; nil if there is none that may be used.
func oldKey(path string) []byte {
	if ring, err := Load(path); err != nil || !ring.Old {
		return nil
	}
	return usable(path)
}

// usable is what is in a file of keys; nil if there is none that may be used.
func usable(path string) []byte {
	if _, err := Load(path); err != nil {
		return nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	return data
}

// create makes a file if it is not there, of the given text or else with a random key of the old form, which earlier
// versions can read. Of several that do so at once one wins.
func create(path string, data []byte, link linker) error {
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if data == nil {
		var key [newKey]byte
		_, _ = rand.Read(key[:]) // never fails
		data = []byte(hex.EncodeToString(key[:]) + "\n")
	}
	if err := place(path, data, link); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// stateName is where kvport's folder in the user's state folder is, or will be.
func stateName() (string, error) {
	base := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(base) {
		home := os.Getenv("HOME")
		if !filepath.IsAbs(home) {
			return "", errors.New("neither XDG_STATE_HOME nor HOME is set")
		}
		base = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(base, "kvport"), nil
}

// runtimeName is where kvport's folder in the user's runtime folder, or among the temporary files, is or will be.
func runtimeName() string {
	if runtime := os.Getenv("XDG_RUNTIME_DIR"); runtime != "" {
		return filepath.Join(runtime, "kvport")
	}
	return filepath.Join(os.TempDir(), "kvport-"+strconv.Itoa(os.Getuid()))
}

// stateDir makes kvport's folder in the user's state folder.
func stateDir() (string, error) {
	dir, err := stateName()
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return "", fmt.Errorf("state folder: %w", err)
	}
	return private(dir)
}

// runtimeDir makes kvport's folder in the user's runtime folder, or among the temporary files.
func runtimeDir() (string, error) { return private(runtimeName()) }

// private makes a folder of the user's own and checks that nobody else made it first.
func private(dir string) (string, error) {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("private folder: %w", err)
	}
	return dir, checkPrivate(dir)
}

func checkPrivate(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("private folder: %w", err)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || info.Mode().Perm()&0o077 != 0 || !ok || int(stat.Uid) != os.Getuid() {
		return fmt.Errorf("private folder %s is not a folder of ours with mode 0700; remove it, or set ticket_key_file: %w", dir, connector.ErrIncompatible)
	}
	if err := syscall.Access(dir, 2|1); err != nil { // to write and to enter
		return fmt.Errorf("private folder %s: %w", dir, err)
	}
	return nil
}
