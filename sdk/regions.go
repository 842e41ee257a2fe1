package sdk

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
)

// regions maps each piece of shared memory once for all sessions of the process.
type regions struct {
	mu     sync.Mutex
	mapped map[fileID]*sharedRegion
}

// fileID identifies a memfd, because descriptor numbers are reused.
type fileID struct{ device, inode uint64 }

type sharedRegion struct {
	region *shm.Region
	refs   int
}

// arena maps the arena of a session. It returns nil if the session has none.
func (r *regions) arena(want wire.Region) (_ []byte, free func() error, err error) {
	if want.Size == 0 {
		return nil, func() error { return nil }, nil
	}
	views, free, err := r.acquire([]wire.Region{want}, mapArena)
	if err != nil {
		return nil, nil, fmt.Errorf("arena: %w", err)
	}
	return views[0], free, nil
}

// mapArena maps an arena, whose pages this process maps in the background as the host allocates them.
func mapArena(fd int, size int64) (*shm.Region, error) {
	region, err := shm.MapOnDemand(fd, size)
	if err != nil {
		return nil, err
	}
	region.Warm()
	return region, nil
}

// board maps the counters of SaveLayers and LoadLayers. It returns nil if the host has none. free waits until nobody reads
// them.
func (r *regions) board(want wire.Region) (_ *shm.BoardView, free func() error, err error) {
	if want.Size == 0 {
		return nil, func() error { return nil }, nil
	}
	views, unmap, err := r.acquire([]wire.Region{want}, shm.Map)
	if err != nil {
		return nil, func() error { return nil }, fmt.Errorf("progress: %w", err)
	}
	board, err := shm.ViewBoard(views[0])
	if err != nil {
		return nil, unmap, fmt.Errorf("progress: %w: %w", err, connector.ErrIncompatible)
	}
	return board, func() error {
		board.Close()
		return unmap()
	}, nil
}

// worker maps the regions of a worker side. Those that its layout does not name are for Reshape, and may never be used.
func (r *regions) worker(o *wire.Open) (views [][]byte, unmap func() error, err error) {
	named := 0
	for _, s := range o.Env.Layout.Segments {
		named = max(named, int(s.Region)+1)
	}
	views, unmapNamed, err := r.acquire(o.Regions[:named], shm.Map)
	if err != nil || named == len(o.Regions) {
		return views, unmapNamed, err
	}
	more, unmapMore, err := r.acquire(o.Regions[named:], shm.MapOnDemand)
	if err != nil {
		return nil, nil, errors.Join(err, unmapNamed())
	}
	return append(views, more...), func() error { return errors.Join(unmapMore(), unmapNamed()) }, nil
}

type mapper func(fd int, size int64) (*shm.Region, error)

// acquire maps all regions of a session, in order. free unmaps those that nobody else uses.
func (r *regions) acquire(want []wire.Region, mapIt mapper) (_ [][]byte, free func() error, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var ids []fileID
	free = func() error { return r.release(ids) }
	views := make([][]byte, 0, len(want))
	for i, w := range want {
		id, region, err := r.one(w, mapIt)
		if err != nil {
			r.mu.Unlock()
			err = errors.Join(fmt.Errorf("regions[%d]: %w", i, err), free())
			r.mu.Lock()
			return nil, nil, err
		}
		ids = append(ids, id)
		views = append(views, region.Bytes())
	}
	return views, free, nil
}

// one takes a reference on the region behind a descriptor, mapping it if it is new. The caller holds
// the lock.
func (r *regions) one(w wire.Region, mapIt mapper) (fileID, *shm.Region, error) {
	var st unix.Stat_t
	if err := unix.Fstat(w.FD, &st); err != nil {
		return fileID{}, nil, fmt.Errorf("fd %d: %w: %w", w.FD, os.NewSyscallError("fstat", err), connector.ErrIncompatible)
	}
	id := fileID{st.Dev, st.Ino}
	if shared := r.mapped[id]; shared != nil {
		if shared.region.Size() != w.Size {
			return id, nil, fmt.Errorf("fd %d has %d bytes instead of %d: %w", w.FD, shared.region.Size(), w.Size, connector.ErrIncompatible)
		}
		shared.refs++
		return id, shared.region, nil
	}
	if err := fault.Point("sdk.region.map"); err != nil {
		return id, nil, err
	}
	region, err := mapIt(w.FD, w.Size)
	fault.Crash("sdk.region.mapped")
	if errors.Is(err, shm.ErrIncompatible) {
		err = fmt.Errorf("%w: %w", err, connector.ErrIncompatible)
	}
	if err != nil {
		return id, nil, err
	}
	r.mapped[id] = &sharedRegion{region: region, refs: 1}
	return id, region, nil
}

func (r *regions) release(ids []fileID) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, id := range ids {
		shared := r.mapped[id]
		if shared.refs--; shared.refs == 0 {
			fault.Crash("sdk.region.unmap")
			delete(r.mapped, id)
			errs = append(errs, shared.region.Close())
		}
	}
	return errors.Join(errs...)
}
