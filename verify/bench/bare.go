package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
)

// bareBinary is the name under which this program is a process that only copies.
const bareBinary = "kvport-bench-bare"

// bare is the limit of a store in another process that sleeps while it has nothing to do: twelve bytes on a
// socket wake a process, which copies the same bytes between shared and own memory and wakes us with one byte.
// It knows no protocol, no keys and no deadlines.
type bare struct {
	hot
	socket  int
	process *exec.Cmd
}

// bareRequest is what wakes the process: 1 to save or 0 to load, the first block, and how many.
type bareRequest [3]uint32

// startBare starts the process with memory in which blocks lie as in the link's.
func startBare(ctx context.Context, self string, l *link) (_ *bare, err error) {
	b := &bare{hot: hot{link: l}, socket: -1}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	memory, err := bareMemory(int64(l.blocks) * l.shape.block())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "bare")
	defer func() { err = errors.Join(err, theirs.Close()) }()
	b.socket = fds[0]
	path, remove, err := selfLink(self, bareBinary)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	s := l.shape
	cmd := exec.CommandContext(ctx, path, strconv.Itoa(s.segments), strconv.FormatInt(s.bytes, 10), strconv.Itoa(l.blocks))
	cmd.ExtraFiles, cmd.Stderr = []*os.File{theirs, memory}, os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	b.process = cmd
	return b, b.wait() // it is ready: nobody needs the link any more
}

func bareMemory(size int64) (*os.File, error) {
	fd, err := unix.MemfdCreate(bareBinary, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), bareBinary)
	if err := f.Truncate(size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (b *bare) save(t *connector.Transfer, digests bool) error {
	b.pass(t, digests)
	return b.ask(t, 1)
}

func (b *bare) load(t *connector.Transfer, digests bool) error {
	err := b.ask(t, 0)
	b.pass(t, digests)
	return err
}

func (b *bare) ask(t *connector.Transfer, save uint32) error {
	var m [12]byte
	if _, err := binary.Encode(m[:], binary.NativeEndian, bareRequest{save, uint32(t.Blocks[0].ID), uint32(len(t.Blocks))}); err != nil {
		return err
	}
	if _, err := unix.Write(b.socket, m[:]); err != nil {
		return fmt.Errorf("%s: %w", bareBinary, err)
	}
	return b.wait()
}

// wait is for the byte that says that it is done.
func (b *bare) wait() error {
	var done [1]byte
	for {
		n, err := unix.Read(b.socket, done[:])
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("%s: %w", bareBinary, err)
		case n == 0:
			return fmt.Errorf("%s: %w", bareBinary, io.ErrUnexpectedEOF)
		default:
			return nil
		}
	}
}

func (b *bare) close() error {
	var errs []error
	if b.socket >= 0 {
		errs = append(errs, unix.Close(b.socket)) // ends it
	}
	if b.process != nil {
		errs = append(errs, b.process.Wait())
	}
	return errors.Join(errs...)
}

// serveBare is the process. It ends with its socket.
func serveBare() {
	if err := runBare(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, bareBinary+":", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func runBare(args []string) error {
	const socket, memory = 3, 4
	if len(args) != 3 {
		return errors.New("want segments, bytes of one, and blocks")
	}
	var size [3]int
	for i, a := range args {
		n, err := strconv.Atoi(a)
		if err != nil {
			return err
		}
		size[i] = n
	}
	segments, bytes, blocks := size[0], size[1], size[2]
	cache, err := unix.Mmap(memory, 0, segments*bytes*blocks, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	own := make([]byte, len(cache))
	fill(cache)
	fill(own)
	var m [12]byte
	for {
		if _, err := unix.Write(socket, m[:1]); err != nil {
			return os.NewSyscallError("write", err)
		}
		n, err := unix.Read(socket, m[:])
		for errors.Is(err, unix.EINTR) {
			n, err = unix.Read(socket, m[:])
		}
		if err != nil || n < len(m) {
			return os.NewSyscallError("read", err) // nil: the other end is closed
		}
		var r bareRequest
		if _, err := binary.Decode(m[:], binary.NativeEndian, &r); err != nil {
			return err
		}
		for id := int(r[1]); id < int(r[1]+r[2]); id++ {
			for s := range segments {
				part, place := cache[(s*blocks+id)*bytes:][:bytes], own[(id*segments+s)*bytes:][:bytes]
				if r[0] == 1 {
					copy(place, part)
				} else {
					copy(part, place)
				}
			}
		}
	}
}
