package kvevents

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/kvport/kvport/internal/zmtp"
)

// folder begins the names of the folders in which sockets without a configured path are, and these are the sockets.
const (
	folder     = "kvport-events-"
	eventsFile = "events"
	replayFile = "replay"
)

// maxPath is the length of a socket's path at most, as Linux has it.
const maxPath = 107

// privateFolder makes a folder that only this user can enter, and takes away those of engines that have died.
func privateFolder() (string, error) {
	old, _ := filepath.Glob(filepath.Join(os.TempDir(), folder+"*")) // the pattern is right
	for _, dir := range old {
		removeDead(dir)
	}
	return os.MkdirTemp("", folder)
}

// removeDead removes a folder that privateFolder made, if its engine has died: it is older than a minute and has nothing
// but the sockets of an engine, at which nobody listens.
func removeDead(dir string) {
	info, err := os.Lstat(dir)
	if err != nil || info.Mode() != os.ModeDir|0o700 || time.Since(info.ModTime()) <= time.Minute {
		return
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); !ok || int(stat.Uid) != os.Getuid() {
		return
	}
	list, err := os.ReadDir(dir)
	ours := func(f os.DirEntry) bool {
		return f.Type() == os.ModeSocket && (f.Name() == eventsFile || f.Name() == replayFile) && isDead(filepath.Join(dir, f.Name()))
	}
	if err != nil || slices.ContainsFunc(list, func(f os.DirEntry) bool { return !ours(f) }) {
		return
	}
	for _, f := range list {
		_ = os.Remove(filepath.Join(dir, f.Name()))
	}
	_ = os.Remove(dir) // unless there is something new in it
}

// isDead reports whether nobody listens at a socket any more. One that is busy is not dead.
func isDead(path string) bool {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(context.Background(), "unix", path)
	if err == nil {
		_ = conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// listen listens at an endpoint. A socket in the file system is this user's alone, and takes the place of one at which
// nobody listens any more.
func listen(e zmtp.Endpoint) (net.Listener, error) {
	if e.Network != "unix" {
		return (&net.ListenConfig{}).Listen(context.Background(), e.Network, e.Address)
	}
	switch info, err := os.Lstat(e.Address); {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return nil, err
	case info.Mode()&os.ModeSocket == 0:
		return nil, fmt.Errorf("%s is there and is not a socket: remove it or choose another path", e.Address)
	case !isDead(e.Address):
		return nil, fmt.Errorf("somebody listens at %s already: choose another path", e.Address)
	}
	// It gets its name when its mode is right, so that nobody can connect before.
	dir, err := os.MkdirTemp(filepath.Dir(e.Address), ".kvport-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	hidden := filepath.Join(dir, "s")
	if over := max(len(hidden), len(e.Address)) - maxPath; over > 0 {
		return nil, fmt.Errorf("%s is too long for a socket by %d bytes: choose a shorter path", e.Address, over)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: hidden, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(hidden, 0o600), os.Rename(hidden, e.Address)); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &socketFile{Listener: l, path: e.Address}, nil
}

// socketFile is a listener that takes its file away, once.
type socketFile struct {
	net.Listener
	path string
	once sync.Once
}

// Close ends the listener.
func (s *socketFile) Close() error {
	err := net.ErrClosed
	s.once.Do(func() { err = errors.Join(s.Listener.Close(), os.Remove(s.path)) })
	return err
}
