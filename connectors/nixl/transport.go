package nixl

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// transport says by what a backend reaches a peer, for metrics and to know which process has to be awake: NIXL does not tell.
// Where UCX may choose, it reads another process's memory directly ("cma") if the kernel lets it; else it has
// the peer copy through shared memory ("posix") or, where it may, goes over the network's devices.
func (d *transportPolicy) transport(backend, host string, pid int, addr uint64) string {
	switch {
	case backend != backendUCX:
		return strings.ToLower(backend)
	case !d.reaches(host, pid):
		return unreached
	case (d.open || d.far) && d.list != "":
		return "ucx:" + d.list[:min(len(d.list), 64)]
	}
	here, err := os.Hostname()
	direct := err == nil && here == host && canRead(pid, addr)
	switch {
	case direct && (d.open || strings.Contains(d.list, "cma")):
		return "ucx:cma"
	case d.open:
		return overNetwork
	}
	return "ucx:posix"
}

const overNetwork = "ucx:network"

// overTCP says whether the bytes of a transport go through sockets, where UCX writes faster than it
// reads. A network that is not TCP has devices in rdma.
func overTCP(transport, rdma string) bool {
	if transport == overNetwork {
		devices, _ := os.ReadDir(rdma)
		return len(devices) == 0
	}
	return only(transport, "tcp")
}

// copied says whether the peer's process has to work for every byte: over TCP, and by shared memory without cma.
func copied(transport, rdma string) bool {
	return overTCP(transport, rdma) || only(transport, "posix") || only(transport, "tcp", "posix")
}

// only says whether a list of UCX's has all of some transports and no others; self aside.
func only(transport string, all ...string) bool {
	list, ucx := strings.CutPrefix(transport, "ucx:")
	found := map[string]bool{}
	for name := range strings.SplitSeq(list, ",") {
		if name != "self" {
			found[name] = true
		}
	}
	for _, name := range all {
		if !found[name] {
			return false
		}
	}
	return ucx && len(found) == len(all)
}

// rdmaDevices are those of this machine.
const rdmaDevices = "/sys/class/infiniband"

// canRead tries to read one byte of a process's memory.
func canRead(pid int, addr uint64) bool {
	if pid <= 0 {
		return false
	}
	b := make([]byte, 1)
	local := []unix.Iovec{{Base: &b[0], Len: 1}}
	remote := []unix.RemoteIovec{{Base: uintptr(addr), Len: 1}}
	n, err := unix.ProcessVMReadv(pid, local, remote, 0)
	return err == nil && n == 1
}
