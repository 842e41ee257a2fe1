// Package sandbox starts a program that can do little more than its policy says, whatever it tries: the kernel refuses
// it files (Landlock), system calls (seccomp), privileges and signals to others. A program cannot be trusted to lock
// itself in, and a thread that were locked in before a fork would share its Landlock domain with the program, which
// could read the host's memory through it. So a third process image stands between: the host starts its own executable
// again, [Main] applies the policy there, and becomes the program.
package sandbox

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
)

// Name is argument 0 of the process in which Main applies a policy.
const Name = "kvport-sandbox"

// PolicyKey is the environment variable with the policy. The program does not get it.
const PolicyKey = "KVPORT_SANDBOX_POLICY"

// Self is the path by which a program starts itself again.
const Self = "/proc/self/exe"

// programArg is the place in the arguments of the program's path.
const programArg = 1

// Policy says what a program in the sandbox may do in addition to what every program needs: see common and online. Paths are absolute; what does not exist when the program starts is left out. What is said of a
// folder is said of everything below it.
type Policy struct {
	Read    []string `json:"read,omitempty"`    // may be read
	Run     []string `json:"run,omitempty"`     // may be read and started
	Write   []string `json:"write,omitempty"`   // may be read, written, made and removed, and not started
	Connect []string `json:"connect,omitempty"` // sockets of others to which a program with a network may connect, as to those below Write
	Network bool     `json:"network,omitempty"`
	Data    uint64   `json:"data,omitempty"` // the most bytes of its own that it may have (RLIMIT_DATA); 0: no limit

	// Inherited is how many descriptors the program gets behind the first three. Others are closed. It is for [Spec.Wrap] to set.
	Inherited int `json:"inherited,omitempty"`
}

// Spec is a policy, and the program that applies it.
type Spec struct {
	Trampoline string // a program whose main function calls [Main] first
	Policy     Policy
}

// And is a Spec that permits to write a folder as well; nil for nil.
func (s *Spec) And(folder string) *Spec {
	if s == nil {
		return nil
	}
	more := *s
	more.Policy.Write = slices.Concat(s.Policy.Write, []string{folder})
	return &more
}

// Wrap makes a command that starts a program one that starts it in the sandbox, where it may also run what [Program]
// lists. The environment of cmd must be set, and may grow. inherited is how many ExtraFiles cmd is going to have.
func (s *Spec) Wrap(cmd *exec.Cmd, inherited int) error {
	own := s.Policy
	own.Inherited = inherited
	policy, err := json.Marshal(&own)
	if err != nil {
		return fmt.Errorf("policy of the sandbox: %w", err)
	}
	cmd.Args = append([]string{Name, cmd.Path}, cmd.Args...)
	cmd.Path = s.Trampoline
	cmd.Env = append(cmd.Env, PolicyKey+"="+string(policy))
	return nil
}

// Descriptor says that the program of a wrapped command is what it inherits as descriptor fd.
func Descriptor(cmd *exec.Cmd, fd int) { cmd.Args[programArg] = fmt.Sprintf("%s%d", descriptors, fd) }

// descriptors is the folder of a process's own descriptors.
const descriptors = "/proc/self/fd/"

// common is what every program may read: its libraries, the time zone, and what its runtime asks about the machine.
// There is no other process in it.
func common() []string {
	return []string{
		"/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64", "/usr/lib32", "/usr/local/lib", "/usr/local/lib64",
		"/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
		"/etc/localtime", "/usr/share/zoneinfo", "/usr/share/locale",
		"/proc/self", "/proc/sys", "/proc/meminfo", "/proc/cpuinfo", "/proc/stat",
		"/sys/devices/system", "/sys/kernel/mm", "/sys/fs/cgroup",
	}
}

// devices are what every program may read and write.
func devices() []string { return []string{"/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"} }

// online is what a program with a network may read as well: names, certificates, cards.
func online() []string {
	return []string{
		"/etc/hosts", "/etc/resolv.conf", "/run/systemd/resolve", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/services", "/etc/protocols",
		"/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates",
		"/sys/class/net", "/sys/class/infiniband", "/sys/devices",
	}
}
