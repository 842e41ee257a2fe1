package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// idleArg makes this program one that does nothing for a while.
const idleArg = "--idle"

// idle is what a process does that is left behind.
func idle() {
	fmt.Fprintln(os.Stdout, "idle")
	time.Sleep(time.Minute) //nolint:forbidigo // it is nothing else
	os.Exit(0)
}

// attempt does what a mode says that has nothing to do with blocks.
func attempt(c *config, log *slog.Logger) {
	for mode, tries := range attempts() {
		if mode != c.Mode && c.Mode != "all" {
			continue
		}
		for name, try := range tries {
			if err := try(c); err == nil {
				_ = report(c, "%s: %s", mode, name)
			} else {
				log.Debug("refused", "try", name, "error", err)
			}
		}
	}
	switch c.Mode {
	case "flood":
		flood(log)
	case "bomb":
		bomb()
	}
}

// attempts are tries by mode. One returns nil if it worked.
func attempts() map[string]map[string]func(*config) error {
	return map[string]map[string]func(*config) error{
		"files": fileTries(), "variables": variableTries(), "memory": memoryTries(), "signals": signalTries(), "programs": programTries(), "leave": leaveTries(),
		"tcp": {"connects over TCP": dial(unix.SOCK_STREAM, 0), "listens over TCP": listens(unix.SOCK_STREAM, 0)}, "mptcp": {"connects over MPTCP": dial(unix.SOCK_STREAM, unix.IPPROTO_MPTCP), "listens over MPTCP": listens(unix.SOCK_STREAM, unix.IPPROTO_MPTCP)},
		"udp": {"sends over UDP": datagram, "takes a UDP port": listens(unix.SOCK_DGRAM, 0)}, "unix": unixTries(), "privileges": privilegeTries(), "pages": pageTries(), "core": {"leaves a core": core},
	}
}

func fileTries() map[string]func(*config) error {
	each := func(do func(path string) error) func(*config) error {
		return func(c *config) error {
			if len(c.Secrets) == 0 {
				return errors.New("no secrets are named")
			}
			var last error
			for _, path := range c.Secrets {
				if last = do(path); last == nil {
					return nil
				}
			}
			return last
		}
	}
	return map[string]func(*config) error{
		"reads a secret": each(func(path string) error {
			data, err := os.ReadFile(path)
			if err == nil {
				fmt.Fprintln(os.Stderr, "the secret is", string(data))
			}
			return err
		}),
		"reads a secret through /proc/self/root": each(func(path string) error { _, err := os.ReadFile("/proc/self/root" + path); return err }),
		"lists the folder of a secret":           each(func(path string) error { _, err := os.ReadDir(filepath.Dir(path)); return err }),
		"reads a secret through a link": func(c *config) error {
			link := filepath.Join(c.Dir, "link")
			if err := os.Symlink(c.Secrets[0], link); err != nil && !errors.Is(err, os.ErrExist) {
				return err
			}
			_, err := os.ReadFile(link)
			return err
		},
		"writes a file of a sibling": func(c *config) error { return os.WriteFile(filepath.Join(c.Sibling, "block"), []byte("forged"), 0o600) },
		"writes in /dev/shm": func(*config) error {
			f, err := os.CreateTemp("/dev/shm", "kvport-attack-")
			if err != nil {
				return err
			}
			return errors.Join(f.Close(), os.Remove(f.Name()))
		},
	}
}

func variableTries() map[string]func(*config) error {
	out := map[string]func(*config) error{}
	for _, name := range []string{"HF_TOKEN", "ATTACK_SECRET"} {
		out["has "+name] = func(*config) error {
			if os.Getenv(name) == "" {
				return os.ErrNotExist
			}
			return nil
		}
	}
	return out
}

