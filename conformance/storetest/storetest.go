// Package storetest checks that a connector.Store keeps blocks apart whose keys are nearly the same, and that it answers
// random histories of calls as the rules of docs/spec allow. Authors of stores run it beside package conformance:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, storetest.Harness{Open: func(t storetest.T) connector.Store { ... }})
//	}
//
// A Store sees keys that the sdk derives by SHA-256, so that no engine, and no case of package conformance, can
// choose them: two that share eight bytes come once in a while, in production. Here they are chosen.
package storetest

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// T is the part of testing.TB that a case needs.
type T interface {
	require.TestingT // Errorf reports a failure, FailNow ends the case
	// Context ends with the case's deadline.
	Context() context.Context
	// Skipf ends the case as one that does not apply, saying why.
	Skipf(format string, args ...any)
	// Cleanup runs a function at the end of the case.
	Cleanup(func())
}

// Harness makes stores for the suite.
type Harness struct {
	// Open makes a new, empty store, which has room for 2 MiB. The suite closes it.
	Open func(t T) connector.Store
	// Block is the most bytes that a block may have in random histories, for a store of fixed slots; 128 at least, 0: any number. With it,
	// the store needs room for 1024 blocks.
	Block int64
}

// A Case checks one promise.
type Case struct {
	Name string
	Text string // what the case does, one sentence
	Run  func(t T, h Harness)
}

// Run runs every case as a subtest.
func Run(t *testing.T, h Harness) {
	t.Helper()
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) { c.Run(t, h) })
	}
}

// Cases lists the suite.
func Cases() []Case {
	return []Case{
		{"one-byte", "Keys that differ in one byte, wherever it is, are kept apart.", func(t T, h Harness) { apart(t, h, oneByte(filled(0x5A))) }},
		{"one-bit", "Keys that differ in one bit are kept apart.", func(t T, h Harness) { apart(t, h, oneBit(filled(0xC3))) }},
		{"zeros", "Keys of zeros that differ in one byte are kept apart.", func(t T, h Harness) { apart(t, h, oneByte(filled(0))) }},
		{"folded", "Keys that differ in the same bit of two bytes, or in the order of their bytes, are kept apart.", func(t T, h Harness) { apart(t, h, folded()) }},
		{"text", "Keys with bytes that mean something in paths, lines and strings are kept apart.", func(t T, h Harness) { apart(t, h, texts()) }},
		{"trimmed", "Keys that begin or end with bytes which are cut off from strings are kept apart.", func(t T, h Harness) { apart(t, h, trimmed()) }},
		{"plain", "Blocks of zeros, of one byte, and of equal bytes come back as they are, also when one of them is replaced.", plain},
		{"random", "Random histories of Puts, Gets and Lookups, at once and cancelled: each answer is one that the rules allow.", func(t T, h Harness) { Random(t, h, 1, short) }},
	}
}

func filled(with byte) (k connector.StoreKey) {
	for i := range k {
		k[i] = with
	}
	return k
}

// oneByte is a key and those that differ from it in one byte.
func oneByte(k connector.StoreKey) []connector.StoreKey {
	keys := []connector.StoreKey{k}
	for i := range k {
		near := k
		near[i] ^= 0xFF
		keys = append(keys, near)
	}
	return keys
}

// oneBit is a key and those that differ from it in one bit.
func oneBit(k connector.StoreKey) []connector.StoreKey {
	keys := []connector.StoreKey{k}
	for i := range 8 * len(k) {
		near := k
		near[i/8] ^= 1 << (i % 8)
		keys = append(keys, near)
	}
	return keys
}

// folded is keys that are the same when their parts are added up.
func folded() []connector.StoreKey {
	var base connector.StoreKey
	for i := range base {
		base[i] = byte(i + 1)
	}
	keys := []connector.StoreKey{base}
	for _, apart := range []int{1, 2, 4, 8, 16} {
		near := base
		near[3] ^= 0x80
		near[3+apart] ^= 0x80
		keys = append(keys, near)
		var turned connector.StoreKey
		copy(turned[:], base[apart:])
		copy(turned[len(base)-apart:], base[:apart])
		keys = append(keys, turned)
	}
	return keys
}

