package storetest_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/storetest"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe/pipetest"
)

// memory is a store that knows keys by what name makes of them.
type memory struct {
	name func(connector.StoreKey) string

	mu     sync.Mutex
	blocks map[string][]byte
}

// Lookup implements connector.Store.
func (m *memory) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	found := make([]int, len(runs))
	for i, keys := range runs {
		for found[i] < len(keys) && m.blocks[m.name(keys[found[i]])] != nil {
			found[i]++
		}
	}
	return found, nil
}

// Get implements connector.Store.
func (m *memory) Get(_ context.Context, items []connector.Item) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	failed := &connector.ItemError{Err: connector.ErrGone}
	for i, it := range items {
		data := m.blocks[m.name(it.Key)]
		if data == nil {
			failed.Items = append(failed.Items, i)
		}
		for _, s := range it.Spans {
			data = data[copy(s, data):]
		}
	}
	if failed.Items == nil {
		return nil
	}
	return failed
}

// Put implements connector.Store.
func (m *memory) Put(_ context.Context, items []connector.Item) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, it := range items {
		if name := m.name(it.Key); m.blocks[name] == nil || it.Replace {
			m.blocks[name] = bytes.Join(it.Spans, nil)
		}
	}
	return nil
}

// Close implements connector.Store.
func (m *memory) Close() error { return nil }

func named(name func(connector.StoreKey) string) storetest.Harness {
	return storetest.Harness{Open: func(storetest.T) connector.Store { return &memory{name: name, blocks: map[string][]byte{}} }}
}

func TestRightStore(t *testing.T) {
	storetest.Run(t, named(whole))
}

// Whatever part of a key a store leaves out, a case finds it.
func TestShortenedKeys(t *testing.T) {
	names := map[string]func(connector.StoreKey) string{
		"8 leading bytes":   func(k connector.StoreKey) string { return string(k[:8]) },
		"8 trailing bytes":  func(k connector.StoreKey) string { return string(k[24:]) },
		"3 leading bytes":   func(k connector.StoreKey) string { return string(k[:3]) },
		"16 leading bytes":  func(k connector.StoreKey) string { return string(k[:16]) },
		"24 leading bytes":  func(k connector.StoreKey) string { return string(k[:24]) },
		"16 trailing bytes": func(k connector.StoreKey) string { return string(k[16:]) },
		"8 in the middle":   func(k connector.StoreKey) string { return string(k[12:20]) },
		"no last byte":      func(k connector.StoreKey) string { return string(k[:31]) },
		"no first byte":     func(k connector.StoreKey) string { return string(k[1:]) },
		"no sign bits": func(k connector.StoreKey) string {
			for i := range k {
				k[i] &= 0x7F
			}
			return string(k[:])
		},
		"up to a zero":   func(k connector.StoreKey) string { s, _, _ := bytes.Cut(k[:], []byte{0}); return string(s) },
		"as JSON has it": func(k connector.StoreKey) string { return strings.ToValidUTF8(string(k[:]), "\uFFFD") },
		"trimmed":        func(k connector.StoreKey) string { return string(bytes.TrimSpace(k[:])) },
		"small letters of base 64": func(k connector.StoreKey) string {
			return strings.ToLower(base64.StdEncoding.EncodeToString(k[:]))
		},
		"no case":         func(k connector.StoreKey) string { return string(bytes.ToLower(k[:])) },
		"a sum of bytes":  func(k connector.StoreKey) string { return string(binary.AppendUvarint(nil, sum(k))) },
		"halves put over": func(k connector.StoreKey) string { return fold(k, 16) },
		"8 bytes, folded": func(k connector.StoreKey) string { return fold(k, 8) },
	}
	for what, name := range names {
		t.Run(what, func(t *testing.T) {
			noticed := 0
			for _, c := range storetest.Cases() {
				if c.Name != "random" && pipetest.Failed(t.Context(), func(t pipetest.T) { c.Run(t, named(name)) }) {
					noticed++
				}
			}
			require.Positive(t, noticed)
		})
	}
}

// wrong is a store of which one call is changed.
type wrong struct {
	*memory
	get, put func(m *memory, items []connector.Item) error
}

// Get implements connector.Store.
func (w *wrong) Get(ctx context.Context, items []connector.Item) error {
	if w.get != nil {
		return w.get(w.memory, items)
	}
	return w.memory.Get(ctx, items)
}

