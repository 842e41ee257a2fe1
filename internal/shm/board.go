package shm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A board is shared memory in which one process says how far several things have come, and another
// waits for it: counters, and a bell that is rung after each change. Only the process that made it hands
// counters out. Either end may count with one, as both have agreed. The process that made the board reads
// back only the counters that the other one counts with, and believes nothing else of them.

// BoardSlots is how many counters a board has.
const BoardSlots = 1024

// boardCounters is where the counters begin, behind the bell and in other cache lines.
const boardCounters = 64

// BoardBytes is the size of a board.
const BoardBytes = boardCounters + 8*BoardSlots

// GivenUp is the count of what will not go on.
const GivenUp = 1<<32 - 1

// ErrNotMine says that a counter is in use for something else: what it counted is over.
var ErrNotMine = errors.New("the counter is another's by now")

// ring wakes everybody who waits for the bell of a board.
func ring(mem []byte) {
	bell := (*uint32)(unsafe.Pointer(unsafe.SliceData(mem)))
	atomic.AddUint32(bell, 1)
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(bell)), futexWake, 1<<30, 0, 0, 0)
}

// The operations of the futex system call, shared between processes.
const futexWait, futexWake = 0, 1

func counterOf(mem []byte, slot int) *uint64 {
	return (*uint64)(unsafe.Pointer(&mem[boardCounters+8*slot]))
}

// Board is the end of a board that writes. Its methods are safe for concurrent use.
type Board struct {
	region *Region

	mu     sync.Mutex
	closed bool
	last   uint32
	free   []int
	view   *BoardView
	waits  sync.WaitGroup
	quit   chan struct{} // closed with the board
}

// NewBoard makes a board.
func NewBoard() (*Board, error) {
	region, err := Create("kvport-progress", BoardBytes)
	if err != nil {
		return nil, err
	}
	view, err := ViewBoard(region.Bytes())
	if err != nil {
		return nil, errors.Join(err, region.Close())
	}
	b := &Board{region: region, view: view, quit: make(chan struct{})}
	for slot := range BoardSlots {
		b.free = append(b.free, BoardSlots-1-slot)
	}
	return b, nil
}

// Region is the board's memory, to hand to the process that waits.
func (b *Board) Region() *Region { return b.region }

// Counter is one counter of a board while it is in use.
type Counter struct {
	Slot int    // where it is
	Call uint32 // which use of the slot this is; never 0

	board *Board
}

// Take takes a counter, at 0; false when all are in use or the board is closed.
func (b *Board) Take() (*Counter, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || len(b.free) == 0 {
		return nil, false
	}
	if b.last++; b.last == 0 {
		b.last++
	}
	c := &Counter{Slot: b.free[len(b.free)-1], Call: b.last, board: b}
	b.free = b.free[:len(b.free)-1]
	c.store(uint64(c.Call) << 32)
	return c, true
}

func (c *Counter) store(v uint64) {
	mem := c.board.region.Bytes()
	atomic.StoreUint64(counterOf(mem, c.Slot), v)
	ring(mem)
}

// Set changes the count. It never blocks.
func (c *Counter) Set(n uint32) {
	c.board.mu.Lock()
	defer c.board.mu.Unlock()
	if !c.board.closed {
		c.store(uint64(c.Call)<<32 | uint64(n))
	}
}

// Wait waits until the other process has set the counter above seen and gives its count. ErrNotMine: the counter
// holds something else, or the board is closed. Otherwise the error is that of ctx.
func (c *Counter) Wait(ctx context.Context, seen uint32) (uint32, error) {
	b := c.board
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return 0, ErrNotMine
	}
	b.waits.Add(1)
	b.mu.Unlock()
	defer b.waits.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	over := make(chan struct{})
	defer close(over)
	go func() {
		select {
		case <-b.quit:
			cancel()
		case <-over:
		}
	}()
	return b.view.Wait(ctx, c.Slot, c.Call, seen)
}

// Give gives the counter back. It is not to be used any more.
func (c *Counter) Give() {
	c.board.mu.Lock()
	defer c.board.mu.Unlock()
	if !c.board.closed {
		c.store(0)
		c.board.free = append(c.board.free, c.Slot)
	}
}

// Close unmaps the board. Counters that are in use do nothing from then on.
func (b *Board) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	close(b.quit)
	b.waits.Wait()
	b.view.Close()
	return b.region.Close()
}

