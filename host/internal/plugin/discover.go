package plugin

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/host/internal/config"
	"github.com/kvport/kvport/internal/sandbox"
	"github.com/kvport/kvport/internal/strictjson"
	"github.com/kvport/kvport/internal/wire"
)

// Bounds of what plugins say about themselves.
const (
	maxManifest  = 1 << 20         // of a manifest, in bytes
	manifestWait = 5 * time.Second // for a manifest at least; a busy machine stretches it, see Patient
	settleWait   = time.Second     // for plugins before the one that has answered
)

// Wanted says which plugin is looked for.
type Wanted struct {
	Connector string   // name or alias
	Paths     []string // folders with kvport-* executables, in order
	Module    string   // the plugin's binary; empty: it is searched for
	SHA256    string   // that the binary must have, in hex; empty: any
	Composed  []string // connectors that need no plugin: a misspelt name may be meant to be theirs

	Handshake time.Duration // that the config gives a plugin's start; a manifest may take as long
	Sandbox   *sandbox.Spec // in which the manifest of the wanted plugin is asked for; nil: outside
	Search    *sandbox.Spec // in which those of others are, on the way to it; nil: outside
}

// wait is how long each plugin may take for its manifest.
func (w *Wanted) wait() time.Duration { return max(manifestWait, w.Handshake) }

// Binary is a plugin on disk.
type Binary struct {
	Path     string
	Manifest *wire.Manifest
}

// pluginPrefix begins the file name of every plugin.
const pluginPrefix = "kvport-"

// Find looks for the plugin that answers to the wanted name among the executables of the given folders.
// Of several the first in the order of the folders wins, but one whose file is called like the connector
// goes before all others: then nothing else is run. Errors wrap config.Err and say where it looked, what
// it found, and which known name is nearest.
func Find(ctx context.Context, w *Wanted) (*Binary, error) {
	var named, others []string
	for _, path := range candidates(w.Paths) {
		if namedAfter(path, w.Connector) {
			named = append(named, path)
		} else {
			others = append(others, path)
		}
	}
	first, b := probe(ctx, named, w, w.Sandbox)
	if b != nil {
		return b, nil
	}
	second, b := probe(ctx, others, w, w.Search)
	if b != nil {
		return b, nil
	}
	return nil, notFound(w, append(first, second...))
}

// namedAfter reports whether a file is called like a connector: kvport-disk for DiskConnector.
func namedAfter(path, name string) bool {
	lower := strings.ToLower(name)
	base := strings.TrimPrefix(filepath.Base(path), pluginPrefix)
	return base == lower || base == strings.TrimSuffix(lower, "connector")
}

func notFound(w *Wanted, found []Found) error {
	known, own, broken := slices.Clone(w.Composed), slices.Clone(w.Composed), []string(nil)
	for _, f := range found {
		if f.Err != nil {
			broken = append(broken, f.Err.Error())
			continue
		}
		own = append(own, f.Manifest.Name)
		known = append(append(known, f.Manifest.Name), f.Manifest.Aliases...)
	}
	looked := "no plugin folder is set"
	if len(w.Paths) > 0 {
		looked = "looked in " + strings.Join(w.Paths, ", ")
	}
	slices.Sort(own)
	err := fmt.Errorf("%w: kv_connector: no plugin is called %s%s; there are %s (%s)",
		config.Err, strictjson.Quote(w.Connector), nearestConnector(w.Connector, known), strings.Join(slices.Compact(own), ", "), looked)
	if len(broken) > 0 {
		err = fmt.Errorf("%w; skipped: %s", err, strings.Join(broken, "; "))
	}
	return err
}

// nearestConnector suggests a connector whose name was misspelt. Most names end in Connector, which is no
// likeness.
func nearestConnector(name string, known []string) string {
	stems, whole := make([]string, len(known)), map[string]string{}
	for i, k := range known {
		stems[i] = stem(k)
		whole[stems[i]] = k
	}
	near := strictjson.Nearest(name, known, 3) // an end that was misspelt itself
	if near == "" {
		near = whole[strictjson.Nearest(stem(name), stems, len(stem(name))/3+1)]
	}
	if near == "" {
		return ""
	}
	return fmt.Sprintf(", did you mean %q?", near)
}

func stem(connector string) string {
	return strings.TrimSuffix(strings.ToLower(connector), "connector")
}

// probe asks all candidates at once. When one answers to the wanted name, those before it in order have
// settleWait to do so too; the rest is not waited for. Without a winner it returns all answers.
func probe(ctx context.Context, paths []string, w *Wanted, box *sandbox.Spec) ([]Found, *Binary) {
	ctx, cancel := context.WithCancel(ctx)
	found := make([]Found, len(paths))
	answers := make(chan int, len(paths))
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel() // kills who still runs
	for i, path := range paths {
		work.Go(func() {
			found[i] = look(ctx, path, w.wait(), box)
			answers <- i
		})
	}
	settled := time.NewTimer(settleWait)
	settled.Stop() // until there is a winner
	defer settled.Stop()
	best, done := len(paths), make([]bool, len(paths))
	for ahead := 0; ahead < best; {
		select {
		case i := <-answers:
			done[i] = true
			if m := found[i].Manifest; m != nil && m.Answers(w.Connector) && i < best {
				if best == len(paths) {
					settled.Reset(settleWait)
				}
				best = i
			}
		case <-settled.C:
			ahead = best
		}
		for ahead < best && done[ahead] {
			ahead++
		}
	}
	if best == len(paths) {
		return found, nil
	}
	return nil, &Binary{Path: paths[best], Manifest: found[best].Manifest}
}

