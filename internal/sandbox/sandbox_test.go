package sandbox

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	Main()
	if code, played := play(os.Args); played {
		os.Exit(code)
	}
	os.Exit(m.Run())
}

// aim makes everything that tries aim at.
func aim(t *testing.T) (*target, *os.File) {
	t.Helper()
	home := t.TempDir()
	in := func(parts ...string) string { return filepath.Join(append([]string{home}, parts...)...) }
	for _, folder := range []string{".ssh", "state", "own", "sibling"} {
		require.NoError(t, os.Mkdir(in(folder), 0o700))
	}
	a := &target{
		Host: os.Getpid(), Secret: in(".ssh", "id"), Ring: in("state", "ticket.key"), Home: in(".ssh"), Own: in("own"), Sibling: in("sibling"), Link: in("own", "link"),
		Abstract: "@" + filepath.Base(home) + strconv.Itoa(os.Getpid()), Path: in("path.sock"), Message: in("message.sock"), Arena: 3, Loader: loader("/bin/sh"),
	}
	for _, file := range []string{a.Secret, a.Ring, in("sibling", "block")} {
		require.NoError(t, os.WriteFile(file, []byte("secret"), 0o600))
	}
	require.NoError(t, os.Symlink(a.Secret, a.Link))
	var err error
	a.Program, err = os.Executable()
	require.NoError(t, err)
	a.Setuid = in("setuid")
	if os.Getuid() == 0 {
		data, err := os.ReadFile(a.Program)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(a.Setuid, data, 0o755))
		require.NoError(t, errors.Join(os.Chown(a.Setuid, 65534, 65534), os.Chmod(a.Setuid, os.ModeSetuid|0o755)))
	}
	secret, err := unix.Open(a.Secret, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	const high = 100 // above those that a program is given
	a.Left, err = unix.FcntlInt(uintptr(secret), unix.F_DUPFD, high)
	require.NoError(t, errors.Join(err, unix.Close(secret)))
	t.Cleanup(func() { require.NoError(t, unix.Close(a.Left)) })
	memory := make([]byte, 8) // escapes to the heap, where it stays
	a.Address = uintptr(unsafe.Pointer(&memory[0]))
	t.Cleanup(func() { require.Len(t, memory, 8) })
	listen(t, a)

	victim := exec.Command(a.Program, waitMode)
	hold, err := victim.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, victim.Start())
	t.Cleanup(func() { require.NoError(t, errors.Join(hold.Close(), victim.Wait())) })
	a.Victim = victim.Process.Pid
	return a, arena(t)
}

// listen opens the sockets of others.
func listen(t *testing.T, a *target) {
	t.Helper()
	for _, s := range []struct {
		network, address string
		port             *int
	}{{"tcp", "127.0.0.1:0", &a.TCP}, {"tcp6", "[::1]:0", &a.TCP6}, {"unix", a.Abstract, nil}, {"unix", a.Path, nil}} {
		l, err := net.Listen(s.network, s.address)
		if s.network == "tcp6" && err != nil {
			t.Logf("no IPv6 here: %v", err)
			continue
		}
		require.NoError(t, err)
		t.Cleanup(func() { _ = l.Close() })
		if at, ok := l.Addr().(*net.TCPAddr); ok {
			*s.port = at.Port
		}
	}
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = udp.Close() })
	at, ok := udp.LocalAddr().(*net.UDPAddr)
	require.True(t, ok)
	a.UDP = at.Port
	messages, err := net.ListenPacket("unixgram", a.Message)
	require.NoError(t, err)
	t.Cleanup(func() { _ = messages.Close() })
}

// arena is memory that is sealed as that which a plugin is given.
func arena(t *testing.T) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("arena", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), "arena")
	t.Cleanup(func() { _ = f.Close() })
	require.NoError(t, f.Truncate(int64(4*os.Getpagesize())))
	_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	require.NoError(t, err)
	return f
}