func memoryTries() map[string]func(*config) error {
	parent := os.Getppid()
	opens := func(name string, mode int) func(*config) error {
		return func(*config) error {
			f, err := os.OpenFile(fmt.Sprintf("/proc/%d/%s", parent, name), mode, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			if name == "mem" {
				return nil
			}
			if _, err = f.Read(make([]byte, 1)); errors.Is(err, io.EOF) {
				err = nil
			}
			return err
		}
	}
	return map[string]func(*config) error{
		"opens the engine's memory to write":   opens("mem", os.O_RDWR),
		"reads the engine's environment":       opens("environ", os.O_RDONLY),
		"reads the engine's map of memory":     opens("maps", os.O_RDONLY),
		"lists the engine's descriptors":       func(*config) error { _, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", parent)); return err },
		"overwrites the cache by a descriptor": func(*config) error { return overwriteCache(parent) },
		"traces the engine":                    func(*config) error { return trace(parent) },
		"takes a descriptor of the engine": func(*config) error {
			pidfd, err := unix.PidfdOpen(parent, 0)
			if err == nil {
				_, err = unix.PidfdGetfd(pidfd, 1, 0)
			}
			return err
		},
	}
}

// trace takes the engine's first thread as a debugger does, and lets it go again. A thread that is traced stops at its next
// signal until its tracer tells it to go on, so an engine that is not let go may never end.
func trace(engine int) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.PtraceSeize(engine); err != nil {
		return err
	}
	if err := unix.PtraceInterrupt(engine); err != nil {
		return err
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(engine, &status, unix.WALL, nil); err != nil {
		return err
	}
	var signal uintptr // that stopped it: it is delivered now
	if status>>16 != unix.PTRACE_EVENT_STOP {
		signal = uintptr(status.StopSignal())
	}
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_DETACH, uintptr(engine), 0, signal, 0, 0)
	return orNil(errno)
}

// overwriteCache writes into the engine's paged cache by the engine's descriptor of it, or by its own mapping of it.
func overwriteCache(engine int) error {
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", engine))
	if err != nil {
		return err
	}
	for _, link := range links {
		if target, err := os.Readlink(link); err != nil || !strings.Contains(target, "kvport-cache") {
			continue
		}
		f, err := os.OpenFile(link, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		junk := make([]byte, 1<<20)
		noise(junk)
		_, err = f.WriteAt(junk, 0)
		return errors.Join(err, f.Close())
	}
	return os.ErrNotExist
}

func signalTries() map[string]func(*config) error {
	parent := os.Getppid()
	return map[string]func(*config) error{
		"may signal the engine":        func(*config) error { return unix.Kill(parent, 0) },
		"lowers the engine's priority": func(*config) error { return unix.Setpriority(unix.PRIO_PROCESS, parent, 1) },
		"limits the engine": func(*config) error {
			var was unix.Rlimit
			if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
				return err
			}
			return unix.Prlimit(parent, unix.RLIMIT_NOFILE, &was, nil)
		},
	}
}

func programTries() map[string]func(*config) error {
	return map[string]func(*config) error{
		"runs a shell": func(*config) error { return exec.CommandContext(context.Background(), "/bin/sh", "-c", "true").Run() },
		"runs a program that it has written": func(c *config) error {
			path := filepath.Join(c.Dir, "program")
			if err := os.WriteFile(path, []byte("#!/bin/sh\ntrue\n"), 0o700); err != nil { //nolint:gosec // a program
				return err
			}
			return exec.CommandContext(context.Background(), path).Run()
		},
	}
}

func leaveTries() map[string]func(*config) error {
	return map[string]func(*config) error{
		"begins a session of its own": func(*config) error { return leave(-1, true) },
		"outlives the engine":         func(*config) error { return unix.Prctl(unix.PR_SET_PDEATHSIG, 0, 0, 0, 0) },
	}
}

// leave starts a process that goes on, and gives it a descriptor. Without a session of its own it is killed with the plugin's group.
func leave(fd int, session bool) error {
	cmd := exec.CommandContext(context.Background(), "/proc/self/exe", idleArg)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: session}
	if fd >= 0 {
		cmd.ExtraFiles = []*os.File{os.NewFile(uintptr(fd), "parked")}
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	_, err = out.Read(make([]byte, 1))
	return err
}

func dial(kind, protocol int) func(*config) error {
	return func(c *config) error {
		fd, err := unix.Socket(unix.AF_INET, kind, protocol)
		if err != nil {
			return err
		}
		return unix.Connect(fd, &unix.SockaddrInet4{Port: c.TCP, Addr: [4]byte{127, 0, 0, 1}})
	}
}

// listens keeps its port, so that the engine's operator can see it.
func listens(kind, protocol int) func(*config) error {
	return func(*config) error {
		fd, err := unix.Socket(unix.AF_INET, kind, protocol)
		if err != nil {
			return err
		}
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
		if err == nil && kind == unix.SOCK_STREAM {
			err = unix.Listen(fd, 1)
		}
		return err
	}
}

func datagram(c *config) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	return unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: c.UDP, Addr: [4]byte{127, 0, 0, 1}})
}

