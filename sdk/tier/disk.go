package tier

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/machine"
	"github.com/kvport/kvport/internal/storekit"
)

// DiskOptions say where a Disk keeps its blocks.
type DiskOptions struct {
	// Path is the folder of its file; made when it is missing. Several processes may use one folder:
	// each has a file, and Bytes, for itself. So have blocks of different sizes: an engine of another
	// shape finds its file as it was.
	Path string
	// Field names the field of a config that Bytes comes from, for errors; empty: none does.
	Field string
	// Bytes is the largest size of the file and of all those in the folder that nobody uses together. It
	// is never exceeded: what was left longest makes room.
	Bytes int64
	// SlotBytes is the size of the largest block, in a Store's lower tier with LowerHeader.
	SlotBytes int64
	// Policy is the eviction policy; "": LRU.
	Policy string
	// TTL says that blocks begin with a LowerHeader, and that those whose time is over are not found.
	TTL bool
	// Changed is told when a block appears or leaves, as in Options.
	Changed func(k connector.StoreKey, stored bool)
	// Log is for what an operator should know; nil: nothing.
	Log *slog.Logger
}

// Disk keeps blocks in the slots of one file. A block's digest is checked whenever it is read, so that
// what a crash or the disk left of it is never served. It is safe for concurrent use.
type Disk struct {
	shape
	o       DiskOptions
	file    *os.File
	index   *keyIndex
	c       counts
	serial  atomic.Uint64
	expires []atomic.Int64 // of each slot, in Unix ms; nil without TTL

	gate      sync.RWMutex // held for reading by every call, so that Reset and renew meet none
	resetting bool

	growing sync.Mutex
	granted atomic.Int64 // bytes to which the file may grow without looking at the others

	// The file's calls, replaced by tests.
	readAt  func(b []byte, at int64) (int, error)
	writeAt func(b []byte, at int64) (int, error)

	told  atomic.Int64 // before that time, in Unix ms, no lost block is logged
	full  atomic.Int64 // until then, in Unix ms, nothing is written: the disk was full
	waits atomic.Int64 // until then, in Unix ms, no other file is looked for: the own was removed, and there was none

	named    bool          // the file system says how many names the file has; guarded by gate
	renewals atomic.Uint32 // files that were begun because the one before was removed
}

// How long a full disk is left alone, and a folder without a file in the place of one that was removed.
const fullWait, lostWait = time.Second, time.Second

// OpenDisk opens the tier in a folder. Blocks that an earlier one left are there at once, if their
// headers are whole. Errors wrap connector.ErrIncompatible and name the folder.
func OpenDisk(o DiskOptions) (*Disk, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	d := &Disk{o: o, shape: fit(o.Bytes, o.SlotBytes)}
	if o.SlotBytes < 1 || d.slots < 1 {
		return nil, fmt.Errorf("%d bytes on disk have no room for a block of %d: %w", o.Bytes, o.SlotBytes, connector.ErrIncompatible)
	}
	err := d.fits(machine.FreeMemory("/"))
	if err != nil {
		return nil, err
	}
	if d.index, err = newKeyIndex(d.slots, o.Policy); err != nil {
		return nil, err
	}
	if o.TTL {
		d.expires = make([]atomic.Int64, d.slots)
	}
	if d.file, err = claim(o.Path, d.super()); err != nil {
		return nil, fmt.Errorf("folder %s: %w: %w", o.Path, err, connector.ErrIncompatible)
	}
	d.index.came, d.index.gone = func(id uint32) { d.changed(id, true) }, d.gone
	d.readAt, d.writeAt, d.named = d.file.ReadAt, d.file.WriteAt, !nameless(d.file)
	if err := errors.Join(d.opened(), d.restart()); err != nil {
		return nil, errors.Join(fmt.Errorf("folder %s: %w: %w", o.Path, err, connector.ErrIncompatible), d.file.Close())
	}
	return d, nil
}

// refusedFrom is how large a tier must be to be refused where its file system is smaller. A small one serves for as
// long as there is room, like one on a full disk.
const refusedFrom = 1 << 30

// entryBytes is about what an entry of the index takes in memory.
const entryBytes = 128

// fits says why the tier is larger than the folder's file system, or its index than the free memory. A
// file system that is only full by now is no reason: its room may come back.
func (d *Disk) fits(memory int64) error {
	field := cmp.Or(d.o.Field, "the size of the disk tier")
	size, free := d.fileSystem()
	if d.o.Bytes > size && d.o.Bytes >= refusedFrom {
		return fmt.Errorf("%s is %d bytes, the file system of %s has %d in all, %d of them free: set it lower: %w", field, d.o.Bytes, d.o.Path, size, free, connector.ErrIncompatible)
	}
	if need := int64(d.slots) * entryBytes; need > memory {
		return fmt.Errorf("%s is %d bytes: the index of %d blocks of %d bytes takes %d bytes of memory, this machine has free %d: set it lower: %w",
			field, d.o.Bytes, d.slots, d.slotBytes, need, memory, connector.ErrIncompatible)
	}
	if d.o.Bytes > free {
		d.o.Log.Warn("the disk tier may grow to more than its file system has free now", "folder", d.o.Path, "field", field, "bytes", d.o.Bytes, "free", free)
	}
	return nil
}

