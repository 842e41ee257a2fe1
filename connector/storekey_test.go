package connector

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// storeKeyRow is one line of testdata/storekeys.txt.
type storeKeyRow struct {
	block BlockKey
	shape Fingerprint
	group uint16
	shard Shard
	want  StoreKey
}

// readStoreKeys reads keys that the first NewStoreKey derived, field by field. The file never changes: stores hold blocks under these keys.
func readStoreKeys(t testing.TB) (rows []storeKeyRow) {
	t.Helper()
	file, err := os.Open("testdata/storekeys.txt")
	require.NoError(t, err)
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		var r storeKeyRow
		var block, shape, want string
		_, err := fmt.Sscan(lines.Text(), &block, &shape, &r.group, &r.shard.Rank, &r.shard.World, &r.shard.First, &r.shard.Count, &want)
		require.NoError(t, err, lines.Text())
		unhex(t, r.block[:], block)
		unhex(t, r.shape[:], shape)
		unhex(t, r.want[:], want)
		rows = append(rows, r)
	}
	return rows
}

func unhex(t testing.TB, to []byte, text string) {
	t.Helper()
	n, err := hex.Decode(to, []byte(text))
	require.NoError(t, err)
	require.Len(t, to, n)
}

// TestStoreKeysAreFixed: the keys of blocks that are stored already never change.
func TestStoreKeysAreFixed(t *testing.T) {
	rows := readStoreKeys(t)
	require.Len(t, rows, 48)
	for _, r := range rows {
		require.Equal(t, r.want, NewStoreKey(r.block, r.shape, r.group, r.shard), "%+v", r.shard)
	}
}

// TestStoreKeyAllocatesNothing: a lookup derives thousands of keys.
func TestStoreKeyAllocatesNothing(t *testing.T) {
	r := readStoreKeys(t)[0]
	require.Zero(t, testing.AllocsPerRun(100, func() { r.want = NewStoreKey(r.block, r.shape, r.group, r.shard) }))
}

func BenchmarkNewStoreKey(b *testing.B) {
	r := readStoreKeys(b)[0]
	b.ReportAllocs()
	for b.Loop() {
		r.want = NewStoreKey(r.block, r.shape, r.group, r.shard)
	}
}
