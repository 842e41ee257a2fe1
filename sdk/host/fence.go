package host

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/internal/wire"
)

// A fence is a pipe whose write end a plugin inherits beside its regions, and so does every process
// that gets the regions from it. Nobody writes to it. Its end of file says that all of them are gone:
// waiting for the plugin's own process alone would not, as one of its children may write on.
//
// Nor would that be all: a peer that writes into a process with process_vm_writev keeps the memory of
// that process mapped while it does, however dead the process is. So each life of a plugin gets memory
// by descriptions of its own, with a lock that goes only with the last of their mappings (ADR 125).
type fence struct {
	read   *os.File
	inode  uint64     // of the pipe, and the byte that the locks are of
	memory []*os.File // what was lent, to look for locks
}

// fenceWait is how long the heirs of a dead plugin have to follow it before they are looked for and
// killed. The kernel kills those that were started with a death signal.
const fenceWait = 200 * time.Millisecond

func newFence() (*fence, *os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(r.Fd()), &st); err != nil {
		_, _ = r.Close(), w.Close()
		return nil, nil, os.NewSyscallError("fstat", err)
	}
	return &fence{read: r, inode: st.Ino}, w, nil
}

// lend opens memory anew for a plugin, locked for this life and for those lives that we are part of
// ourselves: others are the fences that we inherited.
func (f *fence) lend(memory, others []*os.File) (lent []*os.File, err error) {
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
			return nil, fmt.Errorf("memory %s cannot be opened anew for the plugin, which needs /proc: %w", m.Name(), err)
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
func (f *fence) mapped() bool {
	for _, m := range f.memory {
		l := byteLock(unix.F_WRLCK, f.inode)
		if err := unix.FcntlFlock(m.Fd(), unix.F_OFD_GETLK, l); err == nil && l.Type != unix.F_UNLCK {
			return true
		}
	}
	return false
}

// close gives the descriptors back.
func (f *fence) close() { closeAll(append(f.memory, f.read)) }

// wait returns when nobody holds the fence any more and nobody writes through a mapping of what was
// lent. It has no limit: until then somebody may write into the cache.
func (f *fence) wait() {
	f.waitHeirs()
	for wait := peerPause; f.mapped(); wait = min(2*wait, maxPeerPause) {
		<-time.After(wait)
	}
	f.close()
}

// Pauses between looks for peers that write through a dead plugin's memory: none lasts longer than
// their call.
const (
	peerPause    = time.Millisecond
	maxPeerPause = 20 * time.Millisecond
)

// waitHeirs waits for the end of the pipe.
func (f *fence) waitHeirs() {
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		var b [1]byte
		for {
			if n, err := f.read.Read(b[:]); n == 0 && err != nil {
				return
			}
		}
	}()
	timer := time.NewTimer(fenceWait)
	defer timer.Stop()
	var seen map[int]bool
	for {
		select {
		case <-gone:
			return
		case <-timer.C:
			seen = f.strike(seen)
			timer.Reset(fenceWait)
		}
	}
}

// strike kills who holds the fence, but not at first sight: between fork and exec any child of ours
// holds all that we do. It returns whom it saw.
func (f *fence) strike(seen map[int]bool) map[int]bool {
	now := map[int]bool{}
	want := fmt.Sprintf("pipe:[%d]", f.inode)
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*") // the pattern is good
	for _, link := range links {
		if target, err := os.Readlink(link); err != nil || target != want {
			continue
		}
		pid, err := strconv.Atoi(strings.Split(link, "/")[2])
		if err != nil || pid == os.Getpid() {
			continue
		}
		if now[pid] = true; seen[pid] {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	return now
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
			for _, f := range out {
				_ = f.Close()
			}
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