// Put implements connector.Store.
func (w *wrong) Put(ctx context.Context, items []connector.Item) error {
	if w.put != nil {
		return w.put(w.memory, items)
	}
	return w.memory.Put(ctx, items)
}

func whole(k connector.StoreKey) string { return string(k[:]) }

// wrongly opens stores that change made wrong.
func wrongly(change func(*wrong)) storetest.Harness {
	return storetest.Harness{Open: func(storetest.T) connector.Store {
		w := &wrong{memory: &memory{name: whole, blocks: map[string][]byte{}}}
		change(w)
		return w
	}}
}

// What the cases about keys do not see the random one does.
func TestRandomHistoriesOfWrongStores(t *testing.T) {
	for what, change := range map[string]func(*wrong){
		"never replaces": func(w *wrong) {
			w.put = func(m *memory, items []connector.Item) error {
				items = slices.Clone(items)
				for i := range items {
					items[i].Replace = false
				}
				return m.Put(context.Background(), items)
			}
		},
		"moves 16 spans": func(w *wrong) {
			w.put = func(m *memory, items []connector.Item) error {
				items = slices.Clone(items)
				for i := range items {
					items[i].Spans = items[i].Spans[:min(16, len(items[i].Spans))]
				}
				return m.Put(context.Background(), items)
			}
		},
		"names half of what is absent": func(w *wrong) {
			w.get = func(m *memory, items []connector.Item) error {
				err := m.Get(context.Background(), items)
				if absent, ok := errors.AsType[*connector.ItemError](err); ok {
					absent.Items = absent.Items[:(len(absent.Items)+1)/2]
				}
				return err
			}
		},
		"writes into what it stores": func(w *wrong) {
			w.put = func(m *memory, items []connector.Item) error {
				err := m.Put(context.Background(), items)
				items[0].Spans[0][0]++
				return err
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			h := wrongly(change)
			for _, c := range storetest.Cases() {
				failed := pipetest.Failed(t.Context(), func(t pipetest.T) { c.Run(t, h) })
				plain := what == "never replaces" || what == "writes into what it stores" // as case plain sees, too
				require.Equal(t, c.Name == "random" || plain && c.Name == "plain", failed, c.Name)
			}
		})
	}
}

// Bytes that do not look random bring to light what such stores do with them.
func TestPlainBytes(t *testing.T) {
	for what, change := range map[string]func(*wrong){
		"reads nothing where zeros were saved": func(w *wrong) {
			w.get = func(m *memory, items []connector.Item) error {
				for _, it := range items {
					was := bytes.Clone(it.Spans[0])
					if err := m.Get(context.Background(), []connector.Item{it}); err != nil {
						return err
					}
					if len(bytes.Trim(it.Spans[0], "\x00")) == 0 {
						copy(it.Spans[0], was)
					}
				}
				return nil
			}
		},
		"keeps equal blocks once, and replaces all of them": func(w *wrong) {
			w.put = func(m *memory, items []connector.Item) error {
				for _, it := range items {
					m.mu.Lock()
					old, data := m.blocks[whole(it.Key)], bytes.Join(it.Spans, nil)
					for k, have := range m.blocks {
						if it.Replace && bytes.Equal(have, old) {
							m.blocks[k] = data
						}
					}
					m.mu.Unlock()
				}
				return m.Put(context.Background(), items)
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			h := wrongly(change)
			for _, c := range storetest.Cases() {
				failed := pipetest.Failed(t.Context(), func(t pipetest.T) { c.Run(t, h) })
				if c.Name != "random" {
					require.Equal(t, c.Name == "plain", failed, c.Name)
				}
			}
		})
	}
}

// A right store is not accused, whatever the seed.
func TestRandomHistoriesOfARightStore(t *testing.T) {
	seeds := uint64(20)
	if testing.Short() {
		seeds = 4
	}
	for seed := range seeds {
		storetest.Random(t, named(whole), seed, time.Millisecond)
	}
}

func sum(k connector.StoreKey) (n uint64) {
	for _, b := range k {
		n += uint64(b)
	}
	return n
}

func fold(k connector.StoreKey, n int) string {
	for i := n; i < len(k); i++ {
		k[i%n] ^= k[i]
	}
	return string(k[:n])
}
