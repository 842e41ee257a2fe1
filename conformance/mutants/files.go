package mutants

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// FilesConfig is the config of Files.
type FilesConfig struct {
	Dir   string `json:"dir" jsonschema:"description=Folder of the blocks."`
	Fault string `json:"fault,omitempty" jsonschema:"description=What is wrong with it; empty: nothing."`
}

// Files is a connector that keeps each block in a file and survives every fault of the profile
// fault. Its config may name one way in which it does not; see All.
func Files() connector.Plugin {
	d := sdk.Definition{Name: "FilesConnector", Version: "1", Scope: connector.ScopeNode, Groups: true}
	return sdk.FromStore(d, openFiles)
}

func openFiles(_ context.Context, _ connector.Env, c FilesConfig) (connector.Store, error) {
	if c.Fault != "" && !slices.ContainsFunc(fileFaults(), func(f fileFault) bool { return f.fault == c.Fault }) {
		return nil, fmt.Errorf("fault is %q: %w", c.Fault, connector.ErrIncompatible)
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("dir %s: %w: %w", c.Dir, err, connector.ErrGone)
	}
	s := &files{dir: c.Dir}
	return s.faulty(c.Fault)
}

// files is a correct Store.
type files struct{ dir string }

const (
	blockSuffix = ".block"
	sumBytes    = sha256.Size // of the checksum with which the content of a block begins; its key follows
)

func (s *files) path(k connector.StoreKey) string {
	return filepath.Join(s.dir, k.String()+blockSuffix)
}

// Lookup implements connector.Store.
func (s *files) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	found := make([]int, len(runs))
	for i, keys := range runs {
		for found[i] < len(keys) {
			if _, err := os.Lstat(s.path(keys[found[i]])); err != nil {
				break
			}
			found[i]++
		}
	}
	return found, nil
}

// Get implements connector.Store.
func (s *files) Get(ctx context.Context, items []connector.Item) error {
	return each(ctx, items, s.get)
}

// Put implements connector.Store.
func (s *files) Put(ctx context.Context, items []connector.Item) error {
	return each(ctx, items, s.put)
}

// Close implements connector.Store.
func (s *files) Close() error { return nil }

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
	if failed.Err != nil {
		return failed
	}
	return nil
}

func (s *files) get(it connector.Item) error {
	data, err := s.read(it.Key)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return fmt.Errorf("%w: %w", connector.ErrGone, err)
	}
	if err != nil {
		return err
	}
	return fillFrom(data, it)
}

// read reads what lies under a key, unless it is no regular file.
func (s *files) read(k connector.StoreKey) ([]byte, error) {
	f, err := os.OpenFile(s.path(k), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ELOOP) {
		return nil, fmt.Errorf("a link: %w", connector.ErrCorrupt)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("no file: %w", connector.ErrCorrupt)
	}
	data := make([]byte, info.Size())
	n, err := f.ReadAt(data, 0)
	if n < len(data) {
		return nil, err
	}
	return data, nil
}

// fillFrom checks a file's content and copies it into the item.
func fillFrom(data []byte, it connector.Item) error {
	if len(data) != sha256.Size+len(it.Key)+it.Size() {
		return fmt.Errorf("%d bytes: %w", len(data), connector.ErrCorrupt)
	}
	sum, rest := data[:sha256.Size], data[sha256.Size:]
	if have := sha256.Sum256(rest); !bytes.Equal(sum, have[:]) {
		return fmt.Errorf("checksum: %w", connector.ErrCorrupt)
	}
	if !bytes.Equal(rest[:len(it.Key)], it.Key[:]) {
		return fmt.Errorf("another block: %w", connector.ErrCorrupt)
	}
	rest = rest[len(it.Key):]
	for _, span := range it.Spans {
		rest = rest[copy(span, rest):]
	}
	return nil
}

// content is the file of an item: checksum, key, spans.
func content(it connector.Item) []byte {
	rest := slices.Concat(it.Key[:], slices.Concat(it.Spans...))
	sum := sha256.Sum256(rest)
	return append(sum[:], rest...)
}

// put writes a temporary file and renames it.
func (s *files) put(it connector.Item) error {
	f, err := os.CreateTemp(s.dir, "put-*")
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", connector.ErrGone, err)
	}
	if err != nil {
		return err
	}
	_, err = f.Write(content(it))
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), s.path(it.Key))
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// foreign lists what is in the folder and not a block.
func (s *files) foreign() []string {
	entries, _ := os.ReadDir(s.dir)
	var names []string
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), blockSuffix) {
			names = append(names, filepath.Join(s.dir, e.Name()))
		}
	}
	return names
}
