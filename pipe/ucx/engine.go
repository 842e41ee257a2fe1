package ucx

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	native "github.com/kvport/kvport/native/ucx"
	"github.com/kvport/kvport/pipe/internal/staged"
)

// grace is how long landing memory stays unused if a peer may still write to it.
const grace = 10 * time.Second

// engine is shared by the links of one network: it has a worker, the goroutine that lets the worker make
// progress, and memory for links.
type engine struct {
	worker  *native.Worker
	address []byte
	room    staged.Room
	links   sync.WaitGroup
	stop    int // eventfd that wakes the progress goroutine
	stopped chan struct{}

	mu     sync.Mutex
	spare  []*slab
	all    []*slab
	closed bool
}

// slab is the memory of one link: slots to send from, and slots into which the peer writes its pieces.
type slab struct {
	bytes  []byte // from mmap, so its address never changes
	memory *native.Memory
	key    []byte
	rests  bool // a peer may still write to it, so it is never unmapped
}

func (s *slab) address() uint64 { return s.memory.Addr() }

func newEngine(lib *native.Library, o native.Options, room staged.Room) (_ *engine, err error) {
	worker, err := lib.NewWorker(o)
	if err != nil {
		return nil, err
	}
	e := &engine{worker: worker, room: room, stopped: make(chan struct{}), stop: -1}
	e.address, err = worker.Address()
	var fd int
	if err == nil {
		fd, err = worker.FD()
	}
	if err == nil {
		e.stop, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ucx: %w", err), worker.Close())
	}
	go func() {
		defer close(e.stopped)
		progress(worker, fd, e.stop)
	}()
	return e, nil
}

// busyPause is how long progress waits, in milliseconds, where UCX says that there is something to do and does nothing.
const busyPause = 1

// progressRounds is how often progress lets UCX work before it looks whether it must stop. After the death of a
// peer UCX may say forever that it did something.
const progressRounds = 1024

// progresser is what progress needs of a worker.
type progresser interface {
	Progress() (some bool, err error)
	Arm() (armed bool, err error)
}

// progress lets UCX work whenever it has something to do, until stop, an eventfd, is written to. fd is the worker's.
func progress(worker progresser, fd, stop int) {
	wake := []unix.PollFd{{Fd: int32(stop), Events: unix.POLLIN}, {Fd: int32(fd), Events: unix.POLLIN}}
	for {
		rounds := 0
		for some := true; some && rounds < progressRounds; rounds++ {
			var err error
			if some, err = worker.Progress(); err != nil {
				return
			}
		}
		armed, err := false, error(nil)
		if rounds < progressRounds {
			armed, err = worker.Arm()
		}
		if err != nil {
			return
		}
		on, wait := wake, 1000
		if !armed {
			// After the death of a peer that shared memory with it, UCX may refuse for good: it has something to
			// do that it never does.
			on, wait = wake[:1], 0
			if rounds == 1 {
				wait = busyPause
			}
		}
		if _, err := unix.Poll(on, wait); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		if wake[0].Revents != 0 {
			return
		}
	}
}

// half is the size of the part to send from, and of the landing part.
func (e *engine) half() int { return e.room.Piece * e.room.Slots }

// take returns memory for a link.
func (e *engine) take() (*slab, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, native.ErrClosed
	}
	if n := len(e.spare); n > 0 {
		s := e.spare[n-1]
		e.spare = e.spare[:n-1]
		return s, nil
	}
	b, err := unix.Mmap(-1, 0, 2*e.half(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("memory for a link: %w", err)
	}
	s := &slab{bytes: b}
	if s.memory, err = e.worker.Map(b); err == nil {
		s.key, err = s.memory.Key()
	}
	if err != nil {
		if s.memory != nil {
			err = errors.Join(err, s.memory.Close())
		}
		return nil, errors.Join(err, unix.Munmap(b))
	}
	e.all = append(e.all, s)
	return s, nil
}

// give takes memory back, after a pause if a peer may still write to it.
func (e *engine) give(s *slab, clean bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if clean {
		e.spare = append(e.spare, s)
		return
	}
	s.rests = true
	time.AfterFunc(grace, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		s.rests = false
		e.spare = append(e.spare, s)
	})
}

// close ends the engine after its links have ended.
func (e *engine) close() error {
	e.links.Wait()
	var err error
	if _, werr := unix.Write(e.stop, []byte{1, 0, 0, 0, 0, 0, 0, 0}); werr != nil {
		err = fmt.Errorf("ucx: wake: %w", werr)
	}
	<-e.stopped
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	err = errors.Join(err, e.worker.Close(), unix.Close(e.stop))
	for _, s := range e.all {
		if !s.rests {
			err = errors.Join(err, unix.Munmap(s.bytes))
		}
	}
	e.all, e.spare = nil, nil
	return err
}

// mover moves the payload of one link.
type mover struct {
	engine   *engine
	slab     *slab
	patience time.Duration
	peer     *hello
	endpoint *native.Endpoint // nil until the first Put, because UCX does not cope well with endpoints that end right after they begin
	key      *native.Key
}

// mover takes memory for a link, which Free gives back.
func (e *engine) mover(patience time.Duration) (*mover, error) {
	s, err := e.take()
	if err != nil {
		return nil, err
	}
	e.links.Add(1)
	return &mover{engine: e, slab: s, patience: patience}, nil
}

func (m *mover) connect() (err error) {
	if m.endpoint != nil {
		return nil
	}
	if m.endpoint, err = m.engine.worker.Connect(m.peer.worker); err == nil {
		m.key, err = m.endpoint.Unpack(m.peer.key)
	}
	return err
}

// Slot implements staged.Mover.
func (m *mover) Slot(i int) []byte {
	return m.slab.bytes[i*m.engine.room.Piece : (i+1)*m.engine.room.Piece]
}

// Put implements staged.Mover. It returns when the bytes are in the peer's memory.
func (m *mover) Put(ctx context.Context, i, n int) error {
	ctx, cancel := context.WithTimeout(ctx, m.patience)
	defer cancel()
	if err := m.connect(); err != nil {
		return err
	}
	r, err := m.endpoint.Put(m.Slot(i)[:n], m.slab.memory, m.peer.landing+uint64(i*m.engine.room.Piece), m.key)
	if err == nil {
		err = r.Wait(ctx)
	}
	if err == nil {
		r, err = m.endpoint.Flush()
	}
	if err == nil {
		err = r.Wait(ctx)
	}
	return err
}

// Take implements staged.Mover.
func (m *mover) Take(_ context.Context, i, n int) ([]byte, error) {
	at := m.engine.half() + i*m.engine.room.Piece
	return m.slab.bytes[at : at+n], nil
}

// Free implements staged.Mover.
func (m *mover) Free(clean bool) error {
	var err error
	if m.endpoint != nil {
		err = m.endpoint.Close()
	}
	m.engine.give(m.slab, clean)
	return err
}
