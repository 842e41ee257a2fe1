package sandbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// target is what the tries of a program in the sandbox aim at.
type target struct {
	Host, Victim            int     // processes of the same user: the test, and one that may be hurt
	Address                 uintptr // of some bytes of the host
	Secret, Ring, Home      string  // files, and the folder of the secret
	Own, Sibling, Link      string  // folders; a link in Own to the secret
	TCP, TCP6, UDP          int     // ports at which somebody listens
	Abstract, Path, Message string  // sockets of others
	Setuid                  string  // a program of another user that shows its effective user
	Arena                   int     // descriptor of sealed memory
	Program                 string
	Loader                  string // of a shell
	Left                    int    // descriptor of a secret file that the host inherited itself
}

// try is one thing that a malicious plugin would do. It returns nil if that worked.
type try struct {
	name  string
	by    string // what refuses it: files, signals, seccomp; empty: what every kernel has
	do    func(t *target) error
	needs string // of the machine, to work outside the sandbox; empty: nothing
}

const (
	byFiles   = "files"
	bySignals = "signals"
	bySeccomp = "seccomp"
)

func tries() []try {
	var all []try
	for _, some := range [][]try{fileTries(), processTries(), signalTries(), socketTries(), spaceTries(), kernelTries(), memoryTries(), lifeTries()} {
		all = append(all, some...)
	}
	return all
}

func fileTries() []try {
	read := func(path func(*target) string) func(*target) error {
		return func(t *target) error { _, err := os.ReadFile(path(t)); return err }
	}
	return []try{
		{"read a secret file", byFiles, read(func(t *target) string { return t.Secret }), ""},
		{"read the key ring", byFiles, read(func(t *target) string { return t.Ring }), ""},
		{"read a secret file through a link in the plugin's own folder", byFiles, read(func(t *target) string { return t.Link }), ""},
		{"read a secret file through /proc/self/root", byFiles, read(func(t *target) string { return "/proc/self/root" + t.Secret }), ""},
		{"list the folder of a secret file", byFiles, func(t *target) error { _, err := os.ReadDir(t.Home); return err }, ""},
		{"write a file of a sibling", byFiles, func(t *target) error { return os.WriteFile(filepath.Join(t.Sibling, "block"), []byte("forged"), 0o600) }, ""},
		{"make a file in a sibling's folder", byFiles, func(t *target) error { return os.WriteFile(filepath.Join(t.Sibling, "new"), nil, 0o600) }, ""},
		{"truncate a file of a sibling", byFiles, func(t *target) error { return os.Truncate(filepath.Join(t.Sibling, "block"), 0) }, ""},
		{"move a file into a sibling's folder", byFiles, func(t *target) error {
			mine := filepath.Join(t.Own, "mine")
			return errors.Join(os.WriteFile(mine, nil, 0o600), os.Rename(mine, filepath.Join(t.Sibling, "moved")))
		}, ""},
		{"link a secret file into the plugin's own folder", byFiles, func(t *target) error { return os.Link(t.Secret, filepath.Join(t.Own, "linked")) }, ""},
		{"write in /dev/shm", byFiles, func(*target) error {
			f, err := os.CreateTemp("/dev/shm", "kvport-escape-")
			if err != nil {
				return err
			}
			return errors.Join(f.Close(), os.Remove(f.Name()))
		}, ""},
		{"change the mode of a secret file", bySeccomp, func(t *target) error { return os.Chmod(t.Secret, 0o600) }, ""},
		{"change the owner of a secret file", bySeccomp, func(t *target) error { return os.Chown(t.Secret, os.Getuid(), os.Getgid()) }, ""},
		{"change the times of a secret file", bySeccomp, func(t *target) error { return unix.UtimesNanoAt(unix.AT_FDCWD, t.Secret, make([]unix.Timespec, 2), 0) }, ""},
		{"give a secret file an attribute", bySeccomp, func(t *target) error { return unix.Setxattr(t.Secret, "user.kvport", []byte("x"), 0) }, "a file system with attributes"},
		{"watch the folder of a secret file", bySeccomp, func(t *target) error {
			fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
			if err == nil {
				_, err = unix.InotifyAddWatch(fd, t.Home, unix.IN_ALL_EVENTS)
			}
			return err
		}, ""},
		{"open a file by its handle", bySeccomp, func(t *target) error { _, _, err := unix.NameToHandleAt(unix.AT_FDCWD, t.Secret, 0); return err }, ""},
		{"read a descriptor that the host inherited", "", func(t *target) error { _, err := unix.Pread(t.Left, make([]byte, 1), 0); return err }, ""},
		{"run a shell", byFiles, func(*target) error { return exec.Command("/bin/sh", "-c", "true").Run() }, ""},
		{"run a shell by the loader", byFiles, func(t *target) error {
			if t.Loader == "" {
				return errors.New("the shell is a static program")
			}
			return exec.Command(t.Loader, "/bin/sh", "-c", "true").Run()
		}, "a shell with shared libraries"},
		{"run a program that it has written", byFiles, func(t *target) error { return runCopy(t) }, ""},
		{"read a secret file with a program in memory", byFiles, func(t *target) error { return runInMemory(t, "read a secret file") }, ""},
	}
}

