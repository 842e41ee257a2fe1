package plugin

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/host/internal/config"
)

// Program is a binary that can be started. A pinned one is a sealed copy in memory of the bytes
// that were hashed, so nobody can swap the file between the check and the start.
type Program struct {
	Path string
	copy *os.File // nil unless pinned
}

// firstFreeFD is above every descriptor that a plugin is given. A child's descriptors are moved
// into place before exec, and the copy's must not be overwritten by that.
const firstFreeFD = 256

// Executable is the program at path, which is not opened.
func Executable(path string) (*Program, error) {
	if err := checkExecutable(path); err != nil {
		return nil, err
	}
	return &Program{Path: path}, nil
}

// OpenProgram opens a binary; with a hash its content must match.
func OpenProgram(path, hash string) (*Program, error) {
	if hash == "" {
		return &Program{Path: path}, nil
	}
	f, err := config.OpenFile(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	sealed, got, err := sealCopy(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if got != hash {
		return nil, errors.Join(fmt.Errorf("%s has SHA-256 %s, the config requires %s", path, got, hash), sealed.Close())
	}
	return &Program{Path: path, copy: sealed}, nil
}

// sealCopy copies a file into memory that nobody can change any more and hashes the copy.
func sealCopy(f *os.File) (sealed *os.File, hash string, err error) {
	fd, err := unix.MemfdCreate("kvport-plugin", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, "", os.NewSyscallError("memfd_create", err)
	}
	mem := os.NewFile(uintptr(fd), "memfd:kvport-plugin")
	defer mem.Close()
	if _, err := io.Copy(mem, f); err != nil {
		return nil, "", err
	}
	const seals = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(mem.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		return nil, "", os.NewSyscallError("fcntl F_ADD_SEALS", err)
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(mem, 0, 1<<62)); err != nil {
		return nil, "", err
	}
	// A file that is open for writing cannot be executed: open it again for reading only.
	readOnly, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", mem.Fd()))
	if err != nil {
		return nil, "", err
	}
	defer readOnly.Close()
	high, err := unix.FcntlInt(readOnly.Fd(), unix.F_DUPFD_CLOEXEC, firstFreeFD)
	if err != nil {
		return nil, "", os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	}
	return os.NewFile(uintptr(high), "memfd:kvport-plugin"), hex.EncodeToString(h.Sum(nil)), nil
}

// command prepares a start in a process group of its own that dies with the thread that starts it,
// with an empty environment.
func (p *Program) command(ctx context.Context, args ...string) *exec.Cmd {
	file := p.Path
	if p.copy != nil {
		file = fmt.Sprintf("/proc/self/fd/%d", p.copy.Fd())
	}
	cmd := exec.CommandContext(ctx, file, args...)
	cmd.Args[0] = p.Path
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// Close lets go of a pinned copy.
func (p *Program) Close() error {
	if p.copy == nil {
		return nil
	}
	return p.copy.Close()
}
