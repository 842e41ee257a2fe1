package sharedstorage

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
)

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
		d.remove(f.key)
		b.used -= f.size
		gone = append(gone, f.key)
	}
	return gone
}