// Found is a file that is called like a plugin: Manifest is how it describes itself, or Err says why
// it is not a plugin.
type Found struct {
	Path     string
	Manifest *wire.Manifest
	Err      error
}

// List asks every kvport-* executable of the given folders for its manifest, in order.
func List(ctx context.Context, paths []string) []Found {
	files := candidates(paths)
	found := make([]Found, len(files))
	var work sync.WaitGroup
	for i, path := range files {
		work.Go(func() { found[i] = look(ctx, path, manifestWait, nil) })
	}
	work.Wait()
	return found
}

func look(ctx context.Context, path string, limit time.Duration, box *sandbox.Spec) Found {
	p, err := Executable(path)
	if err != nil {
		return Found{Path: path, Err: err}
	}
	m, err := p.Manifest(ctx, limit, box)
	return Found{Path: path, Manifest: m, Err: err}
}

// candidates are the files that could be plugins, in the order of the folders, each once.
func candidates(paths []string) []string {
	var files []string
	for i, dir := range paths {
		if !slices.Contains(paths[:i], dir) {
			files = append(files, executables(dir)...)
		}
	}
	return files
}

// executables lists the plugins of a folder by name. A folder that cannot be read has none.
func executables(dir string) []string {
	// A bare name would be looked for on PATH when it is started: what "." holds has one.
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var found []string
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasPrefix(e.Name(), pluginPrefix) && checkExecutable(path) == nil {
			found = append(found, path)
		}
	}
	return found
}

func checkExecutable(path string) error {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		return fmt.Errorf("%s is not a regular file", path)
	case st.Mode()&0o111 == 0:
		return fmt.Errorf("%s is not executable", path)
	}
	return nil
}

// ReadManifest runs a plugin with --manifest and reads what it prints. It gives the plugin a few
// seconds, more on a busy machine, no environment and nothing to read. Errors name the binary.
func ReadManifest(ctx context.Context, path string) (*wire.Manifest, error) {
	f := look(ctx, path, manifestWait, nil)
	return f.Manifest, f.Err
}

// noManifestError says that a plugin took too long. It is context.DeadlineExceeded.
type noManifestError struct {
	path  string
	limit time.Duration
}

func (e *noManifestError) Error() string {
	return fmt.Sprintf("%s --manifest gave no answer within %s", e.path, e.limit)
}

func (e *noManifestError) Unwrap() error { return context.DeadlineExceeded }

// Manifest runs the program with --manifest and reads what it prints, like ReadManifest. It gives the
// plugin limit, which a busy machine stretches. box may be nil.
func (p *Program) Manifest(ctx context.Context, limit time.Duration, box *sandbox.Spec) (*wire.Manifest, error) {
	var pid atomic.Int64
	ctx, cancel := Patient(ctx, limit, waits(func() int { return int(pid.Load()) }))
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	out, complaint := limitedBuffer{full: stop}, limitedBuffer{full: stop}
	cmd := p.command(ctx, "--manifest")
	inherit, err := p.confine(cmd, box, nil)
	if err != nil {
		return nil, err
	}
	defer closeAll(inherit)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = &out, &complaint, inherit
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	err = onOwnThread(func() error {
		if err := cmd.Start(); err != nil {
			return err
		}
		pid.Store(int64(cmd.Process.Pid))
		return cmd.Wait()
	})
	if errors.Is(err, exec.ErrWaitDelay) {
		// It exited with 0, and somebody else still holds its output: a child of its own, which ends here, or
		// another child of this process between its fork and its exec, on a busy machine.
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		err = nil
	}
	if errors.Is(context.Cause(ctx), errFlood) {
		return nil, fmt.Errorf("%s --manifest %w, it was killed", p.Path, errFlood)
	}
	if RanOut(ctx) {
		return nil, &noManifestError{p.Path, limit}
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%s --manifest: %w", p.Path, ctx.Err())
	}
	if errors.Is(err, syscall.ENOEXEC) {
		return nil, fmt.Errorf("%s cannot be run on this machine%s: %w", p.Path, builtFor(p.Path), err)
	}
	if err != nil {
		return nil, fmt.Errorf("%s --manifest: it is no kvport plugin, or a broken one: %w%s", p.Path, err, firstLine(complaint.kept.Bytes()))
	}
	m, err := wire.ParseManifest(out.kept.Bytes())
	if err != nil {
		return nil, fmt.Errorf("%s --manifest: it is no kvport plugin: %w", p.Path, err)
	}
	if !m.Speaks(wire.ProtocolVersion) {
		return nil, fmt.Errorf("%s speaks protocol versions %v, this host speaks %d: rebuild the older one", p.Path, m.ProtocolVersions, wire.ProtocolVersion)
	}
	return m, nil
}

