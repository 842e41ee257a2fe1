package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// exitCode is that of a process which could not become its program.
const exitCode = 126

// Main must be the first that the main function of a [Spec.Trampoline] calls. It returns at once, unless the process
// was started to apply a policy and to become a program: then it does not return.
func Main() {
	if len(os.Args) <= programArg+1 || os.Args[0] != Name {
		return
	}
	text, given := os.LookupEnv(PolicyKey)
	if !given {
		return
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", Name, become(text, os.Args[programArg], os.Args[programArg+1:]))
	os.Exit(exitCode)
}

// become applies a policy and executes the program. It returns only with an error.
func become(policy, path string, args []string) error {
	var p Policy
	if err := json.Unmarshal([]byte(policy), &p); err != nil {
		return fmt.Errorf("%s: %w", PolicyKey, err)
	}
	// All but the limits is an attribute of this thread. An exec ends the others and keeps this one.
	runtime.LockOSThread()
	if err := closeOthers(p.Inherited); err != nil {
		return err
	}
	program := Program(path)
	if number, inherited := strings.CutPrefix(path, descriptors); inherited {
		if err := closeOnExec(number); err != nil {
			return err
		}
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, PolicyKey+"=") })
	if err := p.apply(program); err != nil {
		return err
	}
	return fmt.Errorf("%s: %w", path, syscall.Exec(path, args, env))
}

func closeOnExec(number string) error {
	var fd int
	if _, err := fmt.Sscan(number, &fd); err != nil {
		return fmt.Errorf("descriptor %q: %w", number, err)
	}
	unix.CloseOnExec(fd)
	return nil
}

// closeOthers keeps from the program what the engine has inherited from whoever started it. Kernels before 5.11 have no
// close_range that does this.
func closeOthers(inherited int) error {
	const standard = 3
	open, err := os.ReadDir(descriptors)
	if err != nil {
		return err
	}
	for _, f := range open {
		if fd, err := strconv.Atoi(f.Name()); err == nil && fd >= standard+inherited {
			unix.CloseOnExec(fd)
		}
	}
	return nil
}

// apply restricts this thread, which becomes a program of those files.
func (p *Policy) apply(program []string) error {
	support := Probe()
	err := errors.Join(
		// 1 and not 0: for that the kernel starts no program that collects cores either.
		lower(unix.RLIMIT_CORE, 1),
		// The host set one for the first thread, which an exec from this one ends.
		prctl("PR_SET_PDEATHSIG", unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL)),
		prctl("PR_SET_NO_NEW_PRIVS", unix.PR_SET_NO_NEW_PRIVS, 1),
		dropCapabilities(),
	)
	if err == nil && support.ABI > 0 {
		err = p.restrict(&support, program)
	}
	if err == nil && p.Data > 0 {
		err = lower(unix.RLIMIT_DATA, p.Data)
	}
	if err == nil && support.Seccomp {
		err = install(filter(p.refused()))
	}
	return err
}

// lower sets both parts of a limit, but not above what they are.
func lower(resource int, to uint64) error {
	var l unix.Rlimit
	err := unix.Getrlimit(resource, &l)
	if err == nil {
		err = unix.Setrlimit(resource, &unix.Rlimit{Cur: min(l.Cur, to), Max: min(l.Max, to)})
	}
	return os.NewSyscallError("setrlimit", err)
}

func prctl(name string, option int, value uintptr) error {
	if err := unix.Prctl(option, value, 0, 0, 0); err != nil {
		return fmt.Errorf("prctl %s: %w", name, err)
	}
	return nil
}

// dropCapabilities gives up what a privileged host has, root included.
func dropCapabilities() error {
	for c := uintptr(0); unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0) == nil; c++ { // ends at the last one, or where there is no right to
		continue
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	return os.NewSyscallError("capset", unix.Capset(&header, &none[0]))
}