// runCopy runs a copy of the program with a try that always works.
func runCopy(t *target) error {
	data, err := os.ReadFile(t.Program)
	if err != nil {
		return err
	}
	path := filepath.Join(t.Own, "copy")
	if err := os.WriteFile(path, data, 0o700); err != nil {
		return err
	}
	return errors.Join(exec.Command(path, "-test.list", "^$").Run(), os.Remove(path))
}

// runInMemory runs the program from a memfd, which Landlock does not know.
func runInMemory(t *target, name string) error {
	data, err := os.ReadFile(t.Program)
	if err != nil {
		return err
	}
	fd, err := unix.MemfdCreate("escape", 0)
	if err != nil {
		return err
	}
	if _, err := os.NewFile(uintptr(fd), "escape").Write(data); err != nil {
		return err
	}
	aim, err := json.Marshal(t)
	if err != nil {
		return err
	}
	out, err := exec.Command(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd), escapeMode, name, string(aim)).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

func processTries() []try {
	proc := func(name string) func(*target) error {
		return func(t *target) error {
			f, err := os.Open(fmt.Sprintf("/proc/%d/%s", t.Host, name))
			if err != nil {
				return err
			}
			defer f.Close()
			if name != "mem" {
				_, err = f.Read(make([]byte, 1))
			}
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return err
		}
	}
	vm := func(call uintptr) func(*target) error {
		return func(t *target) error {
			var b [8]byte
			local := unix.Iovec{Base: &b[0], Len: 8}
			remote := unix.RemoteIovec{Base: t.Address, Len: 8}
			_, _, errno := unix.Syscall6(call, uintptr(t.Host), uintptr(unsafe.Pointer(&local)), 1, uintptr(unsafe.Pointer(&remote)), 1, 0)
			return orNil(errno)
		}
	}
	return []try{
		{"read the host's memory in /proc", byFiles, proc("mem"), ""},
		{"read the host's environment", byFiles, proc("environ"), ""},
		{"read the host's command line", byFiles, proc("cmdline"), ""},
		{"open the host's descriptors", byFiles, func(t *target) error { _, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", t.Host)); return err }, ""},
		{"read the host's memory by process_vm_readv", bySeccomp, vm(unix.SYS_PROCESS_VM_READV), ""},
		{"write the host's memory by process_vm_writev", bySeccomp, vm(unix.SYS_PROCESS_VM_WRITEV), ""},
		{"trace another process", bySeccomp, func(t *target) error {
			runtime.LockOSThread()
			_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(t.Victim), 0, 0, 0, 0)
			return orNil(errno)
		}, ""},
		{"take a descriptor of another process", bySeccomp, func(t *target) error {
			pidfd, err := unix.PidfdOpen(t.Victim, 0)
			if err == nil {
				_, err = unix.PidfdGetfd(pidfd, 1, 0)
			}
			return err
		}, ""},
	}
}

// signalTries reach other processes without their memory.
func signalTries() []try {
	return []try{
		{"signal the host", bySignals, func(t *target) error { return unix.Kill(t.Host, 0) }, ""},
		{"signal another process by its descriptor", bySignals, func(t *target) error {
			pidfd, err := unix.PidfdOpen(t.Victim, 0)
			if err == nil {
				err = unix.PidfdSendSignal(pidfd, 0, nil, 0)
			}
			return err
		}, ""},
		{"limit the host's files", bySeccomp, func(t *target) error {
			var was unix.Rlimit
			if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
				return err
			}
			return unix.Prlimit(t.Victim, unix.RLIMIT_NOFILE, &was, nil)
		}, ""},
		{"keep the host from a processor", bySeccomp, func(t *target) error {
			var all unix.CPUSet
			return errors.Join(unix.SchedGetaffinity(0, &all), unix.SchedSetaffinity(t.Victim, &all))
		}, ""},
		{"lower the host's priority", bySeccomp, func(t *target) error { return unix.Setpriority(unix.PRIO_PROCESS, t.Victim, 19) }, ""},
		{"set the priority of a group of processes", bySeccomp, func(*target) error {
			const zero = 20 // what the kernel says for a priority of 0
			now, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
			if err != nil {
				return err
			}
			return unix.Setpriority(unix.PRIO_PGRP, 0, zero-now)
		}, ""},
	}
}

