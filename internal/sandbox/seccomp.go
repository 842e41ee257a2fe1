package sandbox

import (
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// rule refuses a system call if all of its conditions hold.
type rule struct {
	call  uint32
	errno unix.Errno
	when  []condition
}

// condition compares one half of an argument.
type condition struct {
	arg   int
	high  bool   // the upper 32 bits
	mask  uint32 // 0: all bits
	value uint32
	not   bool // holds where they differ
}

// Offsets in struct seccomp_data. Both architectures are little-endian.
const (
	offsetCall = 0
	offsetArch = 4
	offsetArgs = 16
)

func (c condition) offset() uint32 {
	at := uint32(offsetArgs + 8*c.arg)
	if c.high {
		at += 4
	}
	return at
}

// refused are the rules of a policy.
func (p *Policy) refused() []rule {
	var rules []rule
	for _, call := range append(neverCalled(), legacyCalls()...) {
		rules = append(rules, rule{call: call, errno: unix.EPERM})
	}
	for _, call := range []uint32{unix.SYS_CLONE3, unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER} {
		rules = append(rules, rule{call: call, errno: unix.ENOSYS}) // as on an old kernel: callers have another way
	}
	return slices.Concat(rules, refusedByArgument(), p.refusedSockets())
}

// neverCalled are system calls that no connector needs, and that reach other processes, the kernel's inside, or memory
// and files around the other rules.
func neverCalled() []uint32 {
	return []uint32{
		// Other processes.
		unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PROCESS_MADVISE, unix.SYS_PROCESS_MRELEASE,
		unix.SYS_PIDFD_GETFD, unix.SYS_KCMP, unix.SYS_MIGRATE_PAGES, unix.SYS_MOVE_PAGES,
		// What is shared by all processes of a user, without a path.
		unix.SYS_KEYCTL, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_SHMGET, unix.SYS_SHMAT, unix.SYS_SHMCTL,
		unix.SYS_MSGGET, unix.SYS_MSGSND, unix.SYS_MSGRCV, unix.SYS_MSGCTL, unix.SYS_SEMGET, unix.SYS_SEMOP, unix.SYS_SEMTIMEDOP, unix.SYS_SEMCTL,
		unix.SYS_MQ_OPEN, unix.SYS_MQ_UNLINK,
		// Another view of the files, or of the processes.
		unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE, unix.SYS_OPEN_TREE_ATTR,
		unix.SYS_MOUNT_SETATTR, unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_UNSHARE, unix.SYS_SETNS,
		unix.SYS_NAME_TO_HANDLE_AT, unix.SYS_OPEN_BY_HANDLE_AT,
		// The kernel's inside.
		unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD,
		unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_SYSLOG, unix.SYS_ACCT, unix.SYS_QUOTACTL, unix.SYS_QUOTACTL_FD,
		// Files that Landlock does not guard: it has no rules for attributes, and none for watching a folder.
		unix.SYS_FCHMODAT, unix.SYS_FCHMODAT2, unix.SYS_FCHOWNAT, unix.SYS_SETXATTR, unix.SYS_LSETXATTR, unix.SYS_SETXATTRAT,
		unix.SYS_REMOVEXATTR, unix.SYS_LREMOVEXATTR, unix.SYS_REMOVEXATTRAT, unix.SYS_FILE_SETATTR, unix.SYS_INOTIFY_ADD_WATCH, unix.SYS_FANOTIFY_INIT,
		// The host kills the plugin's process group, so no descendant may leave it.
		unix.SYS_SETSID, unix.SYS_SETPGID,
	}
}

// spaces are the flags of clone that make namespaces, or a child of the plugin's parent.
const spaces = unix.CLONE_NEWNS | unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS |
	unix.CLONE_NEWCGROUP | unix.CLONE_PARENT

// refusedByArgument are system calls of which only some uses are refused.
func refusedByArgument() []rule {
	eperm := func(call uint32, when ...condition) rule { return rule{call, unix.EPERM, when} }
	rules := []rule{
		eperm(unix.SYS_CLONE, condition{arg: 0, mask: spaces, value: 0, not: true}),
		// The death signal is what ends the plugin with its host.
		eperm(unix.SYS_PRCTL, condition{arg: 0, value: unix.PR_SET_PDEATHSIG}),
		// Memory that the host shares with the plugin must not lose its pages: seals do not forbid that.
		eperm(unix.SYS_MADVISE, condition{arg: 2, value: unix.MADV_REMOVE}),
		eperm(unix.SYS_FALLOCATE, condition{arg: 1, mask: unix.FALLOC_FL_PUNCH_HOLE, value: 0, not: true}),
		eperm(unix.SYS_IOCTL, condition{arg: 1, value: unix.TIOCSTI}),
		// Times of a file, by its path; by its descriptor they may be set.
		eperm(unix.SYS_UTIMENSAT, condition{arg: 1, value: 0, not: true}),
		eperm(unix.SYS_UTIMENSAT, condition{arg: 1, high: true, value: 0, not: true}),
		// Limits and priorities of other processes of this user.
		eperm(unix.SYS_SETPRIORITY, condition{arg: 0, value: unix.PRIO_PROCESS, not: true}),
		eperm(unix.SYS_SETPRIORITY, condition{arg: 1, value: 0, not: true}),
		eperm(unix.SYS_IOPRIO_SET, condition{arg: 0, value: ioprioProcess, not: true}),
		eperm(unix.SYS_IOPRIO_SET, condition{arg: 1, value: 0, not: true}),
	}
	for _, call := range []uint32{unix.SYS_PRLIMIT64, unix.SYS_SCHED_SETAFFINITY, unix.SYS_SCHED_SETSCHEDULER, unix.SYS_SCHED_SETPARAM, unix.SYS_SCHED_SETATTR} {
		rules = append(rules, eperm(call, condition{arg: 0, value: 0, not: true}))
	}
	return rules
}

// ioprioProcess is IOPRIO_WHO_PROCESS.
const ioprioProcess = 1

// socketType is the part of a socket's type that is not a flag.
const socketType = 0xf

// refusedSockets leave a plugin without a network the socket at which it listens for its host. It may not connect:
// Landlock does not guard the sockets of other programs that have a path.
func (p *Policy) refusedSockets() []rule {
	not := func(arg int, value uint32) condition { return condition{arg: arg, value: value, not: true} }
	if p.Network {
		return []rule{
			{unix.SYS_SOCKET, unix.EPERM, []condition{not(0, unix.AF_UNIX), not(0, unix.AF_INET), not(0, unix.AF_INET6), not(0, unix.AF_NETLINK)}},
			{unix.SYS_SOCKET, unix.EPERM, []condition{{arg: 0, value: unix.AF_NETLINK}, not(2, unix.NETLINK_ROUTE)}},
		}
	}
	other := condition{arg: 1, mask: socketType, value: unix.SOCK_STREAM, not: true}
	return []rule{
		{unix.SYS_SOCKET, unix.EPERM, []condition{not(0, unix.AF_UNIX)}},
		{unix.SYS_SOCKET, unix.EPERM, []condition{other}},
		{unix.SYS_SOCKETPAIR, unix.EPERM, []condition{other}}, // others could be sent from to any address
		{unix.SYS_CONNECT, unix.EPERM, nil},
	}
}

// filter is the BPF program of some rules.
func filter(rules []rule) []unix.SockFilter {
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	ret := func(action uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
	}
	const equal, atLeast = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
	program := []unix.SockFilter{
		load(offsetArch),
		{Code: equal, Jt: 1, K: auditArch},
		ret(unix.SECCOMP_RET_KILL_PROCESS),
		load(offsetCall),
		{Code: atLeast, Jf: 1, K: otherNumbers},
		ret(unix.SECCOMP_RET_KILL_PROCESS),
	}
	for _, r := range rules {
		var body []unix.SockFilter
		for _, c := range r.when {
			mask := c.mask
			if mask == 0 {
				mask = ^uint32(0)
			}
			body = append(body, load(c.offset()), unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: mask}, unix.SockFilter{Code: equal, K: c.value})
		}
		body = append(body, ret(unix.SECCOMP_RET_ERRNO|uint32(r.errno)))
		for i, c := range r.when { // where a condition does not hold, the rest of the rule is left out
			jump := &body[3*i+2]
			if rest := uint8(len(body) - (3*i + 3)); c.not {
				jump.Jt = rest
			} else {
				jump.Jf = rest
			}
		}
		if len(r.when) > 0 {
			body = append(body, load(offsetCall))
		}
		program = append(program, unix.SockFilter{Code: equal, Jf: uint8(len(body)), K: r.call})
		program = append(program, body...)
	}
	return append(program, ret(unix.SECCOMP_RET_ALLOW))
}

// install puts this thread, and what it becomes, under a filter.
func install(program []unix.SockFilter) error {
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return fmt.Errorf("seccomp: %w", errno)
	}
	return nil
}
