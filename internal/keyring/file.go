package keyring

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"
)

// Every is how often Watch looks at a file.
const Every = 2 * time.Second

// Load reads a file that only its owner can read. Errors name the file, and wrap connector.ErrIncompatible unless it
// cannot be read.
func Load(path string) (*Ring, error) {
	ring, _, err := load(path)
	return ring, err
}

func load(path string) (_ *Ring, _ fs.FileInfo, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("key file %s: %w", path, err)
		}
	}()
	data, info, err := readOwn(path, maxFile, false)
	if refused, is := errors.AsType[*openError](err); is {
		return nil, nil, refuse("%w", refused)
	}
	if err != nil {
		return nil, nil, err
	}
	ring, err := Parse(data)
	return ring, info, err
}

// openError says that others may have read a file, or that it is none.
type openError struct{ text string }

// Error implements error.
func (e *openError) Error() string { return e.text }

// ReadOwn reads a file that only its owner can read, of any kind: the first most+1 bytes of it. A group may read it, too, if the
// owner is root and this process is not, for which there is no other way.
func ReadOwn(path string, most int) ([]byte, error) {
	data, _, err := readOwn(path, most, true)
	return data, err
}

func readOwn(path string, most int, ofRoot bool) ([]byte, fs.FileInfo, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO must not block us
	if err != nil {
		return nil, nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, nil, &openError{"it is no regular file"}
	}
	perm := info.Mode().Perm()
	if sys, ok := info.Sys().(*syscall.Stat_t); exposed(perm, ofRoot && ok && sys.Uid == 0 && os.Geteuid() != 0) {
		return nil, nil, &openError{fmt.Sprintf("mode %#o lets others read it, use chmod 600", perm)}
	}
	data, err := io.ReadAll(io.LimitReader(file, int64(most)+1))
	return data, info, err
}

// exposed reports whether others than those who shall read a file may use it. One of root's that a process of another user shall
// read, such as a mounted secret of Kubernetes, is for the group that root has given it.
func exposed(perm fs.FileMode, ofRoot bool) bool {
	if ofRoot {
		perm &^= 0o040
	}
	return perm&0o077 != 0
}

// File is a file of keys that may change while it is in use. It is safe for concurrent use, except that Watch runs once.
type File struct {
	path  string
	ring  atomic.Pointer[Ring]
	stale atomic.Bool
	fresh bool  // OpenAt has made it
	own   error // why OpenOrOwn has given a key that is in no file
	last  stamp // of the file when it was last looked at; Watch's
}

// stamp tells a file from what was in its place before.
type stamp struct {
	device, inode uint64
	size          int64
	made, changed time.Time
	mode          fs.FileMode
}

func stampOf(info fs.FileInfo) stamp {
	s := stamp{size: info.Size(), made: info.ModTime(), mode: info.Mode()}
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		s.device, s.inode, s.changed = sys.Dev, sys.Ino, time.Unix(sys.Ctim.Unix())
	}
	return s
}

// Open reads a file for the first time.
func Open(path string) (*File, error) {
	ring, info, err := load(path)
	if err != nil {
		return nil, err
	}
	f := &File{path: path, last: stampOf(info)}
	f.ring.Store(ring)
	return f, nil
}

// Fixed is a ring that no file changes.
func Fixed(ring *Ring) *File {
	f := &File{}
	f.ring.Store(ring)
	return f
}

// Fresh reports whether there was no file before OpenAt: its key is a new one.
func (f *File) Fresh() bool { return f.fresh }

// Own is why the key is one that no other process has, as OpenOrOwn gives it; nil: it is in a file.
func (f *File) Own() error { return f.own }

// Path is where the file is.
func (f *File) Path() string { return f.path }

// Ring is what the file said when it could last be read.
func (f *File) Ring() *Ring { return f.ring.Load() }

// Stale reports whether the file has changed since then and cannot be read now.
func (f *File) Stale() bool { return f.stale.Load() }

// Watch takes over what changes in the file until ctx ends. It looks by stat, since that works the same on local disks,
// network file systems and mounted secrets. What cannot be read leaves the ring as it is: the log says so once, and stale
// is called then, and again when it is over. stale may be nil.
func (f *File) Watch(ctx context.Context, log *slog.Logger, stale func(bool)) {
	ticks := time.NewTicker(Every)
	defer ticks.Stop()
	for f.path != "" {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
			before := f.Stale()
			if f.look(log); f.Stale() != before && stale != nil {
				stale(!before)
			}
		}
	}
}

