package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/internal/wire"
)

// Manifest is what a plugin says of itself when it is run with --manifest.
type Manifest struct {
	Name             string          `json:"name"`
	Aliases          []string        `json:"aliases"`
	Version          string          `json:"version"`
	ProtocolVersions []int           `json:"protocol_versions"`
	Capabilities     []string        `json:"capabilities"`
	Environment      []string        `json:"environment"` // names of the variables it wants to see
	Scope            string          `json:"scope,omitempty"`
	ConfigSchema     json.RawMessage `json:"config_schema,omitempty"`
}

// Answers reports whether kv_connector may call the plugin by name.
func (m *Manifest) Answers(name string) bool {
	return m.Name == name || slices.Contains(m.Aliases, name)
}

// Binary is a plugin on disk.
type Binary struct {
	Path     string
	Manifest Manifest
}

// pluginPrefix begins the file name of every plugin.
const pluginPrefix = "kvport-"

// Find looks for the plugin that answers to name, a connector's name or alias, among the kvport-*
// executables of the given folders. The first match in order wins. Errors wrap ErrConfig and say
// where it looked, what it found, and which known name is nearest.
func Find(paths []string, name string) (*Binary, error) {
	candidates, manifests, errs := readAll(paths)
	var known, broken []string
	for i, m := range manifests {
		if m == nil {
			broken = append(broken, errs[i].Error())
			continue
		}
		if m.Answers(name) {
			return &Binary{Path: candidates[i], Manifest: *m}, nil
		}
		known = append(append(known, m.Name), m.Aliases...)
	}
	looked := "no plugin folder is set"
	if len(paths) > 0 {
		looked = "looked in " + strings.Join(paths, ", ")
	}
	err := fmt.Errorf("%w: kv_connector: no plugin is called %s%s (%s)", ErrConfig, quote(name), didYouMean(name, known), looked)
	if len(broken) > 0 {
		err = fmt.Errorf("%w; skipped: %s", err, strings.Join(broken, "; "))
	}
	return nil, err
}

// List describes every plugin of the given folders. Errors name the binaries that could not be
// asked; the others are listed nevertheless.
func List(paths []string) ([]Binary, error) {
	candidates, manifests, errs := readAll(paths)
	var list []Binary
	for i, m := range manifests {
		if m != nil {
			list = append(list, Binary{Path: candidates[i], Manifest: *m})
		}
	}
	return list, errors.Join(errs...)
}

// readAll asks every candidate for its manifest, a few at a time.
func readAll(paths []string) (candidates []string, manifests []*Manifest, errs []error) {
	for _, dir := range paths {
		candidates = append(candidates, executables(dir)...)
	}
	manifests, errs = make([]*Manifest, len(candidates)), make([]error, len(candidates))
	var group errgroup.Group
	group.SetLimit(4)
	for i, path := range candidates {
		group.Go(func() error {
			manifests[i], errs[i] = ReadManifest(context.Background(), path)
			return nil
		})
	}
	_ = group.Wait() // each error is kept in its place
	return candidates, manifests, errs
}

// executables lists the plugins of a folder by name. A folder that cannot be read has none.
func executables(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var found []string
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasPrefix(e.Name(), pluginPrefix) && checkExecutable(path) == nil {
			found = append(found, path)
		}
	}
	return found
}

func checkExecutable(path string) error {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		return fmt.Errorf("%s is not a regular file", path)
	case st.Mode()&0o111 == 0:
		return fmt.Errorf("%s is not executable", path)
	}
	return nil
}

// ReadManifest runs a plugin with --manifest and reads what it prints. It gives the plugin a few
// seconds, no environment and nothing to read. Errors name the binary.
func ReadManifest(ctx context.Context, path string) (*Manifest, error) {
	if err := checkExecutable(path); err != nil {
		return nil, err
	}
	return readManifest(ctx, &program{path: path})
}

func readManifest(ctx context.Context, p *program) (*Manifest, error) {
	ctx, cancel := context.WithTimeout(ctx, manifestWait)
	defer cancel()
	var out, complaint limitedBuffer
	cmd := p.command(ctx, "--manifest")
	cmd.Stdout, cmd.Stderr = &out, &complaint
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	err := onOwnThread(cmd.Run)
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%s --manifest gave no answer within %s", p.path, manifestWait)
	}
	if err != nil {
		return nil, fmt.Errorf("%s --manifest: %w%s", p.path, err, firstLine(complaint.Bytes()))
	}
	m, err := wire.ParseManifest(out.Bytes())
	if err != nil {
		return nil, fmt.Errorf("%s --manifest: %w", p.path, err)
	}
	if !m.Speaks(wire.ProtocolVersion) {
		return nil, fmt.Errorf("%s speaks protocol versions %v, this host speaks %d: rebuild the older one", p.path, m.ProtocolVersions, wire.ProtocolVersion)
	}
	own := Manifest(*m)
	return &own, nil
}

// onOwnThread runs f where the death signal of a child it starts is tied to a thread that lives as
// long as f.
func onOwnThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		done <- f()
	}()
	return <-done
}

// limitedBuffer keeps the first maxManifest bytes and drops the rest.
type limitedBuffer struct{ bytes.Buffer }

// Write implements io.Writer.
func (b *limitedBuffer) Write(p []byte) (int, error) {
	if room := maxManifest - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

func firstLine(b []byte) string {
	line, _, _ := bytes.Cut(bytes.TrimSpace(b), []byte("\n"))
	if len(line) == 0 {
		return ""
	}
	return ": " + quote(string(line))
}

// resolve finds the binary that a config asks for and pins its content if a hash is given. The
// caller closes the program.
func resolve(ctx context.Context, cfg *Config, paths []string) (*program, *Manifest, error) {
	path, hash := cfg.ModulePath, cfg.Settings.PluginSHA256
	switch {
	case path == "" && hash != "":
		return findPinned(ctx, cfg, paths)
	case path == "":
		b, err := Find(paths, cfg.Connector)
		if err != nil {
			return nil, nil, err
		}
		path = b.Path
	}
	if err := checkExecutable(path); err != nil {
		return nil, nil, fmt.Errorf("%w: kv_connector_module_path: %w", ErrConfig, err)
	}
	p, err := openProgram(path, hash)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: kvport.plugin_sha256: %w", ErrConfig, err)
	}
	m, err := readManifest(ctx, p)
	if err == nil && !m.Answers(cfg.Connector) {
		err = fmt.Errorf("%s answers to %q, not to kv_connector %s", path, append([]string{m.Name}, m.Aliases...), quote(cfg.Connector))
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("%w: %w", ErrConfig, err), p.close())
	}
	return p, m, nil
}

// findPinned looks for the binary with the wanted content. Nothing else is run, not even for its
// manifest.
func findPinned(ctx context.Context, cfg *Config, paths []string) (*program, *Manifest, error) {
	var wrong []string
	for _, dir := range paths {
		for _, path := range executables(dir) {
			p, err := openProgram(path, cfg.Settings.PluginSHA256)
			if err != nil {
				wrong = append(wrong, filepath.Base(path))
				continue
			}
			m, err := readManifest(ctx, p)
			if err == nil && m.Answers(cfg.Connector) {
				return p, m, nil
			}
			_ = p.close()
			wrong = append(wrong, filepath.Base(path))
		}
	}
	return nil, nil, fmt.Errorf("%w: kvport.plugin_sha256: no plugin %s with SHA-256 %s (looked in %s; others: %s)", ErrConfig,
		quote(cfg.Connector), cfg.Settings.PluginSHA256, strings.Join(paths, ", "), strings.Join(wrong, ", "))
}
