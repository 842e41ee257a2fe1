package bench

import (
	"context"
	"os"
	"path/filepath"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// Names of the connector that keeps blocks in its process's memory: what is left when nothing else is
// to be measured but kvport itself.
const (
	memoryName   = "BenchMemoryConnector"
	memoryBinary = "kvport-bench-memory"
)

// ServePlugin serves the benchmark's own plugin, or the other end of libraries that are measured alone, and
// does not return, if this process was started under the file name of one: Transfer starts the running binary
// by links of these names.
func ServePlugin() {
	switch filepath.Base(os.Args[0]) {
	case memoryBinary:
		sdk.Serve(memoryPlugin())
		os.Exit(0)
	case rawBinary:
		serveRaw()
	case bareBinary:
		serveBare()
	}
}

type memoryConfig struct{}

func memoryPlugin() connector.Plugin {
	d := sdk.Definition{Name: memoryName, Version: "1", Scope: connector.ScopeEngine}
	return sdk.FromStore(d, func(context.Context, connector.Env, memoryConfig) (connector.Store, error) {
		return &memory{blocks: map[connector.StoreKey][]byte{}}, nil
	})
}

// memory is a store in memory. A block that is stored again goes to the same place: no page is touched
// for the first time while the clock runs.
type memory struct {
	mu     sync.Mutex
	blocks map[connector.StoreKey][]byte
}

// Lookup implements connector.Store.
func (m *memory) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	found := make([]int, len(runs))
	for i, keys := range runs {
		for _, k := range keys {
			if m.blocks[k] == nil {
				break
			}
			found[i]++
		}
	}
	return found, nil
}

// place is where a block is; it is made if size is given.
func (m *memory) place(k connector.StoreKey, size int) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.blocks[k]
	if b == nil && size > 0 {
		b = make([]byte, size)
		m.blocks[k] = b
	}
	return b
}

// Get implements connector.Store.
func (m *memory) Get(_ context.Context, items []connector.Item) error {
	failed := &connector.ItemError{Err: connector.ErrGone}
	for i, it := range items {
		b := m.place(it.Key, 0)
		if b == nil {
			failed.Items = append(failed.Items, i)
			continue
		}
		for _, span := range it.Spans {
			b = b[copy(span, b):]
		}
	}
	if failed.Items != nil {
		return failed
	}
	return nil
}

// Put implements connector.Store.
func (m *memory) Put(_ context.Context, items []connector.Item) error {
	for _, it := range items {
		b := m.place(it.Key, it.Size())
		for _, span := range it.Spans {
			b = b[copy(b, span):]
		}
	}
	return nil
}

// Close implements connector.Store.
func (m *memory) Close() error { return nil }