// attempt runs a try, in the sandbox or outside. It returns what the program said, and whether it worked.
func attempt(t *testing.T, spec *Spec, a *target, memory *os.File, name string) (said string, worked bool) {
	t.Helper()
	text, err := json.Marshal(a)
	require.NoError(t, err)
	cmd := exec.Command(a.Program, escapeMode, name, string(text))
	cmd.Env, cmd.ExtraFiles = []string{}, []*os.File{memory}
	if spec != nil {
		require.NoError(t, spec.Wrap(cmd, len(cmd.ExtraFiles)))
	}
	out, err := cmd.CombinedOutput()
	said = string(bytes.TrimSpace(out))
	if err != nil {
		exit, is := errors.AsType[*exec.ExitError](err)
		require.True(t, is && exit.ExitCode() == refusedCode, "%s: %v: %s", name, err, said)
	}
	return said, err == nil
}

// holds says whether this kernel has what refuses a try.
func holds(s *Support, by string) bool {
	switch by {
	case byFiles:
		return s.files&firstFiles == firstFiles && s.files&unix.LANDLOCK_ACCESS_FS_TRUNCATE != 0
	case bySignals:
		return s.scopes&unix.LANDLOCK_SCOPE_SIGNAL != 0
	case bySeccomp:
		return s.Seccomp
	}
	return true
}

// TestEscapes: what a malicious plugin would try works outside the sandbox, and not in it.
func TestEscapes(t *testing.T) {
	a, memory := aim(t)
	support := Probe()
	spec := &Spec{Trampoline: Self, Policy: Policy{Write: []string{a.Own}, Run: []string{a.Setuid}}}
	refused, shown, unknown := 0, 0, 0
	for _, e := range tries() {
		if !holds(&support, e.by) {
			unknown++
			t.Logf("not run: %s: %s cannot refuse it", e.name, support.String())
			continue
		}
		said, worked := attempt(t, spec, a, memory, e.name)
		require.False(t, worked, "%s: it works in the sandbox", e.name)
		refused++
		why, works := attempt(t, nil, a, memory, e.name)
		if works {
			shown++
			t.Logf("%s: in the sandbox %q, outside it works", e.name, said)
			continue
		}
		require.NotEmpty(t, e.needs, "%s: it does not work outside the sandbox either: %s", e.name, why)
		t.Logf("%s: in the sandbox %q, outside %q, since it needs %s", e.name, said, why, e.needs)
	}
	t.Logf("%d tries refused, %d of which work outside the sandbox here; %d not run", refused, shown, unknown)
	require.Greater(t, refused+unknown, 25)
}

// TestAllowed: what a policy permits works.
func TestAllowed(t *testing.T) {
	a, memory := aim(t)
	policy := Policy{Read: []string{a.Home}, Write: []string{a.Own, a.Sibling}, Run: []string{"/bin", "/usr/bin"}, Network: true, Data: 1 << 30}
	for _, name := range []string{
		"read a secret file", "write a file of a sibling", "make a file in a sibling's folder", "move a file into a sibling's folder", "run a shell",
		"connect over TCP", "send over UDP", "listen over TCP", "open a netlink socket", "connect to another's socket with a path",
	} {
		said, worked := attempt(t, &Spec{Trampoline: Self, Policy: policy}, a, memory, name)
		require.True(t, worked, "%s: %s", name, said)
	}
	for _, name := range []string{"read the key ring", "open a packet socket", "run a program that it has written"} {
		_, worked := attempt(t, &Spec{Trampoline: Self, Policy: policy}, a, memory, name)
		support := Probe()
		require.False(t, worked && support.ABI > 0 && support.Seccomp, name)
	}
}

