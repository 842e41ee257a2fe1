package plugin

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// OfKernel begins each line about a process that comes from the kernel, because the process itself says nothing.
const OfKernel = "kernel: "

// manyThreads bounds how many threads of a process are looked at.
const manyThreads = 256

// threads says what the kernel knows of the threads of a process: whether it has a handler for SIGQUIT, and what each waits for. A program in
// an early or a late state (it has not begun yet, or its runtime ends) has none, and a debugger is often not at hand.
func threads(pid int) (lines []string) {
	switch caught, known := catches(pid, syscall.SIGQUIT); {
	case !known:
	case caught:
		lines = append(lines, OfKernel+"it has a handler for SIGQUIT")
	default:
		lines = append(lines, OfKernel+"it has no handler for SIGQUIT")
	}
	tasks, _ := os.ReadDir(taskFolder(pid))
	for _, task := range tasks[:min(len(tasks), manyThreads)] {
		folder := filepath.Join(taskFolder(pid), task.Name())
		of := func(name string) string {
			text, _ := os.ReadFile(filepath.Join(folder, name)) //nolint:gosec // below /proc
			return strings.TrimSpace(string(text))
		}
		if state := stateOf(filepath.Join(folder, "stat")); state != 0 { // else it has just ended
			lines = append(lines, fmt.Sprintf("%sa thread %q in state %c waits in %s", OfKernel, of("comm"), state, cmp.Or(of("wchan"), "?")))
		}
	}
	slices.Sort(lines)
	return lines
}

// catches says whether a process has a handler for a signal, if that can be known.
func catches(pid int, number syscall.Signal) (caught, known bool) {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(text)) {
		if mask, is := strings.CutPrefix(line, "SigCgt:"); is {
			bits, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
			return bits>>(number-1)&1 == 1, err == nil
		}
	}
	return false, false
}
