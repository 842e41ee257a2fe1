package agent

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// small is a transfer config for shared storage that has room for that many bytes.
func small(t *testing.T, bytes int) string {
	t.Helper()
	c, err := json.Marshal(map[string]any{
		"kv_connector": testkit.Typical(t, fixture.Store).Connector, "kv_role": "kv_both",
		"kv_connector_extra_config": map[string]any{"shared_storage_path": t.TempDir(), "max_bytes": bytes},
		"kvport":                    map[string]any{"heartbeat": map[string]any{"limit": "1m"}, "deadlines": map[string]any{"handshake": "1m"}},
	})
	require.NoError(t, err)
	return string(c)
}

func rankWithEvents() *wire.Attach {
	a := rankAt(0, 1)
	a.Events = true
	return a
}

// blocks gives the next message about blocks.
func (p *process) blocks() *kvportv1.AgentBlocks {
	p.t.Helper()
	return p.find("blocks", func(m *kvportv1.AgentAnswer) bool { return m.GetBlocks() != nil }).GetBlocks()
}

// hears collects what is said of blocks of a kind until it is n blocks.
func (p *process) hears(kind kvportv1.BlockEventKind, n int) (keys []connector.BlockKey) {
	p.t.Helper()
	for len(keys) < n {
		m := p.blocks()
		require.False(p.t, m.GetGap(), "after %d of %d", len(keys), n)
		for _, e := range m.GetEvents() {
			if e.GetKind() != kind {
				continue
			}
			for i := 0; i < len(e.GetKeys()); i += 32 {
				keys = append(keys, connector.BlockKey(e.GetKeys()[i:i+32]))
			}
		}
	}
	return keys
}

const (
	stored  = kvportv1.BlockEventKind_BLOCK_EVENT_KIND_STORED
	removed = kvportv1.BlockEventKind_BLOCK_EVENT_KIND_REMOVED
	cleared = kvportv1.BlockEventKind_BLOCK_EVENT_KIND_CLEARED
)

// Rule AGENT-13: a scheduler is told which blocks come and go, under the engine's own hashes, and where there are gaps.
func TestBlocks(t *testing.T) {
	o := open(t, small(t, 24<<10), nil)
	s := scheduler(t, o.socket)
	w := worker(t, o.socket, rankWithEvents())
	w.attached()
	m := s.blocks()
	require.True(t, m.GetGap(), "what comes first")
	require.Empty(t, m.GetEvents())
	s.save(w, "a", hashes("a", 4), 1)
	require.ElementsMatch(t, hashes("a", 4), s.hears(stored, 4))
	all := hashes("a", 4)
	for i := range 12 { // there is no room for all
		all = append(all, hashes(fmt.Sprint("b", i), 8)...)
		s.save(w, fmt.Sprint("b", i), hashes(fmt.Sprint("b", i), 8), 8)
	}
	require.Subset(t, all, s.hears(removed, 4))

	answer := s.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_Reset_{Reset_: &kvportv1.ResetRequest{}}})
	require.True(t, answer.GetReset_().GetEmptied())
	s.find("all cleared", func(m *kvportv1.AgentAnswer) bool {
		events := m.GetBlocks().GetEvents()
		return len(events) > 0 && events[len(events)-1].GetKind() == cleared
	})

	second := scheduler(t, o.socket) // in place of the first
	require.True(t, second.blocks().GetGap(), "a scheduler that comes later")
	require.NoError(t, unix.PidfdSendSignal(int(second.announced(2).Fd()), unix.SIGKILL, nil, 0))
	require.True(t, second.blocks().GetGap(), "after the plugin's death")
}

// Only those who asked are told.
func TestBlocksUnwanted(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	s := scheduler(t, o.socket)
	w := worker(t, o.socket, rankAt(0, 1))
	w.attached()
	s.save(w, "a", hashes("a", 4), 1)
	require.Zero(t, s.counter("kvport_block_events_total"))
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.seen {
		require.Nil(t, m.GetBlocks())
	}
}

// Rule AGENT-13: a scheduler that does not read, since its engine is idle, is sent no more than one
// message about blocks, so that it is not cut for what is none of its doing.
func TestBlocksOfIdleEngine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	defer listener.Close()
	theirs, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	defer theirs.Close()
	ours, err := listener.AcceptUnix()
	require.NoError(t, err)
	l := defaultLimits()
	c := newConn(ours, os.Getpid(), &l)
	go c.write()
	defer func() {
		c.cut(nil)
		<-c.gone
	}()

	o := &session{s: &server{}, over: make(chan struct{})}
	m := blocksAnswer(true, nil)
	require.True(t, o.deliver(m), "nobody is there: the next one begins with a gap")
	o.s.sched, c.joined = c, true
	require.True(t, o.deliver(m))
	done := make(chan bool, 1)
	go func() { done <- o.deliver(m) }()
	select {
	case <-done:
		require.Fail(t, "sent to one who does not read")
	case <-time.After(10 * readPause):
	}
	for range 2 {
		_, err = wire.ReadFrame(theirs)
		require.NoError(t, err)
	}
	require.True(t, <-done)
	require.True(t, o.deliver(m))
	go func() { done <- o.deliver(m) }()
	close(o.over)
	require.False(t, <-done, "the connector is closed")
}

// Messages about blocks are small, and leave out what the agent has no hash of.
func TestBlocksInPieces(t *testing.T) {
	all, keys := hashes("h", 2*frameKeys+5), hashes("k", 2*frameKeys+5)
	o := &session{keys: &keyring{back: newRecall()}}
	for i, k := range keys[1:] {
		o.keys.back.add(k, all[i+1])
	}
	got := o.answers(&host.BlockReport{Gap: true, Events: []connector.BlockEvent{
		{Seq: 1, Kind: connector.BlocksStored, Keys: keys[:1]},
		{Seq: 2, Kind: connector.BlocksStored, Keys: keys[:7], Medium: "disk"},
		{Seq: 3, Kind: connector.BlocksRemoved, Keys: keys},
		{Seq: 4, Kind: connector.BlocksCleared},
	}})
	require.True(t, got[0].GetBlocks().GetGap())
	var told []byte
	for _, m := range got {
		size := 0
		for _, e := range m.GetBlocks().GetEvents() {
			require.NotEqualValues(t, 1, e.GetSeq(), "nothing of it is known")
			size += len(e.GetKeys())
			if e.GetKind() == removed {
				told = append(told, e.GetKeys()...)
			}
		}
		require.LessOrEqual(t, size, 32*frameKeys)
	}
	require.Len(t, told, 32*(len(all)-1))
	last := got[len(got)-1].GetBlocks().GetEvents()
	require.Equal(t, cleared, last[len(last)-1].GetKind())
	require.Equal(t, all[1][:], told[:32])
}

// What was saved is recalled for long enough, and not for ever.
func TestRecall(t *testing.T) {
	r := newRecall()
	key := func(i int) connector.BlockKey { return connector.BlockKey{byte(i), byte(i >> 8), byte(i >> 16), 1} }
	for i := range 3*maxRecalled + 1 {
		r.add(key(i), key(i))
	}
	require.Empty(t, r.hashes([]connector.BlockKey{key(0), key(maxRecalled - 1)}))
	require.Len(t, r.hashes([]connector.BlockKey{key(2 * maxRecalled), key(3 * maxRecalled)}), 2)
	require.LessOrEqual(t, len(r.fresh)+len(r.older), 2*maxRecalled)
}
