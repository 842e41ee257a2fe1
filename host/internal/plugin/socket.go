package plugin

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
)

// maxSocketDir leaves room for the names that go-plugin adds: a socket's path has 107 bytes.
const maxSocketDir = 68

// SocketDir makes a private folder (0700) for a plugin's socket. A temporary folder whose path is too
// long for a socket, or that cannot be written to, is passed over for the user's runtime folder, and
// that for /tmp. The caller removes it. Errors name TMPDIR.
func SocketDir() (string, error) { return socketDir(SocketRoots()) }

func socketDir(roots []string) (string, error) {
	var failed error
	for _, root := range roots {
		dir, err := os.MkdirTemp(root, socketPrefix)
		if err == nil && len(dir) <= maxSocketDir {
			return dir, nil
		}
		if err == nil {
			err = errors.Join(fmt.Errorf("%s is too long for a socket's path", root), os.Remove(dir))
		}
		failed = errors.Join(failed, err)
	}
	return "", fmt.Errorf("no folder for the plugin's socket, set TMPDIR to a short one: %w", failed)
}

// SocketRoots are the folders to try, best first.
func SocketRoots() []string {
	roots := []string{os.TempDir()}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		roots = append(roots, dir)
	}
	return append(roots, filepath.Join("/run/user", strconv.Itoa(os.Getuid())), "/tmp")
}