// look reads the file if it is another one than before, or could not be read then: what was in the way may have passed and
// left the file as it is.
func (f *File) look(log *slog.Logger) {
	now := stamp{}
	if info, err := os.Stat(f.path); err == nil {
		now = stampOf(info)
	}
	if now == f.last && !f.Stale() {
		return
	}
	ring, info, err := load(f.path)
	if f.last = now; err != nil {
		if !f.stale.Swap(true) {
			log.Warn("the file of keys cannot be read, the keys that it had stay in use", "file", f.path, "error", err)
		}
		return
	}
	f.last = stampOf(info)
	f.stale.Store(false)
	before := f.ring.Swap(ring)
	log.Info("the file of keys has changed", "file", f.path, "signs", ring.First().ID, "reads", ring.IDs(), "before", before.IDs())
}

// Create makes the file of a ring. It never overwrites one: then the error wraps fs.ErrExist.
func Create(path string, ring *Ring) error {
	return CreateOwn(path, ring.Format())
}

// linkOrWrite gives a file another name or, where the file system knows no links, writes its data once more. Neither
// overwrites a file.
func linkOrWrite(from, to string, data []byte, link func(from, to string) error) error {
	err := link(from, to)
	if err == nil || errors.Is(err, fs.ErrExist) {
		return err
	}
	file, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	if err = errors.Join(err, file.Sync(), file.Close()); err != nil {
		err = errors.Join(err, os.Remove(to))
	}
	return err
}

// CreateOwn makes a file that only its owner can read. It never overwrites one: then the error wraps fs.ErrExist.
func CreateOwn(path string, data []byte) error {
	return place(path, data, func(from, to string) error { return linkOrWrite(from, to, data, os.Link) })
}

// Change replaces a file by what edit makes of it, in one step and for the same owner. Two changes at once follow each other.
func Change(path string, edit func(*Ring) (*Ring, error)) (ring *Ring, err error) {
	err = RewriteOwn(path, maxFile, func(data []byte) ([]byte, error) {
		before, err := Parse(data)
		if err != nil {
			return nil, err
		}
		if ring, err = edit(before); err != nil {
			return nil, err
		}
		data = ring.Format()
		if _, err := Parse(data); err != nil { // nobody could read it: it has become too large
			return nil, fmt.Errorf("after this change %w", err)
		}
		return data, nil
	})
	if refused, is := errors.AsType[*openError](err); is {
		err = refuse("key file %s: %w", path, refused)
	}
	if err != nil {
		return nil, err
	}
	return ring, nil
}

// RewriteOwn replaces a file that only its owner can read by what edit makes of its first most+1 bytes, as [Change] does.
func RewriteOwn(path string, most int, edit func([]byte) ([]byte, error)) (err error) {
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return fmt.Errorf("key file: %w", err)
	}
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("key file: %w", err)
	}
	defer folder.Close() // and with it the lock
	if err := syscall.Flock(int(folder.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("key file %s: lock its folder: %w", path, err)
	}
	data, info, err := readOwn(path, most, false)
	if err != nil {
		return fmt.Errorf("key file %s: %w", path, err)
	}
	if data, err = edit(data); err != nil {
		return fmt.Errorf("key file %s: %w", path, err)
	}
	return place(path, data, func(from, to string) error {
		if sys, ok := info.Sys().(*syscall.Stat_t); ok && int(sys.Uid) != os.Geteuid() {
			if err := os.Chown(from, int(sys.Uid), int(sys.Gid)); err != nil {
				return fmt.Errorf("its owner is another user: %w", err)
			}
		}
		return os.Rename(from, to)
	})
}

// place writes a file under a temporary name and moves it to path, so that nobody ever reads half of it.
func place(path string, data []byte, move func(from, to string) error) (err error) {
	file, err := os.CreateTemp(filepath.Dir(path), ".key-*") // mode 0600
	if err != nil {
		return fmt.Errorf("key file: %w", err)
	}
	defer func() {
		if gone := os.Remove(file.Name()); err == nil && !errors.Is(gone, fs.ErrNotExist) {
			err = gone
		}
	}()
	_, err = file.Write(data)
	if err := errors.Join(err, file.Sync(), file.Close()); err != nil {
		return fmt.Errorf("key file %s: %w", path, err)
	}
	if err := move(file.Name(), path); err != nil {
		return fmt.Errorf("key file %s: %w", path, err)
	}
	return nil
}
