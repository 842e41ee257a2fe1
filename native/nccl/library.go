package nccl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Errors of this package, in addition to those that the library reports.
var (
	// ErrUnavailable is what every failure of Open wraps: this machine or this build has no NCCL.
	ErrUnavailable = errors.New("NCCL is not available")
	// ErrNoDevice means that the library is here and a GPU, or its driver, is not.
	ErrNoDevice = errors.New("no GPU that NCCL can use")
	// ErrInvalid means that an argument cannot be right.
	ErrInvalid = errors.New("invalid argument")
)

// LoadError says why the library could not be loaded and what to do about it. It wraps ErrUnavailable.
type LoadError struct {
	Path   string // the library
	Symbol string // the function that the library lacks, "" if that is not the trouble
	Reason string // what was found wrong
	Mend   string // what to do
}

// Error is the reason, with its mend.
func (e *LoadError) Error() string {
	if e.Symbol != "" {
		return fmt.Sprintf("nccl: %s has no function %s: %s", e.Path, e.Symbol, e.Mend)
	}
	return fmt.Sprintf("nccl: cannot load %s: %s: %s", e.Path, e.Reason, e.Mend)
}

// Unwrap is ErrUnavailable.
func (e *LoadError) Unwrap() error { return ErrUnavailable }

// EnvDir names the environment variable with the folder that Open looks in first.
const EnvDir = "KVPORT_NCCL_DIR"

const mendMissing = "install NCCL 2 (wheel nvidia-nccl-cu13, Debian libnccl2), or set KVPORT_NCCL_DIR to the folder with libnccl; without a GPU nothing of it is of use"

// Library is NCCL, loaded. It stays loaded until the process ends.
type Library struct {
	path string
	lib  *library
}

// Open loads the library from dir. If dir is empty it takes the folder that KVPORT_NCCL_DIR names; without
// that, what the system's loader finds. Its errors are a *LoadError. It needs no GPU.
func Open(dir string) (*Library, error) {
	if dir == "" {
		dir = os.Getenv(EnvDir)
	}
	var err error
	for _, name := range [...]string{"libnccl.so.2", "libnccl.so"} {
		path := name
		if dir != "" {
			path = filepath.Join(dir, name)
		}
		var lib *library
		if lib, err = load(path); err == nil {
			return &Library{path, lib}, nil
		}
		var failed *LoadError
		if errors.As(err, &failed) && failed.Symbol != "" {
			break
		}
	}
	return nil, err
}

// Path is what was loaded.
func (l *Library) Path() string { return l.path }
