package agent

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// maxFiles is how many descriptors one read may bring; a process of an engine sends one in its life.
const maxFiles = 4

var (
	errSlow  = errors.New("it does not read what it is sent")
	errFiles = errors.New("descriptors beside a frame that needs none")
)

// conn is the connection of one process of the engine. Frames to it are queued, so that no reader's
// pace is another's or the host's; one that does not read at all is cut (rule AGENT-08).
type conn struct {
	*net.UnixConn
	in       *bufio.Reader
	fds      intake
	pid      int
	engine   string // that its attach named; guarded by the server's mu
	attachID uint64
	joined   bool       // its attach was answered: events are for it; guarded by the server's mu
	pages    *pageStore // of an engine that stores pages; the reader's
	wait     time.Duration
	most     int

	mu     sync.Mutex
	queue  []letter
	size   int // bytes queued or being written
	closed bool
	why    error
	wake   chan struct{}
	gone   chan struct{} // closed when nothing will be sent any more
}

// letter is a frame to send. file, if any, goes beside it and is closed.
type letter struct {
	frame []byte
	file  *os.File
	sent  chan struct{} // closed when the kernel has it; may be nil
}

func newConn(c *net.UnixConn, pid int, l *limits) *conn {
	out := &conn{
		UnixConn: c, pid: pid, wait: l.write, most: l.queue,
		wake: make(chan struct{}, 1), gone: make(chan struct{}),
	}
	out.fds.conn = c
	out.in = bufio.NewReaderSize(&out.fds, 64<<10)
	return out
}

// next reads the next call and the descriptor beside it, if any, which is the caller's.
func (c *conn) next() (*kvportv1.AgentCall, *os.File, error) {
	frame, err := wire.ReadFrame(c.in)
	file := c.fds.take()
	if err == nil && c.fds.tooMany {
		err = errFiles
	}
	var call *kvportv1.AgentCall
	if err == nil {
		call, err = wire.AgentCallFromFrame(frame)
	}
	if err != nil && file != nil {
		_ = file.Close()
		file = nil
	}
	return call, file, err
}

// intake reads a connection and keeps the descriptors that come along.
type intake struct {
	conn    *net.UnixConn
	files   []*os.File
	tooMany bool
}

// Read implements io.Reader.
func (i *intake) Read(p []byte) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4*maxFiles))
	n, oobn, flags, _, err := i.conn.ReadMsgUnix(p, oob)
	if oobn > 0 {
		i.keep(oob[:oobn])
	}
	i.tooMany = i.tooMany || flags&unix.MSG_CTRUNC != 0 || len(i.files) > 1
	if n == 0 && err == nil {
		err = io.EOF
	}
	return max(n, 0), err // it is -1 where the peer was killed, which bufio does not take
}

func (i *intake) keep(oob []byte) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		i.tooMany = true
		return
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue // nothing else is of interest
		}
		for _, fd := range fds {
			i.files = append(i.files, os.NewFile(uintptr(fd), "received"))
		}
	}
}

// take gives the one descriptor that came, if any.
func (i *intake) take() *os.File {
	if len(i.files) == 0 {
		return nil
	}
	for _, f := range i.files[1:] {
		_ = f.Close()
	}
	f := i.files[0]
	i.files = nil
	return f
}

// send queues a message; it never waits. What cannot be sent ends the connection.
func (c *conn) send(m *kvportv1.AgentAnswer) { c.post(m, nil) }

// post queues a message with a descriptor beside it, or nil. sent is closed when the kernel has both;
// if that never happens gone is.
func (c *conn) post(m *kvportv1.AgentAnswer, file *os.File) (sent <-chan struct{}) {
	frame, err := wire.AgentFrame(m)
	l := letter{frame: frame, file: file, sent: make(chan struct{})}
	c.mu.Lock()
	if err == nil && c.size+len(frame) > c.most {
		err = fmt.Errorf("%w: %d bytes wait", errSlow, c.size)
	}
	closed := c.closed
	if err == nil && !closed {
		c.queue, c.size = append(c.queue, l), c.size+len(frame)
	}
	c.mu.Unlock()
	if err != nil || closed {
		if file != nil {
			_ = file.Close()
		}
		if err != nil {
			c.cut(err)
		}
		return l.sent
	}
	c.signal()
	return l.sent
}

