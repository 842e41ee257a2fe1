package tier

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// A folder has one file for each process that uses it and each geometry of slots. A file that nobody uses waits
// for the next process with its geometry. It is emptied when another needs the room, the one that was
// left longest first.
const (
	maxFiles   = 64 // processes that may use one folder at the same time, and geometries
	claimTries = 4  // for a file that fits: whoever makes room in the folder has it for a moment
	claimWait  = 5 * time.Millisecond
	growSteps  = 64 // in which a file gets its room
)

// errInUse says that a file has another process as its user.
var errInUse = errors.New("in use")

// idle is a file that nobody uses.
type idle struct {
	name string
	size int64
	left time.Time // when it was last used
}

// claim opens a file of the folder that nobody else uses: one with the given superblock if there is one, else an
// empty or new one, else, of 64, the one that was left longest, which is then emptied.
func claim(folder string, super []byte) (*os.File, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(folder)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	var others []idle
	for n := range maxFiles {
		f, other, err := fitting(root, fileName(n), super)
		if f != nil || err != nil {
			return f, err
		}
		if other != nil {
			others = append(others, *other)
		}
	}
	slices.SortFunc(others, func(a, b idle) int {
		return cmp.Or(cmp.Compare(min(a.size, 1), min(b.size, 1)), a.left.Compare(b.left))
	})
	for _, other := range others {
		f, err := openFile(root, other.name, os.O_RDWR|os.O_CREATE)
		if errors.Is(err, errInUse) {
			continue // somebody was faster
		}
		if err == nil {
			err = begin(f, super)
		}
		return f, err
	}
	return nil, fmt.Errorf("all %d files are in use", maxFiles)
}

func fileName(n int) string { return fmt.Sprintf("tier-%d.kv", n) }

// fitting opens a file that has the superblock. It returns nil for a file that is in use or has another superblock,
// and describes the latter in other: a missing file has no bytes.
func fitting(root *os.Root, name string, super []byte) (_ *os.File, other *idle, err error) {
	for try := 1; ; try++ {
		f, err := openFile(root, name, os.O_RDWR)
		if errors.Is(err, unix.EROFS) { // what it holds can still be read; writes fail one by one
			f, err = openFile(root, name, os.O_RDONLY)
		}
		switch {
		case errors.Is(err, os.ErrNotExist):
			return nil, &idle{name: name}, nil
		case errors.Is(err, errInUse) && try < claimTries && same(root, name, super):
			<-time.After(claimWait)
			continue
		case errors.Is(err, errInUse):
			return nil, nil, nil
		case err != nil:
			return nil, nil, err
		}
		if has(f, super) {
			return f, nil, nil
		}
		info, err := f.Stat()
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, nil, err
		}
		return nil, &idle{name: name, size: info.Size(), left: info.ModTime()}, nil
	}
}

// openFile opens and locks one file. One that another process has locked is errInUse.
func openFile(root *os.Root, name string, flags int) (*os.File, error) {
	f, err := root.OpenFile(name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = fmt.Errorf("%s is no regular file", name)
	case unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil:
		err = errInUse
	default:
		return f, nil
	}
	return nil, errors.Join(err, f.Close())
}

// same reports whether a file that is in use has the superblock.
func same(root *os.Root, name string, super []byte) bool {
	f, err := root.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	return has(f, super)
}

func has(f *os.File, super []byte) bool {
	have := make([]byte, len(super))
	_, err := f.ReadAt(have, 0)
	return err == nil && bytes.Equal(have, super)
}

// begin empties a file and gives it the superblock. On an error the file is closed.
func begin(f *os.File, super []byte) error {
	err := f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt(super, 0)
	}
	if err != nil {
		err = errors.Join(err, f.Close())
	}
	return err
}

// makeRoom empties files that nobody uses until the remaining ones have at most that many bytes.
func makeRoom(folder string, most int64) (emptied int, err error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return 0, err
	}
	defer root.Close()
	var files []idle
	var sum int64
	for n := range maxFiles {
		info, err := root.Stat(fileName(n))
		if err != nil || info.Size() == 0 || inUse(root, fileName(n)) {
			continue
		}
		files = append(files, idle{name: fileName(n), size: info.Size(), left: info.ModTime()})
		sum += info.Size()
	}
	slices.SortFunc(files, func(a, b idle) int { return a.left.Compare(b.left) })
	for _, file := range files {
		if sum <= most {
			break
		}
		f, err := openFile(root, file.name, os.O_RDWR)
		if errors.Is(err, errInUse) {
			continue
		}
		if err == nil {
			err = errors.Join(f.Truncate(0), f.Close())
		}
		if err != nil {
			return emptied, err
		}
		sum -= file.size
		emptied++
	}
	return emptied, nil
}

// inUse reports whether another process has a file, or nobody can say.
func inUse(root *os.Root, name string) bool {
	f, err := openFile(root, name, os.O_RDONLY)
	if err != nil {
		return true
	}
	return f.Close() != nil
}

// room lets the file grow to end bytes. Files that nobody uses make room for it.
func (d *Disk) room(end int64) error {
	if end <= d.granted.Load() {
		return nil
	}
	d.growing.Lock()
	defer d.growing.Unlock()
	if end <= d.granted.Load() {
		return nil
	}
	most := max(end, min(d.o.Bytes, end+d.o.Bytes/growSteps))
	emptied, err := makeRoom(d.o.Path, d.o.Bytes-most)
	if emptied > 0 {
		d.o.Log.Info("emptied files of other shapes to make room", "folder", d.o.Path, "files", emptied)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) { // a folder that is gone has no other files
		return fmt.Errorf("make room: %w", err)
	}
	d.granted.Store(most)
	return nil
}

// opened notes that the file is used from now on, and how much room it has already.
func (d *Disk) opened() error {
	info, err := d.file.Stat()
	if err != nil {
		return err
	}
	d.used()
	if err := d.room(info.Size()); err != nil {
		d.o.Log.Warn("files of other shapes stay", "folder", d.o.Path, "error", err)
	}
	return nil
}

// used makes the file the one of the folder that was used last.
func (d *Disk) used() {
	now := unix.NsecToTimeval(time.Now().UnixNano())
	_ = unix.Futimes(int(d.file.Fd()), []unix.Timeval{now, now}) // what may not be written is not emptied either
}
