package tier_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
	"github.com/kvport/kvport/sdk/tier"
)

type config struct {
	Memory int64  `json:"memory_bytes" jsonschema:"required,minimum=1,description=Size of the memory tier."`
	Dir    string `json:"dir" jsonschema:"required,description=Folder of the blocks below memory."`
}

// ArenaBytes asks the host for the memory: it outlives the plugin, and the host reads it.
func (c *config) ArenaBytes() int64 { return c.Memory }

// open puts memory before a folder of this engine.
func open(_ context.Context, env connector.Env, c config) (connector.Store, error) {
	dir := filepath.Join(c.Dir, "engine-"+url.PathEscape(env.Engine))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	o := tier.OptionsFor(&env)
	o.Policy, o.Lower = tier.S3FIFO, folder{dir}
	return tier.Open(o)
}

func plugin() connector.Plugin {
	return sdk.FromStore(sdk.Definition{
		Name: "FolderConnector", Version: "1", Scope: connector.ScopeEngine, Groups: true, Needs: connector.Needs{Writes: []string{"dir"}},
		Capabilities: tier.Capabilities, Stats: tier.Infos(),
	}, open)
}

// folder is a Store that knows nothing of memory: one file a block. It has no limit, and whoever is killed amid a Put leaves a file.
type folder struct{ dir string }

func (f folder) path(k connector.StoreKey) string { return filepath.Join(f.dir, k.String()) }

func (f folder) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	found := make([]int, len(runs))
	for i, keys := range runs {
		for _, k := range keys {
			if _, err := os.Stat(f.path(k)); err != nil {
				break
			}
			found[i]++
		}
	}
	return found, nil
}

func (f folder) Get(ctx context.Context, items []connector.Item) error {
	return each(ctx, items, func(it connector.Item) error {
		data, err := os.ReadFile(f.path(it.Key))
		switch {
		case err != nil:
			return errors.Join(connector.ErrGone, err)
		case len(data) != it.Size():
			return connector.ErrOutdated
		}
		for _, span := range it.Spans {
			data = data[copy(span, data):]
		}
		return nil
	})
}

func (f folder) Put(ctx context.Context, items []connector.Item) error {
	return each(ctx, items, func(it connector.Item) error {
		temporary, err := os.CreateTemp(f.dir, "put-*")
		if err != nil {
			return err
		}
		defer os.Remove(temporary.Name())
		_, err = temporary.Write(bytes.Join(it.Spans, nil))
		if err := errors.Join(err, temporary.Close()); err != nil {
			return err
		}
		return os.Rename(temporary.Name(), f.path(it.Key))
	})
}

func (f folder) Reset(context.Context) (bool, error) {
	return true, errors.Join(os.RemoveAll(f.dir), os.MkdirAll(f.dir, 0o700))
}

func (f folder) Close() error { return nil }

// each does something with every item and names those with which that failed.
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
	if failed.Err == nil {
		return nil
	}
	return failed
}

// Two blocks fit into memory; the third one is still found, below.
func Example() {
	dir, err := os.MkdirTemp("", "tier-*")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	const size = 16
	store, err := tier.Open(tier.Options{SlotBytes: size, MemoryBytes: tier.ArenaBytes(2, size), Lower: folder{dir}, AdmitAfter: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	ctx := context.Background()
	keys := make([]connector.StoreKey, 3)
	for i := range keys {
		keys[i][0] = byte(i + 1)
		block := fmt.Appendf(nil, "block %-10d", i)
		err := store.Put(ctx, []connector.Item{{Key: keys[i], Spans: [][]byte{block}}})
		if err := errors.Join(err, store.Flush(ctx)); err != nil { // else it is written to the folder some time later
			fmt.Println(err)
		}
	}
	found, err := store.Lookup(ctx, [][]connector.StoreKey{keys})
	memory, lower := store.Counts()
	fmt.Println(found, err, memory.Blocks, "in memory,", lower.WriteBacks, "written below")

	first := connector.Item{Key: keys[0], Spans: [][]byte{make([]byte, size)}}
	err = store.Get(ctx, []connector.Item{first}) // from the folder, and into memory again
	fmt.Printf("%q %v %v\n", first.Spans[0], err, store.Has(keys[0]))
	// Output:
	// [3] <nil> 2 in memory, 3 written below
	// "block 0         " <nil> true
}