// await waits until the kernel has a message, or the connection is over; nil: there is none.
func (c *conn) await(sent <-chan struct{}) {
	if sent == nil {
		return
	}
	select {
	case <-sent:
	case <-c.gone:
	}
}

// idle reports whether the peer has taken all that it was sent.
func (c *conn) idle() bool {
	c.mu.Lock()
	size := c.size
	c.mu.Unlock()
	return size == 0 && unread(c.UnixConn) == 0
}

func (c *conn) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// finish ends the connection when all that is queued has been sent.
func (c *conn) finish() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.signal()
}

// cut ends the connection at once. The first reason counts.
func (c *conn) cut(why error) {
	c.mu.Lock()
	c.closed = true
	c.why = cmp.Or(c.why, why)
	c.mu.Unlock()
	_ = c.Close()
	c.signal()
}

// reason is why the connection was cut; nil if the peer ended it.
func (c *conn) reason() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.why
}

// write sends what is queued until the connection ends.
func (c *conn) write() {
	defer close(c.gone)
	for {
		c.mu.Lock()
		batch, closed := c.queue, c.closed
		c.queue = nil
		c.mu.Unlock()
		for i := range batch {
			if err := c.put(&batch[i]); err != nil {
				for _, l := range batch[i:] {
					l.drop()
				}
				c.cut(err)
				break
			}
		}
		switch {
		case len(batch) > 0:
		case closed:
			_ = c.Close()
			return
		default:
			<-c.wake
		}
	}
}

// put writes one letter, piece by piece: a peer that takes some of it now and then is not slow.
func (c *conn) put(l *letter) error {
	const piece = 64 << 10
	rest := l.frame
	for len(rest) > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(c.wait)); err != nil {
			return err
		}
		var n int
		var err error
		if l.file != nil {
			n, _, err = c.WriteMsgUnix(rest[:min(piece, len(rest))], unix.UnixRights(int(l.file.Fd())), nil)
			l.drop()
		} else {
			n, err = c.Write(rest[:min(piece, len(rest))])
		}
		rest = rest[n:]
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("%w for %s", errSlow, c.wait)
		}
		if err != nil {
			return err
		}
	}
	close(l.sent)
	c.mu.Lock()
	c.size -= len(l.frame)
	c.mu.Unlock()
	return nil
}

func (l *letter) drop() {
	if l.file != nil {
		_ = l.file.Close()
		l.file = nil
	}
}

// osProcess is a process at the other end of connections, or one of a plugin: a connector that is made of others has several.
type osProcess struct {
	pid   int
	pidfd *os.File
}

// credentials says who connected: the kernel knows, whatever the peer says.
func credentials(c *net.UnixConn) (*unix.Ucred, error) {
	var cred *unix.Ucred
	err := control(c, func(fd int) (err error) {
		cred, err = unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		return os.NewSyscallError("getsockopt SO_PEERCRED", err)
	})
	return cred, err
}

// newPeer opens the process that made a connection.
func newPeer(c *net.UnixConn, pid int) (*osProcess, error) {
	fd := -1
	err := control(c, func(conn int) (err error) {
		if fd, err = unix.GetsockoptInt(conn, unix.SOL_SOCKET, unix.SO_PEERPIDFD); err != nil { // before Linux 6.5
			fd, err = unix.PidfdOpen(pid, 0)
		}
		return os.NewSyscallError("pidfd_open", err)
	})
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fd))
	}
	return &osProcess{pid: pid, pidfd: os.NewFile(uintptr(fd), "pidfd")}, nil
}

// gone reports whether the process has ended, and lets go of it if so.
func (p *osProcess) gone() bool {
	ended := readable(int(p.pidfd.Fd()))
	if ended {
		p.close()
	}
	return ended
}

// wait returns true when the process has ended, and false when it was let go of before.
func (p *osProcess) wait() bool {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return false
	}
	err = raw.Read(func(fd uintptr) bool { return readable(int(fd)) })
	return err == nil
}

// readable reports whether a pidfd says that its process has ended.
func readable(pidfd int) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

func (p *osProcess) close() { _ = p.pidfd.Close() }

// control runs f with a connection's descriptor.
func control(c *net.UnixConn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}

// unread is how many bytes the peer has not taken yet.
func unread(c *net.UnixConn) int {
	n := 1
	_ = control(c, func(fd int) (err error) {
		n, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ)
		return err
	})
	return n
}