// texts is keys of bytes that end a string, a line or the name of a file, and keys that are the same up to those.
func texts() []connector.StoreKey {
	var keys []connector.StoreKey
	for _, b := range []byte{0, '\n', '/', '\\', '%', ' ', ':', 0x80, 0xFE, 0xFF} {
		for _, after := range []byte{'a', 'A'} {
			k := filled('k')
			k[4], k[5] = b, after
			keys = append(keys, k)
		}
	}
	return keys
}

// trimmed is keys that are the same without what begins or ends them, or when their texts in base 64 have small letters only.
func trimmed() []connector.StoreKey {
	var keys []connector.StoreKey
	for _, b := range []byte{0, ' ', '\n', '\t', '=', '0', '.'} {
		first, last := filled('k'), filled('k')
		first[0], last[len(last)-1] = b, b
		keys = append(keys, first, last)
	}
	large, small := filled('k'), filled('k')
	copy(large[:], []byte{0x00, 0x00, 0x00}) // AAAA
	copy(small[:], []byte{0x69, 0xA6, 0x9A}) // aaaa
	return append(keys, large, small)
}

// plain stores blocks of which several have the same bytes, replaces one, and requires that each has its own.
func plain(t T, h Harness) {
	store := h.Open(t)
	t.Cleanup(func() { _ = store.Close() })
	var items []connector.Item
	for n, with := range []byte{0, 0, 0xFF, 0xFF, 'x', 'x'} {
		k := filled(byte(n + 1))
		items = append(items, item(k, bytes.Repeat([]byte{with}, len(content(0)))))
	}
	require.NoError(t, store.Put(t.Context(), items))
	same := func(when string) {
		for n, it := range items {
			got := bytes.Repeat([]byte{0x55}, it.Size())
			require.NoError(t, store.Get(t.Context(), []connector.Item{item(it.Key, got)}), "block %d, %s", n, when)
			require.Equal(t, bytes.Join(it.Spans, nil), got, "block %d, %s", n, when)
		}
	}
	same("when all were put")
	for n := 0; n < len(items); n += 2 {
		items[n] = item(items[n].Key, content(n))
		items[n].Replace = true
		require.NoError(t, store.Put(t.Context(), items[n:n+1]))
	}
	same("when every other one was replaced")
}

// content is a block's bytes, a function of its number.
func content(n int) []byte {
	return bytes.Repeat([]byte(fmt.Sprintf("block %4d;", n)), 8)
}

// item is a block in two spans, as those of a cache are.
func item(k connector.StoreKey, data []byte) connector.Item {
	return connector.Item{Key: k, Spans: [][]byte{data[:24], data[24:]}}
}

// apart stores blocks one by one and requires that none stands for another.
func apart(t T, h Harness, keys []connector.StoreKey) {
	store := h.Open(t)
	t.Cleanup(func() { _ = store.Close() })
	for n, k := range keys {
		require.False(t, found(t, store, k), "key %v was not put and is found, of those that were put %v is nearest", k, nearest(keys[:n], k))
		err := store.Get(t.Context(), []connector.Item{item(k, make([]byte, len(content(n))))})
		require.Error(t, err, "key %v was not put and Get succeeds, of those that were put %v is nearest", k, nearest(keys[:n], k))
		var failed *connector.ItemError
		require.ErrorAs(t, err, &failed, "Get of key %v: the error names no item", k)
		require.NoError(t, store.Put(t.Context(), []connector.Item{item(k, content(n))}))
	}
	for n, k := range keys {
		require.True(t, found(t, store, k), "key %v was put and is not found", k)
		got := make([]byte, len(content(n)))
		require.NoError(t, store.Get(t.Context(), []connector.Item{item(k, got)}), "key %v", k)
		require.Equal(t, string(content(n)), string(got), "key %v has the bytes of another", k)
	}
}

func found(t T, store connector.Store, k connector.StoreKey) bool {
	n, err := store.Lookup(t.Context(), [][]connector.StoreKey{{k}})
	require.NoError(t, err)
	require.Len(t, n, 1)
	return n[0] == 1
}

// nearest is the key that differs from k in the fewest bytes.
func nearest(keys []connector.StoreKey, k connector.StoreKey) (best connector.StoreKey) {
	least := len(k) + 1
	for _, other := range keys {
		differ := 0
		for i := range k {
			if k[i] != other[i] {
				differ++
			}
		}
		if differ < least {
			best, least = other, differ
		}
	}
	return best
}
