package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A RingArea is the memory of two rings of frames, one for each direction between two processes: a page
// of counters, then the slots of either ring.
const (
	RingSlots = 64   // frames that one direction holds
	ringSlot  = 4096 // bytes of a slot: 8 for the frame's length, then the frame
	RingFrame = ringSlot - slotHeader
	RingArea  = 4096 + 2*RingSlots*ringSlot

	slotHeader = 8
	ringCounts = 4096 / 2 // bytes between the counters of the two rings
)

// ErrRing says that the other end of a ring wrote what no end of ours writes.
var ErrRing = errors.New("the other end broke the ring")

// counts are what the ends of one direction tell each other, each on a cache line of its own. An end
// also keeps its own counter and never reads it from here.
type counts struct {
	tail  atomic.Uint32 // frames sent
	_     [60]byte
	head  atomic.Uint32 // frames received
	_     [60]byte
	state atomic.Uint32 // asleep: the receiver must be woken
	_     [60]byte
}

// asleep is the counts.state of a receiver that sleeps, or is about to.
const asleep = 1

// RingEnd is one process's end of a pair of rings. What the other end writes is trusted in nothing: a
// frame is copied before anybody looks at it, and a counter or length that cannot be is ErrRing.
type RingEnd struct {
	bell  *Bell
	unmap func() error

	sending sync.Mutex
	out     *counts
	outMem  []byte
	sent    uint32
	over    bool // guarded by sending: closed or broken

	receiving sync.Mutex // held while frames are taken
	in        *counts
	inMem     []byte
	take      func(frame []byte) // nil until Start, and when the end is closed or broken
	failed    func(error)
	frame     [RingFrame]byte // private copy
	received  atomic.Uint32   // written under receiving

	polling sync.Mutex  // held by whoever polls, and in the end by Close
	owed    atomic.Bool // the bell left it to whoever holds polling to be idle
	closing atomic.Bool
}

// NewRingEnd maps the area of fd that begins at offset, a multiple of the page size. One end is first,
// the other is not. The descriptor stays the caller's; the bell must outlive the end. ErrIncompatible says
// that it is no sealed memory with such an area.
func NewRingEnd(fd int, offset int64, first bool, bell *Bell) (*RingEnd, error) {
	if offset < 0 || offset%int64(os.Getpagesize()) != 0 {
		return nil, fmt.Errorf("ring at %d: no multiple of a page: %w", offset, ErrIncompatible)
	}
	size, err := sealedSize(fd)
	if err != nil {
		return nil, fmt.Errorf("ring of %w", err)
	}
	if offset > size-RingArea {
		return nil, fmt.Errorf("ring of fd %d: %d bytes at %d of %d: %w", fd, RingArea, offset, size, ErrIncompatible)
	}
	mem, err := unix.Mmap(fd, offset, RingArea, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("ring of fd %d: %w", fd, os.NewSyscallError("mmap", err))
	}
	e := newRingEnd(mem, first)
	e.bell = bell
	e.unmap = func() error { return os.NewSyscallError("munmap", unix.Munmap(mem)) }
	return e, nil
}

// newRingEnd makes an end of memory of RingArea bytes, at an address that suits the counters.
func newRingEnd(mem []byte, first bool) *RingEnd {
	at := func(i int) (*counts, []byte) {
		const slots = RingSlots * ringSlot
		from := 2*ringCounts + i*slots
		return (*counts)(unsafe.Pointer(&mem[i*ringCounts])), mem[from : from+slots : from+slots]
	}
	e := &RingEnd{unmap: func() error { return nil }}
	e.out, e.outMem = at(0)
	e.in, e.inMem = at(1)
	if !first {
		e.out, e.in, e.outMem, e.inMem = e.in, e.out, e.inMem, e.outMem
	}
	return e
}

func slot(mem []byte, n uint32) []byte {
	at := int(n%RingSlots) * ringSlot
	return mem[at : at+ringSlot : at+ringSlot]
}

// Send lets fill append a frame of n bytes to the empty slice that it is given, in the ring itself, and
// wakes the other end if that sleeps. It never waits: false means that there is no room, now or ever, that
// the end was closed or that fill failed. ErrRing is final.
func (e *RingEnd) Send(n int, fill func(to []byte) ([]byte, error)) (bool, error) {
	if n > RingFrame {
		return false, nil
	}
	e.sending.Lock()
	defer e.sending.Unlock()
	if e.over {
		return false, nil
	}
	switch used := e.sent - e.out.head.Load(); {
	case used > RingSlots:
		e.over = true
		return false, fmt.Errorf("%d frames of %d are unread: %w", used, RingSlots, ErrRing)
	case used == RingSlots:
		return false, nil
	}
	to := slot(e.outMem, e.sent)
	frame, err := fill(to[slotHeader:slotHeader])
	if err != nil || len(frame) != n {
		return false, nil // whoever sends it in another way meets the error there
	}
	binary.NativeEndian.PutUint32(to, uint32(n))
	e.sent++
	e.out.tail.Store(e.sent)
	if e.out.state.Load() == asleep && e.out.state.CompareAndSwap(asleep, 0) {
		e.bell.ring()
	}
	return true, nil
}

