// Package ucx is a Go binding of UCX's ucp layer (github.com/openucx/ucx), API 1.22 and later, loaded at run
// time: a program that imports this package builds and starts on a machine that has no UCX, and [Open] says
// what is missing. The UCX inside NIXL's wheel, which make deps fetches, will do.
//
// A [Worker] is one end. Its [Worker.Address] goes to the peer by whatever way the two already have, and the
// peer's [Worker.Connect] makes an [Endpoint] of it. Over an endpoint go tagged messages, FIFO for each tag,
// and reads and writes of [Memory] whose [Memory.Key] the other side has been given.
//
// Everything that moves data starts a [Request] and returns at once. UCX works only inside calls: a request
// advances when it, another one or its worker is polled, at both ends where a transport requires that (TCP
// does). Flushing is no exception: a peer that has stopped polling keeps a flush from ending, so flush
// before saying goodbye, not after.
//
// Buffers of requests may be Go's: they are pinned until the request has ended. [Worker.Map] requires memory
// that stays until the Memory is closed: from mmap, or pinned by the caller. Close it before unmapping it.
//
// Open sets UCX_LOG_FILE to stderr where it is not set. Everything here is safe for use by several goroutines
// at once; the calls of one worker take turns.
//
// UCX authenticates nothing and encrypts nothing. Over TCP it opens ports at which anybody writes any address of
// the process, without a key: [SharedMemory], [RDMA] and [Closed] are lists of transports that open none.
package ucx

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvport/kvport/native/internal/loader"
)

// Errors of this package; those of UCX itself are a StatusError.
var (
	// ErrUnavailable is what every failure of Open wraps: this machine or this build has no UCX.
	ErrUnavailable = errors.New("UCX is not available")
	// ErrClosed means that the worker, or what belongs to it, was closed.
	ErrClosed = errors.New("closed")
	// ErrInvalid means that an argument cannot be right.
	ErrInvalid = errors.New("invalid argument")
)

// StatusError is a negative status of UCX's.
type StatusError int

// The statuses that a caller may want to tell apart.
const (
	ErrNoMemory        StatusError = -4
	ErrUnreachable     StatusError = -6 // no transport leads to the peer
	ErrTruncated       StatusError = -9 // a message did not fit the receiver's buffer
	ErrCanceled        StatusError = -16
	ErrNotConnected    StatusError = -24
	ErrConnectionReset StatusError = -25 // the peer has gone
	ErrEndpointTimeout StatusError = -80 // the peer does not answer
)

// Error is what UCX calls the status.
func (e StatusError) Error() string {
	names := map[StatusError]string{
		-1: "no message", -2: "no resource", -3: "input/output error", ErrNoMemory: "out of memory", -5: "invalid parameter",
		ErrUnreachable: "destination is unreachable", -7: "address not valid", -8: "not implemented", ErrTruncated: "message truncated",
		-10: "no progress", -11: "buffer too small", -12: "no such element", -13: "failed to connect some endpoints", -14: "no such device",
		-15: "busy", ErrCanceled: "request canceled", -17: "shared memory error", -18: "exists already", -19: "out of range", -20: "timed out",
		-21: "limit exceeded", -22: "not supported", -23: "rejected by the peer", ErrNotConnected: "not connected",
		ErrConnectionReset: "connection reset by the peer", ErrEndpointTimeout: "endpoint timeout",
	}
	if name, ok := names[e]; ok {
		return name
	}
	return fmt.Sprintf("UCX status %d", int(e))
}

// LoadError says why the library could not be loaded and what to do about it. It wraps ErrUnavailable.
type LoadError struct{ failure }

type failure = loader.LoadError

func binding() *loader.Binding {
	return &loader.Binding{Name: "ucx", EnvDir: EnvDir, Unavailable: ErrUnavailable, Mend: mendMissing}
}

// EnvDir names the environment variable with the folder that Open looks in first. (It does not begin with
// UCX_: UCX complains about variables that it does not know.)
const EnvDir = "KVPORT_UCX_DIR"

const (
	systemName  = "libucp.so.0"
	mendMissing = "run make deps in the repository of kvport, or pip install nixl-cu12==1.5.1 beside kvport's wheel, or install UCX 1.22 or later (Debian: libucx0), or set " + EnvDir + " to a folder with libucp"
)

// Library is UCX, loaded. It stays loaded until the process ends.
type Library struct {
	path string
	lib  *library
}

