// Package shm is a pipe through memory that two processes of one machine share.
//
// Each direction is a ring in a sealed memfd: a payload is copied in from the sender's memory and out to
// the receiver's, and no system call moves a byte of it. Every link has a unix socket. The descriptor of
// the memory is passed over it, each end wakes the other on it, and it closes when a process ends: then the
// pipes end with connector.ErrGone. Only processes of the same user can make a link.
package shm

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/pipe"
)

// Network makes links on one machine. It must not be changed once it is in use.
type Network struct {
	// Dir is the folder of the listeners' sockets. It is created if necessary, for this user only. If it is
	// empty, each listener has a folder of its own in the system's folder for temporary files.
	Dir string
	// Ring is how many bytes each direction holds, a power of two between 256 KiB and 1 GiB; 0 means 4 MiB.
	Ring int
}

const (
	defaultRing  = 4 << 20
	helloTimeout = 5 * time.Second

	helloMagic   = 0x6b767053 // "kvpS"
	helloVersion = 1
	helloSize    = 4 + 4 + 8
	accepted     = 1 // the listener's answer
)

func (n *Network) ring() (int, error) {
	size := cmp.Or(n.Ring, defaultRing)
	return size, checkRing(uint64(size)) //nolint:gosec // a negative size is too large
}

func checkRing(size uint64) error {
	if size < minData || size > maxData || size&(size-1) != 0 {
		return fmt.Errorf("ring of %d bytes, must be a power of two between %d and %d: %w", size, minData, maxData, connector.ErrIncompatible)
	}
	return nil
}

// Listen implements pipe.Network.
func (n *Network) Listen(ctx context.Context) (_ pipe.Listener, err error) {
	if _, err := n.ring(); err != nil {
		return nil, err
	}
	dir, own := n.Dir, ""
	if dir == "" {
		sweep(os.TempDir(), time.Now())
		if dir, err = os.MkdirTemp("", folderPrefix); err != nil {
			return nil, fmt.Errorf("listen: %w", err)
		}
		own = dir
	} else if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	path, err := freeName(dir)
	var inner net.Listener
	if err == nil {
		var config net.ListenConfig
		inner, err = config.Listen(ctx, "unix", path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen in %s: %w", dir, err), tidy(own))
	}
	return &listener{Acceptor: pipe.NewAcceptor(inner, greet), folder: own}, nil
}

// freeName makes a name for a socket that is not in use.
func freeName(dir string) (string, error) {
	f, err := os.CreateTemp(dir, "pipe-*")
	if err != nil {
		return "", err
	}
	return f.Name(), errors.Join(f.Close(), os.Remove(f.Name()))
}

// Dial implements pipe.Network.
func (n *Network) Dial(ctx context.Context, address string) (pipe.Link, error) {
	ring, err := n.ring()
	if err != nil {
		return pipe.Link{}, fmt.Errorf("dial %s: %w", address, err)
	}
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	var dialer net.Dialer
	raw, err := dialer.DialContext(ctx, "unix", address)
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %w", err, connector.ErrGone)
	}
	if err != nil {
		return pipe.Link{}, fmt.Errorf("dial %s: %w", address, err)
	}
	conn, isUnix := raw.(*net.UnixConn)
	if !isUnix {
		return pipe.Link{}, errors.Join(fmt.Errorf("dial %s: %w", address, connector.ErrIncompatible), raw.Close())
	}
	region, err := offer(ctx, conn, ring)
	if err != nil {
		return pipe.Link{}, errors.Join(fmt.Errorf("dial %s: %w", address, err), conn.Close())
	}
	return newEnd(conn, region, false).link(), nil
}

// offer sends the memory of a link to the listener and waits until it has mapped it.
func offer(ctx context.Context, conn *net.UnixConn, ring int) (_ *shm.Region, err error) {
	if err := sameUser(conn); err != nil {
		return nil, err
	}
	region, err := shm.Create("kvport-pipe", 2*int64(controlSize+ring))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, region.Close())
		}
	}()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	hello := binary.LittleEndian.AppendUint32(nil, helloMagic)
	hello = binary.LittleEndian.AppendUint32(hello, helloVersion)
	hello = binary.LittleEndian.AppendUint64(hello, uint64(ring))
	if _, _, err := conn.WriteMsgUnix(hello, unix.UnixRights(int(region.File().Fd())), nil); err != nil {
		return nil, err
	}
	var answer [1]byte
	if _, err := conn.Read(answer[:]); err != nil || answer[0] != accepted {
		return nil, errors.Join(fmt.Errorf("the listener did not take the memory: %w", connector.ErrIncompatible), err)
	}
	if !stop() {
		return nil, ctx.Err()
	}
	return region, nil
}

