package shm

import (
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// Sweep removes this user's folders that match a pattern and are abandoned, and counts them. It only tidies up:
// what it cannot remove stays. Processes that were killed leave such folders behind.
func Sweep(pattern string, now time.Time, abandoned func(dir string, age time.Duration) bool) (removed int) {
	dirs, _ := filepath.Glob(pattern) // the pattern is good
	for _, dir := range dirs {
		st, err := os.Lstat(dir)
		if err != nil || !st.IsDir() {
			continue
		}
		owner, ok := st.Sys().(*syscall.Stat_t)
		if ok && int(owner.Uid) == os.Getuid() && abandoned(dir, now.Sub(st.ModTime())) && os.RemoveAll(dir) == nil {
			removed++
		}
	}
	return removed
}
