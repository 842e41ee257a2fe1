package remote

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/connector"
)

// Every round saves and loads a set of blocks twice, once by the store and once by go-redis' own SET and GET of as many bytes
// that lie together: the limit. The two take turns within each block, so that whatever disturbs the machine disturbs
// both. Reported are the medians and their ratio.
func BenchmarkStore(b *testing.B) {
	for _, program := range redistest.Programs() {
		srv, err := redistest.StartProgram(program)
		require.NoError(b, err)
		version, err := srv.Version(b.Context())
		require.NoError(b, err)
		for _, shape := range []struct {
			name          string
			layers, bytes int
		}{{"1.41MiB", 30, 48 << 10}, {"8MiB", 32, 256 << 10}} {
			benchShape(b, srv.Address, version+"/"+shape.name, append(slices.Repeat([]int{shape.bytes}, shape.layers), 16*shape.layers))
		}
		require.NoError(b, srv.Close())
	}
}

func benchShape(b *testing.B, address, name string, lengths []int) {
	const blocks = 8
	s, err := Open(b.Context(), Options{Addresses: []string{address}, Connections: 1})
	require.NoError(b, err)
	raw := redis.NewClient(&redis.Options{Addr: address, Protocol: 2, DisableIdentity: true})
	items := make([]connector.Item, blocks)
	for n := range items {
		items[n] = item(n, lengths...)
		items[n].Replace = true
	}
	flat := make([]byte, items[0].Size())
	pair := func(what string, store, limit func(n int) error) {
		b.Run(name+"/"+what, func(b *testing.B) {
			b.SetBytes(2 * blocks * int64(len(flat)))
			var took [2][]time.Duration
			for b.Loop() {
				for n := range items {
					for turn := range 2 {
						which := (n + turn) % 2
						start := time.Now()
						if err := [2]func(int) error{store, limit}[which](n); err != nil {
							b.Fatal(err)
						}
						took[which] = append(took[which], time.Since(start))
					}
				}
			}
			for _, t := range took {
				slices.Sort(t)
			}
			ours, theirs := took[0][len(took[0])/2], took[1][len(took[1])/2]
			b.ReportMetric(float64(len(flat))/ours.Seconds()/1e9, "GB/s")
			b.ReportMetric(float64(len(flat))/theirs.Seconds()/1e9, "limit-GB/s")
			b.ReportMetric(theirs.Seconds()/ours.Seconds(), "ratio")
		})
	}
	key := func(n int) string { return fmt.Sprint("raw", n) }
	pair("save", func(n int) error { return s.Put(b.Context(), items[n:n+1]) },
		func(n int) error { return raw.Set(b.Context(), key(n), flat, 0).Err() })
	pair("load", func(n int) error { return s.Get(b.Context(), items[n:n+1]) },
		func(n int) error { return raw.Get(b.Context(), key(n)).Err() })
	require.NoError(b, raw.Close())
	require.NoError(b, s.Close())
}

// A lookup of the 32 keys of a prompt of 512 tokens, all there.
func BenchmarkLookup(b *testing.B) {
	srv, err := redistest.Start()
	require.NoError(b, err)
	s, err := Open(b.Context(), Options{Addresses: []string{srv.Address}})
	require.NoError(b, err)
	full, _ := items(32, 1000)
	require.NoError(b, s.Put(b.Context(), full))
	var took []time.Duration
	for b.Loop() {
		start := time.Now()
		n, err := s.Lookup(b.Context(), [][]connector.StoreKey{keysOf(full)})
		took = append(took, time.Since(start))
		if err != nil || n[0] != 32 {
			b.Fatal(n, err)
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-us")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-us")
	require.NoError(b, s.Close())
	require.NoError(b, srv.Close())
}