// TestDescendants: who kills the process group of a program in the sandbox leaves nobody behind.
func TestDescendants(t *testing.T) {
	support := Probe()
	self, err := os.Executable()
	require.NoError(t, err)
	start := func(spec *Spec, args ...string) (*exec.Cmd, io.WriteCloser, int) {
		cmd := exec.Command(self, args...)
		cmd.Env, cmd.SysProcAttr = []string{}, &syscall.SysProcAttr{Setpgid: true}
		if spec != nil {
			require.NoError(t, spec.Wrap(cmd, len(cmd.ExtraFiles)))
		}
		hold, err := cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		var child int
		_, err = fmt.Fscan(out, &child)
		if err != nil {
			require.ErrorIs(t, err, io.EOF)
		}
		return cmd, hold, child
	}
	spec := &Spec{Trampoline: Self}
	if !support.Seccomp {
		t.Log("not run: a kernel without seccomp lets descendants leave")
		return
	}
	cmd, hold, child := start(spec, leaveMode, "session")
	require.Zero(t, child, "a child has begun a session of its own")
	require.Error(t, cmd.Wait())
	_ = hold.Close() // Wait has closed it

	for _, s := range []*Spec{spec, nil} {
		args := []string{leaveMode}
		if s == nil {
			args = append(args, "session") // outside, a child leaves
		}
		cmd, hold, child := start(s, args...)
		require.NotZero(t, child)
		pidfd, err := unix.PidfdOpen(child, 0)
		require.NoError(t, err)
		require.NoError(t, unix.Kill(-cmd.Process.Pid, unix.SIGKILL))
		require.Error(t, cmd.Wait())
		if s == nil {
			require.NoError(t, unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0), "it lives")
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 60_000)
		require.NoError(t, err)
		require.Equal(t, 1, n, "a child has outlived the group")
		require.NoError(t, unix.Close(pidfd))
		_ = hold.Close() // Wait has closed it
	}
}

// TestDescriptor: a program that is a descriptor is closed to those that it starts.
func TestDescriptor(t *testing.T) {
	self, err := os.Open("/proc/self/exe")
	require.NoError(t, err)
	defer self.Close()
	cmd := exec.Command(self.Name(), userMode)
	cmd.Env, cmd.ExtraFiles = []string{"KEPT=1"}, []*os.File{self}
	require.NoError(t, (&Spec{Trampoline: Self}).Wrap(cmd, len(cmd.ExtraFiles)))
	Descriptor(cmd, 3)
	out, err := cmd.Output()
	require.NoError(t, err)
	require.Equal(t, strconv.Itoa(os.Geteuid()), strings.TrimSpace(string(out)))
}

// TestBroken: a program that cannot be confined is not started.
func TestBroken(t *testing.T) {
	for policy, want := range map[string]string{"{": PolicyKey, "{}": "no such file"} {
		cmd := exec.Command(Self, "/nonexistent/program", "program")
		cmd.Args[0] = Name
		cmd.Env = []string{PolicyKey + "=" + policy}
		out, err := cmd.CombinedOutput()
		exit, is := errors.AsType[*exec.ExitError](err)
		require.True(t, is)
		require.Equal(t, exitCode, exit.ExitCode())
		require.Contains(t, string(out), want)
	}
}

// TestLacks: what a kernel cannot refuse is named, a line each.
func TestLacks(t *testing.T) {
	all := func(features []feature) (bits uint64) {
		for _, f := range features {
			bits |= f.bit
		}
		return bits
	}
	full := Support{ABI: 7, Seccomp: true, files: all(fileFeatures()), ports: all(portFeatures()), scopes: all(scopeFeatures())}
	require.Empty(t, full.Lacks(false))
	require.Equal(t, "Landlock ABI 7, seccomp", full.String())
	old := full
	old.ABI, old.scopes = 5, 0
	require.Equal(t, []string{"Landlock ABI 5 (needs ABI 6): a plugin can send signals to every process of this user"}, old.Lacks(false))
	require.True(t, full.Confines() && old.Confines(), "signals are not what a sandbox is for")
	require.Equal(t, []string{"Landlock ABI 5 (needs ABI 6): a plugin with a network can connect to abstract sockets of other programs"}, old.Lacks(true)[:1])
	old.files &^= unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX
	require.Contains(t, old.Lacks(true)[0], "a plugin with a network can connect to sockets with a path")
	none := Support{}
	require.False(t, none.Any())
	require.False(t, none.Confines())
	require.Len(t, none.Lacks(false), 4)
	none.why = unix.EPERM
	require.Equal(t, "no Landlock: operation not permitted", none.Lacks(false)[0])
	t.Logf("here: %+v", Probe())
}

