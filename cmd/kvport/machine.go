package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/engine/model/kernel"
	"github.com/kvport/kvport/host"
)

// checkKernel tries each thing that kvport asks of the kernel.
func checkKernel(ctx context.Context) []check {
	const newer = "use Linux 5.10 or newer; in a container, let its seccomp profile pass the call"
	release := "unknown"
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		release = unix.ByteSliceToString(name.Release[:])
	}
	region, err := host.NewRegion(int64(os.Getpagesize()))
	if err == nil {
		err = region.Close()
	}
	checks := []check{
		{Check: "kernel", Status: statusOK, Detail: "Linux " + release + " " + runtime.GOARCH},
		result("memfd seals", "memfd_create and F_ADD_SEALS work", err, newer),
		result("vectored I/O", "preadv and pwritev work", tryVectors(), newer),
		checkProc(),
		checkMemfdExec(),
	}
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err == nil {
		err = unix.Close(fd)
	}
	checks = append(checks, result("pidfd", "pidfd_open works", err, newer).warn())
	return append(checks, result("death signal", "PR_SET_PDEATHSIG works: plugins die with their engine", tryDeathSignal(ctx), newer))
}

// tryDeathSignal starts this program as plugins are started.
func tryDeathSignal(ctx context.Context) error {
	runtime.LockOSThread() // the child would die with the thread
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "--version")
	cmd.Args[0] = os.Args[0]
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd.Run()
}

// tryVectors writes and reads several spans at once.
func tryVectors() error {
	fd, err := unix.MemfdCreate("kvport-doctor", unix.MFD_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("memfd_create", err)
	}
	defer unix.Close(fd)
	spans := [][]byte{[]byte("ab"), []byte("cd")}
	if n, err := unix.Pwritev(fd, spans, 0); err != nil || n != 4 {
		return fmt.Errorf("pwritev wrote %d of 4 bytes: %w", n, err)
	}
	if n, err := unix.Preadv(fd, spans, 0); err != nil || n != 4 {
		return fmt.Errorf("preadv read %d of 4 bytes: %w", n, err)
	}
	return nil
}

func checkProc() check {
	_, err := os.ReadDir("/proc/self/fd")
	if err == nil {
		_, err = os.Stat("/proc/meminfo")
	}
	return result("/proc", "is mounted", err, "mount it: mount -t proc none /proc")
}

// checkMemfdExec: pinned plugins are run from sealed memory.
func checkMemfdExec() check {
	const name = "pinned plugins"
	data, err := os.ReadFile("/proc/sys/vm/memfd_noexec") // absent before Linux 6.3
	if level := strings.TrimSpace(string(data)); err == nil && level != "0" {
		return check{name, statusWarn, "vm.memfd_noexec is " + level + ": kvport.plugin_sha256 may not work", "sysctl vm.memfd_noexec=0"}
	}
	return check{Check: name, Status: statusOK, Detail: "programs in sealed memory may be run"}
}

// checkCPU says which kernels a model would run on and measures them on a small product.
func checkCPU() []check {
	c, err := kernel.New(kernel.Options{})
	if err != nil {
		return []check{result("cpu", "", err, "report it as a bug")}
	}
	defer c.Close()
	speed, err := multiplySpeed(c)
	if err != nil {
		return []check{result("cpu", "", err, "free some memory")}
	}
	detail := fmt.Sprintf("%s kernels, %d threads, about %.3g GFLOP/s", c.ISA(), c.Threads(), speed)
	if c.ISA() == kernel.Portable {
		const mend = "run on an x86-64 CPU with AVX2 and FMA, or AVX-512; --model sim and tiny-random work anywhere"
		return []check{{"cpu", statusWarn, detail + ": the portable kernels have the same bits and are too slow to serve a real model", mend}}
	}
	return []check{{Check: "cpu", Status: statusOK, Detail: detail}}
}

// multiplySpeed is what a matrix product reaches, in 1e9 floating point operations a second.
func multiplySpeed(c *kernel.Compute) (float64, error) {
	const rows, n, k, least = 16, 256, 256, 20 * time.Millisecond
	memory, err := kernel.NewMemory(kernel.MatrixBytes(n, k, kernel.F32))
	if err != nil {
		return 0, err
	}
	defer memory.Close()
	w := c.Pack(memory, n, k, kernel.F32, func(dst []float32, row int) {
		for i := range dst {
			dst[i] = float32((row+i)%7) - 3
		}
	})
	x, y := make([]float32, rows*k), make([]float32, rows*w.Stride())
	for i := range x {
		x[i] = float32(i%5) - 2
	}
	began, done := time.Now(), 0
	for ; done == 0 || time.Since(began) < least; done++ {
		c.MatMul(y, x, rows, w)
	}
	return float64(2*rows*n*k*done) / time.Since(began).Seconds() / 1e9, nil
}

