package sharedstorage

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
)

// The folder holds 16 x 16 shards named by the key's first two hex digits, each with one file a
// block, and a folder for files that are being written:
//
//	PATH/3/f/3f09…    64 hex digits, the store key
//	PATH/tmp/…        renamed into a shard when complete
//
// Every folder below PATH is opened through an os.Root, so that no symbolic link leads out of it.
// Files are opened by a name of hex digits inside an open folder, never by a path.
const (
	shards   = 256
	tmpName  = "tmp"
	staleTmp = 10 * time.Minute // a temporary file this old belongs to nobody any more
)

// errStale says that the folder was removed under us.
var errStale = errors.New("folder was removed")

// dir is one opening of the folder.
type dir struct {
	path     string
	identity os.FileInfo
	root     *os.Root
	tmp      *os.File // nil when read-only
	shard    [shards]atomic.Pointer[os.File]

	mu      sync.Mutex
	retired []*os.File // shards that were removed; others may still use the descriptors
}

// openDir opens the folder at path, and unless readOnly makes it when it is missing.
func openDir(path string, readOnly bool) (*dir, error) {
	var made error
	if !readOnly {
		if made = os.MkdirAll(path, 0o700); made != nil && !unwritable(made) {
			return nil, made
		}
	}
	root, err := os.OpenRoot(path)
	if made != nil && errors.Is(err, fs.ErrNotExist) {
		return nil, made // says why it is not there
	}
	if err != nil {
		return nil, err
	}
	d := &dir{path: path, root: root}
	if d.identity, err = root.Stat("."); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	if readOnly {
		return d, nil
	}
	if err := root.Mkdir(tmpName, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		if unwritable(err) {
			return d, nil
		}
		return nil, errors.Join(err, root.Close())
	}
	if d.tmp, err = d.openFolder(tmpName); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return d, nil
}

// openFolder opens a folder below the root, not following a link.
func (d *dir) openFolder(name string) (*os.File, error) {
	return d.root.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}