func socketTries() []try {
	open := func(family, kind, protocol int) func(*target) error {
		return func(*target) error { _, err := unix.Socket(family, kind, protocol); return err }
	}
	connect := func(family, kind, protocol int, to func(*target) unix.Sockaddr) func(*target) error {
		return func(t *target) error {
			fd, err := unix.Socket(family, kind, protocol)
			if err != nil {
				return err
			}
			return unix.Connect(fd, to(t))
		}
	}
	loopback := [4]byte{127, 0, 0, 1}
	tcp := func(t *target) unix.Sockaddr { return &unix.SockaddrInet4{Port: t.TCP, Addr: loopback} }
	named := func(name func(*target) string) func(*target) unix.Sockaddr {
		return func(t *target) unix.Sockaddr { return &unix.SockaddrUnix{Name: name(t)} }
	}
	return []try{
		{"connect over TCP", bySeccomp, connect(unix.AF_INET, unix.SOCK_STREAM, 0, tcp), ""},
		{"connect over TCP and IPv6", bySeccomp, connect(unix.AF_INET6, unix.SOCK_STREAM, 0, func(t *target) unix.Sockaddr {
			return &unix.SockaddrInet6{Port: t.TCP6, Addr: [16]byte{15: 1}}
		}), "IPv6"},
		{"connect over MPTCP", bySeccomp, connect(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP, tcp), "MPTCP"},
		{"send over UDP", bySeccomp, func(t *target) error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
			if err != nil {
				return err
			}
			return unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: t.UDP, Addr: loopback})
		}, ""},
		{"listen over TCP", bySeccomp, func(*target) error { _, err := net.Listen("tcp", "127.0.0.1:0"); return err }, ""},
		{"open a raw socket", bySeccomp, open(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP), "CAP_NET_RAW"},
		{"open a packet socket", bySeccomp, open(unix.AF_PACKET, unix.SOCK_RAW, 0), "CAP_NET_RAW"},
		{"open a netlink socket", bySeccomp, open(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE), ""},
		{"connect to another's abstract socket", bySeccomp, connect(unix.AF_UNIX, unix.SOCK_STREAM, 0, named(func(t *target) string { return t.Abstract })), ""},
		{"connect to another's socket with a path", bySeccomp, connect(unix.AF_UNIX, unix.SOCK_STREAM, 0, named(func(t *target) string { return t.Path })), ""},
		{"send a message to another's socket", bySeccomp, func(t *target) error {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM, 0)
			if err != nil {
				return err
			}
			return unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrUnix{Name: t.Message})
		}, ""},
		{"send a message from a pair of sockets", bySeccomp, func(t *target) error {
			pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM, 0)
			if err != nil {
				return err
			}
			return unix.Sendto(pair[0], []byte("x"), 0, &unix.SockaddrUnix{Name: t.Message})
		}, ""},
	}
}

