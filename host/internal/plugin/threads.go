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
	folder := fmt.Sprintf("/proc/%d", pid)
	if caught, known := catches(folder, syscall.SIGQUIT); known {
		lines = append(lines, OfKernel+"it has "+map[bool]string{true: "a", false: "no"}[caught]+" handler for SIGQUIT")
	}
	tasks, _ := os.ReadDir(filepath.Join(folder, "task"))
	for _, task := range tasks[:min(len(tasks), manyThreads)] {
		of := func(name string) string {
			text, _ := os.ReadFile(filepath.Join(folder, "task", task.Name(), name)) //nolint:gosec // below /proc
			return strings.TrimSpace(string(text))
		}
		stat := of("stat")
		if stat == "" {
			continue // it has just ended
		}
		state, _, _ := strings.Cut(strings.TrimSpace(stat[strings.LastIndexByte(stat, ')')+1:]), " ")
		lines = append(lines, fmt.Sprintf("%sa thread %q in state %s waits in %s", OfKernel, of("comm"), state, cmp.Or(of("wchan"), "?")))
	}
	slices.Sort(lines)
	return lines
}

// catches says whether a process has a handler for a signal, if that can be known.
func catches(folder string, number syscall.Signal) (caught, known bool) {
	text, _ := os.ReadFile(filepath.Join(folder, "status")) //nolint:gosec // below /proc
	for line := range strings.Lines(string(text)) {
		if mask, is := strings.CutPrefix(line, "SigCgt:"); is {
			bits, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
			return bits>>(number-1)&1 == 1, err == nil
		}
	}
	return false, false
}
