package nixl

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvport/kvport/native/internal/wheel"
)

// ErrUnavailable is what every failure of Open wraps: this machine or this build has no NIXL.
var ErrUnavailable = errors.New("NIXL is not available")

// LoadError says why the library could not be loaded and what to do about it. It wraps ErrUnavailable.
type LoadError struct {
	Path   string // the library, "" if none was found
	Symbol string // the function that the library lacks, "" if that is not the trouble
	Reason string // what was found wrong
	Mend   string // what to do
}

// Error is the reason, with its mend.
func (e *LoadError) Error() string {
	switch {
	case e.Symbol != "":
		return fmt.Sprintf("nixl: %s has no function %s: %s", e.Path, e.Symbol, e.Mend)
	case e.Path != "":
		return fmt.Sprintf("nixl: cannot load %s: %s: %s", e.Path, e.Reason, e.Mend)
	}
	return fmt.Sprintf("nixl: %s: %s", e.Reason, e.Mend)
}

// Unwrap is ErrUnavailable.
func (e *LoadError) Unwrap() error { return ErrUnavailable }

// EnvDir names the environment variable with the folder that Open looks in first.
const EnvDir = "NIXL_LIB_DIR"

const (
	libraryName = "libnixl_capi.so"
	mendMissing = "run make deps in the repository of kvport, or pip install nixl-cu12==1.5.1 beside kvport's wheel, or set " + EnvDir + " to a folder into which that wheel was unpacked"
	mendVersion = "it is not NIXL 1.5.1; " + mendMissing
)

// Library is NIXL, loaded. It stays loaded until the process ends.
type Library struct {
	path string
	lib  *library
}

// Open loads NIXL from dir, a folder with the library or with the unpacked wheel in it. If dir is empty
// it takes the folder that NIXL_LIB_DIR names; without that, the one that make deps fills beside the
// program's own folder, or, for a program in kvport's wheel, the one that pip unpacks wheels into; without that,
// what the system's loader finds. Its errors are a *LoadError.
func Open(dir string) (*Library, error) {
	path, err := find(dir)
	if err != nil {
		return nil, err
	}
	if err := defaults(); err != nil {
		return nil, &LoadError{Path: path, Reason: err.Error(), Mend: "check the environment"}
	}
	lib, err := load(path)
	if err != nil {
		return nil, err
	}
	return &Library{path: path, lib: lib}, nil
}

// Path is the file that was loaded.
func (l *Library) Path() string { return l.path }

// find is the path of the library: absolute, or its bare name for the loader to look for.
func find(dir string) (string, error) {
	if dir == "" {
		dir = os.Getenv(EnvDir)
	}
	if dir != "" {
		if path := within(dir); path != "" {
			return path, nil
		}
		return "", &LoadError{Reason: fmt.Sprintf("no %s in %s", libraryName, dir), Mend: mendMissing}
	}
	return cmp.Or(wheel.Find(within), libraryName), nil
}

// within is the absolute path of the library in a folder, or in that of an unpacked wheel; "" if there
// is none.
func within(dir string) string {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return ""
	}
	found := []string{filepath.Join(dir, libraryName)}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if name := e.Name(); strings.HasPrefix(name, ".nixl_cu") && strings.HasSuffix(name, ".mesonpy.libs") {
			found = append(found, filepath.Join(dir, name, libraryName))
		}
	}
	for _, path := range found {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path
		}
	}
	return ""
}

// defaults sets what UCX reads from the environment, where the user has not.
func defaults() error {
	var errs []error
	for _, v := range [...][2]string{
		{"UCX_LOG_FILE", "stderr"},
		{"UCX_RCACHE_MAX_UNRELEASED", "1024"}, // otherwise freed memory stays registered; vLLM sets the same
	} {
		if _, set := os.LookupEnv(v[0]); !set {
			errs = append(errs, os.Setenv(v[0], v[1]))
		}
	}
	return errors.Join(errs...)
}

// loadError explains what the loader said.
func loadError(path, symbol, reason string) error {
	e := &LoadError{Path: path, Symbol: symbol, Reason: reason, Mend: mendMissing}
	switch {
	case symbol != "":
		e.Mend = mendVersion
	case strings.Contains(reason, "libssl.so") || strings.Contains(reason, "libcrypto.so") || strings.Contains(reason, "libz.so"):
		e.Mend = "install the packages libssl3 and zlib1g"
	case strings.Contains(reason, "libstdc++.so"):
		e.Mend = "install the package libstdc++6"
	case strings.Contains(reason, "GLIBC"):
		e.Mend = "NIXL's wheel needs glibc 2.28 or later"
	}
	return e
}
