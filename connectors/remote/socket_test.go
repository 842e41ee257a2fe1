package remote_test

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/remote"
	"github.com/kvport/kvport/sdk"
)

// BenchmarkSocket asks a server on this machine for 32 keys, and loads 16 blocks of 1.41 MiB from it, by TCP and by a unix
// socket in turns. Values are medians; CPU time is this process's, without the server's.
func BenchmarkSocket(b *testing.B) {
	socket := filepath.Join(b.TempDir(), "s")
	srv, err := redistest.Start("--unixsocket", socket, "--maxmemory", "200mb")
	require.NoError(b, err)
	defer func() { require.NoError(b, srv.Close()) }()
	const size, blocks, asked = 1474560, 16, 32
	urls := []string{"redis://" + srv.Address, "unix://" + socket}
	stores := make([]connector.Store, len(urls))
	for i, url := range urls {
		config, err := sdk.DecodeConfig[remote.Config](json.RawMessage(fmt.Sprintf(`{"url":%q}`, url)))
		require.NoError(b, err)
		stores[i], err = remote.Open(b.Context(), env(&strings.Builder{}), config)
		require.NoError(b, err)
		defer func() { require.NoError(b, stores[i].Close()) }()
	}
	items, run := make([]connector.Item, blocks), make([]connector.StoreKey, asked)
	for i := range run {
		binary.LittleEndian.PutUint64(run[i][:], uint64(i))
		if i < blocks {
			items[i] = connector.Item{Key: run[i], Spans: [][]byte{make([]byte, size)}}
		}
	}
	require.NoError(b, stores[0].Put(b.Context(), items))
	ask := func(s connector.Store) {
		found, err := s.Lookup(b.Context(), [][]connector.StoreKey{run})
		require.NoError(b, err)
		require.Equal(b, []int{blocks}, found)
	}
	load := func(s connector.Store) { require.NoError(b, s.Get(b.Context(), items)) }
	for name, call := range map[string]func(connector.Store){"lookup": ask, "load": load} {
		b.Run(name, func(b *testing.B) {
			var wall, cpu [2][]time.Duration
			for range b.N {
				for i, s := range stores {
					used, began := processorTime(b), time.Now()
					call(s)
					wall[i], cpu[i] = append(wall[i], time.Since(began)), append(cpu[i], processorTime(b)-used)
				}
			}
			for i, by := range []string{"tcp", "unix"} {
				slices.Sort(wall[i])
				slices.Sort(cpu[i])
				b.ReportMetric(float64(wall[i][len(wall[i])/2].Microseconds()), by+"-us")
				b.ReportMetric(float64(cpu[i][len(cpu[i])/2].Microseconds()), by+"-cpu-us")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
