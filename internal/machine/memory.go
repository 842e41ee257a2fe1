// Package machine says what this machine, or the control group that we run in, has left.
package machine

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// FreeMemory is how much memory can still be allocated without swapping, in bytes, also by the limits of
// our control group and those above it; MaxInt64 where the kernel does not say. root is "/" except in tests.
func FreeMemory(root string) int64 {
	free := GroupMemory(root)
	if available, ok := Memory(root, "MemAvailable"); ok {
		free = min(free, available)
	}
	return free
}

// GroupMemory is how much the limits of our control group and those above it still permit, in bytes; MaxInt64
// without a limit.
func GroupMemory(root string) int64 {
	room := int64(math.MaxInt64)
	for _, group := range groups(root) {
		limit, hasLimit := number(filepath.Join(group, "memory.max"))
		used, hasUsed := number(filepath.Join(group, "memory.current"))
		if hasLimit && hasUsed {
			room = min(room, max(0, limit-used))
		}
	}
	return room
}

// groups are the folders of our control group and of those above it, the outermost first.
func groups(root string) []string {
	top := filepath.Join(root, "sys/fs/cgroup")
	folders := []string{top}
	data, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return folders
	}
	for line := range strings.Lines(string(data)) {
		path, ours := strings.CutPrefix(strings.TrimSpace(line), "0::/")
		if !ours {
			continue
		}
		folder := top
		for part := range strings.SplitSeq(path, "/") {
			if part == "" || part == ".." { // a group outside what we see
				break
			}
			folder = filepath.Join(folder, part)
			folders = append(folders, folder)
		}
	}
	return folders
}

// Memory is a value of /proc/meminfo in bytes; false where the kernel does not say.
func Memory(root, name string) (bytes int64, ok bool) {
	data, _ := os.ReadFile(filepath.Join(root, "proc/meminfo"))
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) >= 2 && fields[0] == name+":" {
			kib, err := strconv.ParseInt(fields[1], 10, 53)
			return kib << 10, err == nil
		}
	}
	return 0, false
}

// number reads a file that holds one number; false if it does not ("max": no limit).
func number(path string) (int64, bool) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	return n, err == nil
}
