// Package nixl is a Go binding of NIXL, NVIDIA's library for moving memory between processes and hosts
// (github.com/ai-dynamo/nixl), version 1.5.1. It loads the library at run time: a program that imports
// this package builds and starts on a machine that has no NIXL, and [Open] says what is missing.
//
// An [Agent] is one end. It starts a [Backend] (UCX for other processes, POSIX for files), registers
// [Memory] with it and hands its metadata to a peer by whatever way the two already have; a peer that has
// added it can then read and write that memory while this process does nothing at all. A [Transfer] is one
// such read or write, of many regions: it is prepared once and posted as often as wanted. A notification
// is a short message, sent with a transfer's end or on its own.
//
// # Memory
//
// Registered memory must not move and must outlive its registration. Take it from mmap (or a memfd), or
// pin it with [runtime.Pinner]; a plain Go slice is neither. Close the Memory before unmapping it: UCX
// does not see what Go unmaps. Whoever holds an agent's metadata can write its memory, at any time and
// without a trace: hand it only to peers that may.
//
// # Progress
//
// Unless [Options.Progress] is set, NIXL works only inside calls: a transfer over TCP, or a notification
// on its way in, advances when [Transfer.Poll] or [Agent.Notifications] is called. So an agent that others
// reach must call Notifications every now and then: to be connected to at all, and over TCP for each byte
// of a transfer. Only once connected, and over shared memory (UCX's cma), it is read and written while it
// does nothing.
//
// # Environment
//
// Open sets UCX_LOG_FILE to stderr and UCX_RCACHE_MAX_UNRELEASED to 1024 where they are not set: UCX logs
// to stdout otherwise, in the way of whatever speaks there. UCX_TLS and UCX_NET_DEVICES choose the
// transports of the whole process. They are read when a backend starts, and go before a backend's
// engine_config.
//
// Without UCX_TLS, UCX opens TCP ports, and it authenticates nobody: whoever can reach one of them writes any
// address of the process, without metadata and before any handshake. On one machine UCX_TLS=posix,cma,self
// with UCX_POSIX_ERROR_HANDLING=y opens none; UCX_NET_DEVICES=lo keeps ports off the network, but not from
// other users of the machine. Package native/ucx has lists of transports without ports.
//
// Where the system has libibverbs too, the wheel's libraries crash when a process ends by C's exit. Go
// programs do not, unless they are built with -race or -asan; UCX_MODULES=^ib, without RDMA, is the way
// around.
//
// Everything here is safe for use by several goroutines at once.
package nixl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"github.com/kvport/kvport/native/internal/loader"
)

// Errors that NIXL's calls end with, wrapped in what was asked for: match them with errors.Is.
var (
	// ErrInvalid means that NIXL refused an argument: a peer that is not known, memory that is not
	// registered, metadata that is no metadata.
	ErrInvalid = errors.New("invalid argument")
	// ErrBackend means that the transport failed. That the peer's process has gone looks like this;
	// NIXL does not tell the two apart.
	ErrBackend = errors.New("the transport failed, or the peer has gone")
	// ErrState means that a handle is not in a state for the call.
	ErrState = errors.New("not possible in this state")
	// ErrInternal is an exception inside NIXL; what it was went to stderr, if anywhere.
	ErrInternal = errors.New("exception inside NIXL")
	// ErrNoTelemetry means that the agent was made without Options.Telemetry, or that the transfer has
	// not ended.
	ErrNoTelemetry = errors.New("no telemetry")
	// ErrNotFound means that no metadata of the peer is loaded, or that no backend serves both ends'
	// kinds of memory.
	ErrNotFound = errors.New("peer not known, or no backend for this memory")
	// ErrClosed means that the agent, memory or transfer was closed.
	ErrClosed = errors.New("closed")
	// ErrInFlight means that a transfer was posted and has not ended.
	ErrInFlight = errors.New("in flight")
)

// statusError is the error of a negative status of NIXL's.
func statusError(status int) error {
	known := [...]error{ErrInvalid, ErrBackend, ErrState, ErrInternal, ErrNoTelemetry, ErrNotFound}
	if i := -status - 1; i >= 0 && i < len(known) {
		return known[i]
	}
	return fmt.Errorf("status %d, which NIXL 1.5 does not have", status)
}

// Kind is where memory is. The values are NIXL's.
type Kind int

// The kinds of memory.
const (
	DRAM   Kind = iota // host memory; Device 0
	VRAM               // memory of a GPU; Device is its number
	Block              // a block device
	Object             // an object of a store
	File               // a file: Device is its descriptor, Addr an offset
)