func unixTries() map[string]func(*config) error {
	connects := func(name func(*config) string) func(*config) error {
		return func(c *config) error {
			conn, err := (&net.Dialer{}).DialContext(context.Background(), "unix", name(c))
			if err == nil {
				err = conn.Close()
			}
			return err
		}
	}
	return map[string]func(*config) error{
		"connects to another's socket":          connects(func(c *config) string { return c.Unix }),
		"connects to another's abstract socket": connects(func(c *config) string { return "@" + c.Unix }),
		"sends to another's socket from a pair": func(c *config) error {
			pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM, 0)
			if err != nil {
				return err
			}
			return unix.Sendto(pair[0], []byte("x"), 0, &unix.SockaddrUnix{Name: c.Unix + ".messages"})
		},
	}
}

func privilegeTries() map[string]func(*config) error {
	return map[string]func(*config) error{
		"uses a capability": func(*config) error {
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var have [2]unix.CapUserData
			err := unix.Capget(&header, &have[0])
			if err == nil && have == [2]unix.CapUserData{} {
				err = errors.New("it has none")
			}
			return err
		},
		"reads the kernel's key rings": func(*config) error { _, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_USER_KEYRING, true); return err },
		"makes a mount namespace":      func(*config) error { runtime.LockOSThread(); return unix.Unshare(unix.CLONE_NEWNS) },
		"makes a System V segment": func(*config) error {
			id, err := unix.SysvShmGet(unix.IPC_PRIVATE, os.Getpagesize(), 0o600)
			if err == nil {
				_, err = unix.SysvShmCtl(id, unix.IPC_RMID, nil)
			}
			return err
		},
		"uses io_uring": func(*config) error {
			var params [120]byte
			_, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
			return orNil(errno)
		},
	}
}

// pageTries take pages out of memory that it shares with the host.
func pageTries() map[string]func(*config) error {
	shared := func(do func(fd int) error) func(*config) error {
		return func(*config) error {
			err := os.ErrNotExist
			for fd := range 64 {
				var st unix.Stat_t // an arena that nobody has asked for is empty, and nobody uses it
				if to, e := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd)); e == nil && strings.Contains(to, "memfd:kvport") && unix.Fstat(fd, &st) == nil && st.Size > 0 {
					if err = do(fd); err == nil {
						return nil
					}
				}
			}
			return err
		}
	}
	return map[string]func(*config) error{
		"takes a hole into shared memory": shared(func(fd int) error {
			return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(os.Getpagesize()))
		}),
		"removes pages of shared memory": shared(func(fd int) error {
			memory, err := unix.Mmap(fd, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err == nil {
				err = unix.Madvise(memory, unix.MADV_REMOVE)
			}
			return err
		}),
		"shortens shared memory": shared(func(fd int) error { return unix.Ftruncate(fd, 0) }),
	}
}

func core(*config) error {
	l := unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}
	return unix.Setrlimit(unix.RLIMIT_CORE, &l)
}

// flood fills the log, with lines that look like the engine's own.
func flood(log *slog.Logger) {
	for n := range 20_000 {
		_, _ = fmt.Fprintf(os.Stderr, "\x1b[2J\rtime=2026-01-01T00:00:00Z level=ERROR msg=forged-by-a-plugin n=%d\n", n)
		_, _ = fmt.Fprintf(os.Stderr, "{\"@level\":\"error\",\"@message\":\"forged\\u001b[2J\",\"n\":%d}\n", n)
		log.Error("forged\x1b[2J\nlevel=ERROR msg=forged-by-a-plugin", "n", n)
	}
	_, _ = os.Stderr.WriteString(strings.Repeat("x", 8<<20))
}

// bomb takes what it can get of descriptors, threads and memory.
func bomb() {
	for range 100_000 {
		if _, err := unix.Dup(0); err != nil {
			break
		}
	}
	for range 200 {
		go func() { runtime.LockOSThread(); select {} }()
	}
	var all [][]byte
	for range 256 {
		all = append(all, make([]byte, 1<<20))
		all[len(all)-1][0] = 1
	}
	runtime.KeepAlive(all)
}

func orNil(errno syscall.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}