// fileSystem is the size of the folder's file system and what it has free or has given to tiers in this folder, in
// bytes; MaxInt64 where it does not say.
func (d *Disk) fileSystem() (size, free int64) {
	folder := d.o.Path
	for folder != filepath.Dir(folder) { // the folder may have to be made
		if _, err := os.Stat(folder); err == nil {
			break
		}
		folder = filepath.Dir(folder)
	}
	var st unix.Statfs_t
	if unix.Statfs(folder, &st) != nil || st.Blocks == 0 || st.Bsize < 1 {
		return math.MaxInt64, math.MaxInt64
	}
	bytes := func(blocks uint64) int64 { return int64(min(blocks, math.MaxInt64/4/uint64(st.Bsize))) * st.Bsize }
	size, free = bytes(st.Blocks), bytes(st.Bavail)
	for n := range maxFiles {
		var own unix.Stat_t
		if unix.Stat(filepath.Join(d.o.Path, fileName(n)), &own) == nil {
			free += own.Blocks * 512
		}
	}
	return size, free
}

// Slots is the number of blocks that fit.
func (d *Disk) Slots() int { return d.slots }

// Counts are the numbers so far.
func (d *Disk) Counts() Stats {
	s := d.c.Now()
	s.Blocks, s.Slots = uint64(d.index.Len()), uint64(d.slots)
	return s
}

// gone is called for every block that leaves, before its slot is used again.
func (d *Disk) gone(id uint32) {
	if !d.resetting {
		d.setState(id, stateFree)
	}
	d.changed(id, false)
}

func (d *Disk) changed(id uint32, stored bool) {
	if d.o.Changed != nil {
		d.o.Changed(d.index.keys[id], stored)
	}
}

// setState writes a slot's state. Should that fail, the digest still tells what the slot holds.
func (d *Disk) setState(id, state uint32) {
	b := [4]byte{byte(state), byte(state >> 8), byte(state >> 16), byte(state >> 24)}
	if _, err := d.writeAt(b[:], d.headerAt(id)); err != nil {
		d.c.Count(func(n *Stats) { n.Errors++ })
	}
}

// Lookup implements connector.Store.
func (d *Disk) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	return storekit.Leading(runs, d.has), nil
}

// has reports whether a block can be read, as far as is known.
func (d *Disk) has(k connector.StoreKey) bool {
	id := d.index.entry(k)
	return id != none && (d.expires == nil || !past(d.expires[id].Load()))
}

// Has reports whether a block is there. It may be called from Options.Changed of the tier above.
func (d *Disk) Has(k connector.StoreKey) bool { return d.has(k) }

// Get implements connector.Store. A block that cannot be read as it was written is forgotten.
func (d *Disk) Get(ctx context.Context, items []connector.Item) error {
	d.gate.RLock()
	defer d.gate.RUnlock()
	return storekit.Each(ctx, items, d.get)
}

func (d *Disk) get(it connector.Item) error {
	for {
		id, ok := d.index.Acquire(it.Key, true)
		if !ok {
			d.c.Count(func(n *Stats) { n.Misses++ })
			return fmt.Errorf("%v is not on disk: %w", it.Key, connector.ErrGone)
		}
		err := d.read(id, it)
		if err == nil || errors.Is(err, connector.ErrIncompatible) {
			d.index.Release(id)
			d.c.Count(func(n *Stats) { n.read(it.Size()) })
			return err
		}
		same := d.index.forget(it.Key, id)
		d.index.Release(id)
		if same {
			d.lost(it.Key, err)
			return err
		}
		// Somebody else has written it meanwhile, and this was what it was before: look again.
	}
}

// lost counts and tells that a block could not be read as it was written.
func (d *Disk) lost(k connector.StoreKey, err error) {
	d.c.Count(func(n *Stats) { n.Misses++ })
	if errors.Is(err, connector.ErrCorrupt) {
		d.c.Count(func(n *Stats) { n.Corrupt++ })
	} else {
		d.c.Count(func(n *Stats) { n.Errors++ })
	}
	if now := time.Now().UnixMilli(); now >= d.told.Load() { // damage seldom comes alone
		d.told.Store(now + time.Second.Milliseconds())
		d.o.Log.Warn("a block on disk is lost", "folder", d.o.Path, "key", k.String(), "error", err)
	}
}

