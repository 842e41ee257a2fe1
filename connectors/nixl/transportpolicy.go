package nixl

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/ucx"
	"github.com/kvport/kvport/pipe"
)

// trustNetwork is the one value of ucx_tcp.
const trustNetwork = "trusted-network"

// transportPolicy is the transports that UCX may use. It authenticates nothing: whoever reaches a TCP port of its own
// writes any memory of this process. So on one machine it gets shared memory alone, and RDMA between machines.
type transportPolicy struct {
	open bool   // ucx_tcp: whatever UCX_TLS says
	far  bool   // between machines
	list string // UCX's list; "": all
}

// mendTCP are the ways out of what would need an open port.
const mendTCP = `use machines with RDMA devices, or a connector that moves blocks over TCP inside TLS (docs/connectors/nixl.md names two), ` +
	`or take the risk, on a network that you trust, with "ucx_tcp": "trusted-network" in kv_connector_extra_config`

// transportPolicy finds out which transports UCX may use. Errors wrap connector.ErrIncompatible.
func (c *Config) transportPolicy(log *slog.Logger) (transportPolicy, error) {
	wanted := os.Getenv(envTransports)
	d := transportPolicy{open: c.UCXTCP == trustNetwork, far: !pipe.IsLoopback(c.Host) || c.Advertise != "" && !pipe.IsLoopback(c.Advertise)}
	if d.open {
		if d.list = wanted; wanted == "all" {
			d.list = ""
		}
		log.Warn("UCX may use TCP: whoever can reach its ports can read and write the memory of this plugin", "ucx_tcp", trustNetwork)
		return d, nil
	}
	if !slices.Contains(c.Backends, backendUCX) {
		return d, nil
	}
	if d.far && !ucx.HasRDMA() {
		return d, c.errFar("this machine has no RDMA device")
	}
	var out []string
	var err error
	if d.list, out, err = ucx.Closed(wanted, d.far); err != nil {
		return d, fmt.Errorf("%w: change UCX_TLS, or %s: %w", err, mendTCP, connector.ErrIncompatible)
	}
	if len(out) > 0 {
		log.Warn("transports of UCX_TLS are left out: UCX may use only those that open no port", "left_out", strings.Join(out, ","), "used", d.list)
	}
	return d, nil
}

// errFar says why blocks cannot go to other machines.
func (c *Config) errFar(why string) error {
	return fmt.Errorf("side_channel_host: %s is for peers on other machines, to which UCX moves blocks by RDMA, but %s, and %w: %s: %w",
		c.Host, why, ucx.ErrOpenPort, mendTCP, connector.ErrIncompatible)
}

const (
	backendUCX    = "UCX"
	envTransports = "UCX_TLS"
	envDevices    = "UCX_NET_DEVICES"
)

// set tells UCX, which reads its environment when a backend starts: what NIXL is told itself goes behind it.
func (d *transportPolicy) set(devices string) error {
	var errs []error
	unless := func(name, value string) {
		if _, set := os.LookupEnv(name); !set && value != "" {
			errs = append(errs, os.Setenv(name, value))
		}
	}
	if !d.open && d.list != "" {
		errs = append(errs, os.Setenv(envTransports, d.list))
	}
	if d.open || d.far {
		unless(envDevices, devices)
	} else { // or endpoints that report the death of their peer need TCP, or find out late
		unless("UCX_POSIX_ERROR_HANDLING", "y")
		unless("UCX_KEEPALIVE_INTERVAL", "1s")
	}
	return errors.Join(errs...)
}

// reaches says whether UCX can reach a process by shared memory.
func (d *transportPolicy) reaches(host string, pid int) bool {
	if d.open || d.far || host == "" {
		return true // UCX will say
	}
	here, err := os.Hostname()
	if err != nil {
		return true
	}
	info, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	if err != nil {
		return false
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	return here == host && ok && int(owner.Uid) == os.Geteuid()
}

// unreached is the transport to a peer that UCX cannot reach.
const unreached = "none"

// errUnreached says what to do about one.
var errUnreached = fmt.Errorf("the peer is on another machine, in another container or of another user, and UCX moves blocks by shared memory of one user "+
	"on one machine, since %w: give both engines a side_channel_host on a network with RDMA, or %s: %w", ucx.ErrOpenPort, mendTCP, connector.ErrGone)

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
	return overTCP(transport, rdma) || only(transport, "posix") || only(transport, "posix", "tcp")
}

// only says whether a list of UCX's has all of some transports, in order, and no others; self aside.
func only(transport string, all ...string) bool {
	list, ucx := strings.CutPrefix(transport, "ucx:")
	found := slices.DeleteFunc(strings.Split(list, ","), func(name string) bool { return name == "self" })
	slices.Sort(found)
	return ucx && slices.Equal(slices.Compact(found), all)
}

// rdmaDevices are those of this machine.
const rdmaDevices = "/sys/class/infiniband"

// canRead tries to read one byte of a process's memory.
func canRead(pid int, addr uint64) bool { return pid > 0 && peek(pid, addr, make([]byte, 1)) }

// peek copies memory of another process.
func peek(pid int, addr uint64, to []byte) bool {
	local := []unix.Iovec{{Base: &to[0], Len: uint64(len(to))}}
	remote := []unix.RemoteIovec{{Base: uintptr(addr), Len: len(to)}}
	n, err := unix.ProcessVMReadv(pid, local, remote, 0)
	return err == nil && n == len(to)
}
