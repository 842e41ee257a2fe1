package plugin

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/internal/wire"
)

// A Fence is a pipe whose write end a plugin inherits beside its regions, and so does every process
// that gets the regions from it. Nobody writes to it. Its end of file says that all of them are gone:
// waiting for the plugin's own process alone would not, as one of its children may write on.
//
// Nor would that be all: a peer that writes into a process with process_vm_writev keeps the memory of
// that process mapped while it does, however dead the process is. So each life of a plugin gets memory
// by descriptions of its own, with a lock that goes only with the last of their mappings (record 125 in docs/adr).
type Fence struct {
	read   *os.File
	inode  uint64     // of the pipe, and the byte that the locks are of
	mark   string     // in the environment of the plugin and of those that it starts
	memory []*os.File // what was lent, to look for locks
}

// fenceWait is how long the heirs of a dead plugin have to follow it before they are looked for and
// killed. The kernel kills those that were started with a death signal.
const fenceWait = 200 * time.Millisecond

func newFence() (*Fence, *os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	f := &Fence{read: r}
	var mark [16]byte
	_, _ = rand.Read(mark[:]) // never fails, says its documentation
	f.mark = hex.EncodeToString(mark[:])
	raw, err := r.SyscallConn() // Fd would make reads block without a deadline
	if err == nil {
		var st unix.Stat_t
		var failed error
		err = raw.Control(func(fd uintptr) { failed = unix.Fstat(int(fd), &st) })
		if f.inode = st.Ino; failed != nil {
			err = os.NewSyscallError("fstat", failed)
		}
	}
	if err != nil {
		_, _ = r.Close(), w.Close()
		return nil, nil, err
	}
	return f, w, nil
}

// lend opens memory again for a plugin, locked for this life and for those lives that we are part of
// ourselves: others are the fences that we inherited.
func (f *Fence) lend(memory, others []*os.File) (lent []*os.File, err error) {
	if f.memory, err = dupAll(memory); err != nil {
		return nil, err
	}
	marks := []uint64{f.inode}
	for _, o := range others {
		var st unix.Stat_t
		if err := unix.Fstat(int(o.Fd()), &st); err != nil {
			return nil, os.NewSyscallError("fstat", err)
		}
		marks = append(marks, st.Ino)
	}
	for _, m := range memory {
		fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", m.Fd()), unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			closeAll(lent)
			return nil, fmt.Errorf("memory %s cannot be opened again for the plugin, which needs /proc: %w", m.Name(), err)
		}
		lent = append(lent, os.NewFile(uintptr(fd), m.Name()))
		for _, mark := range marks {
			if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, byteLock(unix.F_RDLCK, mark)); err != nil {
				closeAll(lent)
				return nil, os.NewSyscallError("fcntl F_OFD_SETLK", err)
			}
		}
	}
	return lent, nil
}

func byteLock(kind int16, at uint64) *unix.Flock_t {
	return &unix.Flock_t{Type: kind, Start: int64(at), Len: 1}
}

// mapped says whether memory that was lent is still mapped, or open, anywhere.
func (f *Fence) mapped() bool {
	for _, m := range f.memory {
		l := byteLock(unix.F_WRLCK, f.inode)
		if err := unix.FcntlFlock(m.Fd(), unix.F_OFD_GETLK, l); err == nil && l.Type != unix.F_UNLCK {
			return true
		}
	}
	return false
}

// close gives the descriptors back.
func (f *Fence) close() { closeAll(append(f.memory, f.read)) }

// patience says how long a fence is waited for.
type patience struct {
	limit time.Duration
	hurry <-chan struct{} // closed when the host closes: then it waits no longer than hurriedWait
}

// hurriedWait is enough to find and kill those that a plugin has left behind.
const hurriedWait = time.Second

// wait says whether nobody holds the fence any more and nobody writes through a mapping of what was lent.
// It is false where that does not come: somebody may write into the memory for ever then.
func (f *Fence) wait(p patience) bool {
	end, hurried := time.Now().Add(p.limit), false
	over := func() bool {
		select {
		case <-p.hurry:
			if soon := time.Now().Add(hurriedWait); !hurried && soon.Before(end) {
				end = soon
			}
			hurried = true
		default:
		}
		return !time.Now().Before(end)
	}
	if !f.waitDescendants(over) {
		return false
	}
	for wait := peerPause; f.mapped(); wait = min(2*wait, maxPeerPause) {
		if over() {
			return false
		}
		<-time.After(wait)
	}
	return true
}

// Pauses between looks for peers that write through a dead plugin's memory: none lasts longer than
// their call.
const (
	peerPause    = time.Millisecond
	maxPeerPause = 20 * time.Millisecond
)