func (d *Disk) read(id uint32, it connector.Item) error {
	h, err := d.header(id, it.Key)
	if err != nil {
		return err
	}
	if int(h.length) != it.Size() {
		return fmt.Errorf("block of %d bytes, stored are %d: %w", it.Size(), h.length, connector.ErrIncompatible)
	}
	at := d.slotAt(id)
	sum := xxh3.New()
	for _, s := range it.Spans {
		if err := d.readFull(s, at); err != nil {
			return err
		}
		_, _ = sum.Write(s) // never fails
		at += int64(len(s))
	}
	if sum.Sum128() != h.data {
		return fmt.Errorf("slot %d holds other bytes than were written: %w", id, connector.ErrCorrupt)
	}
	return nil
}

// header reads the header of a slot that holds a block.
func (d *Disk) header(id uint32, k connector.StoreKey) (h header, err error) {
	var b [headerSize]byte
	if err := d.readFull(b[:], d.headerAt(id)); err != nil {
		return h, err
	}
	if stateOf(b[:]) != stateReady || !h.decode(b[:]) || h.key != k {
		return h, fmt.Errorf("slot %d has a damaged header: %w", id, connector.ErrCorrupt)
	}
	return h, nil
}

// readFull reads all of b. A file that ends before is damaged; any other failure means that the block
// is gone.
func (d *Disk) readFull(b []byte, at int64) error {
	n, err := d.readAt(b, at)
	switch {
	case n == len(b):
		return nil
	case errors.Is(err, io.EOF):
		return fmt.Errorf("the file ends too early: %w", connector.ErrCorrupt)
	}
	return fmt.Errorf("%w: %w", err, connector.ErrGone)
}

// Put implements connector.Store.
func (d *Disk) Put(ctx context.Context, items []connector.Item) error {
	if err := d.renew(); err != nil {
		d.c.Count(func(n *Stats) { n.Errors++ })
		return err
	}
	d.gate.RLock()
	defer d.gate.RUnlock()
	return storekit.Each(ctx, items, d.put)
}

// Renewals implements Renewer.
func (d *Disk) Renewals() uint32 {
	_ = d.renew() // the next Put says so
	return d.renewals.Load()
}

// removed reports whether somebody has removed the file: it has no name any more, and nobody finds it again. One that was moved with its
// folder has one, and may come back.
func (d *Disk) removed() bool { return d.named && nameless(d.file) }

// nameless reports whether a file has no name, or its file system counts none.
func nameless(f *os.File) bool {
	var st unix.Stat_t
	return unix.Fstat(int(f.Fd()), &st) == nil && st.Nlink == 0
}

// renew begins another file if the one that is open was removed (rule FAULT-11): what is written there would be lost with the process, and
// what lies there is.
func (d *Disk) renew() error {
	if d.waits.Load() > time.Now().UnixMilli() {
		return errLost
	}
	d.gate.RLock()
	removed := d.removed()
	d.gate.RUnlock()
	if !removed {
		return nil
	}
	d.gate.Lock()
	defer d.gate.Unlock()
	switch {
	case !d.removed():
		return nil // another call was faster
	case d.waits.Load() > time.Now().UnixMilli():
		return errLost
	}
	file, err := claim(d.o.Path, d.super())
	if err != nil {
		d.waits.Store(time.Now().Add(lostWait).UnixMilli())
		d.o.Log.Error("the file of the disk tier was removed, and no other can be opened", "folder", d.o.Path, "error", err)
		return fmt.Errorf("folder %s: %w: %w", d.o.Path, errLost, err)
	}
	d.o.Log.Warn("the file of the disk tier was removed: its blocks are lost, and another file begins", "folder", d.o.Path, "blocks", d.index.Len())
	d.forgetAll()
	old := d.file
	d.file, d.readAt, d.writeAt, d.named = file, file.ReadAt, file.WriteAt, !nameless(file)
	d.granted.Store(0)
	d.renewals.Add(1)
	return errors.Join(old.Close(), d.opened(), d.restart())
}

// forgetAll empties the index and leaves the file as it is. The gate is locked.
func (d *Disk) forgetAll() {
	d.resetting = true
	for _, k := range d.index.Keys() {
		d.index.Remove(k)
	}
	d.resetting = false
}

