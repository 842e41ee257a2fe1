package nixl

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/nixl"
)

// aliasMapping is a second mapping of the cache, which loads are written to: by NIXL here, or by a producer that
// pushes. A writer that does not say that it has ended cannot be made to stop, but what it writes to can be
// taken away: revoke puts other memory over the pages of its blocks (record 125 in docs/adr).
type aliasMapping struct {
	rank     *rank
	areas    []aliasArea
	memory   *nixl.Memory
	metadata []byte // of the agent, with this mapping

	// Guarded by rank.view.
	users   int
	retired bool                // for new loads there is another
	gone    map[uint64]struct{} // pages that were revoked
}

// aliasArea is one area of the mapping.
type aliasArea struct {
	of nixl.Region // in the cache
	to uint64      // the address here of its first page
}

// landGrace is how long after a revocation the kernel may go on with a copy that it had begun: one call of
// process_vm_writev looks pages up 4 MiB ahead.
const landGrace = 250 * time.Millisecond

// errNoWindow means that a cache cannot be mapped twice: it is not shared memory.
var errNoAlias = errors.New("the cache cannot be mapped a second time")

func pageSize() uint64 { return uint64(os.Getpagesize()) }

func pageOf(addr uint64) uint64 { return addr &^ (pageSize() - 1) }

// aliasMapping is what loads go to now. The caller leaves it. Errors wrap errNoAlias.
func (r *rank) aliasMapping() (*aliasMapping, error) {
	r.view.Lock()
	defer r.view.Unlock()
	if r.now == nil {
		w, err := r.newAliasMapping()
		if err != nil {
			return nil, err
		}
		r.now = w
	}
	r.now.users++
	return r.now, nil
}

// newAliasMapping maps and registers a mapping.
func (r *rank) newAliasMapping() (*aliasMapping, error) {
	w := &aliasMapping{rank: r, gone: map[uint64]struct{}{}}
	var regions []nixl.Region
	var areas []nixl.Region
	if c := r.cache(); c != nil {
		areas = slices.Clone(c.areas)
	}
	sources := r.sources.Load()
	if sources != nil {
		areas = append(areas, *sources)
	}
	for _, a := range areas {
		first, end := pageOf(a.Addr), pageOf(a.Addr+a.Len+pageSize()-1)
		// An old size of 0 makes another mapping of shared memory.
		to, _, errno := unix.Syscall6(unix.SYS_MREMAP, uintptr(first), 0, uintptr(end-first), unix.MREMAP_MAYMOVE, 0, 0)
		if errno != 0 {
			w.unmap()
			return nil, fmt.Errorf("%w: %w", errNoAlias, os.NewSyscallError("mremap", errno))
		}
		if sources == nil || a != *sources { // of which most is never used
			_, _, _ = unix.Syscall(unix.SYS_MADVISE, to, uintptr(end-first), unix.MADV_POPULATE_WRITE) // or page by page later
		}
		w.areas = append(w.areas, aliasArea{of: a, to: uint64(to)})
		regions = append(regions, w.at(a))
	}
	var err error
	if w.memory, err = r.agent.Register(r.backend, nixl.DRAM, regions...); err == nil {
		w.metadata, err = r.agent.Metadata()
	}
	if err != nil {
		w.unmap()
		return nil, fmt.Errorf("%w: %w", errNoAlias, err)
	}
	return w, nil
}

// unmap is for a mapping whose address nobody was told.
func (w *aliasMapping) unmap() {
	for _, a := range w.areas {
		_, _, _ = unix.Syscall(unix.SYS_MUNMAP, uintptr(a.to), uintptr(a.size()), 0)
	}
}

func (a *aliasArea) size() uint64 { return pageOf(a.of.Addr+a.of.Len+pageSize()-1) - pageOf(a.of.Addr) }

// at is where a part of the cache is in the mapping.
func (w *aliasMapping) at(in nixl.Region) nixl.Region {
	for _, a := range w.areas {
		if in.Addr >= a.of.Addr && in.Addr-a.of.Addr < a.of.Len {
			return nixl.Region{Addr: a.to + in.Addr - pageOf(a.of.Addr), Len: in.Len, Device: in.Device}
		}
	}
	return in // not of the cache: NIXL will say so
}

// revoke makes sure that whatever is written to regions of the mapping reaches no block: it returns when
// nobody can write to them any longer. The mapping is not used for loads that begin from now on.
func (w *aliasMapping) revoke(regions []nixl.Region) error {
	w.rank.view.Lock()
	w.retire()
	err := w.take(regions)
	w.rank.view.Unlock()
	if err != nil {
		return err
	}
	timer := time.NewTimer(landGrace)
	defer timer.Stop()
	<-timer.C
	return nil
}

// take puts anonymous memory over the pages of regions. The caller holds rank.view.
func (w *aliasMapping) take(regions []nixl.Region) error {
	for _, r := range regions {
		for page := pageOf(r.Addr); page < r.Addr+r.Len; page += pageSize() {
			w.gone[page] = struct{}{}
		}
		first := pageOf(r.Addr)
		if err := blank(first, pageOf(r.Addr+r.Len+pageSize()-1)-first); err != nil {
			return err
		}
	}
	return nil
}

// blank replaces a part of a mapping: nothing that writes there fails, and nothing of it is seen.
func blank(addr, size uint64) error {
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, uintptr(addr), uintptr(size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_FIXED|unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE, ^uintptr(0), 0)
	if errno != 0 {
		return os.NewSyscallError("mmap", errno)
	}
	return nil
}

// touched says whether pages of regions were revoked for another load's sake. Blocks share pages only at
// their ends.
func (w *aliasMapping) touched(regions []nixl.Region) bool {
	w.rank.view.Lock()
	defer w.rank.view.Unlock()
	if len(w.gone) == 0 {
		return false
	}
	for _, r := range regions {
		_, first := w.gone[pageOf(r.Addr)]
		_, last := w.gone[pageOf(r.Addr+r.Len-1)]
		if first || last {
			return true
		}
	}
	return false
}

// retire has new loads use another mapping. The caller holds rank.view.
func (w *aliasMapping) retire() {
	w.retired = true
	if w.rank.now == w {
		w.rank.now = nil
	}
}

// leave ends a use. A retired mapping that nobody uses is blank from then on: its addresses are not given to
// anything else, since a writer may still know them.
func (w *aliasMapping) leave() {
	w.rank.view.Lock()
	defer w.rank.view.Unlock()
	w.users--
	if !w.retired || w.users > 0 {
		return
	}
	err := w.memory.Close()
	for _, a := range w.areas {
		err = errors.Join(err, blank(a.to, a.size()))
	}
	if err != nil {
		w.rank.env.Log.Error("a mapping of the cache stays", "error", err)
	}
}

// errRevoked is what a load ends with whose pages were taken for another's sake.
var errRevoked = fmt.Errorf("blocks beside it were taken from a writer that did not end: %w", connector.ErrGone)