// sameUser refuses processes of other users.
func sameUser(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	control := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(control, err); err != nil {
		return err
	}
	if int(peer.Uid) != os.Getuid() {
		return fmt.Errorf("the peer belongs to user %d, this process to user %d: %w", peer.Uid, os.Getuid(), connector.ErrIncompatible)
	}
	return nil
}

// listener accepts links.
type listener struct {
	*pipe.Acceptor
	folder string // the listener's own folder, removed at the end
}

// Address implements pipe.Listener.
func (l *listener) Address() string { return l.Addr().String() }

// Close implements pipe.Listener.
func (l *listener) Close() error { return errors.Join(l.Acceptor.Close(), tidy(l.folder)) }

// tidy removes a listener's own folder; an empty name means that there is none.
func tidy(folder string) error {
	if folder == "" {
		return nil
	}
	return os.RemoveAll(filepath.Clean(folder))
}

// greet accepts the memory that a dialer offers.
func greet(ctx context.Context, raw net.Conn, to *pipe.Acceptor) error {
	stop := context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	conn, isUnix := raw.(*net.UnixConn)
	if !isUnix {
		return connector.ErrIncompatible
	}
	if err := sameUser(conn); err != nil {
		return err
	}
	region, err := take(conn)
	if err != nil {
		return err
	}
	if _, err := conn.Write([]byte{accepted}); err != nil || !stop() {
		return errors.Join(err, ctx.Err(), region.Close())
	}
	return to.Offer(newEnd(conn, region, true).link())
}

// take reads a dialer's hello and maps the memory that came with it.
func take(conn *net.UnixConn) (*shm.Region, error) {
	hello, control := make([]byte, helloSize), make([]byte, unix.CmsgSpace(4))
	n, nControl, _, _, err := conn.ReadMsgUnix(hello, control)
	if err != nil {
		return nil, err
	}
	files, err := descriptors(control[:nControl])
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	if err != nil {
		return nil, err
	}
	ring, err := parseHello(hello[:n])
	if err != nil {
		return nil, err
	}
	if len(files) != 1 {
		return nil, fmt.Errorf("%d descriptors came instead of 1: %w", len(files), connector.ErrIncompatible)
	}
	return shm.Map(int(files[0].Fd()), 2*(controlSize+int64(ring)))
}

func parseHello(b []byte) (ring uint64, err error) {
	if len(b) != helloSize || binary.LittleEndian.Uint32(b) != helloMagic {
		return 0, fmt.Errorf("the peer that connected does not speak kvport's protocol: %w", connector.ErrIncompatible)
	}
	if v := binary.LittleEndian.Uint32(b[4:]); v != helloVersion {
		return 0, fmt.Errorf("the peer speaks version %d, this end version %d: %w", v, helloVersion, connector.ErrIncompatible)
	}
	ring = binary.LittleEndian.Uint64(b[8:])
	return ring, checkRing(ring)
}

// descriptors are the files that came with a message, which the caller closes.
func descriptors(control []byte) ([]*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, fmt.Errorf("the descriptors that came with the hello: %w: %w", err, connector.ErrIncompatible)
	}
	var files []*os.File
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "pipe"))
		}
		if err != nil {
			return files, fmt.Errorf("the descriptors that came with the hello: %w: %w", err, connector.ErrIncompatible)
		}
	}
	return files, nil
}

// folderPrefix begins the name of every folder that a listener makes for itself.
const folderPrefix = "kvport-shm-"

// How old a folder must be to count as left behind: a listener makes its folder first and its socket
// afterwards.
const (
	staleSocket = 10 * time.Second
	staleEmpty  = time.Hour
)

// sweep removes the folders that listeners of this user left behind when their processes were killed.
func sweep(root string, now time.Time) {
	shm.Sweep(filepath.Join(root, folderPrefix+"*"), now, abandoned)
}

// abandoned reports whether nobody listens in a folder. The kernel knows whether a socket has a listener, however
// the process ended and whichever process has its id now.
func abandoned(dir string, age time.Duration) bool {
	entries, err := os.ReadDir(dir)
	if err != nil || age <= staleSocket || len(entries) == 0 && age <= staleEmpty {
		return false
	}
	for _, entry := range entries {
		if entry.Type() != os.ModeSocket || !silent(filepath.Join(dir, entry.Name())) {
			return false
		}
	}
	return true
}

// silent reports whether nobody listens at a socket.
func silent(path string) bool {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err == nil {
		_ = conn.Close() // the listener takes this for a dialer that left
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}