// close closes every descriptor. No call may be running.
func (d *dir) close() error {
	errs := []error{d.root.Close()}
	if d.tmp != nil {
		errs = append(errs, d.tmp.Close())
	}
	for i := range d.shard {
		if f := d.shard[i].Load(); f != nil {
			errs = append(errs, f.Close())
		}
	}
	for _, f := range d.retired {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// current reports whether the folder is still the one at its path.
func (d *dir) current() bool {
	now, err := os.Stat(d.path)
	return err == nil && os.SameFile(now, d.identity)
}

// folder gives the open shard n. With create it makes it when it is missing, otherwise the error
// is fs.ErrNotExist.
func (d *dir) folder(n int, create bool) (*os.File, error) {
	if f := d.shard[n].Load(); f != nil {
		return f, nil
	}
	name := fmt.Sprintf("%x/%x", n>>4, n&15)
	f, err := d.openFolder(name)
	if errors.Is(err, fs.ErrNotExist) && create {
		if err := d.root.MkdirAll(name, 0o700); err != nil {
			return nil, err
		}
		f, err = d.openFolder(name)
	}
	if err != nil {
		return nil, err
	}
	if !d.shard[n].CompareAndSwap(nil, f) {
		_ = f.Close()
		return d.folder(n, create)
	}
	return f, nil
}

// forget makes the next call open shard n again.
func (d *dir) forget(n int, f *os.File) {
	if d.shard[n].CompareAndSwap(f, nil) {
		d.mu.Lock()
		d.retired = append(d.retired, f)
		d.mu.Unlock()
	}
}

// forgetRemoved forgets all shards that were removed.
func (d *dir) forgetRemoved() {
	for n := range d.shard {
		f := d.shard[n].Load()
		if f == nil {
			continue
		}
		if st, err := stat(f, ""); err != nil || st.Nlink == 0 {
			d.forget(n, f)
		}
	}
}

// open opens the file of a key for reading; st describes it. Whatever is no regular file counts as
// damaged, and opening it has no effect: O_NONBLOCK keeps a FIFO from waiting for a writer.
func (d *dir) open(k connector.StoreKey) (fd int, st *unix.Stat_t, err error) {
	f, err := d.folder(int(k[0]), false)
	if err != nil {
		return -1, nil, err
	}
	fd, err = retry(func() (int, error) {
		return unix.Openat(int(f.Fd()), fileName(k), unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	})
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) { // a link, a socket
		return -1, nil, fmt.Errorf("%s is no regular file: %w", fileName(k), connector.ErrCorrupt)
	}
	if err != nil {
		return -1, nil, fmt.Errorf("open block file: %w", err)
	}
	st = new(unix.Stat_t)
	if err := unix.Fstat(fd, st); err != nil {
		return -1, nil, errors.Join(fmt.Errorf("stat block file: %w", err), unix.Close(fd))
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		_ = unix.Close(fd)
		return -1, nil, fmt.Errorf("%s is no regular file: %w", fileName(k), connector.ErrCorrupt)
	}
	return fd, st, nil
}

// has reports whether there is a file of the key.
func (d *dir) has(k connector.StoreKey) bool {
	f, err := d.folder(int(k[0]), false)
	if err != nil {
		return false
	}
	st, err := stat(f, fileName(k))
	return err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG
}

// remove deletes the key's file; one that is not there is fine.
func (d *dir) remove(k connector.StoreKey) error {
	f, err := d.folder(int(k[0]), false)
	if err != nil {
		return nil //nolint:nilerr // its folder is not there
	}
	if err := unix.Unlinkat(int(f.Fd()), fileName(k), 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove %s: %w", fileName(k), err)
	}
	return nil
}

// create opens a new temporary file for writing.
func (d *dir) create(name string) (int, error) {
	if d.tmp == nil {
		return -1, fmt.Errorf("make a file in %s: %w", d.path, unix.EROFS)
	}
	fd, err := retry(func() (int, error) {
		return unix.Openat(int(d.tmp.Fd()), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESTALE) { // ESTALE: the same on NFS
		return -1, errStale
	}
	if err != nil {
		return -1, fmt.Errorf("make a file in %s: %w", d.path, err)
	}
	return fd, nil
}

// publish gives a complete temporary file its name, over whatever had it.
func (d *dir) publish(name string, k connector.StoreKey, sync bool) error {
	for {
		f, err := d.folder(int(k[0]), true)
		if err != nil {
			return err
		}
		err = unix.Renameat(int(d.tmp.Fd()), name, int(f.Fd()), fileName(k))
		if errors.Is(err, unix.ENOENT) {
			if st, serr := stat(f, ""); serr == nil && st.Nlink == 0 {
				d.forget(int(k[0]), f)
				continue
			}
			return errStale
		}
		if errors.Is(err, unix.EISDIR) && d.clear(f, fileName(k), name) == nil {
			continue
		}
		if err == nil && sync {
			err = f.Sync()
		}
		if err != nil {
			return fmt.Errorf("rename block file: %w", err)
		}
		return nil
	}
}

// clear takes a folder away that lies where a block file belongs: an empty one is removed, another
// is moved to tmp, since nobody knows whose it is.
func (d *dir) clear(shard *os.File, name, temporary string) error {
	err := unix.Unlinkat(int(shard.Fd()), name, unix.AT_REMOVEDIR)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
		err = unix.Renameat(int(shard.Fd()), name, int(d.tmp.Fd()), temporary+"-folder")
	}
	return err
}

// discard removes a temporary file.
func (d *dir) discard(name string) { _ = unix.Unlinkat(int(d.tmp.Fd()), name, 0) }

// sweep removes temporary files that crashed writers left.
func (d *dir) sweep(now time.Time) (removed int) {
	if d.tmp == nil {
		return 0
	}
	f, err := d.openFolder(tmpName) // a fresh descriptor: reading moves its position
	if err != nil {
		return 0
	}
	defer f.Close()
	for {
		entries, err := f.ReadDir(1024)
		for _, e := range entries {
			st, serr := stat(f, e.Name())
			if serr != nil || st.Mode&unix.S_IFMT == unix.S_IFDIR || now.Sub(time.Unix(st.Mtim.Unix())) < staleTmp {
				continue
			}
			if unix.Unlinkat(int(f.Fd()), e.Name(), 0) == nil {
				removed++
			}
		}
		if err != nil || len(entries) == 0 {
			return removed
		}
	}
}

// stat describes a name in a folder, or the folder itself when name is empty, not following links.
func stat(f *os.File, name string) (st unix.Stat_t, err error) {
	flags := unix.AT_SYMLINK_NOFOLLOW
	if name == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	_, err = retry(func() (int, error) { return 0, unix.Fstatat(int(f.Fd()), name, &st, flags) })
	return st, err
}

// retry runs a system call again when a signal interrupted it.
func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// unwritable reports whether an error says that the folder cannot be written at all.
func unwritable(err error) bool {
	return errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM)
}

// fileName is the name of a key's file.
func fileName(k connector.StoreKey) string { return hex.EncodeToString(k[:]) }

// parseName is the key of a file name in shard n.
func parseName(n int, name string) (k connector.StoreKey, ok bool) {
	if len(name) != 2*len(k) {
		return k, false
	}
	if _, err := hex.Decode(k[:], []byte(name)); err != nil || int(k[0]) != n || fileName(k) != name {
		return k, false
	}
	return k, true
}

const (
	// touchAfter is how old a file's mtime must be for a Get to renew it: mtime is the time of the
	// last use, to this precision. Mounts seldom keep atime.
	touchAfter = time.Minute
	// scanLimit bounds one scan of the folder, in files.
	scanLimit = 1 << 20
	// slack is the part of the cap, 1/slack, that an eviction frees beyond what is needed, and
	// that an engine writes before it looks again what others wrote.
	slack = 16
)

// budget keeps the folder under its cap. Every engine that shares the folder runs its own: they
// count what they write themselves and learn of the others' files by scanning, so together they
// exceed the cap by at most 1/slack each.
type budget struct {
	mu      sync.Mutex
	max     int64
	used    int64 // at the last scan, plus what was reserved since
	pending int64 // the part of used whose files are still being written
	written int64 // reserved since the last scan
	scanned bool
	start   int // shard at which the next scan begins, so that a bounded scan reaches all in turn
}

// reserve makes room for n bytes that are about to be written and returns the keys it removed.
func (b *budget) reserve(d *dir, n int64) ([]connector.StoreKey, error) {
	if b.max == 0 {
		return nil, nil
	}
	if n > b.max {
		return nil, fmt.Errorf("a block file of %d bytes is larger than max_bytes, %d", n, b.max)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used, b.pending, b.written = b.used+n, b.pending+n, b.written+n
	if b.scanned && b.used <= b.max && b.written <= b.max/slack {
		return nil, nil
	}
	files := b.scan(d)
	if b.used <= b.max {
		return nil, nil
	}
	return b.evict(d, files), nil
}

// settle ends a reservation: its file is on disk, or it is not and the room is free again.
func (b *budget) settle(n int64, onDisk bool) {
	if b.max == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pending -= n
	if !onDisk {
		b.used -= n
	}
}

// known is how many bytes there are, if that was ever found out.
func (b *budget) known() (int64, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used, b.scanned
}

// forget makes the next reservation scan the folder.
func (b *budget) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.scanned = false
}

// file is one block file of a scan.
type file struct {
	key  connector.StoreKey
	size int64
	used time.Time
}

// scan lists the block files and sets used. Anything else in the folder is passed over.
func (b *budget) scan(d *dir) []file {
	var files []file
	b.used, b.written, b.scanned = b.pending, 0, true
	for i := range shards {
		n := (b.start + i) % shards
		if len(files) >= scanLimit {
			b.start = n
			break
		}
		files = appendShard(files, d, n)
	}
	for _, f := range files {
		b.used += f.size
	}
	return files
}

// appendShard appends the block files of shard n.
func appendShard(files []file, d *dir, n int) []file {
	f, err := d.openFolder(fmt.Sprintf("%x/%x", n>>4, n&15))
	if err != nil {
		return files
	}
	defer f.Close()
	for len(files) < scanLimit {
		entries, err := f.ReadDir(1024)
		for _, e := range entries {
			k, ok := parseName(n, e.Name())
			if !ok {
				continue
			}
			st, err := stat(f, e.Name())
			if err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
				continue
			}
			files = append(files, file{k, st.Size, time.Unix(st.Mtim.Unix())})
		}
		if err != nil || len(entries) == 0 {
			break
		}
	}
	return files
}

// evict removes the files that were not used for longest until the folder is 1/slack below the cap.
// A file that another engine removed first counts as removed.
func (b *budget) evict(d *dir, files []file) []connector.StoreKey {
	slices.SortFunc(files, func(x, y file) int { return x.used.Compare(y.used) })
	var gone []connector.StoreKey
	for _, f := range files {
		if b.used <= b.max-b.max/slack {
			break
		}
		fault.Crash("store.evict")
		_ = d.remove(f.key)
		b.used -= f.size
		gone = append(gone, f.key)
	}
	return gone
}

const (
	// fresh is how long a block that was seen on disk is believed to be there. Another engine may
	// evict it meanwhile: its Get then fails and the block is computed.
	fresh = time.Second
	// generation is how many keys one generation of the index holds; there are two.
	generation = 1 << 17
)

// index remembers which keys were on disk a moment ago, so that asking about one prompt 72 times
// costs one look at the disk. Only presence is remembered: what is absent is asked of the disk
// every time, so that what another engine saved is seen at once.
//
// It holds at most two generations of keys. When the young one is full it becomes the old one;
// what is still asked for moves back.
type index struct {
	mu         sync.Mutex
	young, old map[connector.StoreKey]time.Time
}

// has reports whether the key was seen less than fresh ago.
func (x *index) has(k connector.StoreKey, now time.Time) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	seen, ok := x.young[k]
	if !ok {
		seen, ok = x.old[k]
	}
	return ok && now.Sub(seen) < fresh
}

// add notes that the key is on disk.
func (x *index) add(k connector.StoreKey, now time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.young == nil || len(x.young) >= generation {
		x.young, x.old = make(map[connector.StoreKey]time.Time), x.young
	}
	x.young[k] = now
}

// drop forgets the key.
func (x *index) drop(k connector.StoreKey) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.young, k)
	delete(x.old, k)
}

// clear forgets everything.
func (x *index) clear() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.young, x.old = nil, nil
}
