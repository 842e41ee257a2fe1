package nixl

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/nixl"
)

// window is a second mapping of the cache, that loads are written to: by NIXL here, or by a producer that
// pushes. A writer that does not say that it has ended cannot be made to stop, but what it writes to can be
// taken away: revoke puts other memory over the pages of its blocks (ADR 125).
type window struct {
	rank     *rank
	areas    []alias
	memory   *nixl.Memory
	metadata []byte // of the agent, with this window

	// Guarded by rank.view.
	users   int
	retired bool                // for new loads there is another
	gone    map[uint64]struct{} // pages that were revoked
}

// alias is one area of the window.
type alias struct {
	of nixl.Region // in the cache
	to uint64      // the address here of its first page
}

// landGrace is how long after a revocation the kernel may go on with a copy that it had begun: one call of
// process_vm_writev looks pages up 4 MiB ahead.
const landGrace = 250 * time.Millisecond

// errNoWindow means that a cache cannot be mapped twice: it is not shared memory.
var errNoWindow = errors.New("the cache cannot be mapped a second time")

func pageSize() uint64 { return uint64(os.Getpagesize()) }

func pageOf(addr uint64) uint64 { return addr &^ (pageSize() - 1) }

// window is what loads go to now. The caller leaves it. Errors wrap errNoWindow.
func (r *rank) window() (*window, error) {
	r.view.Lock()
	defer r.view.Unlock()
	if r.now == nil {
		w, err := r.newWindow()
		if err != nil {
			return nil, err
		}
		r.now = w
	}
	r.now.users++
	return r.now, nil
}

// newWindow maps and registers a window.
func (r *rank) newWindow() (*window, error) {
	w := &window{rank: r, gone: map[uint64]struct{}{}}
	var regions []nixl.Region
	for _, a := range r.cache().areas {
		first, end := pageOf(a.Addr), pageOf(a.Addr+a.Len+pageSize()-1)
		// An old size of 0 makes another mapping of shared memory.
		to, _, errno := unix.Syscall6(unix.SYS_MREMAP, uintptr(first), 0, uintptr(end-first), unix.MREMAP_MAYMOVE, 0, 0)
		if errno != 0 {
			w.unmap()
			return nil, fmt.Errorf("%w: %w", errNoWindow, os.NewSyscallError("mremap", errno))
		}
		_, _, _ = unix.Syscall(unix.SYS_MADVISE, to, uintptr(end-first), unix.MADV_POPULATE_WRITE) // or page by page later
		w.areas = append(w.areas, alias{of: a, to: uint64(to)})
		regions = append(regions, w.at(a))
	}
	var err error
	if w.memory, err = r.agent.Register(r.backend, nixl.DRAM, regions...); err == nil {
		w.metadata, err = r.agent.Metadata()
	}
	if err != nil {
		w.unmap()
		return nil, fmt.Errorf("%w: %w", errNoWindow, err)
	}
	return w, nil
}

// unmap is for a window that nobody was told of.
func (w *window) unmap() {
	for _, a := range w.areas {
		_, _, _ = unix.Syscall(unix.SYS_MUNMAP, uintptr(a.to), uintptr(a.size()), 0)
	}
}

func (a *alias) size() uint64 { return pageOf(a.of.Addr+a.of.Len+pageSize()-1) - pageOf(a.of.Addr) }

// at is where a part of the cache is in the window.
func (w *window) at(in nixl.Region) nixl.Region {
	for _, a := range w.areas {
		if in.Addr >= a.of.Addr && in.Addr-a.of.Addr < a.of.Len {
			return nixl.Region{Addr: a.to + in.Addr - pageOf(a.of.Addr), Len: in.Len, Device: in.Device}
		}
	}
	return in // not of the cache: NIXL will say so
}

// revoke makes sure that whatever is written to regions of the window reaches no block: it returns when
// nobody can write them any more. The window is not used for loads that begin from now on.
func (w *window) revoke(regions []nixl.Region) error {
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
func (w *window) take(regions []nixl.Region) error {
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
func (w *window) touched(regions []nixl.Region) bool {
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

// retire has new loads use another window. The caller holds rank.view.
func (w *window) retire() {
	w.retired = true
	if w.rank.now == w {
		w.rank.now = nil
	}
}

// leave ends a use. A retired window that nobody uses is blank from then on: its addresses are not given to
// anything else, since a writer may still know them.
func (w *window) leave() {
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
		w.rank.env.Log.Error("a window stays", "error", err)
	}
}

// errRevoked is what a load ends with whose pages were taken for another's sake.
var errRevoked = fmt.Errorf("blocks beside it were taken from a writer that did not end: %w", connector.ErrGone)