// BoardView is the end of a board that gets counters. However many wait, one thread does so in the kernel,
// and only while somebody waits.
type BoardView struct {
	mem []byte

	mu      sync.Mutex
	waiting int
	inVain  int // bells since a wait has ended
	watched bool
	changed chan struct{} // closed when the bell was rung
	idle    chan struct{} // closed when the watching goroutine has ended; nil while there is none

	rest func() // after a bell that is one too many; tests have their own
}

// A bell is rung for one counter and wakes all who wait for one of the board, so some are for nobody. But a peer that rings for
// nobody without end must not keep a processor busy: after spareBells of them in a row there is a pause before the next one
// is heard.
const (
	spareBells = 64
	bellPause  = time.Millisecond
)

// ViewBoard makes the waiting end of a board that is mapped at mem, which must outlive it. It refuses
// memory of another size with ErrIncompatible.
func ViewBoard(mem []byte) (*BoardView, error) {
	if len(mem) != BoardBytes {
		return nil, fmt.Errorf("board of %d bytes, want %d: %w", len(mem), BoardBytes, ErrIncompatible)
	}
	return &BoardView{mem: mem, changed: make(chan struct{}), rest: func() { <-time.After(bellPause) }}, nil
}

// Wait waits until a counter is above seen and gives its count. ErrNotMine: call is over. Otherwise the
// error is that of ctx. Errors of the arguments wrap ErrIncompatible.
func (v *BoardView) Wait(ctx context.Context, slot int, call, seen uint32) (uint32, error) {
	if slot < 0 || slot >= BoardSlots || call == 0 {
		return 0, fmt.Errorf("counter %d of call %d, a board has %d: %w", slot, call, BoardSlots, ErrIncompatible)
	}
	v.enter()
	defer v.leave()
	for {
		changed := v.bell() // before the look, so that no change is missed between the two
		now := atomic.LoadUint64(counterOf(v.mem, slot))
		switch {
		case uint32(now>>32) != call:
			return 0, ErrNotMine
		case uint32(now) > seen:
			return uint32(now), nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// Set changes the count of a counter that belongs to call; it does nothing if the counter is another's. It never blocks.
func (v *BoardView) Set(slot int, call, n uint32) {
	if slot < 0 || slot >= BoardSlots || call == 0 {
		return
	}
	at := counterOf(v.mem, slot)
	for {
		old := atomic.LoadUint64(at)
		if uint32(old>>32) != call {
			return
		}
		if atomic.CompareAndSwapUint64(at, old, uint64(call)<<32|uint64(n)) {
			ring(v.mem)
			return
		}
	}
}

func (v *BoardView) bell() <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.changed
}

func (v *BoardView) enter() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.waiting++
	if !v.watched {
		v.watched, v.idle = true, make(chan struct{})
		go v.watch(v.idle)
	}
}

func (v *BoardView) leave() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.inVain = 0
	if v.waiting--; v.waiting == 0 {
		ring(v.mem)
	}
}

// rung counts a bell.
func (v *BoardView) rung() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.inVain++
}

// watch passes the bell on to all who wait, until nobody does.
func (v *BoardView) watch(idle chan struct{}) {
	defer close(idle)
	bell := (*uint32)(unsafe.Pointer(unsafe.SliceData(v.mem)))
	// The bell cannot be missed, but a peer that broke it must cost no more than this.
	patience := unix.NsecToTimespec(int64(100 * time.Millisecond))
	for {
		heard := atomic.LoadUint32(bell)
		v.mu.Lock()
		close(v.changed)
		v.changed = make(chan struct{})
		if v.waiting == 0 {
			v.watched = false
			v.mu.Unlock()
			return
		}
		tired := v.inVain > spareBells
		v.mu.Unlock()
		if tired {
			v.rest()
		}
		_, _, errno := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(bell)), futexWait, uintptr(heard), uintptr(unsafe.Pointer(&patience)), 0, 0)
		if errno != unix.ETIMEDOUT {
			v.rung()
		}
	}
}

// Close waits until nothing looks at the memory any more. No Wait may be running.
func (v *BoardView) Close() {
	v.mu.Lock()
	idle := v.idle
	v.mu.Unlock()
	if idle != nil {
		<-idle
	}
}