// builtFor says for which machine a binary was built, if it was for another one.
func builtFor(path string) string {
	f, err := elf.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	name, ok := map[elf.Machine]string{elf.EM_AARCH64: "arm64", elf.EM_X86_64: "amd64"}[f.Machine]
	if !ok {
		name = strings.ToLower(strings.TrimPrefix(f.Machine.String(), "EM_"))
	}
	if name == runtime.GOARCH {
		return ""
	}
	return fmt.Sprintf(", it was built for %s and this is %s", name, runtime.GOARCH)
}

// onOwnThread runs f where the death signal of a child it starts is tied to a thread that lives as
// long as f.
func onOwnThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		done <- f()
	}()
	return <-done
}

// errFlood is why a plugin that prints without end is killed.
var errFlood = errors.New("prints more than 1 MiB")

// limitedBuffer keeps the first maxManifest bytes and fails beyond them. The bytes are in a named field:
// an embedded buffer would lend it a ReadFrom, by which io.Copy goes around the limit.
type limitedBuffer struct {
	kept bytes.Buffer
	full context.CancelCauseFunc // told when there is more
}

// Write implements io.Writer.
func (b *limitedBuffer) Write(p []byte) (int, error) {
	room := maxManifest - b.kept.Len()
	if len(p) <= room {
		return b.kept.Write(p)
	}
	b.kept.Write(p[:room])
	b.full(errFlood)
	return room, errFlood
}

func firstLine(b []byte) string {
	line, _, _ := bytes.Cut(bytes.TrimSpace(b), []byte("\n"))
	if len(line) == 0 {
		return ""
	}
	return ": " + strictjson.Quote(string(line))
}

// Resolve finds the wanted program and pins its content if a hash is given. The caller closes it. Errors
// wrap config.Err.
func Resolve(ctx context.Context, w *Wanted) (*Program, *wire.Manifest, error) {
	path, hash := w.Module, w.SHA256
	switch {
	case path == "" && hash != "":
		return findPinned(ctx, w)
	case path == "":
		b, err := Find(ctx, w)
		if err != nil {
			return nil, nil, err
		}
		path = b.Path
	}
	if err := checkExecutable(path); err != nil {
		return nil, nil, fmt.Errorf("%w: kv_connector_module_path: %w", config.Err, noModule(path, err))
	}
	p, err := OpenProgram(path, hash)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: kvport.plugin_sha256: %w", config.Err, err)
	}
	m, err := p.Manifest(ctx, w.wait(), w.Sandbox)
	if err == nil && !m.Answers(w.Connector) {
		err = fmt.Errorf("%s answers to %q, not to kv_connector %s", path, append([]string{m.Name}, m.Aliases...), strictjson.Quote(w.Connector))
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("%w: %w", config.Err, err), p.Close())
	}
	return p, m, nil
}

// noModule says to those who give a module of Python, as vLLM takes it, what kvport takes.
func noModule(path string, err error) error {
	if !errors.Is(err, fs.ErrNotExist) || strings.Contains(path, "/") {
		return err
	}
	return fmt.Errorf("%w; want the path of a plugin binary: modules of Python are not looked up", err)
}

// findPinned looks for the binary with the wanted content. Nothing else is run, not even for its
// manifest.
func findPinned(ctx context.Context, w *Wanted) (*Program, *wire.Manifest, error) {
	var wrong []string
	for _, path := range candidates(w.Paths) {
		p, err := OpenProgram(path, w.SHA256)
		if err != nil {
			wrong = append(wrong, filepath.Base(path))
			continue
		}
		m, err := p.Manifest(ctx, w.wait(), w.Sandbox)
		if err == nil && m.Answers(w.Connector) {
			return p, m, nil
		}
		_ = p.Close()
		wrong = append(wrong, filepath.Base(path))
	}
	return nil, nil, fmt.Errorf("%w: kvport.plugin_sha256: no plugin %s with SHA-256 %s (looked in %s; others: %s)", config.Err,
		strictjson.Quote(w.Connector), w.SHA256, strings.Join(w.Paths, ", "), strings.Join(wrong, ", "))
}

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

// confine makes a command of the program one that runs it in a sandbox; nil: it stays as it is. inherit is what the
// process gets, of which a pinned copy is the last then.
func (p *Program) confine(cmd *exec.Cmd, box *sandbox.Spec, inherit []*os.File) ([]*os.File, error) {
	if box == nil {
		return inherit, nil
	}
	number := len(inherit)
	if p.copy != nil {
		number++
	}
	if err := box.Wrap(cmd, number); err != nil || p.copy == nil {
		return inherit, err
	}
	own, err := dupAll([]*os.File{p.copy})
	if err != nil {
		return inherit, err
	}
	inherit = append(inherit, own...)
	sandbox.Descriptor(cmd, FirstRegionFD+len(inherit)-1)
	return inherit, nil
}

// Close lets go of a pinned copy.
func (p *Program) Close() error {
	if p.copy == nil {
		return nil
	}
	return p.copy.Close()
}
