package plugin

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
)

// maxRings is how many sessions of one plugin process have rings. What is beyond goes over the stream.
const maxRings = 64

// Rings is memory through which the sessions of one plugin process exchange small messages, beside
// their streams (rule RING-01). It takes no room until sides open.
type Rings struct {
	file      *os.File
	bell      *shm.Bell
	bellEnd   *os.File // the plugin's
	mu        sync.Mutex
	taken     [maxRings]bool
	closed    bool
	open      int
	lastClose sync.Cond // open may have become 0
}

// NewRings makes memory for rings.
func NewRings() (_ *Rings, err error) {
	if err := fault.Point("host.rings"); err != nil {
		return nil, err
	}
	r := &Rings{}
	r.lastClose.L = &r.mu
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	if r.file, err = shm.NewRings("kvport-rings", maxRings); err != nil {
		return nil, err
	}
	var own *os.File
	if own, r.bellEnd, err = shm.NewBells(); err != nil {
		return nil, err
	}
	r.bell, err = shm.NewBell(int(own.Fd()))
	return r, errors.Join(err, own.Close())
}

// Close lets go of the memory. It waits for the sessions that use it, whose connection must have ended.
func (r *Rings) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	for r.open > 0 {
		r.lastClose.Wait()
	}
	var errs []error
	if r.bell != nil {
		errs = append(errs, r.bell.Close())
	}
	for _, f := range []*os.File{r.file, r.bellEnd} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// UseRings says that the sides that are opened from now on may have a ring. The plugin must run in
// this process or have inherited the rings under the same descriptor number.
func (r *Remote) UseRings(rings *Rings) {
	r.rings = ringsRef{rings, int(rings.file.Fd()), int(rings.bellEnd.Fd())}
}

// ringsRef are rings as a plugin knows them.
type ringsRef struct {
	rings *Rings // nil: none
	fd    int    // in the plugin
	bell  int    // in the plugin
}

// ring is the host's end of one session's rings.
type ring struct {
	*shm.RingEnd
	of   *Rings
	n    int
	wire *wire.Ring
}

func (r *ring) offset() int64 { return int64(r.n) * shm.RingArea }

// take gives a session a ring; nil where none is free, in which case the session uses the stream.
func (f *ringsRef) take() *ring {
	if f.rings == nil {
		return nil
	}
	f.rings.mu.Lock()
	defer f.rings.mu.Unlock()
	n := slices.Index(f.rings.taken[:], false)
	if n < 0 || f.rings.closed {
		return nil
	}
	r := &ring{of: f.rings, n: n}
	r.wire = &wire.Ring{FD: f.fd, Bell: f.bell, Offset: r.offset()}
	err := shm.AllocateRing(f.rings.file, r.offset())
	if err == nil {
		r.RingEnd, err = shm.NewRingEnd(int(f.rings.file.Fd()), r.offset(), true, f.rings.bell)
	}
	if err != nil {
		return nil
	}
	f.rings.taken[n] = true
	f.rings.open++
	return r
}

// end closes our end. If the plugin has closed its own the area can be used again; else it is lost until
// the process ends.
func (r *ring) end(both bool) error {
	err := r.Close()
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	if both {
		err = errors.Join(err, shm.FreeRing(r.of.file, r.offset()))
		r.of.taken[r.n] = false
	}
	r.of.open--
	r.of.lastClose.Broadcast()
	if err != nil {
		return fmt.Errorf("ring %d: %w", r.n, err)
	}
	return nil
}
