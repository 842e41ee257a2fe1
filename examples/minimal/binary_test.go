package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
)

func TestOverTheWire(t *testing.T) {
	conformance.Run(t, conformance.Wire(plugin(), testConfig(t)))
}

// A connector lives in a module of its own, as a stranger's would: nothing it needs is internal.
// Everything is resolved from this checkout and the module cache, so no network is needed.
func TestModuleOfItsOwn(t *testing.T) {
	root, err := filepath.Abs(filepath.Join("..", ".."))
	require.NoError(t, err)
	dir := t.TempDir()
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	require.NoError(t, err)
	head, requires, ok := strings.Cut(string(mod), "require (")
	require.True(t, ok)
	_, goVersion, ok := strings.Cut(head, "\ngo ")
	require.True(t, ok)
	const module = "github.com/kvport/kvport"
	text := fmt.Sprintf("module example.com/minimal\n\ngo %s\n\nrequire %s v0.0.0\n\nreplace %s => %s\n\nrequire (%s",
		strings.TrimSpace(goVersion), module, module, root, requires)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte(text), 0o600))
	copyFile(t, filepath.Join(root, "go.sum"), filepath.Join(dir, "go.sum"))
	copyFile(t, "main.go", filepath.Join(dir, "main.go"))

	path := filepath.Join(dir, "kvport-minimal")
	build(t, dir, path)
	conformance.Run(t, conformance.Binary(path, testConfig(t)))
}

func build(t *testing.T, dir, out string) {
	t.Helper()
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", out, ".")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off")
	if dir == "." {
		cmd.Env = os.Environ()
	}
	output, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", output)
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	require.NoError(t, err)
	defer in.Close()
	out, err := os.Create(to)
	require.NoError(t, err)
	_, err = io.Copy(out, in)
	require.NoError(t, err)
	require.NoError(t, out.Close())
}
