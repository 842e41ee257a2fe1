package host

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/shm"
)

// Region is the memory of one rank's paged cache: a sealed memfd that plugins map, so that blocks
// never have to be copied to them. It cannot be resized by anyone.
type Region struct {
	mem       *shm.Region // nil: inherited
	inherited *os.File
	size      int64 // of an inherited one
}

// NewRegion makes a region of size bytes, mapped and touched.
func NewRegion(size int64) (*Region, error) {
	r, err := newRegion("kvport-cache", size)
	if err != nil {
		return nil, fmt.Errorf("cache region of %d bytes: %w", size, err)
	}
	return r, nil
}

// newRegion makes a region under a name that shows in /proc.
func newRegion(name string, size int64) (*Region, error) {
	if err := fault.Point("host.region"); err != nil {
		return nil, err
	}
	mem, err := shm.Create(name, size)
	if err != nil {
		return nil, err
	}
	return &Region{mem: mem}, nil
}

// OpenRegion makes a region of a sealed memfd of size bytes that another process made. file is the
// region's own from now on, and closed on an error too. Errors wrap connector.ErrIncompatible where
// the file is not such memory.
func OpenRegion(file *os.File, size int64) (*Region, error) {
	mem, err := shm.Adopt(file, size)
	if errors.Is(err, shm.ErrIncompatible) {
		return nil, fmt.Errorf("cache region: %w: %w", err, connector.ErrIncompatible)
	}
	if err != nil {
		return nil, fmt.Errorf("cache region: %w", err)
	}
	return &Region{mem: mem}, nil
}

// Bytes is the whole region, in place. It must not be used after Close.
func (r *Region) Bytes() []byte {
	if r.mem == nil {
		return nil
	}
	return r.mem.Bytes()
}

// Size is the region's length in bytes.
func (r *Region) Size() int64 {
	if r.mem == nil {
		return r.size
	}
	return r.mem.Size()
}

// Close unmaps the region. Plugins that still run keep their own mapping.
func (r *Region) Close() error {
	if r.mem == nil {
		return nil // the descriptor is the process's
	}
	return r.mem.Close()
}

// file is the region's memfd; it stays the region's.
func (r *Region) file() *os.File {
	if r.mem == nil {
		return r.inherited
	}
	return r.mem.File()
}

// lentRegions are regions as a plugin process is given them.
func lentRegions(regions []*Region) []plugin.Region {
	lent := make([]plugin.Region, len(regions))
	for i, r := range regions {
		lent[i] = plugin.Region{File: r.file(), Size: r.Size()}
	}
	return lent
}

// inheritedRegions are those that a plugin has from its host, in the order of the ranks: sealed memory
// from the first descriptor on. They are not mapped.
func inheritedRegions() []*Region {
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	var out []*Region
	for fd := plugin.FirstRegionFD; ; fd++ {
		got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
		var st unix.Stat_t
		if err != nil || got&seals != seals || unix.Fstat(fd, &st) != nil {
			return out
		}
		out = append(out, &Region{inherited: os.NewFile(uintptr(fd), "region"), size: st.Size})
	}
}

// WithDigests adds room for the host's digests to a layout, one segment for each group, behind
// everything else in region 0. It returns the layout to serve and the size in bytes of the region
// that holds it.
func WithDigests(l connector.Layout) (connector.Layout, int64) {
	return digest.WithSegments(l, regionEnd(&l))
}

func regionEnd(l *connector.Layout) int64 {
	var end int64
	for _, s := range l.Segments {
		end = max(end, s.Offset+int64(l.Blocks-1)*s.BlockStride+s.Bytes)
	}
	return end
}
