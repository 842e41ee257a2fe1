// Minimal is a whole connector: it keeps KV blocks as files in one folder.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

type config struct {
	Dir string `json:"dir,omitempty" jsonschema:"description=Folder of the blocks; empty: one in the system's folder for temporary files."`
}

type store struct{ dir string }

func (s store) path(k connector.StoreKey) string { return filepath.Join(s.dir, k.String()) }

func open(_ context.Context, _ connector.Env, c config) (connector.Store, error) {
	if c.Dir == "" {
		c.Dir = filepath.Join(os.TempDir(), fmt.Sprintf("kvport-minimal-%d", os.Getuid()))
	}
	return store{c.Dir}, os.MkdirAll(c.Dir, 0o700)
}

func (s store) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	found := make([]int, len(runs))
	for i, keys := range runs {
		for _, k := range keys {
			if _, err := os.Stat(s.path(k)); err != nil {
				break
			}
			found[i]++
		}
	}
	return found, nil
}

func (s store) Get(ctx context.Context, items []connector.Item) error { return each(ctx, items, s.get) }

func (s store) Put(ctx context.Context, items []connector.Item) error { return each(ctx, items, s.put) }
func (s store) Close() error                                          { return nil }

// each runs do for every item and names those that failed.
func each(ctx context.Context, items []connector.Item, do func(connector.Item) error) error {
	failed := &connector.ItemError{}
	for i, it := range items {
		err := ctx.Err()
		if err == nil {
			err = do(it)
		}
		if err != nil {
			failed.Items, failed.Err = append(failed.Items, i), err
		}
	}
	if failed.Items == nil {
		return nil
	}
	return failed
}

// get reads a regular file. The open waits for nobody, as that of a pipe which lies there would.
func (s store) get(it connector.Item) error {
	f, err := os.OpenFile(s.path(it.Key), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("%w: %w", connector.ErrGone, err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return errors.Join(connector.ErrCorrupt, err)
	}
	for _, span := range it.Spans {
		if _, err := io.ReadFull(f, span); err != nil { // a version of kvport with shorter blocks has stored it, or it was cut
			return fmt.Errorf("%w: %w", connector.ErrOutdated, err)
		}
	}
	return nil
}

// put writes a temporary file and renames it, so that nobody sees half a block.
func (s store) put(it connector.Item) error {
	temporary := s.path(it.Key) + rand.Text()
	defer os.Remove(temporary)
	if err := os.WriteFile(temporary, bytes.Join(it.Spans, nil), 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, s.path(it.Key))
}

func main() {
	sdk.Serve(sdk.FromStore(sdk.Definition{Name: "MinimalConnector", Version: "1", Scope: connector.ScopeShared, Needs: connector.Needs{Writes: []string{"dir"}}}, open))
}
