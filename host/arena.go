package host

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/machine"
	"github.com/kvport/kvport/internal/shm"
)

// Arena is memory that a connector asked for with Info.ArenaBytes: a sealed memfd that the host
// keeps as long as the engine lives, so that every life of the plugin finds what the one before it
// wrote (rule ARENA-05). The plugin has its descriptor from its start, and learns its size when its
// sides open; until Fit an arena is empty and costs nothing, and until Fill or a first touch its pages take
// no memory.
type Arena struct {
	file *os.File

	size    atomic.Int64 // 0 until Fit
	mu      sync.Mutex
	mem     *shm.Region   // nil until Fit
	closing chan struct{} // closed by Close
	filling sync.WaitGroup
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
	return &Arena{file: file, closing: make(chan struct{})}, nil
}

// Fit gives the arena its size in bytes, zeroed. It is called once, and takes no memory yet.
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
	a.size.Store(size)
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
func (a *Arena) Size() int64 { return a.size.Load() }

// fillStep is how much of an arena is allocated in one go, in bytes: Close waits for one at most.
const fillStep = 16 << 20

// Fill allocates the arena's pages, from the first to the last, until Close. It tells what it has allocated
// after each step, and gives the first error: the memory is not there. What a plugin wrote meanwhile stays.
func (a *Arena) Fill(allocated func(bytes int64)) error {
	for at, size := int64(0), a.Size(); at < size; at += fillStep {
		if a.closed() {
			return nil
		}
		step, began := min(fillStep, size-at), time.Now()
		if err := a.allocate(at, step); err != nil {
			return fmt.Errorf("arena: %d of %d bytes are allocated: %w", at, size, err)
		}
		allocated(step)
		select { // a quarter of one processor at most: whatever else starts comes first
		case <-a.closing:
		case <-time.After(3 * time.Since(began)):
		}
	}
	return nil
}

// allocate gives a part of the arena its pages. Renew may come between two parts: the next one is of the new file.
func (a *Arena) allocate(from, size int64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := shm.Allocate(a.file, from, size); err != nil {
		return err
	}
	return a.mem.Populate(from, size)
}

// Close ends Fill and unmaps the arena. A plugin that still runs keeps its own mapping. It is called once.
func (a *Arena) Close() error {
	close(a.closing)
	a.filling.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	var err error
	if a.mem != nil {
		err = a.mem.Close()
	}
	return errors.Join(err, a.file.Close())
}

// lent is the arena as a plugin process is given it.
func (a *Arena) lent() *plugin.Arena {
	if a == nil {
		return nil
	}
	return &plugin.Arena{File: a.file, Bytes: a.Bytes}
}

// promised is the memory that arenas of one host may take and have not taken yet.
type promised struct {
	mu    sync.Mutex
	bytes int64
}

// free is what the machine has left. The caller holds mu.
func (p *promised) free() int64 { return max(0, machine.FreeMemory("/")-p.bytes) }

// take promises a connector an arena of that many bytes, if the config and the machine permit it. field is what asks for it.
func (p *promised) take(set *Settings, info *connector.Info, want int64) (field string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	field = cmp.Or(info.ArenaField, "the connector's config")
	if why := tooMuch(want, int64(set.ArenaLimit), p.free()); why != "" {
		return field, fmt.Errorf("%w: kv_connector_extra_config: %s: %s asks for an arena of %d bytes, %s", ErrConfig, field, info.Name, want, why)
	}
	p.bytes += want
	return field, nil
}

// tooMuch is why an arena of that many bytes is not permitted; empty: it is. limit is that of the config; 0: it names none. It is
// the plugin that says how much it needs, and the host that runs out of memory.
func tooMuch(want, limit, free int64) string {
	switch {
	case limit > 0 && want > limit && limit <= free:
		return fmt.Sprintf("kvport.arena_limit permits %d: ask for less or raise the limit", limit)
	case want > free:
		return fmt.Sprintf("this machine has free %d: ask for less or free some memory", free)
	case limit == 0 && want > free-free/8:
		return fmt.Sprintf("this machine has free %d, of which it may have seven eighths without kvport.arena_limit: ask for less or set the limit", free)
	}
	return ""
}

func (p *promised) kept(bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes -= bytes
}

// fitArena gives the connector the arena that it asks for, once in the life of the host, if the
// config and the machine permit it. It takes no memory yet, so it costs no time: see fillArena.
func (s *source) fitArena() error {
	want := s.info.ArenaSize(&s.eng.Layout, len(s.regions))
	if want == 0 {
		return nil
	}
	field, err := s.promised.take(&s.cfg.Settings, &s.info, want)
	if err != nil {
		return err
	}
	if err := s.arena.Fit(want); err != nil {
		return fmt.Errorf("%w: kv_connector_extra_config: %s: %s asks for an arena of %d bytes: %w", ErrConfig, field, s.info.Name, want, err)
	}
	if s.held != nil {
		s.held(want)
	}
	return nil
}

// fillArena allocates the arena in the background, after the start that must not wait for it: a page that
// is not there yet costs its first use some time, and a machine that runs out of memory says so here
// rather than in the middle of a transfer.
func (s *source) fillArena() {
	s.arena.filling.Go(func() {
		// It goes slowly instead of in a thread of low priority: such a thread would have to end with this goroutine,
		// and the kernel kills the children that a thread has started when it ends, if they asked for a death signal.
		began := time.Now()
		err := s.arena.Fill(func(n int64) {
			s.promised.kept(n)
			if s.filled != nil {
				s.filled(n)
			}
		})
		switch size := s.arena.Size(); {
		case err == nil && size > 0 && !s.arena.closed():
			s.log.Info("the connector's arena is allocated", "connector", s.info.Name, "bytes", size, "took", time.Since(began).Round(time.Millisecond))
		case err != nil:
			s.log.Error("the memory that a connector asked for is not there: give it less or the machine more",
				"connector", s.info.Name, "field", s.info.ArenaField, "error", err)
		}
	})
}

func (a *Arena) closed() bool {
	select {
	case <-a.closing:
		return true
	default:
		return false
	}
}

// arenaBytes is the memory that connectors have as arenas.
func (h *Host) arenaBytes() int64 {
	switch {
	case h.composite != nil:
		return h.composite.arenaBytes()
	case h.src == nil:
		return 0
	}
	return h.src.arena.Size()
}