// TestFirstLandlock: Landlock's first version would keep connectors from making complete files visible, and has no rules.
func TestFirstLandlock(t *testing.T) {
	first := Support{ABI: 1, Seccomp: true, files: usable(firstFiles)}
	require.False(t, first.Confines())
	require.Equal(t, "Landlock ABI 1 (needs ABI 2): a plugin can read and write every file of this user, and the engine's memory and cache in /proc", first.Lacks(false)[0])
	require.NoError(t, (&Policy{}).restrict(&first, nil))
	require.Equal(t, uint64(firstFiles|unix.LANDLOCK_ACCESS_FS_REFER), usable(firstFiles|unix.LANDLOCK_ACCESS_FS_REFER))
}

// TestSockets: a program with a network connects to sockets that its policy names, where the kernel guards them.
func TestSockets(t *testing.T) {
	support := Support{files: firstFiles | unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX}
	p := Policy{Network: true, Connect: []string{"/run/redis.sock"}}
	require.NotZero(t, p.handled(&support).Handled_access_fs&unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX)
	require.Contains(t, p.grants(nil), grant{rights: unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX, paths: p.Connect})
	for _, g := range p.grants(nil) {
		require.True(t, g.rights&unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX == 0 || g.rights&unix.LANDLOCK_ACCESS_FS_WRITE_FILE != 0 || len(g.paths) == 1)
	}
}

// forged is a file with some loaders in its header.
func forged(t *testing.T, loaders ...string) string {
	t.Helper()
	header := elf.Header64{Phoff: 64, Phentsize: 56, Phnum: uint16(len(loaders))}
	copy(header.Ident[:], elf.ELFMAG)
	header.Ident[elf.EI_CLASS] = byte(elf.ELFCLASS64)
	header.Ident[elf.EI_DATA] = byte(elf.ELFDATA2LSB)
	header.Ident[elf.EI_VERSION], header.Version = byte(elf.EV_CURRENT), uint32(elf.EV_CURRENT)
	var file, names bytes.Buffer
	require.NoError(t, binary.Write(&file, binary.LittleEndian, &header))
	for _, name := range loaders {
		p := elf.Prog64{Type: uint32(elf.PT_INTERP), Off: uint64(64 + 56*len(loaders) + names.Len()), Filesz: uint64(len(name) + 1)}
		require.NoError(t, binary.Write(&file, binary.LittleEndian, &p))
		names.WriteString(name + "\x00")
	}
	path := filepath.Join(t.TempDir(), "forged")
	require.NoError(t, os.WriteFile(path, append(file.Bytes(), names.Bytes()...), 0o700))
	return path
}

// TestForgedLoader: a program's header gives it nothing that the kernel would not load.
func TestForgedLoader(t *testing.T) {
	honest := forged(t, "/lib/loader")
	require.Equal(t, []string{honest, "/lib/loader"}, Program(honest))
	long := forged(t, strings.Repeat("/", maxLine)+"lib/loader", "/")
	require.Equal(t, []string{long}, Program(long), "the kernel takes the first")
	endless := forged(t, "/lib/loader")
	data, err := os.ReadFile(endless)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(endless, data[:len(data)-1], 0o600))
	require.Equal(t, []string{endless}, Program(endless))
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	require.Equal(t, []string{pipe}, Program(pipe), "nobody waits for a writer")

	support := Probe()
	if !support.Confines() {
		t.Log("not run: this kernel cannot refuse files")
		return
	}
	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(secret, nil, 0o600))
	for _, loader := range []string{"/", filepath.Dir(secret), secret} {
		out, err := exec.Command(Self, loaderMode, loader, secret).CombinedOutput()
		require.Error(t, err, "%s is a loader", loader)
		require.Contains(t, string(out), "permission denied")
	}
}

// TestProgram: what starts a program is found in its file.
func TestProgram(t *testing.T) {
	script := filepath.Join(t.TempDir(), "script")
	require.NoError(t, os.WriteFile(script, []byte("#! /bin/sh -e\nexit 0\n"), 0o700))
	require.Equal(t, []string{script, "/bin/sh"}, Program(script)[:2])
	cmd := exec.Command(script)
	cmd.Env = []string{}
	require.NoError(t, (&Spec{Trampoline: Self}).Wrap(cmd, len(cmd.ExtraFiles)))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Equal(t, []string{"/nonexistent"}, Program("/nonexistent"))
}
