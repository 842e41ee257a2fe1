package machine

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Children are the processes that one has started and that are not reaped; pid 0 is this one.
func Children(pid int) []int { return newFamily().children(pid) }

// Descendants are the children of some processes, their children, and so on, the older generations first, not more than most. What a dead
// process has started is a child of another one, and not among them.
func Descendants(most int, pids ...int) []int {
	f := newFamily()
	var found []int
	for kin := pids; len(kin) > 0 && len(found) < most; {
		next := f.children(kin[0])
		found, kin = append(found, next...), append(kin[1:len(kin):len(kin)], next...)
	}
	return found[:min(len(found), most)]
}

// family says who started whom. Most kernels list the children of each thread. On the others (those without CONFIG_PROC_CHILDREN)
// all processes are read once, and asked who their parent is.
type family struct {
	proc     string
	byParent map[int][]int // nil: the kernel lists them
}

func newFamily() *family {
	_, err := os.Stat(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
	return familyIn("/proc", err == nil)
}

func familyIn(proc string, listed bool) *family {
	f := &family{proc: proc}
	if listed {
		return f
	}
	f.byParent = map[int][]int{}
	entries, _ := os.ReadDir(proc)
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil {
			if parent := f.parent(pid); parent > 0 {
				f.byParent[parent] = append(f.byParent[parent], pid)
			}
		}
	}
	return f
}

// parent is who started a process, or has taken it over from the dead; 0 if it is gone.
func (f *family) parent(pid int) int {
	data, _ := os.ReadFile(filepath.Join(f.proc, strconv.Itoa(pid), "stat")) //nolint:gosec // below /proc
	text := string(data)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:]) // the name before it may hold anything
	if len(fields) < 2 {
		return 0
	}
	parent, _ := strconv.Atoi(fields[1])
	return parent
}

func (f *family) children(pid int) (pids []int) {
	if pid == 0 {
		pid = os.Getpid()
	}
	if f.byParent != nil {
		return f.byParent[pid]
	}
	folder := filepath.Join(f.proc, strconv.Itoa(pid), "task")
	threads, _ := os.ReadDir(folder) // not by a pattern: that would list all that /proc has of each thread
	for _, thread := range threads {
		data, _ := os.ReadFile(filepath.Join(folder, thread.Name(), "children")) //nolint:gosec // below /proc
		for text := range strings.FieldsSeq(string(data)) {
			if child, err := strconv.Atoi(text); err == nil {
				pids = append(pids, child)
			}
		}
	}
	return pids
}
