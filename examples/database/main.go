// Database is a connector on top of a key-value database: here a folder with one file a value.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/sdk"
)

type config struct {
	Dir  string `json:"dir,omitempty"  jsonschema:"description=Folder of the values; empty: one in the system's folder for temporary files."`
	Keep bool   `json:"keep,omitempty" jsonschema:"description=Blocks stay after they were loaded."`
}

// database is a folder. A database of yours needs the same four methods.
type database struct{ dir string }

func (d database) path(key string) string { return filepath.Join(d.dir, key) }

// Exists implements lookupbuffer.KV.
func (d database) Exists(ctx context.Context, keys []string) ([]bool, error) {
	there := make([]bool, len(keys))
	for i, k := range keys {
		_, err := os.Stat(d.path(k))
		if there[i] = err == nil; !there[i] && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%w: %w", connector.ErrGone, err) // until the folder is back
		}
	}
	return there, ctx.Err()
}

// Get implements lookupbuffer.KV.
func (d database) Get(_ context.Context, key string) ([]byte, error) {
	f, err := os.OpenFile(d.path(key), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0) // a pipe there is not waited for
	if err != nil {
		return nil, fmt.Errorf("%w: %w", connector.ErrGone, err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(connector.ErrCorrupt, err)
	}
	return io.ReadAll(f)
}

// Put implements lookupbuffer.KV: whole or not at all.
func (d database) Put(_ context.Context, key string, value []byte) error {
	f, err := os.CreateTemp(d.dir, "put-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(value)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), d.path(key))
}

// Delete implements lookupbuffer.KV.
func (d database) Delete(_ context.Context, key string) error {
	if err := os.Remove(d.path(key)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func open(_ context.Context, _ connector.Env, c config) (lookupbuffer.Buffer, error) {
	if c.Dir == "" {
		c.Dir = filepath.Join(os.TempDir(), fmt.Sprintf("kvport-database-%d", os.Getuid()))
	}
	d := database{c.Dir}
	return lookupbuffer.NewDatabase(d, lookupbuffer.DatabaseOptions{Keep: c.Keep}), os.MkdirAll(c.Dir, 0o700)
}

func main() {
	sdk.Serve(sdk.FromBuffer(sdk.Definition{Name: "DatabaseExample", Version: "1", Scope: connector.ScopeShared, Needs: connector.Needs{Writes: []string{"dir"}}}, open))
}
