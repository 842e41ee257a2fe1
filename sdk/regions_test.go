package sdk

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
)

// TestWorkerRegions: a worker side unmaps what it has mapped, the memory for Reshape included, once.
func TestWorkerRegions(t *testing.T) {
	o := &wire.Open{Env: connector.Env{Layout: connector.Layout{Segments: []connector.Segment{{Region: 0}}}}}
	for range 2 {
		mem, err := shm.Create("kvport-test", 4096)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, mem.Close()) })
		o.Regions = append(o.Regions, wire.Region{FD: int(mem.File().Fd()), Size: mem.Size()})
	}
	r := &regions{mapped: map[fileID]*sharedRegion{}}
	views, unmap, err := r.worker(o)
	require.NoError(t, err)
	require.Len(t, views, 2)
	require.Len(t, r.mapped, 2)
	require.NoError(t, unmap())
	require.Empty(t, r.mapped)
}