// String names the kind as NIXL does.
func (k Kind) String() string {
	if names := [...]string{"DRAM", "VRAM", "BLK", "OBJ", "FILE"}; k >= 0 && int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("Kind(%d)", int(k))
}

// Op is the direction of a transfer. The values are NIXL's.
type Op int

// The directions.
const (
	Read  Op = iota // from the peer's memory to ours
	Write           // from our memory to the peer's
)

// String is read or write.
func (o Op) String() string {
	switch o {
	case Read:
		return "read"
	case Write:
		return "write"
	}
	return fmt.Sprintf("Op(%d)", int(o))
}

// Region is a run of memory of one agent. It names memory, it does not hold it: a peer's regions travel
// as these numbers.
type Region struct {
	Addr   uint64 // address in the owner's process; an offset in a File
	Len    uint64 // bytes
	Device uint64 // see Kind
}

// Bytes is the region of b, which must not be memory that the garbage collector may free: see the
// package comment.
func Bytes(b []byte) Region {
	return Region{Addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), Len: uint64(len(b))}
}

// Slice is the n bytes of r that start at offset. It fails if they are not within r.
func (r Region) Slice(offset, n uint64) (Region, error) {
	if offset > r.Len || n > r.Len-offset {
		return Region{}, fmt.Errorf("nixl: bytes %d to %d of a region of %d: %w", offset, offset+n, r.Len, ErrInvalid)
	}
	return Region{Addr: r.Addr + offset, Len: n, Device: r.Device}, nil
}

// ErrUnavailable is what every failure of Open wraps: this machine or this build has no NIXL.
var ErrUnavailable = errors.New("NIXL is not available")

// LoadError says why the library could not be loaded and what to do about it. It wraps ErrUnavailable.
type LoadError struct{ failure }

type failure = loader.LoadError

func binding() *loader.Binding {
	return &loader.Binding{Name: "nixl", EnvDir: EnvDir, Unavailable: ErrUnavailable, Mend: mendMissing}
}

// EnvDir names the environment variable with the folder that Open looks in first.
const EnvDir = "NIXL_LIB_DIR"

const (
	libraryName = "libnixl_capi.so"
	mendMissing = "run make deps in the repository of kvport, or pip install nixl-cu12==1.5.1 beside kvport's wheel, or set " + EnvDir + " to a folder into which that wheel was unpacked"
	mendVersion = "it is not NIXL 1.5.1; " + mendMissing
)

// Library is NIXL, loaded. It stays loaded until the process ends.
type Library struct {
	path string
	lib  *library
}

// Open loads NIXL from dir, a folder with the library or with the unpacked wheel in it. If dir is empty
// it takes the folder that NIXL_LIB_DIR names; without that, the one that make deps fills beside the
// program's own folder, or, for a program in kvport's wheel, the one that pip unpacks wheels into; without that,
// what the system's loader finds. Its errors are a *LoadError.
func Open(dir string) (*Library, error) {
	path, failed := binding().Locate(dir, libraryName, libraryName, within)
	if failed == nil {
		// Without the second, freed memory stays registered; vLLM sets the same.
		failed = binding().Default(path, [2]string{"UCX_LOG_FILE", "stderr"}, [2]string{"UCX_RCACHE_MAX_UNRELEASED", "1024"})
	}
	var lib *library
	if failed == nil {
		lib, failed = load(path)
	}
	if failed != nil {
		return nil, &LoadError{*failed}
	}
	return &Library{path: path, lib: lib}, nil
}

// Path is the file that was loaded.
func (l *Library) Path() string { return l.path }

// within is the absolute path of the library in a folder, or in that of an unpacked wheel; "" if there
// is none.
func within(dir string) string {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return ""
	}
	found := []string{filepath.Join(dir, libraryName)}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if name := e.Name(); strings.HasPrefix(name, ".nixl_cu") && strings.HasSuffix(name, ".mesonpy.libs") {
			found = append(found, filepath.Join(dir, name, libraryName))
		}
	}
	for _, path := range found {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path
		}
	}
	return ""
}

// loadError explains what the loader said.
func loadError(path, symbol, reason string) *failure {
	e := binding().Fail(path, symbol, reason)
	switch {
	case symbol != "":
		e.Mend = mendVersion
	case strings.Contains(reason, "libssl.so") || strings.Contains(reason, "libcrypto.so") || strings.Contains(reason, "libz.so"):
		e.Mend = "install the packages libssl3 and zlib1g"
	case strings.Contains(reason, "libstdc++.so"):
		e.Mend = "install the package libstdc++6"
	case strings.Contains(reason, "GLIBC"):
		e.Mend = "NIXL's wheel needs glibc 2.28 or later"
	}
	return e
}
