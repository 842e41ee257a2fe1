package sandbox

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// verdict is what a filter does with a call, as the kernel's interpreter would.
func verdict(t *testing.T, program []unix.SockFilter, arch, call uint32, args ...uint64) uint32 {
	t.Helper()
	var data [64]byte
	binary.LittleEndian.PutUint32(data[offsetCall:], call)
	binary.LittleEndian.PutUint32(data[offsetArch:], arch)
	for i, arg := range args {
		binary.LittleEndian.PutUint64(data[offsetArgs+8*i:], arg)
	}
	var a uint32
	jump := func(yes bool, f unix.SockFilter) int {
		if yes {
			return int(f.Jt)
		}
		return int(f.Jf)
	}
	for at := 0; at < len(program); at++ {
		switch f := program[at]; f.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			a = binary.LittleEndian.Uint32(data[f.K:])
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
			a &= f.K
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			at += jump(a == f.K, f)
		case unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
			at += jump(a >= f.K, f)
		case unix.BPF_RET | unix.BPF_K:
			return f.K
		default:
			require.FailNow(t, "unknown instruction", "%#x", f.Code)
		}
	}
	require.FailNow(t, "the program has no end")
	return 0
}

// TestFilter: which calls the filter refuses, with and without a network.
func TestFilter(t *testing.T) {
	const eperm, enosys = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM), unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	const allow, kill = uint32(unix.SECCOMP_RET_ALLOW), uint32(unix.SECCOMP_RET_KILL_PROCESS)
	offline, online := filter((&Policy{}).refused()), filter((&Policy{Network: true}).refused())
	require.Less(t, len(offline), 4096, "the kernel takes no longer ones")
	for _, c := range []struct {
		name            string
		call            uint32
		args            []uint64
		offline, online uint32
	}{
		{"getpid", unix.SYS_GETPID, nil, allow, allow},
		{"execve", unix.SYS_EXECVE, nil, allow, allow},
		{"ptrace", unix.SYS_PTRACE, nil, eperm, eperm},
		{"setsid", unix.SYS_SETSID, nil, eperm, eperm},
		{"clone3", unix.SYS_CLONE3, nil, enosys, enosys},
		{"clone of a thread", unix.SYS_CLONE, []uint64{unix.CLONE_VM | unix.CLONE_THREAD | unix.CLONE_SIGHAND}, allow, allow},
		{"clone with a namespace", unix.SYS_CLONE, []uint64{unix.CLONE_NEWUSER | uint64(unix.SIGCHLD)}, eperm, eperm},
		{"madvise", unix.SYS_MADVISE, []uint64{0, 0, unix.MADV_DONTNEED}, allow, allow},
		{"madvise that removes", unix.SYS_MADVISE, []uint64{0, 0, unix.MADV_REMOVE}, eperm, eperm},
		{"fallocate", unix.SYS_FALLOCATE, []uint64{3, unix.FALLOC_FL_KEEP_SIZE}, allow, allow},
		{"fallocate of a hole", unix.SYS_FALLOCATE, []uint64{3, unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE}, eperm, eperm},
		{"limits of its own", unix.SYS_PRLIMIT64, []uint64{0, unix.RLIMIT_NOFILE}, allow, allow},
		{"limits of others", unix.SYS_PRLIMIT64, []uint64{7, unix.RLIMIT_NOFILE}, eperm, eperm},
		{"times by descriptor", unix.SYS_UTIMENSAT, []uint64{3, 0}, allow, allow},
		{"times by path", unix.SYS_UTIMENSAT, []uint64{3, 4096}, eperm, eperm},
		{"times by a path at a round address", unix.SYS_UTIMENSAT, []uint64{3, 1 << 32}, eperm, eperm},
		{"own priority", unix.SYS_SETPRIORITY, []uint64{unix.PRIO_PROCESS, 0, 5}, allow, allow},
		{"a user's priority", unix.SYS_SETPRIORITY, []uint64{unix.PRIO_USER, 0, 5}, eperm, eperm},
		{"death signal", unix.SYS_PRCTL, []uint64{unix.PR_SET_PDEATHSIG, 0}, eperm, eperm},
		{"name of a thread", unix.SYS_PRCTL, []uint64{unix.PR_SET_NAME, 1}, allow, allow},
		{"listener", unix.SYS_SOCKET, []uint64{unix.AF_UNIX, unix.SOCK_STREAM | unix.SOCK_CLOEXEC}, allow, allow},
		{"unix datagrams", unix.SYS_SOCKET, []uint64{unix.AF_UNIX, unix.SOCK_DGRAM}, eperm, allow},
		{"pair", unix.SYS_SOCKETPAIR, []uint64{unix.AF_UNIX, unix.SOCK_STREAM}, allow, allow},
		{"pair of datagrams", unix.SYS_SOCKETPAIR, []uint64{unix.AF_UNIX, unix.SOCK_DGRAM}, eperm, allow},
		{"TCP", unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_STREAM}, eperm, allow},
		{"MPTCP", unix.SYS_SOCKET, []uint64{unix.AF_INET6, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}, eperm, allow},
		{"routes", unix.SYS_SOCKET, []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE}, eperm, allow},
		{"audit", unix.SYS_SOCKET, []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT}, eperm, eperm},
		{"packets", unix.SYS_SOCKET, []uint64{unix.AF_PACKET, unix.SOCK_RAW}, eperm, eperm},
		{"vsock", unix.SYS_SOCKET, []uint64{unix.AF_VSOCK, unix.SOCK_STREAM}, eperm, eperm},
		{"connect", unix.SYS_CONNECT, nil, eperm, allow},
		{"bind", unix.SYS_BIND, nil, allow, allow},
	} {
		require.Equal(t, c.offline, verdict(t, offline, auditArch, c.call, c.args...), "%s, without a network", c.name)
		require.Equal(t, c.online, verdict(t, online, auditArch, c.call, c.args...), "%s, with a network", c.name)
	}
	require.Equal(t, kill, verdict(t, offline, auditArch+1, unix.SYS_GETPID), "calls of another architecture")
	require.Equal(t, kill, verdict(t, offline, auditArch, otherNumbers), "calls by other numbers")
}
