package agent

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// Ranks whose memory, layout or hashes cannot be served are refused with a reason that names the field,
// and the agent goes on.
func TestRefusedRanks(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	for name, c := range map[string]struct {
		change func(*wire.Attach)
		seals  int
		size   int64 // beyond what is said
		none   bool  // no descriptor
		want   string
	}{
		"too small":       {change: func(a *wire.Attach) { a.Region = numBlocks * segments * blockBytes }, want: "room for its digests needs"},
		"beyond":          {change: func(a *wire.Attach) { a.Layout.Segments[1].Offset += a.Region }, want: "segments[1] ends beyond region 0"},
		"other size":      {size: 4096, want: "bytes, want"},
		"unsealed":        {seals: unix.F_SEAL_SEAL, want: "seals are"},
		"no descriptor":   {none: true, want: "did not come beside the frame"},
		"second region":   {change: func(a *wire.Attach) { a.Layout.Segments[1].Region = 1 }, want: "region 1"},
		"overlap":         {change: func(a *wire.Attach) { a.Layout.Segments[1].Offset-- }, want: "layout.segments[0] and layout.segments[1] of group 0 overlap"},
		"own digests":     {change: func(a *wire.Attach) { a.Layout.Segments[1].Layer = connector.DigestLayer }, want: "digests are the agent's"},
		"no blocks":       {change: func(a *wire.Attach) { a.Layout.Blocks = 0 }, want: "layout.blocks"},
		"other world":     {change: func(a *wire.Attach) { a.Rank = 2 }, want: "rank 2 of 2"},
		"weak hashes":     {change: func(a *wire.Attach) { a.Hashes = "vllm/xxhash" }, want: "allow_weak_hashes"},
		"no hashes":       {change: func(a *wire.Attach) { a.Hashes = "" }, want: "attach.hashes"},
		"nobody's engine": {change: func(a *wire.Attach) { a.Engine = "" }, want: "attach.engine"},
	} {
		t.Run(name, func(t *testing.T) {
			a := rankAt(0, 2)
			if c.change != nil {
				c.change(a)
			}
			if c.seals == 0 {
				c.seals = seals
			}
			p := dial(t, o.socket)
			p.memory(max(a.Region, 4096)+c.size, c.seals)
			file := p.file
			if c.none {
				file = nil
			}
			p.post(attachCall(a), file)
			m := p.answer(1)
			require.Contains(t, m.GetError().GetMessage(), c.want)
			require.Equal(t, kvportv1.ErrorCode_ERROR_CODE_INCOMPATIBLE, m.GetError().GetCode())
			<-p.over
		})
	}
	one := worker(t, o.socket, rankAt(0, 2))
	one.attached()
	other := rankAt(1, 2)
	other.Shape, other.ShapeText = connector.NewFingerprint("another"), "bf16 isa=test"
	two := worker(t, o.socket, other)
	require.Contains(t, two.answer(1).GetError().GetMessage(), "rank 0 and rank 1 differ in shape (f32 isa=test; bf16 isa=test)")
	require.Contains(t, one.state("broken").GetError(), "differ in shape")
	worker(t, o.socket, rankAt(1, 2)).attached()
	one.state("ready")
}

// A scheduler and ranks of different engines are not taken for one, whoever comes first, and the agent goes on.
func TestOtherEngine(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	refused := func(p *process) {
		t.Helper()
		m := p.answer(1)
		require.Contains(t, m.GetError().GetMessage(), "both must have the same engine_id")
		require.Equal(t, kvportv1.ErrorCode_ERROR_CODE_INCOMPATIBLE, m.GetError().GetCode())
		<-p.over
	}
	other := rankAt(0, 1)
	other.Engine = "other"
	s := scheduler(t, o.socket)
	refused(worker(t, o.socket, other))
	w := worker(t, o.socket, rankAt(0, 1))
	w.attached()
	late := dial(t, o.socket)
	late.post(attachCall(&wire.Attach{Side: kvportv1.Side_SIDE_SCHEDULER, Engine: "other"}), nil)
	refused(late)
	require.Zero(t, s.match(query("r", hashes("a", 2))), "the scheduler keeps its place")
}

