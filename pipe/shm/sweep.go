package shm

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kvport/kvport/internal/shm"
)

// folderPrefix begins the name of every folder that a listener makes for itself.
const folderPrefix = "kvport-shm-"

// How old a folder must be to count as left behind: a listener makes its folder first and its socket
// afterwards.
const (
	staleSocket = 10 * time.Second
	staleEmpty  = time.Hour
)

// sweep removes the folders that listeners of this user left behind when their processes were killed.
func sweep(root string, now time.Time) {
	shm.Sweep(filepath.Join(root, folderPrefix+"*"), now, abandoned)
}

// abandoned reports whether nobody listens in a folder. The kernel knows whether a socket has a listener, however
// the process ended and whichever process has its id now.
func abandoned(dir string, age time.Duration) bool {
	entries, err := os.ReadDir(dir)
	if err != nil || age <= staleSocket || len(entries) == 0 && age <= staleEmpty {
		return false
	}
	for _, entry := range entries {
		if entry.Type() != os.ModeSocket || !silent(filepath.Join(dir, entry.Name())) {
			return false
		}
	}
	return true
}

// silent reports whether nobody listens at a socket.
func silent(path string) bool {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err == nil {
		_ = conn.Close() // the listener takes this for a dialer that left
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}
