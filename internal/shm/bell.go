package shm

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Bell wakes one process when there are frames in any of its rings with another process. It is a socket,
// on which a sleeping process is sent a byte: Go's poller waits for many of them without a thread of its own,
// where a futex would hold a thread and, until the runtime notices, one of its processors (ADR 116).
type Bell struct {
	file *os.File
	conn syscall.RawConn
	fd   int
	one  [1]byte // what is sent
	done chan struct{}

	mu   sync.Mutex
	ends []*RingEnd // replaced, never changed
}

// NewBells makes the two ends of a bell.
func NewBells() (a, b *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(fds[0]), "bell"), os.NewFile(uintptr(fds[1]), "bell"), nil
}

// NewBell waits at one end of a bell, by a descriptor of its own. ErrIncompatible says that it is none.
func NewBell(fd int) (*Bell, error) {
	if kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err != nil || kind != unix.AF_UNIX {
		return nil, fmt.Errorf("bell of fd %d is no socket (%w): %w", fd, err, ErrIncompatible)
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("bell of fd %d: %w", fd, os.NewSyscallError("fcntl", err))
	}
	if err := unix.SetNonblock(own, true); err != nil {
		return nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(own))
	}
	file := os.NewFile(uintptr(own), "bell")
	conn, err := file.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	b := &Bell{file: file, conn: conn, fd: own, done: make(chan struct{})}
	go b.serve()
	return b, nil
}

// Close ends the waiting. The ends that use the bell must be closed.
func (b *Bell) Close() error {
	err := b.file.Close() // wakes serve
	<-b.done
	return err
}

func (b *Bell) add(e *RingEnd) {
	b.mu.Lock()
	b.ends = append(slices.Clone(b.ends), e)
	b.mu.Unlock()
	for !e.idle() { // the bell may not have rung for what came before
		e.drain()
	}
}

func (b *Bell) remove(e *RingEnd) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ends = slices.DeleteFunc(slices.Clone(b.ends), func(o *RingEnd) bool { return o == e })
}

// ring wakes the other process. If the socket is full it has enough to wake up for.
func (b *Bell) ring() {
	_ = unix.Send(b.fd, b.one[:], unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

// serve takes the frames of all rings whenever the bell rings.
func (b *Bell) serve() {
	defer close(b.done)
	var rung [64]byte
	_ = b.conn.Read(func(fd uintptr) bool {
		for {
			n, _, err := unix.Recvfrom(int(fd), rung[:], unix.MSG_DONTWAIT)
			for b.drain() {
				// Whoever was handed a frame runs first, on this thread: it is awake.
				runtime.Gosched()
			}
			switch {
			case n == len(rung) || errors.Is(err, unix.EINTR):
			case n > 0 || errors.Is(err, unix.EAGAIN):
				return false // sleeps
			default:
				return true // the other process has gone, as others will tell too
			}
		}
	})
}

// drain takes the frames of all rings. It reports whether there were any; if not the bell may sleep.
func (b *Bell) drain() bool {
	b.mu.Lock()
	ends := b.ends
	b.mu.Unlock()
	some := false
	for _, e := range ends {
		some = e.drain() > 0 || some
	}
	for _, e := range ends {
		some = some || !e.rest()
	}
	return some
}
