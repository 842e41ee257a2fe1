package loader

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
)

// Binding describes a binding of a library.
type Binding struct {
	Name        string // begins its errors
	EnvDir      string // the environment variable with the folder in which it looks first
	Unavailable error  // what its errors wrap
	Mend        string // what to do where nothing better is known
}

// LoadError is why a library could not be loaded. Each binding has an error of its own with a LoadError in it.
type LoadError struct {
	Path   string // the library, "" if none was found
	Symbol string // the function that the library lacks, "" if that is not the trouble
	Reason string // what was found wrong
	Mend   string // what to do

	of *Binding // nil in an error that no binding made
}

func (e *LoadError) binding() *Binding { return cmp.Or(e.of, &Binding{Name: "library"}) }

// Error is the reason, with its mend.
func (e *LoadError) Error() string {
	switch {
	case e.Symbol != "":
		return fmt.Sprintf("%s: %s has no function %s: %s", e.binding().Name, e.Path, e.Symbol, e.Mend)
	case e.Path != "":
		return fmt.Sprintf("%s: cannot load %s: %s: %s", e.binding().Name, e.Path, e.Reason, e.Mend)
	}
	return fmt.Sprintf("%s: %s: %s", e.binding().Name, e.Reason, e.Mend)
}

// Unwrap is the binding's ErrUnavailable.
func (e *LoadError) Unwrap() error { return e.binding().Unavailable }

// Fail is the error for a library that the system's loader refuses.
func (b *Binding) Fail(path, symbol, reason string) *LoadError {
	return &LoadError{Path: path, Symbol: symbol, Reason: reason, Mend: b.Mend, of: b}
}

// NotBuilt is the error of a program that can load no library.
func (b *Binding) NotBuilt(path string) *LoadError {
	e := b.Fail(path, "", "this program was built without cgo or for another system")
	e.Mend = "build it on Linux on amd64 or arm64, with gcc and CGO_ENABLED=1"
	return e
}

// Default sets variables that the library at a path will read, where the user has not.
func (b *Binding) Default(path string, variables ...[2]string) *LoadError {
	for _, v := range variables {
		if _, set := os.LookupEnv(v[0]); set {
			continue
		}
		if err := os.Setenv(v[0], v[1]); err != nil {
			e := b.Fail(path, "", err.Error())
			e.Mend = "check the environment"
			return e
		}
	}
	return nil
}

// Locate is the path of a library, absolute, or its bare name for the system's loader to look for. It is what within
// finds in dir; if dir is empty, in the folder that the environment names; without that, in NIXL's unpacked wheel.
func (b *Binding) Locate(dir, name, bare string, within func(dir string) string) (string, *LoadError) {
	if dir = cmp.Or(dir, os.Getenv(b.EnvDir)); dir == "" {
		return cmp.Or(Find(within), bare), nil
	}
	if path := within(dir); path != "" {
		return path, nil
	}
	return "", b.Fail("", "", fmt.Sprintf("no %s in %s", name, dir))
}

// First loads the first of several names that can be loaded from dir; if dir is empty, from the folder that the
// environment names; without that, from where the system's loader finds it. A library that lacks a function is the last
// that it tries.
func First[L any](b *Binding, dir string, load func(path string) (L, *LoadError), names ...string) (lib L, path string, failed *LoadError) {
	dir = cmp.Or(dir, os.Getenv(b.EnvDir))
	for _, name := range names {
		path = filepath.Join(dir, name)
		if lib, failed = load(path); failed == nil || failed.Symbol != "" {
			break
		}
	}
	return lib, path, failed
}
