// Package loader finds and loads the libraries of the bindings, also those inside NIXL's unpacked wheel.
package loader

import (
	"os"
	"path/filepath"
)

// ours is the package of kvport's wheel, whose folder bin holds our programs.
const ours = "kvport_agent"

// Find is what within finds in the first folder beside this program where there may be NIXL's unpacked wheel, or "".
func Find(within func(dir string) string) string {
	program, err := os.Executable()
	if err != nil {
		return ""
	}
	for _, dir := range beside(program) {
		if path := within(dir); path != "" {
			return path
		}
	}
	return ""
}

// beside are the folders in which a program finds NIXL's unpacked wheel: the one that make deps fills beside the
// program's folder, and, for a program in kvport's own wheel, the folder into which pip unpacks both wheels. No
// other program looks there: its grandparent may be a folder that anybody can write.
func beside(program string) []string {
	parent := filepath.Dir(filepath.Dir(program))
	folders := []string{filepath.Join(parent, ".deps", "nixl")}
	if filepath.Base(parent) == ours {
		folders = append(folders, filepath.Dir(parent))
	}
	return folders
}
