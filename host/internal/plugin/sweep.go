package plugin

import (
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/internal/shm"
)

// socketPrefix begins the name of every folder of a plugin's socket.
const socketPrefix = "kvport-plugin-"

// lockName is a file in such a folder. The host of the plugin holds its lock (flock): the kernel lets
// go of it however the host ends.
const lockName = "lock"

// How old a folder must be to be taken for one that was left behind: a host makes the folder first and
// its lock then, and somebody else's may have no lock.
const (
	staleLocked = 10 * time.Second
	staleBare   = time.Hour
)

// lockDir marks a folder as in use until the file is closed.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, &fs.PathError{Op: "flock", Path: f.Name(), Err: err}
	}
	return f, nil
}

// SweepSockets removes the socket folders that hosts of this user left behind when they were killed,
// and counts them.
func SweepSockets(roots []string, now time.Time) (removed int) {
	for _, root := range roots {
		removed += shm.Sweep(filepath.Join(root, socketPrefix+"*"), now, abandoned)
	}
	return removed
}

// abandoned reports whether the host of a folder is gone.
func abandoned(dir string, age time.Duration) bool {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return age > staleBare && os.IsNotExist(err)
	}
	defer f.Close()
	return age > staleLocked && unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
}
