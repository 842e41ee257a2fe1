// Package machine says what this machine, or the control group that we run in, has left.
package machine

import (
	"bufio"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// FreeMemory is how much memory can still be allocated without swapping, in bytes, also by the limits of
// our control group and those above it; MaxInt64 where the kernel does not say. root is "/" except in tests.
func FreeMemory(root string) int64 {
	free := int64(math.MaxInt64)
	if kib, ok := field(filepath.Join(root, "proc/meminfo"), "MemAvailable:"); ok {
		free = kib << 10
	}
	for _, group := range groups(root) {
		limit, hasLimit := number(filepath.Join(group, "memory.max"))
		used, hasUsed := number(filepath.Join(group, "memory.current"))
		if hasLimit && hasUsed {
			free = min(free, max(0, limit-used))
		}
	}
	return free
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

// field reads a value of a file like /proc/meminfo.
func field(path, name string) (int64, bool) {
	f, err := os.Open(path)
	if err != nil {
		return 0, false
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) >= 2 && fields[0] == name {
			n, err := strconv.ParseInt(fields[1], 10, 53)
			return n, err == nil
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