// The error of a connector that does not open is the answer to the last rank.
func TestConnectorDoesNotOpen(t *testing.T) {
	o := open(t, fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both","kv_connector_extra_config":{"shared_storage_pat":"x"}}`, testkit.Typical(t, fixture.Store).Connector), nil)
	s := scheduler(t, o.socket)
	m := worker(t, o.socket, rankAt(0, 1)).answer(1)
	require.Contains(t, m.GetError().GetMessage(), "shared_storage_pat")
	require.Contains(t, s.state("broken").GetError(), "shared_storage_pat")
	require.Zero(t, s.match(query("r", hashes("a", 2))))
}

// Weak hashes are accepted where the config says so.
func TestWeakHashesAllowed(t *testing.T) {
	o := open(t, config(t.TempDir(), map[string]any{"allow_weak_hashes": true}), nil)
	a := rankAt(0, 1)
	a.Hashes = "vllm/builtin"
	worker(t, o.socket, a).attached()
}

// What breaks the protocol ends its connection, with a reason where there can be one, and nothing else.
func TestGarbage(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	w := worker(t, o.socket, rankAt(0, 1))
	w.attached()
	raw := func(b []byte) {
		p := dial(t, o.socket)
		_, _ = p.conn.Write(b)
		_ = p.conn.CloseWrite()
		<-p.over
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		b := make([]byte, rng.IntN(200))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		if len(b) >= 4 && rng.IntN(2) == 0 {
			binary.LittleEndian.PutUint32(b, uint32(len(b)-4))
		}
		raw(b)
	}
	raw([]byte{0, 0, 0, 0})
	raw([]byte{0xff, 0xff, 0xff, 0xff, 1})
	hs := hashes("a", 2)
	outside := transfer("r", hs, numBlocks-1)
	many := transfer("r", hs, 0)
	many.Tokens = blockTokens
	for name, c := range map[string]*kvportv1.AgentCall{
		"block outside":   {Call: &kvportv1.AgentCall_Step{Step: wire.StepToProto(&connector.Step{Computed: []connector.Transfer{outside}})}},
		"too many blocks": {Call: &kvportv1.AgentCall_Step{Step: wire.StepToProto(&connector.Step{Admitted: []connector.Transfer{many}})}},
		"other group": {Call: &kvportv1.AgentCall_Step{Step: wire.StepToProto(&connector.Step{Ended: []connector.Ended{{
			Request: "r", Reason: connector.ReasonStop, Blocks: []connector.Block{{Group: 1}},
		}}})}},
		"attach again":      attachCall(&wire.Attach{Side: kvportv1.Side_SIDE_SCHEDULER, Engine: "e"}),
		"finish outside":    {Call: &kvportv1.AgentCall_Finish{Finish: wire.EndToProto(&connector.Ended{Request: "r", Reason: 1, Blocks: outside.Blocks})}},
		"layers of no load": {LayerWise: []string{"q"}, Call: &kvportv1.AgentCall_Step{Step: wire.StepToProto(&connector.Step{Computed: []connector.Transfer{transfer("q", hs, 0)}})}},
		"layers of a match": {LayerWise: []string{"q"}, Call: &kvportv1.AgentCall_Match{Match: &kvportv1.Query{Request: "q"}}},
		"no call":           {},
	} {
		s := scheduler(t, o.socket)
		s.post(c, nil)
		s.find(name, func(m *kvportv1.AgentAnswer) bool { return m.GetError() != nil })
		<-s.over
	}
	s := scheduler(t, o.socket)
	s.post(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_Match{Match: &kvportv1.Query{}}}, os.Stdin)
	require.NotNil(t, s.answer(2).GetError(), "a descriptor that nobody asked for")
	<-s.over
	w.post(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_Match{Match: &kvportv1.Query{}}}, nil)
	require.Contains(t, w.answer(2).GetError().GetMessage(), "only the scheduler")
	<-w.over
	worker(t, o.socket, rankAt(0, 1)).attached()
	require.Zero(t, scheduler(t, o.socket).match(query("r", hs)))
}

// Another user's processes are not let in.
func TestOtherUser(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), func(l *limits) { l.uid++ })
	<-dial(t, o.socket).over
}

// The socket is made only where nobody else can enter, never over something else, and by one agent at
// a time; what a killed one left is replaced.
func TestSocketFolder(t *testing.T) {
	dir := t.TempDir()
	cfg, err := host.ParseConfig(config(dir, nil))
	require.NoError(t, err)
	try := func(path string) error {
		return Run(t.Context(), Config{Transfer: cfg, PluginPath: []string{bin}, Socket: path})
	}
	loose := filepath.Join(dir, "loose")
	require.NoError(t, os.Mkdir(loose, 0o700))
	require.NoError(t, os.Chmod(loose, 0o750))
	require.ErrorContains(t, try(filepath.Join(loose, "s")), "others could enter it")
	require.ErrorIs(t, try(filepath.Join(loose, "s")), host.ErrConfig)
	tight := filepath.Join(dir, "tight")
	require.NoError(t, os.Mkdir(tight, 0o700))
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(tight, link))
	require.ErrorContains(t, try(filepath.Join(link, "s")), "not a folder")
	require.NoError(t, os.WriteFile(filepath.Join(tight, "file"), nil, 0o600))
	require.ErrorContains(t, try(filepath.Join(tight, "file")), "not a socket")
	require.ErrorContains(t, try(filepath.Join(tight, string(make([]byte, 200)))), "want at most 107")

	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(tight, "s"), Net: "unix"})
	require.NoError(t, err)
	stale.SetUnlinkOnClose(false)
	require.NoError(t, stale.Close())
	s, err := listen(filepath.Join(tight, "s"))
	require.NoError(t, err)
	require.ErrorContains(t, try(filepath.Join(tight, "s")), "another agent serves it")
	require.NoError(t, s.close())
	left, err := os.ReadDir(tight)
	require.NoError(t, err)
	require.Len(t, left, 1)
	fresh := filepath.Join(dir, "fresh", "s")
	s, err = listen(fresh)
	require.NoError(t, err)
	st, err := os.Stat(filepath.Dir(fresh))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), st.Mode().Perm())
	require.NoError(t, s.close())
}
