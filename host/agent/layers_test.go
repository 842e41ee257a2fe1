package agent

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// layered is an agent with two ranks whose connector holds what is saved, and brings it layer by layer. No second layer
// arrives before the gate is there.
type layered struct {
	t     *testing.T
	s     *process
	ranks []*process
	hs    []connector.BlockKey
	gate  string
	loads int
}

func openLayered(t *testing.T, fault string) *layered {
	t.Helper()
	dir, err := os.MkdirTemp("", "h") //nolint:usetesting // the name of a socket must be short
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	l := &layered{t: t, hs: hashes("a", 4), gate: filepath.Join(dir, "gate")}
	o := open(t, fmt.Sprintf(`{"kv_connector": "HoldConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"dir": %q, "gate": %q, "fault": %q},
		"kvport": {"heartbeat": {"limit": "1m"}, "deadlines": {"handshake": "1m", "transfer": "1m", "finish": "1m", "later": "1m"}}}`, dir, l.gate, fault),
		func(l *limits) { l.finish = time.Minute })
	for rank := range 2 {
		l.ranks = append(l.ranks, worker(t, o.socket, rankAt(rank, 2)))
	}
	for _, w := range l.ranks {
		w.attached()
	}
	l.s = scheduler(t, o.socket)
	return l
}

// load holds the blocks of a request and begins a load of them by another one. It returns where they go.
func (l *layered) load(id string, layerWise ...string) []connector.Block {
	l.t.Helper()
	first := connector.BlockID(16 * l.loads)
	from, to := transfer("from "+id, l.hs, first), transfer(id, l.hs, first+8)
	for rank, w := range l.ranks {
		w.fill(from.Blocks, rank)
	}
	l.s.step(&connector.Step{ID: uint64(2*l.loads + 1), Arrived: []connector.Query{query("from "+id, l.hs)}, Computed: []connector.Transfer{from}})
	require.Empty(l.t, l.s.event(saved, "from "+id).GetFailed())
	q := query(id, l.hs)
	q.Ticket = l.s.finish("from "+id, from.Tokens, from.Blocks)
	require.NotEmpty(l.t, q.Ticket)
	require.Equal(l.t, to.Tokens, l.s.match(q))
	l.loads++
	l.s.post(&kvportv1.AgentCall{LayerWise: layerWise, Call: &kvportv1.AgentCall_Step{
		Step: wire.StepToProto(&connector.Step{ID: uint64(2 * l.loads), Admitted: []connector.Transfer{to}}),
	}}, nil)
	return to.Blocks
}

// sameLayer reports whether a layer of some blocks has come.
func (p *process) sameLayer(blocks []connector.Block, rank, layer int) bool {
	n, same := 0, true
	p.each(blocks, rank, func(have, want []byte) {
		same = same && (n%segments != layer || bytes.Equal(have, want))
		n++
	})
	return same
}

// first waits until the ranks learn of the first layer of a load, and makes sure that it is there and the second one is not.
func (l *layered) first(id string, to []connector.Block) {
	l.t.Helper()
	for rank, w := range l.ranks {
		e := w.event(layersEvent, id)
		require.Equal(l.t, uint32(1), e.GetLayers())
		require.Equal(l.t, uint64(2*l.loads), e.GetStep())
		require.True(l.t, w.sameLayer(to, rank, 0), "announced without its bytes")
		require.False(l.t, w.sameLayer(to, rank, 1))
		require.False(l.t, w.has(loaded, id))
	}
}

// Rule AGENT-15: the ranks learn of each layer of a load that its step named, and of no layer of another one.
func TestLayers(t *testing.T) {
	l := openLayered(t, "")
	began := time.Now()
	to := l.load("q", "q")
	l.first("q", to)
	gated := time.Now()
	require.Zero(t, l.s.match(query("other", hashes("b", 4))))
	least := time.Since(gated)
	require.NoError(t, os.WriteFile(l.gate, nil, 0o600))
	for rank, w := range l.ranks {
		e := w.event(loaded, "q")
		require.Empty(t, e.GetFailed())
		took := time.Duration(e.GetTookUs()) * time.Microsecond
		require.Greater(t, took, least, "it waited for the gate")
		require.Less(t, took, time.Since(began))
		require.True(t, w.same(to, rank))
		require.False(t, w.has(landed, "q"), "nothing of it may be read before it is verified")
	}
	require.Empty(t, l.s.event(loaded, "q").GetFailed())
	require.False(t, l.s.has(layersEvent, "q"), "the scheduler has no use for it")

	to = l.load("r")
	for rank, w := range l.ranks {
		w.event(landed, "r")
		require.Empty(t, w.event(loaded, "r").GetFailed())
		require.True(t, w.same(to, rank))
		require.False(t, w.has(layersEvent, "r"), "nobody asked for them")
	}
}

