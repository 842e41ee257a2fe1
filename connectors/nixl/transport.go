package nixl

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// transportOf says by what a backend reaches a peer, for metrics: NIXL does not tell. Where UCX may choose,
// it reads another process's memory directly ("cma") if the kernel lets it, as here, and goes over the
// network's devices otherwise.
func transportOf(backend, host string, pid int, addr uint64) string {
	if backend != "UCX" {
		return strings.ToLower(backend)
	}
	if tls := os.Getenv("UCX_TLS"); tls != "" && tls != "all" {
		return "ucx:" + tls[:min(len(tls), 64)]
	}
	if here, err := os.Hostname(); err == nil && here == host && canRead(pid, addr) {
		return "ucx:cma"
	}
	return overNetwork
}

const overNetwork = "ucx:network"

// overTCP says whether the bytes of a transport go through sockets, where UCX writes faster than it
// reads. A network that is not TCP has devices in rdma.
func overTCP(transport, rdma string) bool {
	if transport == overNetwork {
		devices, _ := os.ReadDir(rdma)
		return len(devices) == 0
	}
	list, ucx := strings.CutPrefix(transport, "ucx:")
	tcp := false
	for name := range strings.SplitSeq(list, ",") {
		switch name {
		case "tcp":
			tcp = true
		case "self":
		default:
			return false
		}
	}
	return ucx && tcp
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
