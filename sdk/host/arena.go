package host

import (
	"bufio"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
)

// Arena is memory that a connector asked for with Info.ArenaBytes: a sealed memfd that the host
// keeps as long as the engine lives, so that every life of the plugin finds what the one before it
// wrote (rule ARENA-05). The plugin has its descriptor from its start, and learns its size when its
// sides open; until Fit an arena is empty and costs nothing.
type Arena struct {
	file *os.File

	mu  sync.Mutex
	mem *shm.Region // nil until Fit
}

// NewArena makes an arena without a size.
func NewArena() (*Arena, error) {
	if err := fault.Point("host.arena"); err != nil {
		return nil, err
	}
	file, err := shm.Reserve("kvport-arena")
	if err != nil {
		return nil, err
	}
	return &Arena{file: file}, nil
}

// Fit gives the arena its size in bytes, zeroed and allocated. It is called once.
func (a *Arena) Fit(size int64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mem != nil {
		return errors.New("arena: it has its size already")
	}
	mem, err := shm.Fit(a.file, size)
	if err != nil {
		return fmt.Errorf("arena: %w", err)
	}
	a.mem = mem
	return nil
}

// Bytes is the arena as this process sees it; nil before Fit. It must not be used after Close.
func (a *Arena) Bytes() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mem == nil {
		return nil
	}
	return a.mem.Bytes()
}

// Size is the arena's length in bytes; 0 before Fit.
func (a *Arena) Size() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mem == nil {
		return 0
	}
	return a.mem.Size()
}

// Close unmaps the arena. A plugin that still runs keeps its own mapping.
func (a *Arena) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var err error
	if a.mem != nil {
		err = a.mem.Close()
	}
	return errors.Join(err, a.file.Close())
}

// arenaRef is an arena as a plugin knows it.
type arenaRef struct {
	arena *Arena // nil: none
	fd    int    // in the plugin
}

// region is what an Open says of the memory that a side is to have as Env.Arena: that of the arena,
// or none. Any other memory the plugin could not reach.
func (r *arenaRef) region(want []byte) (wire.Region, error) {
	if len(want) == 0 {
		return wire.Region{}, nil
	}
	if r.arena == nil || unsafe.SliceData(want) != unsafe.SliceData(r.arena.Bytes()) {
		return wire.Region{}, fmt.Errorf("arena: its memory is not this plugin's Arena: %w", connector.ErrIncompatible)
	}
	return wire.Region{FD: r.fd, Size: int64(len(want))}, nil
}

// UseArena says which arena Env.Arena is of in the sides that are opened from now on. The plugin
// must run in this process or have inherited the arena under the same descriptor number.
func (r *Remote) UseArena(a *Arena) { r.arena = arenaRef{a, int(a.file.Fd())} }

// fitArena gives the connector the arena that it asks for, once in the life of the host, if the
// config and the machine permit it.
func (s *source) fitArena() error {
	want := s.info.ArenaSize(&s.eng.Layout, len(s.regions))
	if want == 0 {
		return nil
	}
	limit, of := int64(s.cfg.Settings.ArenaLimit), "kvport.arena_limit permits"
	if free := availableMemory("/"); limit == 0 || free < limit {
		limit, of = free, "this machine has free"
	}
	if want > limit {
		return fmt.Errorf("%w: kv_connector_extra_config: %s asks for an arena of %d bytes, %s %d", ErrConfig, s.info.Name, want, of, limit)
	}
	if err := s.arena.Fit(want); err != nil {
		return fmt.Errorf("%w: kv_connector_extra_config: %s asks for an arena of %d bytes: %w", ErrConfig, s.info.Name, want, err)
	}
	if s.held != nil {
		s.held(want)
	}
	return nil
}

// arenaBytes is the memory that connectors have as arenas.
func (h *Host) arenaBytes() int64 {
	if h.family != nil {
		return h.family.arenaBytes()
	}
	return h.src.arena.Size()
}

// availableMemory is how much memory can still be allocated without swapping, in bytes, also by the
// limit of our control group; MaxInt64 where the kernel does not say. root is "/" but in tests.
func availableMemory(root string) int64 {
	free := int64(math.MaxInt64)
	if f, err := os.Open(root + "proc/meminfo"); err == nil {
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			fields := strings.Fields(lines.Text())
			if len(fields) < 2 || fields[0] != "MemAvailable:" {
				continue
			}
			if kib, err := strconv.ParseInt(fields[1], 10, 53); err == nil {
				free = kib << 10
			}
		}
	}
	limit, hasLimit := readNumber(root + "sys/fs/cgroup/memory.max")
	used, hasUsed := readNumber(root + "sys/fs/cgroup/memory.current")
	if hasLimit && hasUsed {
		free = min(free, max(0, limit-used))
	}
	return free
}

// readNumber reads a file that holds one number; false if it does not ("max": no limit).
func readNumber(path string) (int64, bool) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	return n, err == nil
}