// waitDescendants waits for the end of the pipe, at most until over.
func (f *Fence) waitDescendants(over func() bool) bool {
	var seen map[int]bool
	for next := time.Now().Add(fenceWait); !over(); {
		_ = f.read.SetReadDeadline(next)
		var b [512]byte
		_, err := f.read.Read(b[:])
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return true
		}
		if !time.Now().Before(next) { // whoever writes to the fence must not keep us from looking
			seen = f.killDescendants(seen)
			next = time.Now().Add(fenceWait)
		}
	}
	return false
}

// killDescendants kills the processes that the plugin has left behind with the fence, but not at first sight:
// between fork and exec any child of ours holds all that we do. It returns the processes that it saw. A plugin
// can hand the fence to any process; only the mark in the environment tells that a process descends from it,
// and no other process is killed.
func (f *Fence) killDescendants(seen map[int]bool) map[int]bool {
	now := map[int]bool{}
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*") // the pattern is good
	for _, link := range links {
		if !f.holds(link) {
			continue
		}
		pid, err := strconv.Atoi(strings.Split(link, "/")[2])
		if err != nil || pid == os.Getpid() {
			continue
		}
		if now[pid] = true; seen[pid] {
			f.kill(pid, link)
		}
	}
	return now
}

// holds says whether a link in /proc is a descriptor of the fence.
func (f *Fence) holds(link string) bool {
	target, err := os.Readlink(link)
	return err == nil && target == fmt.Sprintf("pipe:[%d]", f.inode)
}

// kill ends a process that descends from the plugin. The descriptor of the process is there first, so that
// what is looked at afterwards is the process that the signal goes to.
func (f *Fence) kill(pid int, link string) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer func() { _ = unix.Close(fd) }()
	if f.holds(link) && f.marked(pid) {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}
}

// marked says whether a process was started with the mark of this life of the plugin, or by one that was.
func (f *Fence) marked(pid int) bool {
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return false
	}
	for entry := range bytes.SplitSeq(environ, []byte{0}) {
		marks, ours := bytes.CutPrefix(entry, []byte(wire.LifeKey+"="))
		if ours && slices.Contains(strings.Split(string(marks), ","), f.mark) {
			return true
		}
	}
	return false
}

// variable is the environment variable with the mark, and those of the lives that we are part of ourselves.
func (f *Fence) variable() string {
	marks := f.mark
	if others := os.Getenv(wire.LifeKey); others != "" {
		marks += "," + others
	}
	return wire.LifeKey + "=" + marks
}

// inheritedFences duplicates the fences that this process holds for those who started it, so that a
// plugin that it starts holds them too.
func inheritedFences() ([]*os.File, error) {
	var out []*os.File
	for _, text := range strings.FieldsFunc(os.Getenv(wire.FenceKey), func(c rune) bool { return c == ',' }) {
		n, err := strconv.Atoi(text)
		if err == nil {
			n, err = unix.FcntlInt(uintptr(n), unix.F_DUPFD_CLOEXEC, 0)
		}
		if err != nil {
			closeAll(out)
			return nil, fmt.Errorf("%s names %q: %w", wire.FenceKey, text, err)
		}
		out = append(out, os.NewFile(uintptr(n), "fence"))
	}
	return out, nil
}

// fenceVariable says which descriptors of the plugin are fences: n of them after the memory.
func fenceVariable(first, n int) string {
	numbers := make([]string, n)
	for i := range numbers {
		numbers[i] = strconv.Itoa(first + i)
	}
	return wire.FenceKey + "=" + strings.Join(numbers, ",")
}

// ErrAbandoned says that a fence did not come back. The host goes on without what it guards: memory is lost,
// not the service.
var ErrAbandoned = errors.New("a process to which it gave its fence may write its memory for ever")

// AbandonedMemory is what former lives of a plugin have left behind.
type AbandonedMemory struct {
	mu      sync.Mutex
	fences  []*Fence
	spoiled bool // since the memory of the next life was made
}

// Add takes a fence over. Its descriptors stay open: the number of its pipe must not come back, since locks
// of other lives are found by it.
func (a *AbandonedMemory) Add(f *Fence) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fences, a.spoiled = append(a.fences, f), true
}

// Count says how many lives have left memory behind.
func (a *AbandonedMemory) Count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.fences)
}

// Spoil says whether memory was left behind since it was last asked.
func (a *AbandonedMemory) Spoil(yes bool) (was bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	was, a.spoiled = a.spoiled, yes
	return was
}

// Close gives the descriptors back.
func (a *AbandonedMemory) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range a.fences {
		f.close()
	}
	a.fences = nil
}