// spaceTries are for other views of files and processes, and for privileges.
func spaceTries() []try {
	return []try{
		{"mount a file system", bySeccomp, func(t *target) error {
			err := unix.Mount("none", t.Own, "tmpfs", 0, "")
			if err == nil {
				err = unix.Unmount(t.Own, 0)
			}
			return err
		}, "CAP_SYS_ADMIN"},
		{"make a user namespace", bySeccomp, func(*target) error { runtime.LockOSThread(); return unix.Unshare(unix.CLONE_NEWUSER) }, "a process with one thread"},
		{"make a mount namespace", bySeccomp, func(*target) error { runtime.LockOSThread(); return unix.Unshare(unix.CLONE_NEWNS) }, "CAP_SYS_ADMIN"},
		{"start a child in a user namespace", bySeccomp, func(t *target) error {
			cmd := exec.Command(t.Program, "-test.list", "^$")
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER}
			return cmd.Run()
		}, "user namespaces"},
		{"start a child of the plugin's parent", bySeccomp, func(t *target) error {
			cmd := exec.Command(t.Program, "-test.list", "^$")
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_PARENT}
			err := cmd.Start()
			if err == nil {
				_, err = fmt.Fprintln(os.Stderr, cmd.Process.Pid)
			}
			return err
		}, ""},
		{"enter a network namespace", bySeccomp, func(*target) error {
			runtime.LockOSThread()
			fd, err := unix.Open("/proc/self/ns/net", unix.O_RDONLY, 0)
			if err == nil {
				err = unix.Setns(fd, unix.CLONE_NEWNET)
			}
			return err
		}, "CAP_SYS_ADMIN"},
		{"become another user by a program", "", func(t *target) error {
			out, err := exec.Command(t.Setuid, userMode).Output()
			if user := strings.TrimSpace(string(out)); err == nil && user == fmt.Sprint(os.Getuid()) {
				err = fmt.Errorf("it runs as user %s", user)
			}
			return err
		}, "root, who can make such a program"},
		{"use a capability", "", func(*target) error {
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var have [2]unix.CapUserData
			err := unix.Capget(&header, &have[0])
			if err == nil && have == [2]unix.CapUserData{} {
				err = errors.New("it has none")
			}
			return err
		}, "capabilities"},
	}
}

func kernelTries() []try {
	return []try{
		{"handle page faults", bySeccomp, func(*target) error {
			_, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|userModeOnly, 0, 0)
			return orNil(errno)
		}, "userfaultfd"},
		{"use io_uring", bySeccomp, func(*target) error {
			var params [120]byte
			_, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
			return orNil(errno)
		}, "io_uring"},
		{"use bpf", bySeccomp, func(*target) error {
			attr := [20]uint32{2, 4, 4, 1} // an array of one value
			_, _, errno := unix.Syscall(unix.SYS_BPF, 0, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
			return orNil(errno)
		}, "CAP_BPF"},
		{"measure with perf", bySeccomp, func(*target) error {
			attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Size: unix.PERF_ATTR_SIZE_VER0, Config: unix.PERF_COUNT_SW_CPU_CLOCK}
			_, err := unix.PerfEventOpen(&attr, 0, -1, -1, 0)
			return err
		}, "perf events"},
		{"read the kernel's key rings", bySeccomp, func(*target) error { _, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_USER_KEYRING, true); return err }, "key rings"},
	}
}

