package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/host"
)

// maxSocketPath is the longest path of a unix socket in bytes.
const maxSocketPath = 107

// lockSuffix makes the name of the file whose lock (flock) an agent holds while it has the socket.
const lockSuffix = ".agent"

// socket is a listening socket that no other agent has.
type socket struct {
	*net.UnixListener
	path string
	lock *os.File
}

// listen makes the socket, in a folder that only its owner can enter, and makes that folder if need be
// (rule AGENT-01). The socket that a killed agent left behind is replaced; one that is in use is not.
// Errors wrap host.ErrConfig where another path could cure them.
func listen(path string) (*socket, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("%w: socket: %s has %d bytes, want at most %d: use a shorter folder", host.ErrConfig, path, len(path), maxSocketPath)
	}
	if err := privateFolder(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("%w: socket: %w", host.ErrConfig, err)
	}
	lock, err := lockFile(path + lockSuffix)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	s := &socket{path: path, lock: lock}
	if err := removeStale(path); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: socket: %w", host.ErrConfig, err), s.unlock())
	}
	if s.UnixListener, err = net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: socket: %w", host.ErrConfig, err), s.unlock())
	}
	return s, nil
}

// privateFolder makes sure that nobody else can enter dir.
func privateFolder(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	st, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	owner, ok := st.Sys().(*syscall.Stat_t)
	switch {
	case !st.IsDir():
		return fmt.Errorf("%s is not a folder", dir)
	case !ok || int(owner.Uid) != os.Getuid():
		return fmt.Errorf("%s belongs to another user", dir)
	case st.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("%s has mode %#o, others could enter it: chmod 700 it, or use a folder of its own", dir, st.Mode().Perm())
	}
	return nil
}

// lockFile takes the lock at path. The file is created again if its holder has just removed it.
func lockFile(path string) (*os.File, error) {
	for range 100 {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			return nil, errors.Join(fmt.Errorf("another agent serves it: %w", &fs.PathError{Op: "flock", Path: path, Err: err}), f.Close())
		}
		mine, err := f.Stat()
		there, err2 := os.Lstat(path)
		if err == nil && err2 == nil && os.SameFile(mine, there) {
			return f, nil
		}
		_ = f.Close()
	}
	return nil, fmt.Errorf("%s is made and removed again and again", path)
}

// removeStale removes a socket that nobody serves: we have the lock.
func removeStale(path string) error {
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case st.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s is not a socket", path)
	}
	return os.Remove(path)
}

// close removes the socket and lets go of its lock.
func (s *socket) close() error {
	err := s.Close() // removes the socket too
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	return errors.Join(err, s.unlock())
}

func (s *socket) unlock() error {
	return errors.Join(os.Remove(s.path+lockSuffix), s.lock.Close())
}
