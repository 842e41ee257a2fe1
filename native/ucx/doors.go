package ucx

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

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
