package nixl

import (
	"bytes"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/nixl"
	"github.com/kvport/kvport/native/ucx"
	"github.com/kvport/kvport/verify/testkit"
)

// TestNoPort: except for the side channel no port is open, whatever UCX_TLS says, and a frame of UCX's that writes
// memory without a word before writes none. Where ucx_tcp takes the risk there are ports, and the frame writes.
func TestNoPort(t *testing.T) {
	t.Setenv(envDevices, "lo")
	for _, c := range []struct {
		tls, tcp string
		ports    bool
	}{{"", "", false}, {"all", "", false}, {"tcp,posix,cma,self", "", false}, {"all", trustNetwork, true}} {
		t.Run(c.tls+" "+c.tcp, func(t *testing.T) {
			t.Setenv(envTransports, c.tls)
			before := testkit.BoundPorts(t, os.Getpid())
			var said bytes.Buffer
			p := open(t, connector.RoleProducer, Config{UCXTCP: c.tcp}, func(e *connector.Env) { e.Log = slog.New(slog.NewTextHandler(&said, nil)) })
			open(t, connector.RoleConsumer, Config{UCXTCP: c.tcp, Mode: modePush}, nil)
			require.Equal(t, strings.Contains(c.tls, "tcp,"), strings.Contains(said.String(), "left_out=tcp"), said.String())
			side := p.node.address()
			others := slices.DeleteFunc(testkit.BoundPorts(t, os.Getpid()), func(port string) bool { return port == side || slices.Contains(before, port) })
			require.Equal(t, c.ports, len(others) > 0, "ports other than the side channel's: %v", others)
			target, err := syscall.Mmap(-1, 0, os.Getpagesize(), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
			require.NoError(t, err)
			defer func() { require.NoError(t, syscall.Munmap(target)) }()
			for _, port := range append(others, side) {
				testkit.PutFrame(t, port, uint64(uintptr(unsafe.Pointer(&target[0]))))
			}
			written := func() bool { return bytes.Contains(target, []byte(strings.Repeat("x", 64))) }
			if c.ports {
				require.Eventually(t, written, time.Minute, time.Millisecond, "the test can see a write")
			}
			require.Equal(t, c.ports, written())
		})
	}
}

// TestDoors: what would need an open port, or has no way to other machines, is an error at the start that says
// what is missing and how to go on.
func TestDoors(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(key, []byte(strings.Repeat("k", 32)), 0o600))
	refused := func(c Config) {
		t.Helper()
		c.LibDir = libDir(t)
		_, err := Open(t.Context(), testEnv(connector.RoleProducer, 1), c)
		require.ErrorIs(t, err, connector.ErrIncompatible)
		require.ErrorIs(t, err, ucx.ErrOpenPort)
		for _, way := range []string{"inside TLS", `"ucx_tcp": "trusted-network"`} {
			require.ErrorContains(t, err, way)
		}
	}
	t.Setenv(envTransports, "tcp,self")
	refused(Config{})
	t.Setenv(envTransports, "")
	if !ucx.HasRDMA() {
		refused(Config{Host: "0.0.0.0", KeyFile: key})
		refused(Config{Advertise: "192.0.2.7", KeyFile: key})
	}
	t.Setenv(envTransports, "tcp,self")
	t.Setenv(envDevices, "lo")
	rng := rand.New(rand.NewPCG(30, 31))
	far := Config{Host: "127.0.0.1", Advertise: "localhost", KeyFile: key, UCXTCP: trustNetwork}
	p, d := open(t, connector.RoleProducer, far, nil), open(t, connector.RoleConsumer, far, nil)
	theirs, hold := p.finish(rng, 1, 4)
	ours, err := d.load(rng, 1, 4, hold.Ticket)
	require.NoError(t, err)
	require.Equal(t, p.bytes(theirs), d.bytes(ours))
}

// TestUnreached: a peer that shared memory does not lead to is said to be one at once.
func TestUnreached(t *testing.T) {
	here, err := os.Hostname()
	require.NoError(t, err)
	near, trusting := transportPolicy{list: ucx.SharedMemory}, transportPolicy{open: true}
	own := nixl.Bytes(make([]byte, 1)).Addr
	require.Equal(t, "ucx:cma", near.transport(backendUCX, here, os.Getpid(), own))
	require.Equal(t, "ucx:posix", (&transportPolicy{list: "posix,self"}).transport(backendUCX, here, os.Getpid(), own))
	require.Equal(t, unreached, near.transport(backendUCX, "elsewhere", os.Getpid(), own))
	require.Equal(t, unreached, near.transport(backendUCX, here, 1<<30, own), "no such process")
	require.Equal(t, overNetwork, trusting.transport(backendUCX, "elsewhere", os.Getpid(), own))
	d := open(t, connector.RoleConsumer, Config{}, nil)
	m := move{transport: unreached}
	err = d.w.(*worker).rank.move(t.Context(), &m, &read{})
	require.ErrorIs(t, err, errUnreached)
	require.ErrorContains(t, err, "trusted-network")
}

// noCMA has this test binary run where the kernel forbids a process to read another's memory.
const noCMA = "KVPORT_TEST_NO_CMA"

// TestWithoutCMA: where process_vm_readv is forbidden, as in many containers, blocks go through shared memory, and
// no port is open either.
func TestWithoutCMA(t *testing.T) {
	if os.Getenv(noCMA) == "" {
		libDir(t) // or skip
		self, err := os.Executable()
		require.NoError(t, err)
		child := exec.CommandContext(t.Context(), self, "-test.run=^TestWithoutCMA$", "-test.v")
		child.Env = append(os.Environ(), noCMA+"=1", envTransports+"=")
		said, err := child.CombinedOutput()
		require.NoError(t, err, "%s", said)
		return
	}
	before := testkit.BoundPorts(t, os.Getpid())
	for _, mode := range []string{modePull, modePush} {
		rng := rand.New(rand.NewPCG(32, 33))
		p, d := open(t, connector.RoleProducer, Config{}, nil), open(t, connector.RoleConsumer, Config{Mode: mode}, nil)
		require.Len(t, testkit.BoundPorts(t, os.Getpid()), len(before)+1, "the side channel's")
		for i := range 5 {
			theirs, hold := p.finish(rng, byte(i), 9)
			ours, err := d.load(rng, byte(i), 9, hold.Ticket)
			require.NoError(t, err)
			require.Equal(t, p.bytes(theirs), d.bytes(ours))
		}
		require.InDelta(t, 5, d.value("reads_total", mode, "ucx:posix", "ok"), 0)
		before = testkit.BoundPorts(t, os.Getpid())
	}
}

// forbidCMA has process_vm_readv and process_vm_writev fail in this process from now on.
func forbidCMA() error {
	const permission = uint32(unix.SECCOMP_RET_ERRNO) | uint32(unix.EPERM)
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the number of the call
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 2, K: unix.SYS_PROCESS_VM_READV},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1, K: unix.SYS_PROCESS_VM_WRITEV},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
		{Code: unix.BPF_RET | unix.BPF_K, K: permission},
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return os.NewSyscallError("seccomp", errno)
	}
	return nil
}