// memoryTries are for memory that is shared with others.
func memoryTries() []try {
	return []try{
		{"take a hole into the arena", bySeccomp, func(t *target) error {
			return unix.Fallocate(t.Arena, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(os.Getpagesize()))
		}, ""},
		{"remove pages of the arena", bySeccomp, func(t *target) error {
			memory, err := unix.Mmap(t.Arena, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err == nil {
				err = unix.Madvise(memory, unix.MADV_REMOVE)
			}
			return err
		}, ""},
		{"make a System V segment", bySeccomp, func(*target) error {
			id, err := unix.SysvShmGet(unix.IPC_PRIVATE, os.Getpagesize(), 0o600)
			if err == nil {
				_, err = unix.SysvShmCtl(id, unix.IPC_RMID, nil)
			}
			return err
		}, "System V IPC"},
		{"make a message queue", bySeccomp, func(*target) error {
			name := []byte("kvport-escape\x00")
			_, _, errno := unix.Syscall6(unix.SYS_MQ_OPEN, uintptr(unsafe.Pointer(&name[0])), unix.O_CREAT|unix.O_RDWR, 0o600, 0, 0, 0)
			_, _, _ = unix.Syscall(unix.SYS_MQ_UNLINK, uintptr(unsafe.Pointer(&name[0])), 0, 0)
			return orNil(errno)
		}, "message queues"},
	}
}

// userModeOnly is UFFD_USER_MODE_ONLY.
const userModeOnly = 1

func lifeTries() []try {
	return []try{
		{"begin a session of its own", bySeccomp, func(t *target) error { return leave(t, &syscall.SysProcAttr{Setsid: true}) }, ""},
		{"leave the process group", bySeccomp, func(t *target) error { return leave(t, &syscall.SysProcAttr{Setpgid: true}) }, ""},
		{"outlive the host", bySeccomp, func(*target) error { return unix.Prctl(unix.PR_SET_PDEATHSIG, 0, 0, 0, 0) }, ""},
		{"leave a core", "", func(*target) error {
			l := unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}
			return unix.Setrlimit(unix.RLIMIT_CORE, &l)
		}, ""},
	}
}

// leave starts a child outside the group.
func leave(t *target, how *syscall.SysProcAttr) error {
	cmd := exec.Command(t.Program, "-test.list", "^$")
	cmd.SysProcAttr = how
	return cmd.Run()
}

func orNil(errno syscall.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}

// Modes of the test binary, apart from a test run.
const (
	escapeMode = "escape"  // a try
	userMode   = "user"    // prints the effective user
	waitMode   = "wait"    // until standard input ends
	leaveMode  = "descend" // starts a child that waits, and waits
	loaderMode = "loader"  // puts itself under the rules of a program with a certain loader, and reads a file
)

// play is the test binary in one of its modes; false: it is to run the tests.
func play(args []string) (code int, played bool) {
	if len(args) < 2 {
		return 0, false
	}
	switch args[1] {
	case escapeMode:
		return escape(args[2], args[3]), true
	case loaderMode:
		if err := readUnderLoader(args[2], args[3]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return refusedCode, true
		}
	case userMode:
		fmt.Fprintln(os.Stdout, os.Geteuid())
	case waitMode:
		_, _ = io.Copy(io.Discard, os.Stdin)
	case leaveMode:
		cmd := exec.Command(args[0], waitMode)
		cmd.Stdin, cmd.SysProcAttr = os.Stdin, &syscall.SysProcAttr{Setsid: len(args) > 2}
		if err := cmd.Start(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1, true
		}
		fmt.Fprintln(os.Stdout, cmd.Process.Pid)
		_, _ = io.Copy(io.Discard, os.Stdin)
	default:
		return 0, false
	}
	return 0, true
}

// readUnderLoader reads a file as a program with that loader.
func readUnderLoader(loader, path string) error {
	runtime.LockOSThread()
	support := Probe()
	if err := errors.Join(prctl("PR_SET_NO_NEW_PRIVS", unix.PR_SET_NO_NEW_PRIVS, 1), (&Policy{}).restrict(&support, []string{loader})); err != nil {
		return err
	}
	_, err := os.ReadFile(path)
	return err
}

// escape makes one try; its exit code is 0 if it worked.
func escape(name, aim string) int {
	var t target
	if err := json.Unmarshal([]byte(aim), &t); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	for _, e := range tries() {
		if e.name != name {
			continue
		}
		if err := e.do(&t); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return refusedCode
		}
		return 0
	}
	fmt.Fprintf(os.Stderr, "there is no try %q\n", name)
	return 2
}

// refusedCode is the exit code of a try that did not work.
const refusedCode = 7