// A load whose layers are asked for and not brought lands as any other.
func TestLayersNotBrought(t *testing.T) {
	l := openLayered(t, "silent")
	to := l.load("q", "q")
	for rank, w := range l.ranks {
		w.event(landed, "q")
		require.True(t, w.same(to, rank), "landed without its bytes")
		require.Empty(t, w.event(loaded, "q").GetFailed())
		require.False(t, w.has(layersEvent, "q"))
	}
}

// A layer that is not what was saved is not announced, and the load ends with its blocks as failed.
func TestLayersDamaged(t *testing.T) {
	l := openLayered(t, "damage")
	to := l.load("q", "q")
	l.first("q", to)
	require.NoError(t, os.WriteFile(l.gate, nil, 0o600))
	for _, w := range l.ranks {
		require.Equal(t, []int32{int32(to[3].ID)}, w.event(loaded, "q").GetFailed())
		require.False(t, w.has(layersEvent, "q"))
	}
}

// The plugin dies when a layer was announced: the load is not tried again, which would write what is being read.
func TestLayersPluginKilled(t *testing.T) {
	l := openLayered(t, "")
	to := l.load("q", "q")
	l.first("q", to)
	require.NoError(t, unix.PidfdSendSignal(int(l.ranks[0].announced(1).Fd()), unix.SIGKILL, nil, 0))
	for _, w := range l.ranks {
		require.Len(t, w.event(loaded, "q").GetFailed(), len(to))
		require.False(t, w.has(layersEvent, "q"))
	}
}

// wideBytes is the size of a layer of a block in an engine whose loads are large.
const wideBytes = 256 << 10

// wideAt is rankAt for such an engine.
func wideAt(rank, world int) *wire.Attach {
	a := rankAt(rank, world)
	a.Layout.Blocks = 48 // at trust level staged a load of a quarter of them is one part
	for i := range a.Layout.Segments {
		a.Layout.Segments[i].Offset, a.Layout.Segments[i].BlockStride, a.Layout.Segments[i].Bytes = int64(i)*wideBytes, segments*wideBytes, wideBytes
	}
	a.Region = regionSize(&a.Layout)
	return a
}

// wide are the bytes of neighbouring blocks of such an engine.
func (p *process) wide(blocks []connector.Block) []byte {
	return p.mem[int(blocks[0].ID)*segments*wideBytes:][:len(blocks)*segments*wideBytes]
}

// Rules AGENT-15 and PLACE-36: at both trust levels the ranks learn of layers of what the host itself copies out of the memory of a tier.
func TestLayersOfPlacedLoads(t *testing.T) {
	tier := testkit.Typical(t, fixture.Tier)
	memory, err := fixture.Fill(tier.Memory().Config, fixture.Values{"MEMORY_BYTES": 32 << 20})
	require.NoError(t, err)
	for _, trust := range []string{"in-place", "staged"} {
		t.Run(trust, func(t *testing.T) {
			o := open(t, fmt.Sprintf(`{"kv_connector": %q, "kv_role": "kv_both", "kv_connector_extra_config": %s,
				"kvport": {"trust": %q, "heartbeat": {"limit": "1m"}, "deadlines": {"transfer": "1m"}}}`, tier.Connector, memory, trust), nil)
			ranks := []*process{worker(t, o.socket, wideAt(0, 2)), worker(t, o.socket, wideAt(1, 2))}
			for _, w := range ranks {
				w.attached()
			}
			s := scheduler(t, o.socket)
			hs := hashes("a", 12)
			from, to := blocksOf(hs, 0), blocksOf(hs, 16)
			for rank, w := range ranks {
				for i, data := 0, w.wide(from); i < len(data); i++ {
					data[i] = byte(i ^ i>>10 ^ rank)
				}
			}
			s.step(&connector.Step{ID: 1, Computed: []connector.Transfer{transfer("saved", hs, 0)}})
			require.Empty(t, s.event(saved, "saved").GetFailed())
			for try, heard := 1, false; !heard; try++ { // a load may be over before anybody can be told about a layer
				require.Less(t, try, 200, "no rank has heard of a layer")
				id := fmt.Sprintf("load %d", try)
				for _, w := range ranks {
					clear(w.wide(to))
				}
				s.post(&kvportv1.AgentCall{LayerWise: []string{id}, Call: &kvportv1.AgentCall_Step{
					Step: wire.StepToProto(&connector.Step{ID: uint64(1 + try), Admitted: []connector.Transfer{transfer(id, hs, 16)}}),
				}}, nil)
				for _, w := range ranks {
					require.Empty(t, w.event(loaded, id).GetFailed())
					require.True(t, bytes.Equal(w.wide(from), w.wide(to)))
					require.False(t, w.has(landed, id), "what the host copies is verified in the copy")
				}
				heard = ranks[0].has(layersEvent, id)
				require.Equal(t, heard, ranks[1].has(layersEvent, id))
			}
		})
	}
}
