package conformance

import (
	"debug/buildinfo"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/kvport/kvport/host"
)

// hung is where the processes of a case were that had to be killed. Before that, SIGQUIT asks them: a Go program answers with the
// stacks of all goroutines, of which people want to see those in the connector's own code.
type hung struct {
	log *slog.Logger // gets all that they say

	mu    sync.Mutex
	lines []string // about the first process
}

// tell takes what a process has said.
func (h *hung) tell(path string, pid int, said []string) {
	for _, line := range said {
		if strings.TrimSpace(line) != "" {
			h.log.Info(line, "plugin", filepath.Base(path))
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lines == nil {
		h.lines = whereabouts(path, pid, said)
	}
}

// told is what people read of the first process; nil if none had to be killed.
func (h *hung) told() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lines
}

// whereabouts says for people where a process was.
func whereabouts(path string, pid int, said []string) []string {
	head := fmt.Sprintf("the plugin's process %d had to be killed", pid)
	if from := slices.IndexFunc(said, func(line string) bool { return strings.HasPrefix(line, "SIGQUIT:") }); from >= 0 {
		count, own := ownStacks(said[from:], moduleOf(path))
		head = fmt.Sprintf("%s, with %d of its %d goroutines in the connector's own code; --log FILE has all", head, len(own), count)
		return append([]string{head}, indented(merged(own))...)
	}
	said = slices.DeleteFunc(slices.Clone(said), func(line string) bool { return strings.TrimSpace(line) == "" })
	if len(said) > 0 && !strings.HasPrefix(said[0], host.OfKernel) {
		return append([]string{head + "; to SIGQUIT it said:"}, indented(said)...)
	}
	return append([]string{
		head + ", and wrote nothing when SIGQUIT asked where it was",
		"  have it write its stacks then (Python: faulthandler.register), or look while the case runs, as with py-spy dump --pid",
	}, indented(merged(said))...)
}

// moduleOf is the module of a Go program; empty if it has none, or is no such program, but a script that has started one.
func moduleOf(path string) string {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return ""
	}
	return info.Main.Path
}

// merged has equal lines once, with their number.
func merged(lines []string) (out []string) {
	count := map[string]int{}
	for _, line := range lines {
		count[line]++
	}
	for _, line := range lines {
		switch n := count[line]; n {
		case 0: // told
		case 1:
			out = append(out, line)
		default:
			out = append(out, fmt.Sprintf("%s, %d times", line, n))
		}
		delete(count, line)
	}
	return out
}

func indented(lines []string) []string {
	out := make([]string, len(lines))
	for i, line := range lines {
		out[i] = "  " + line
	}
	return out
}