// Open loads UCX from dir, a folder with libucp or with NIXL's unpacked wheel in it. If dir is empty it takes
// the folder that KVPORT_UCX_DIR names; without that, the one that make deps fills beside the program's own
// folder, or, for a program in kvport's wheel, the one that pip unpacks wheels into; without that, what the
// system's loader finds. Its errors are a *LoadError.
func Open(dir string) (*Library, error) {
	path, failed := binding().Locate(dir, "libucp", systemName, within)
	if failed == nil {
		failed = binding().Default(path, [2]string{"UCX_LOG_FILE", "stderr"})
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

// Version is UCX's, as in "1.23.0".
func (l *Library) Version() string { return l.lib.version() }

// within is the absolute path of libucp in a folder, or in that of an unpacked wheel; "" if there is none.
func within(dir string) string {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return ""
	}
	folders := []string{dir, filepath.Join(dir, "nixl_cu12.libs"), filepath.Join(dir, "nixl_cu13.libs")}
	for _, folder := range folders {
		entries, _ := os.ReadDir(folder)
		for _, e := range entries {
			if name := e.Name(); strings.HasPrefix(name, "libucp") && strings.Contains(name, ".so") {
				return filepath.Join(folder, name)
			}
		}
	}
	return ""
}

func loadError(path, symbol, reason string) *failure {
	e := binding().Fail(path, symbol, reason)
	if symbol != "" {
		e.Mend = "it is older than UCX 1.22; " + mendMissing
	}
	return e
}

// UCX authenticates nothing: whoever can send to one of its ports has it write any address of the process,
// without a key and before any handshake. Over TCP that is everybody who reaches the port, on loopback every
// user of the machine. The lists below open no port.
const (
	// SharedMemory are the transports between processes of one user on one machine. The memory that posix
	// shares can be opened by that user alone; sysv is left out, since a whole group can attach to its memory.
	SharedMemory = "posix,cma,self"
	// RDMA are the transports of RDMA devices. They write for whoever can send on that network.
	RDMA = "ib,self"
)

// ErrOpenPort means that UCX is wanted in a way for which it would have to open a TCP port.
var ErrOpenPort = errors.New("over TCP, UCX lets anybody who can reach its port write the memory of this process")

// rdmaDevices has an entry for each RDMA device.
const rdmaDevices = "/sys/class/infiniband"

// HasRDMA says whether this machine has an RDMA device.
func HasRDMA() bool {
	devices, _ := os.ReadDir(rdmaDevices) // without the folder there is none
	return len(devices) > 0
}

// Closed is a list of transports for UCX that opens no TCP port: those of RDMA where far is set, and of
// SharedMemory otherwise. Of these an operator's own list (as in UCX_TLS; "" and "all" are everything) leaves
// those that it names; what else it names is left out and returned. It fails with ErrOpenPort if that leaves
// no transport that works.
func Closed(wanted string, far bool) (list string, out []string, err error) {
	safe := strings.Split(closedNames(far), ",")
	if wanted == "" || wanted == "all" {
		return strings.Join(safe, ","), nil, nil
	}
	rest, negated := strings.CutPrefix(wanted, "^")
	var kept []string
	for name := range strings.SplitSeq(rest, ",") {
		names := closed(name, far)
		switch {
		case negated && far && len(names) > 0 && !slices.Contains(safe, name):
			return "", nil, fmt.Errorf("UCX_TLS=%s: name the RDMA transports that are to be used, not those that are not: %w", wanted, ErrInvalid)
		case negated:
			safe = slices.DeleteFunc(safe, func(s string) bool { return slices.Contains(names, s) })
		case len(names) == 0:
			out = append(out, name)
		default:
			kept = append(kept, names...)
		}
	}
	if negated {
		kept = safe
	}
	works := func(name string) bool { return name == "posix" || far && name != "self" } // cma alone has no messages
	if !slices.ContainsFunc(kept, works) {
		return "", out, fmt.Errorf("UCX_TLS=%s leaves UCX none of the transports that open no port (%s): %w", wanted, closedNames(far), ErrOpenPort)
	}
	slices.Sort(kept)
	return strings.Join(slices.Compact(kept), ","), out, nil
}

func closedNames(far bool) string {
	if far {
		return RDMA
	}
	return SharedMemory
}

// closed are the transports without a port that a name in UCX's lists stands for; none if it stands for others.
func closed(name string, far bool) []string {
	if name == "self" {
		return []string{name}
	}
	if far {
		family, _, _ := strings.Cut(name, "_")
		if slices.Contains([]string{"ib", "rc", "ud", "dc", "srd"}, family) {
			return []string{name}
		}
		return nil
	}
	switch name {
	case "posix", "cma":
		return []string{name}
	case "mm":
		return []string{"posix"}
	case "sm", "shm":
		return []string{"cma", "posix"}
	}
	return nil
}