func (d *Disk) put(it connector.Item) error {
	size := it.Size()
	switch {
	case int64(size) > d.slotBytes:
		return fmt.Errorf("block of %d bytes, slots have %d: %w", size, d.slotBytes, connector.ErrIncompatible)
	case !it.Replace && d.same(it):
		d.index.Touch(it.Key)
		d.c.Count(func(n *Stats) { n.Known++ })
		return nil
	}
	if past(d.full.Load()) {
		d.full.Store(0)
	}
	if d.full.Load() != 0 {
		return errFull
	}
	id, v, err := d.index.Reserve(it.Key)
	if err != nil {
		d.c.Count(func(n *Stats) { n.AllPinned++ })
		return err
	}
	if v.Evicted {
		d.c.Count(func(n *Stats) { n.Evicted++ })
	}
	if err := d.write(id, it, size); err != nil {
		d.index.Cancel(id)
		d.failed(err)
		return err
	}
	d.index.Commit(id, it.Key)
	d.c.Count(func(n *Stats) { n.wrote(size) })
	return nil
}

// same reports whether a block is there as it is, as far as its length and the beginning of its digests say.
func (d *Disk) same(it connector.Item) bool {
	if !d.has(it.Key) {
		return false
	}
	id, ok := d.index.Acquire(it.Key, false)
	if !ok {
		return false
	}
	defer d.index.Release(id)
	want, at := storekit.Mark(it)
	if want == nil {
		return true
	}
	h, err := d.header(id, it.Key)
	if err != nil || int(h.length) != it.Size() {
		return false
	}
	var have [storekit.MarkBytes]byte
	return d.readFull(have[:], d.slotAt(id)+int64(at)) == nil && bytes.Equal(have[:], want)
}

// write fills a free slot: its header says that it holds the block when all of it was written.
func (d *Disk) write(id uint32, it connector.Item, size int) error {
	h := header{length: uint32(size), generation: d.serial.Add(1), key: it.Key}
	if d.expires != nil && len(it.Spans) > 0 && len(it.Spans[0]) >= LowerHeader {
		h.expires = int64(binary.LittleEndian.Uint64(it.Spans[0]))
		d.expires[id].Store(h.expires)
	}
	sum, at := xxh3.New(), d.slotAt(id)
	if err := d.room(at + d.stride()); err != nil {
		return err
	}
	for _, s := range it.Spans {
		_, _ = sum.Write(s) // never fails
		if _, err := d.writeAt(s, at); err != nil {
			return err
		}
		at += int64(len(s))
	}
	h.data = sum.Sum128()
	var b [headerSize]byte
	h.encode(b[:])
	putState(b[:], stateReady)
	_, err := d.writeAt(b[:], d.headerAt(id))
	return err
}

// failed counts a failed write and leaves a full disk alone for a while.
func (d *Disk) failed(err error) {
	d.c.Count(func(n *Stats) { n.Errors++ })
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		d.o.Log.Error("cannot write to the disk tier", "folder", d.o.Path, "error", err)
		return
	}
	if d.full.Swap(time.Now().Add(fullWait).UnixMilli()) == 0 {
		d.o.Log.Warn("the disk is full: blocks stay in memory only", "folder", d.o.Path)
	}
}

// Reset implements connector.Resetter.
func (d *Disk) Reset(context.Context) (emptied bool, err error) {
	d.gate.Lock()
	defer d.gate.Unlock()
	d.forgetAll()
	if err := d.file.Truncate(superSize); err != nil {
		return false, fmt.Errorf("folder %s: %w", d.o.Path, err)
	}
	return true, nil
}

// Close implements connector.Store.
func (d *Disk) Close() error {
	d.used()
	return d.file.Close()
}

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

// restart takes over the blocks whose headers are whole. Whether their bytes are is found out when they
// are read.
func (d *Disk) restart() error {
	var whole []found
	best := map[connector.StoreKey]uint64{}
	buf := make([]byte, 4096*headerSize)
	for first := 0; first < d.slots; first += 4096 {
		n, err := d.readAt(buf, d.headerAt(uint32(first)))
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		for i := range min(n/headerSize, d.slots-first) {
			b := buf[i*headerSize:][:headerSize]
			f := found{id: uint32(first + i)}
			switch {
			case stateOf(b) == stateFree:
			case stateOf(b) != stateReady || !f.decode(b) || int64(f.length) > d.slotBytes:
				d.c.Count(func(n *Stats) { n.Torn++ })
			default:
				whole = append(whole, f)
				best[f.key] = max(best[f.key], f.generation)
			}
		}
	}
	slices.SortFunc(whole, func(a, b found) int { return cmp.Compare(a.generation, b.generation) })
	for _, f := range whole {
		if f.generation < best[f.key] {
			continue
		}
		d.serial.Store(f.generation)
		if d.expires != nil {
			d.expires[f.id].Store(f.expires)
		}
		d.index.adopt(f.id, f.key)
		d.c.Count(func(n *Stats) { n.Adopted++ })
	}
	return nil
}

func stateOf(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }

func putState(b []byte, state uint32) { binary.LittleEndian.PutUint32(b, state) }
