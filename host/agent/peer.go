package agent

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// peer is a process at the other end of connections.
type peer struct {
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
func newPeer(c *net.UnixConn, pid int) (*peer, error) {
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
	return &peer{pid: pid, pidfd: os.NewFile(uintptr(fd), "pidfd")}, nil
}

// wait returns true when the process has ended, and false when the peer was closed before.
func (p *peer) wait() bool {
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

func (p *peer) close() { _ = p.pidfd.Close() }

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