// What an engine and its plugin want.
const (
	leastFiles, goodFiles = 128, 1024
	goodLocked            = 64 << 20 // bytes
	leastSpace, goodSpace = 1 << 20, 1 << 30
	leastMemory           = 256 << 20
)

func checkLimits() []check {
	return []check{checkFiles(), checkLocked(), checkFileSize()}
}

func checkFiles() check {
	const name, mend = "open files", "ulimit -n 65536, or LimitNOFILE= in the systemd unit"
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return result(name, "", err, mend)
	}
	detail := "RLIMIT_NOFILE is " + limit(l.Cur)
	switch {
	case l.Cur < leastFiles:
		return check{name, statusFail, detail, mend}
	case l.Cur < goodFiles:
		return check{name, statusWarn, detail + ": each request and each plugin session takes one", mend}
	}
	return check{Check: name, Status: statusOK, Detail: detail}
}

func checkLocked() check {
	const name = "locked memory"
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil {
		return result(name, "", err, "see the message")
	}
	detail := "RLIMIT_MEMLOCK is " + limit(l.Cur)
	if l.Cur < goodLocked {
		return check{name, statusWarn, detail + " bytes: connectors that register memory with a network card cannot", "ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit; not needed for stores"}
	}
	return check{Check: name, Status: statusOK, Detail: detail}
}

func checkFileSize() check {
	const name = "file size"
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &l); err != nil {
		return result(name, "", err, "see the message")
	}
	detail := "RLIMIT_FSIZE is " + limit(l.Cur)
	if l.Cur < goodSpace {
		return check{name, statusWarn, detail + " bytes: larger caches and blocks cannot be written", "ulimit -f unlimited"}
	}
	return check{Check: name, Status: statusOK, Detail: detail}
}

func limit(n uint64) string {
	if n == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return strconv.FormatUint(n, 10)
}

// checkSpace looks at the room for caches (memory) and for what plugins and tests write.
func checkSpace() []check {
	checks := []check{checkMemory()}
	folders := []string{os.TempDir()}
	if _, err := os.Stat("/dev/shm"); err == nil {
		folders = append(folders, "/dev/shm")
	}
	for _, folder := range folders {
		name := "space in " + filepath.Clean(folder)
		var st unix.Statfs_t
		if err := unix.Statfs(folder, &st); err != nil {
			checks = append(checks, result(name, "", err, "set TMPDIR to a folder that exists"))
			continue
		}
		free := st.Bavail * uint64(st.Bsize)
		c := check{Check: name, Status: statusOK, Detail: size(free) + " free"}
		const mend = "free some space, or point TMPDIR and the connectors' folders elsewhere"
		switch {
		case free < leastSpace && folder == folders[0]:
			c.Status, c.Mend = statusFail, mend
		case free < goodSpace:
			c.Status, c.Mend = statusWarn, mend
		}
		checks = append(checks, c)
	}
	return checks
}

// checkMemory: a cache is memory that is taken at start.
func checkMemory() check {
	const name, mend = "memory", "free some, raise the container's limit, or give serve a small --num-blocks"
	available := availableMemory()
	detail := size(uint64(available)) + " available"
	if room := controlGroupRoom(); room >= 0 && room < available {
		available, detail = room, size(uint64(room))+" left to this control group"
	}
	if available < leastMemory {
		return check{name, statusWarn, detail, mend}
	}
	return check{Check: name, Status: statusOK, Detail: detail}
}

// controlGroupRoom is what a container may still take; -1 without a limit.
func controlGroupRoom() int64 {
	const folder = "/sys/fs/cgroup/"
	read := func(name string) int64 {
		data, err := os.ReadFile(folder + name)
		if err != nil {
			return -1
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
		if err != nil { // "max"
			return -1
		}
		return n
	}
	most, used := read("memory.max"), read("memory.current")
	if most < 0 || used < 0 {
		return -1
	}
	return max(0, most-used)
}

func size(n uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	f, i := float64(n), 0
	for ; f >= 1024 && i < len(units)-1; i++ {
		f /= 1024
	}
	return fmt.Sprintf("%.4g %s", f, units[i])
}

// firstYear is when kvport began.
const firstYear = 2026

// checkClock: certificates between engine and plugin want a clock that is roughly right; leases are
// durations and do not mind.
func checkClock() []check {
	const name, mend = "clock", "set the time, best by NTP: timedatectl set-ntp true"
	now := time.Now()
	if now.Year() < firstYear {
		return []check{{name, statusFail, "it is " + now.UTC().Format(time.RFC3339) + ", before this program was written", mend}}
	}
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	const unsynchronised = 5 // TIME_ERROR
	detail := now.UTC().Format(time.RFC3339)
	if err == nil && state == unsynchronised {
		return []check{{name, statusWarn, detail + ", the kernel does not know it synchronised; on one machine that does not matter", mend}}
	}
	return []check{{Check: name, Status: statusOK, Detail: detail}}
}
