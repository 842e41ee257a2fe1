package nixl

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// transportOf says by what a backend reaches a peer, for metrics: NIXL does not tell. Where UCX may choose,
// it reads another process's memory directly ("cma") if the kernel lets it, as here, and goes over the
// network's devices otherwise.
func transportOf(backend string, a *answer) string {
	if backend != "UCX" {
		return strings.ToLower(backend)
	}
	if tls := os.Getenv("UCX_TLS"); tls != "" && tls != "all" {
		return "ucx:" + tls[:min(len(tls), 64)]
	}
	if host, err := os.Hostname(); err == nil && host == a.Host && canRead(a.PID, a.Segments) {
		return "ucx:cma"
	}
	return "ucx:network"
}

// canRead tries to read one byte of a process's memory.
func canRead(pid int, segments []segment) bool {
	if pid <= 0 || len(segments) == 0 {
		return false
	}
	b := make([]byte, 1)
	local := []unix.Iovec{{Base: &b[0], Len: 1}}
	remote := []unix.RemoteIovec{{Base: uintptr(segments[0].Addr), Len: 1}}
	n, err := unix.ProcessVMReadv(pid, local, remote, 0)
	return err == nil && n == 1
}