// Start begins to receive: take gets every frame, one after the other, and must neither wait nor keep it.
// failed gets ErrRing if the other end breaks the ring, after which nothing is received.
func (e *RingEnd) Start(take func(frame []byte), failed func(error)) {
	e.receiving.Lock()
	e.take, e.failed = take, failed
	e.receiving.Unlock()
	e.bell.add(e)
}

// next copies the oldest frame out of the ring; nil if there is none. The caller holds receiving.
func (e *RingEnd) next() ([]byte, error) {
	received := e.received.Load()
	switch there := e.in.tail.Load() - received; {
	case there == 0:
		return nil, nil
	case there > RingSlots:
		return nil, fmt.Errorf("%d frames in %d slots: %w", there, RingSlots, ErrRing)
	}
	from := slot(e.inMem, received)
	n := binary.NativeEndian.Uint32(from)
	if n > RingFrame {
		return nil, fmt.Errorf("a frame of %d bytes, limit %d: %w", n, RingFrame, ErrRing)
	}
	frame := e.frame[:n]
	copy(frame, from[slotHeader:])
	e.received.Store(received + 1)
	e.in.head.Store(received + 1)
	return frame, nil
}

// none reports that no frame is there.
func (e *RingEnd) none() bool { return e.in.tail.Load() == e.received.Load() }

// drain takes all frames that are there, and counts them.
func (e *RingEnd) drain() (n int) {
	e.receiving.Lock()
	defer e.receiving.Unlock()
	for e.take != nil {
		frame, err := e.next()
		if err != nil {
			e.take = nil
			e.failed(err)
		}
		if frame == nil {
			break
		}
		e.take(frame)
		n++
	}
	return n
}

// idle says that nobody looks for frames from now on: the other end has to ring. It reports whether
// that is so; if not, a frame came in the meantime.
func (e *RingEnd) idle() bool {
	e.receiving.Lock()
	defer e.receiving.Unlock()
	if e.take == nil {
		return true
	}
	e.in.state.Store(asleep)
	return e.none()
}

// rest is idle unless somebody polls, who will see to it.
func (e *RingEnd) rest() bool {
	if !e.polling.TryLock() {
		e.owed.Store(true)
		if !e.polling.TryLock() { // it is held, so whoever holds it has not looked at owed yet
			return true
		}
	}
	defer e.polling.Unlock()
	return e.idle()
}

// Poll takes frames in the place of the bell, which spares both ends system calls, until done or limit has
// passed. It keeps a core busy: only what is expected any moment is worth it. If somebody else polls
// already it returns at once.
func (e *RingEnd) Poll(limit time.Duration, done func() bool) {
	const checks = 64 // between looks at the clock
	if !e.polling.TryLock() {
		return
	}
	e.in.state.Store(0)
	for begin := time.Now(); !done() && !e.closing.Load(); {
		for i := 0; i < checks && e.none(); i++ {
			continue
		}
		if e.drain() == 0 && time.Since(begin) > limit {
			break
		}
	}
	e.leave()
}

// leave ends the polling, and says that the other end has to ring. If the bell rang after that and before the lock
// was free, it has left it to this end to say so again.
func (e *RingEnd) leave() {
	for !e.idle() {
		e.drain()
	}
	e.polling.Unlock()
	for e.owed.Swap(false) {
		for !e.rest() {
			e.drain()
		}
	}
}

// Close takes what was received and not taken yet, ends the receiving and unmaps the memory. Nothing is
// sent afterwards. It must be called once, and not by take or failed.
func (e *RingEnd) Close() error {
	e.sending.Lock()
	e.over = true
	e.sending.Unlock()
	e.closing.Store(true)
	e.polling.Lock() // for good
	e.drain()
	e.receiving.Lock()
	e.take = nil
	e.receiving.Unlock()
	if e.bell != nil {
		e.bell.remove(e)
	}
	return e.unmap()
}

// NewRings makes sealed memory for n areas, of which none is allocated yet.
func NewRings(name string, n int) (*os.File, error) {
	file, err := Reserve(name)
	if err != nil {
		return nil, err
	}
	err = unix.Ftruncate(int(file.Fd()), int64(n)*RingArea)
	if err == nil {
		_, err = unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("shared memory %q for %d rings: %w", name, n, err), file.Close())
	}
	return file, nil
}

// AllocateRing gives an area its memory, so that a lack of it is an error here and not a SIGBUS later.
func AllocateRing(file *os.File, offset int64) error {
	return Allocate(file, offset, RingArea)
}

// FreeRing takes the memory of an area away, which is zeros from then on.
func FreeRing(file *os.File, offset int64) error {
	const hole = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	err := retry(func() error { return unix.Fallocate(int(file.Fd()), hole, offset, RingArea) })
	return os.NewSyscallError("fallocate", err)
}
