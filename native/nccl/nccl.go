// Package nccl is a Go binding of NCCL's point-to-point functions: what two processes with a GPU each need to
// send memory of one to the other. The library is loaded at run time: a program that imports this package builds
// and starts on a machine without it, and [Open] says what is missing. NCCL has no mode without a GPU: there,
// [Library.Join] fails with [ErrNoDevice].
//
// Two processes that want to talk make a communicator of two ranks: one makes an [ID] and passes it to the
// other, and both join. There is no need for a world of all processes. CUDA's current device belongs to a
// thread: before Join lock the goroutine to its thread (runtime.LockOSThread) and select the device there.
//
// NCCL opens a listener for the ID: NCCL_SOCKET_IFNAME=lo keeps it off the network.
//
// Its prototypes are checked against nccl.h (make native-abi-gpu) and loading, versions and errors are tested;
// it has not yet been run on a GPU.
package nccl

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"github.com/kvport/kvport/native/internal/loader"
)

// CodeError is an error of NCCL's.
type CodeError struct {
	Code int    // ncclResult_t
	Text string // what NCCL says about it
}

// Error is NCCL's text with its code.
func (e *CodeError) Error() string { return fmt.Sprintf("NCCL: %s (%d)", e.Text, e.Code) }

// explain finds the lack of a GPU in what NCCL says.
func explain(code int, text, last string) error {
	for _, lack := range [...]string{"driver version is insufficient", "no CUDA-capable device", "unknown error initializing"} {
		if code == unhandledCUDA && strings.Contains(last, lack) {
			return fmt.Errorf("%w: %s", ErrNoDevice, strings.TrimSpace(last))
		}
	}
	if last = strings.TrimSpace(last); last != "" {
		text += ": " + last
	}
	return &CodeError{code, text}
}

// unhandledCUDA is NCCL's code for a failure of CUDA's.
const unhandledCUDA = 1

func fail(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("nccl: %s: %w", what, err)
}

// Version is NCCL's, as in "2.30.7".
func (l *Library) Version() (string, error) {
	v, err := l.lib.version()
	return fmt.Sprintf("%d.%d.%d", v/10_000, v/100%100, v%100), fail("version", err)
}

// ID is what the ranks of a communicator agree on. It is plain bytes, and lets its holder join.
type ID [128]byte

// NewID makes an ID. The process that made it has to be one of those that join.
func (l *Library) NewID() (ID, error) {
	id, err := l.lib.newID()
	return id, fail("make an id", err)
}

// Comm is a communicator: the way between its ranks.
type Comm struct {
	lib    *library
	handle unsafe.Pointer
}

// Join joins the communicator of an ID as one of that many ranks. It returns when all have joined, however long
// that takes: call it in a goroutine that can be abandoned.
func (l *Library) Join(id ID, ranks, rank int) (*Comm, error) {
	what := fmt.Sprintf("join as rank %d of %d", rank, ranks)
	if ranks < 1 || rank < 0 || rank >= ranks {
		return nil, fail(what, ErrInvalid)
	}
	h, err := l.lib.join(id, ranks, rank)
	if err != nil {
		return nil, fail(what, err)
	}
	return &Comm{l.lib, h}, nil
}

// Send puts on a CUDA stream the sending of n bytes of GPU memory to a rank, which has to receive as many.
func (c *Comm) Send(from unsafe.Pointer, n, rank int, stream unsafe.Pointer) error {
	return fail(fmt.Sprintf("send %d bytes to rank %d", n, rank), c.lib.send(c.handle, from, n, rank, stream))
}

// Receive puts on a CUDA stream the receipt of n bytes from a rank into GPU memory.
func (c *Comm) Receive(to unsafe.Pointer, n, rank int, stream unsafe.Pointer) error {
	return fail(fmt.Sprintf("receive %d bytes from rank %d", n, rank), c.lib.receive(c.handle, to, n, rank, stream))
}

// Group calls do, whose sends and receives then start as one.
func (l *Library) Group(do func() error) error {
	if err := l.lib.group(true); err != nil {
		return fail("start a group", err)
	}
	err := do()
	if ended := l.lib.group(false); err == nil {
		err = fail("end a group", ended)
	}
	return err
}

// Err is what has gone wrong with the communicator since, as the death of a peer; nil if nothing has.
func (c *Comm) Err() error { return fail("communicator", c.lib.state(c.handle)) }

// Abort ends the communicator at once, with what is going on.
func (c *Comm) Abort() error { return fail("abort", c.lib.leave(c.handle, true)) }

// Close ends the communicator when what is going on has ended.
func (c *Comm) Close() error { return fail("close", c.lib.leave(c.handle, false)) }

// Errors of this package, in addition to those that the library reports.
var (
	// ErrUnavailable is what every failure of Open wraps: this machine or this build has no NCCL.
	ErrUnavailable = errors.New("NCCL is not available")
	// ErrNoDevice means that the library is here and a GPU, or its driver, is not.
	ErrNoDevice = errors.New("no GPU that NCCL can use")
	// ErrInvalid means that an argument cannot be right.
	ErrInvalid = errors.New("invalid argument")
)

// LoadError says why the library could not be loaded and what to do about it. It wraps ErrUnavailable.
type LoadError struct{ failure }

type failure = loader.LoadError

func binding() *loader.Binding {
	return &loader.Binding{Name: "nccl", EnvDir: EnvDir, Unavailable: ErrUnavailable, Mend: mendMissing}
}

// EnvDir names the environment variable with the folder that Open looks in first.
const EnvDir = "KVPORT_NCCL_DIR"

const mendMissing = "install NCCL 2 (wheel nvidia-nccl-cu13, Debian libnccl2), or set KVPORT_NCCL_DIR to the folder with libnccl; without a GPU nothing of it is of use"

// Library is NCCL, loaded. It stays loaded until the process ends.
type Library struct {
	path string
	lib  *library
}

// Open loads the library from dir. If dir is empty it takes the folder that KVPORT_NCCL_DIR names; without
// that, what the system's loader finds. Its errors are a *LoadError. It needs no GPU.
func Open(dir string) (*Library, error) {
	lib, path, failed := loader.First(binding(), dir, load, "libnccl.so.2", "libnccl.so")
	if failed != nil {
		return nil, &LoadError{*failed}
	}
	return &Library{path, lib}, nil
}

// Path is what was loaded.
func (l *Library) Path() string { return l.path }
