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
type fence struct {
	read  *os.File
	inode uint64
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

// wait returns when nobody holds the fence any more. It has no limit: until then somebody may write
// into the cache.
func (f *fence) wait() {
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
			_ = f.read.Close()
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
