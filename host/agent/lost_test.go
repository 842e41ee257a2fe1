package agent

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
)

// A plugin dies and its fence does not come back: what it held is never free again. The scheduler is told so, and of its
// load nothing, since the blocks must stay the request's.
func TestLostBlocksAreTold(t *testing.T) {
	dir, err := os.MkdirTemp("", "p") //nolint:usetesting // the name of a socket must be short
	require.NoError(t, err)
	park, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "park.sock"), Net: "unix"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, errors.Join(park.Close(), os.RemoveAll(dir))) })
	o := open(t, fmt.Sprintf(`{"kv_connector": "TestConnector", "kv_role": "kv_both",
		"kv_connector_extra_config": {"dir": %q, "fault": "hold_fence", "at": 1, "once": true},
		"kvport": {"heartbeat": {"limit": "1m"}, "deadlines": {"handshake": "1m", "fence": "300ms"}}}`, dir), nil)
	w := worker(t, o.socket, rankAt(0, 1))
	w.attached()
	s := scheduler(t, o.socket)
	hs := hashes("a", 3)
	s.save(w, "r", hs, 0)
	require.NotEmpty(t, s.finish("r", 3*blockTokens, blocksOf(hs, 0)))
	require.True(t, s.event(finishedEvent, "r").GetHeld())
	s.step(&connector.Step{ID: 2, Admitted: []connector.Transfer{transfer("q", hs, 10)}})
	e := s.event(lost, "r")
	require.True(t, e.GetHeld())
	require.Equal(t, uint64(1), e.GetStep())
	require.Equal(t, []int32{0, 1, 2}, e.GetBlocks())
	s.counts("kvport_blocks_lost", 6)
	require.False(t, s.has(loaded, "q"))
}

// A save whose blocks are lost does not look like one whose blocks are free.
func TestLostSave(t *testing.T) {
	for kind, held := range map[host.EventKind]bool{host.Saved: false, host.Released: true} {
		e := eventToProto(&host.Event{Kind: kind, Request: "r", Step: 7, Lost: true, Blocks: []connector.BlockID{1}}).GetEvent()
		require.Equal(t, lost, e.GetKind())
		require.Equal(t, held, e.GetHeld())
	}
}

// An agent that has no memory left for gets ends, so that the engine starts another one: it would answer every get late.
func TestPagesLost(t *testing.T) {
	dir, err := os.MkdirTemp("", "p") //nolint:usetesting // the name of a socket must be short
	require.NoError(t, err)
	park, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "park.sock"), Net: "unix"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, errors.Join(park.Close(), os.RemoveAll(dir))) })
	p := attachPager(t, open(t, fmt.Sprintf(`{"kv_connector": "TestConnector", "kv_role": "kv_both",
		"kv_connector_extra_config": {"dir": %q, "fault": "hide_fence", "at": 1, "once": true},
		"kvport": {"trust": "in-place", "heartbeat": {"limit": "1m"}, "deadlines": {"handshake": "1m", "fence": "300ms", "transfer": "5m"}}}`, dir), nil).socket, pagesAt())
	hs := hashes("a", pagesAt().Pages/2)
	require.Equal(t, all(len(hs), pageDone), p.put(hs, 0))
	p.begin(true, hs, 0, time.Minute)
	select {
	case <-p.over:
	case <-time.After(time.Minute):
		require.Fail(t, "the agent goes on without memory for gets")
	}
}
