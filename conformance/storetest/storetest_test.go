package storetest_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/storetest"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe/pipetest"
)

// memory is a store that knows keys by what name makes of them.
type memory struct {
	name   func(connector.StoreKey) string
	blocks map[string][]byte
}

// Lookup implements connector.Store.
func (m *memory) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
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
	for _, it := range items {
		if name := m.name(it.Key); m.blocks[name] == nil {
			m.blocks[name] = bytes.Join(it.Spans, nil)
		}
	}
	return nil
}

// Close implements connector.Store.
func (m *memory) Close() error { return nil }

func named(name func(connector.StoreKey) string) storetest.Harness {
	return storetest.Harness{Open: func(storetest.T) connector.Store { return &memory{name, map[string][]byte{}} }}
}

func TestRightStore(t *testing.T) {
	storetest.Run(t, named(func(k connector.StoreKey) string { return string(k[:]) }))
}

// Whatever part of a key a store leaves out, a case finds it.
func TestShortenedKeys(t *testing.T) {
	names := map[string]func(connector.StoreKey) string{
		"8 leading bytes":  func(k connector.StoreKey) string { return string(k[:8]) },
		"8 trailing bytes": func(k connector.StoreKey) string { return string(k[24:]) },
		"3 leading bytes":  func(k connector.StoreKey) string { return string(k[:3]) },
		"8 in the middle":  func(k connector.StoreKey) string { return string(k[12:20]) },
		"no last byte":     func(k connector.StoreKey) string { return string(k[:31]) },
		"no first byte":    func(k connector.StoreKey) string { return string(k[1:]) },
		"no sign bits": func(k connector.StoreKey) string {
			for i := range k {
				k[i] &= 0x7F
			}
			return string(k[:])
		},
		"up to a zero":    func(k connector.StoreKey) string { s, _, _ := bytes.Cut(k[:], []byte{0}); return string(s) },
		"no case":         func(k connector.StoreKey) string { return string(bytes.ToLower(k[:])) },
		"a sum of bytes":  func(k connector.StoreKey) string { return string(binary.AppendUvarint(nil, sum(k))) },
		"halves put over": func(k connector.StoreKey) string { return fold(k, 16) },
		"8 bytes, folded": func(k connector.StoreKey) string { return fold(k, 8) },
	}
	for what, name := range names {
		t.Run(what, func(t *testing.T) {
			noticed := 0
			for _, c := range storetest.Cases() {
				if pipetest.Failed(t.Context(), func(t pipetest.T) { c.Run(t, named(name)) }) {
					noticed++
				}
			}
			require.Positive(t, noticed)
		})
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
