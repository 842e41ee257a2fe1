// Package cuda is a Go binding of the few functions of the CUDA runtime that moving KV blocks takes: memory of
// a GPU, copies, and handles by which another process of the host maps that memory. The library is loaded at run
// time: a program that imports this package builds and starts on a machine without it, and [Open] says what is
// missing. Without a GPU everything but Open and Version fails with [ErrNoDevice].
//
// Its prototypes are checked against cuda_runtime_api.h (make native-abi-gpu) and loading, versions and errors
// are tested; it has not yet been run on a GPU.
package cuda

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/kvport/kvport/native/internal/loader"
)

// CodeError is an error code of the CUDA runtime's.
type CodeError struct {
	Code int    // cudaError_t
	Text string // what CUDA says about it
}

// Error is CUDA's text with its code.
func (e *CodeError) Error() string { return fmt.Sprintf("CUDA: %s (%d)", e.Text, e.Code) }

// fail says which call ended with err.
func fail(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("cuda: %s: %w", what, err)
}

// Version is the runtime's, as in 13000 for 13.0.
func (l *Library) Version() (int, error) {
	v, err := l.lib.version()
	return v, fail("version", err)
}

// Devices is how many GPUs there are: at least one, or it is ErrNoDevice.
func (l *Library) Devices() (int, error) {
	n, err := l.lib.devices()
	if err == nil && n == 0 {
		err = ErrNoDevice
	}
	return n, fail("count the devices", err)
}

// Pointer is an address in a GPU's memory.
type Pointer = unsafe.Pointer

// Alloc allocates n bytes on a device, for Free.
func (l *Library) Alloc(device, n int) (Pointer, error) {
	if n <= 0 {
		return nil, fail(fmt.Sprintf("allocate %d bytes", n), ErrInvalid)
	}
	p, err := l.lib.malloc(device, n)
	return p, fail(fmt.Sprintf("allocate %d bytes on device %d", n, device), err)
}

// Free frees what Alloc has allocated. Handles of it are void from then on.
func (l *Library) Free(device int, p Pointer) error {
	return fail("free", l.lib.free(device, p))
}

// CopyIn copies from the host to a device, and returns when the bytes are there.
func (l *Library) CopyIn(device int, to Pointer, from []byte) error {
	if len(from) == 0 {
		return nil
	}
	return fail(fmt.Sprintf("copy %d bytes to device %d", len(from), device), l.lib.copyIn(device, to, from))
}

// CopyOut copies from a device to the host, and returns when the bytes are there.
func (l *Library) CopyOut(device int, to []byte, from Pointer) error {
	if len(to) == 0 {
		return nil
	}
	return fail(fmt.Sprintf("copy %d bytes from device %d", len(to), device), l.lib.copyOut(device, to, from))
}

// Handle lets another process of this host map memory of a GPU. It is plain bytes.
type Handle [64]byte

// Export makes a handle of memory from Alloc.
func (l *Library) Export(device int, p Pointer) (Handle, error) {
	h, err := l.lib.export(device, p)
	return h, fail("export memory", err)
}

// Import maps the memory of another process's handle, until Unimport. A process cannot import its own.
func (l *Library) Import(device int, h Handle) (Pointer, error) {
	p, err := l.lib.imports(device, h)
	return p, fail("import memory", err)
}

// Unimport unmaps what Import has mapped.
func (l *Library) Unimport(device int, p Pointer) error {
	return fail("unmap imported memory", l.lib.unimport(device, p))
}

// Stream is an order in which a device does things.
type Stream = unsafe.Pointer

// NewStream makes a stream on a device, for FreeStream.
func (l *Library) NewStream(device int) (Stream, error) {
	s, err := l.lib.stream(device)
	return s, fail(fmt.Sprintf("make a stream on device %d", device), err)
}

// Wait waits until all that was put on a stream has been done.
func (l *Library) Wait(s Stream) error { return fail("wait for a stream", l.lib.wait(s)) }

// FreeStream ends a stream.
func (l *Library) FreeStream(s Stream) error { return fail("free a stream", l.lib.freeStream(s)) }

// Errors of this package, in addition to those that the library reports.
var (
	// ErrUnavailable is what every failure of Open wraps: this machine or this build has no CUDA.
	ErrUnavailable = errors.New("CUDA is not available")
	// ErrNoDevice means that the library is here and a GPU, or its driver, is not.
	ErrNoDevice = errors.New("no GPU that CUDA can use")
	// ErrInvalid means that an argument cannot be right.
	ErrInvalid = errors.New("invalid argument")
)

// LoadError says why the library could not be loaded and what to do about it. It wraps ErrUnavailable.
type LoadError struct{ failure }

type failure = loader.LoadError

func binding() *loader.Binding {
	return &loader.Binding{Name: "cuda", EnvDir: EnvDir, Unavailable: ErrUnavailable, Mend: mendMissing}
}

// EnvDir names the environment variable with the folder that Open looks in first.
const EnvDir = "KVPORT_CUDA_DIR"

const mendMissing = "install the CUDA runtime 12 or 13, or set KVPORT_CUDA_DIR to the folder with libcudart; without a GPU nothing of it is of use"

// Library is CUDA, loaded. It stays loaded until the process ends.
type Library struct {
	path string
	lib  *library
}

// Open loads the library from dir. If dir is empty it takes the folder that KVPORT_CUDA_DIR names; without
// that, what the system's loader finds. Its errors are a *LoadError. It needs no GPU.
func Open(dir string) (*Library, error) {
	lib, path, failed := loader.First(binding(), dir, load, "libcudart.so.13", "libcudart.so.12", "libcudart.so")
	if failed != nil {
		return nil, &LoadError{*failed}
	}
	return &Library{path, lib}, nil
}

// Path is what was loaded.
func (l *Library) Path() string { return l.path }
