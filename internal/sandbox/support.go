package sandbox

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Support is what this kernel can refuse to a program. Every feature is tried by itself: kernels backport.
type Support struct {
	ABI     int // version of Landlock; 0: there is none
	Seccomp bool
	why     error // there is no Landlock

	files, ports, scopes uint64 // that Landlock knows
}

// What Landlock's first version knows. Later ones added the features below.
const firstFiles = 1<<13 - 1

// feature is one bit of Landlock.
type feature struct {
	bit  uint64
	abi  int    // that has it
	lack string // what a program can do where it is lacking; empty: nothing that seccomp does not refuse

	online string // what only a program with a network can do then
}

func fileFeatures() []feature {
	return []feature{
		{bit: firstFiles, abi: 2, lack: "read and write every file of this user, and the engine's memory and cache in /proc"}, // see usable
		{bit: unix.LANDLOCK_ACCESS_FS_REFER, abi: 2},
		{bit: unix.LANDLOCK_ACCESS_FS_TRUNCATE, abi: 3, lack: "truncate every file of this user"},
		{bit: unix.LANDLOCK_ACCESS_FS_IOCTL_DEV, abi: 5}, // no device but null, zero and random can be opened
		{bit: unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX, abi: 9, online: "connect to sockets with a path, such as those of systemd, D-Bus, Docker and the agent, and leave the sandbox with their help"},
	}
}

func portFeatures() []feature {
	return []feature{
		{bit: unix.LANDLOCK_ACCESS_NET_BIND_TCP, abi: 4},
		{bit: unix.LANDLOCK_ACCESS_NET_CONNECT_TCP, abi: 4},
		{bit: unix.LANDLOCK_ACCESS_NET_BIND_UDP, abi: 10},
		{bit: unix.LANDLOCK_ACCESS_NET_CONNECT_SEND_UDP, abi: 10},
	}
}

func scopeFeatures() []feature {
	return []feature{
		{bit: unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET, abi: 6, online: "connect to abstract sockets of other programs"},
		{bit: unix.LANDLOCK_SCOPE_SIGNAL, abi: 6, lack: "send signals to every process of this user"},
	}
}

// usable are the rights to files that can be handled. Landlock's first version refuses every move to another folder, by which
// connectors make a complete file visible, so it has none.
func usable(files uint64) uint64 {
	if files&unix.LANDLOCK_ACCESS_FS_REFER == 0 {
		return 0
	}
	return files
}

// Probe asks the kernel. It changes nothing.
func Probe() Support {
	var s Support
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	switch {
	case errno == unix.ENOSYS:
		s.why = errors.New("this kernel is too old, or something above it refuses the call: use Linux 5.13 or newer, and a container profile that lets it pass")
	case errno == unix.EOPNOTSUPP:
		s.why = errors.New("it is not enabled: add landlock to the kernel's parameter lsm=")
	case errno != 0:
		s.why = fmt.Errorf("landlock_create_ruleset: %w", errno)
	default:
		s.ABI = int(abi)
	}
	if s.ABI > 0 {
		s.files = usable(known(fileFeatures(), func(a *unix.LandlockRulesetAttr, bit uint64) { a.Handled_access_fs = bit }))
		s.ports = known(portFeatures(), func(a *unix.LandlockRulesetAttr, bit uint64) { a.Handled_access_net = bit })
		s.scopes = known(scopeFeatures(), func(a *unix.LandlockRulesetAttr, bit uint64) { a.Scoped = bit })
	}
	action := uint32(unix.SECCOMP_RET_ERRNO)
	_, _, errno = unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_GET_ACTION_AVAIL, 0, uintptr(unsafe.Pointer(&action)))
	s.Seccomp = errno == 0
	return s
}

// known are the bits of features with which the kernel makes a ruleset.
func known(features []feature, set func(*unix.LandlockRulesetAttr, uint64)) (bits uint64) {
	for _, f := range features {
		var attr unix.LandlockRulesetAttr
		set(&attr, f.bit)
		fd, err := newRuleset(&attr)
		if err == nil {
			bits |= f.bit
			_ = unix.Close(fd)
		}
	}
	return bits
}

func newRuleset(attr *unix.LandlockRulesetAttr) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(attr)), unsafe.Sizeof(*attr), 0)
	if errno != 0 {
		return -1, fmt.Errorf("landlock_create_ruleset: %w", errno)
	}
	return int(fd), nil
}

// Any reports whether the kernel can refuse anything that a program of another user could not be refused anyway.
func (s *Support) Any() bool { return s.files != 0 || s.Seccomp }

// Confines reports whether the kernel keeps from a program the files of this user, and the memory of other processes.
func (s *Support) Confines() bool { return s.files&firstFiles == firstFiles && s.Seccomp }

// Lacks says, a line each, what this kernel cannot refuse to a program, or to one with a network. It is empty where everything is in force.
func (s *Support) Lacks(network bool) []string {
	var lacks []string
	if s.why != nil {
		lacks = append(lacks, fmt.Sprintf("no Landlock: %v", s.why))
	}
	for _, kind := range []struct {
		features []feature
		known    uint64
	}{{fileFeatures(), s.files}, {scopeFeatures(), s.scopes}} {
		for _, f := range kind.features {
			if kind.known&f.bit != 0 {
				continue
			}
			if f.lack != "" {
				lacks = append(lacks, fmt.Sprintf("%s (needs ABI %d): a plugin can %s", s.landlock(), f.abi, f.lack))
			}
			if f.online != "" && network {
				lacks = append(lacks, fmt.Sprintf("%s (needs ABI %d): a plugin with a network can %s", s.landlock(), f.abi, f.online))
			}
		}
	}
	if !s.Seccomp {
		lacks = append(lacks, "no seccomp: a plugin can use the network, trace other processes of this user and leave processes behind")
	}
	return lacks
}

// landlock names the version.
func (s *Support) landlock() string {
	if s.ABI == 0 {
		return "no Landlock"
	}
	return fmt.Sprintf("Landlock ABI %d", s.ABI)
}

// String says in a line what is in force.
func (s *Support) String() string {
	parts := []string{s.landlock()}
	if s.Seccomp {
		parts = append(parts, "seccomp")
	} else {
		parts = append(parts, "no seccomp")
	}
	return strings.Join(parts, ", ")
}
