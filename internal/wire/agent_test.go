package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

func agentAttach() *Attach {
	return &Attach{
		Side: kvportv1.Side_SIDE_WORKER, Engine: "e", Rank: 1, World: 2, Model: connector.NewFingerprint("m"),
		Shape: connector.NewFingerprint("s"), ShapeText: "text", Region: 4096, Hashes: "vllm/sha256",
		Layout: connector.Layout{
			Name: "l", Blocks: 4, Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}},
			Segments: []connector.Segment{{BlockStride: 512, Bytes: 256}, {Layer: 1, Offset: 256, BlockStride: 512, Bytes: 256}},
		},
	}
}

func frames(t testing.TB, calls ...*kvportv1.AgentCall) []byte {
	t.Helper()
	var all []byte
	for _, c := range calls {
		f, err := AgentFrame(c)
		require.NoError(t, err)
		all = append(all, f...)
	}
	return all
}

func TestAgentFrames(t *testing.T) {
	want := agentAttach()
	r := bytes.NewReader(frames(t,
		&kvportv1.AgentCall{Id: 1, Call: &kvportv1.AgentCall_Attach{Attach: attachToProto(want)}},
		&kvportv1.AgentCall{Call: &kvportv1.AgentCall_Step{Step: StepToProto(&connector.Step{ID: 7})}},
	))
	frame, err := ReadFrame(r)
	require.NoError(t, err)
	call, err := AgentCallFromFrame(frame)
	require.NoError(t, err)
	got, err := AttachFromProto(call.GetAttach())
	require.NoError(t, err)
	require.Equal(t, want, got)
	frame, err = ReadFrame(r)
	require.NoError(t, err)
	call, err = AgentCallFromFrame(frame)
	require.NoError(t, err)
	require.Equal(t, uint64(7), call.GetStep().GetId())
	_, err = ReadFrame(r)
	require.ErrorIs(t, err, io.EOF)

	for _, head := range []uint32{0, MaxMessage + 1, 1 << 31} {
		_, err = ReadFrame(bytes.NewReader(binary.LittleEndian.AppendUint32(nil, head)))
		require.ErrorIs(t, err, ErrMalformed)
	}
	for _, cut := range [][]byte{{1}, {1, 0, 0, 0}, {2, 0, 0, 0, 1}, binary.LittleEndian.AppendUint32(nil, MaxMessage)} {
		_, err = ReadFrame(bytes.NewReader(cut))
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	}
	for _, c := range []*kvportv1.AgentCall{
		{},
		{Id: 1},
		{Id: 1, Call: &kvportv1.AgentCall_Step{Step: &kvportv1.Step{}}},
		{Call: &kvportv1.AgentCall_Detach{Detach: &kvportv1.AgentDetach{}}},
		{Id: 1, Call: &kvportv1.AgentCall_Detach{Detach: &kvportv1.AgentDetach{}}, Ahead: []*kvportv1.Query{{Request: "r"}}},
		{Id: 1, Call: &kvportv1.AgentCall_Match{Match: &kvportv1.Query{}}, Ahead: []*kvportv1.Query{{Request: "r"}}},
		{Id: 1, Call: &kvportv1.AgentCall_Match{Match: &kvportv1.Query{Request: "r"}}, Ahead: []*kvportv1.Query{{Request: "s"}, {}}},
		{Id: 1, Call: &kvportv1.AgentCall_Match{Match: &kvportv1.Query{Request: "r"}}, Ahead: []*kvportv1.Query{{Request: "s", Ticket: []byte{1}}}},
		{Id: 1, Call: &kvportv1.AgentCall_Match{Match: &kvportv1.Query{Request: "r"}}, Ahead: []*kvportv1.Query{{Request: "s"}, {Request: "r"}}},
		{Id: 1, Call: &kvportv1.AgentCall_Match{Match: &kvportv1.Query{Request: "r"}}, Ahead: []*kvportv1.Query{{Request: "s"}, {Request: "s"}}},
		{Id: 1, Call: &kvportv1.AgentCall_Match{Match: &kvportv1.Query{Request: "r"}}, Ahead: queries(MaxAhead + 1)},
	} {
		_, err = AgentCallFromFrame(frames(t, c)[frameHead:])
		require.ErrorIs(t, err, ErrMalformed)
	}
	old := attachToProto(want)
	old.Version = 2
	_, err = AttachFromProto(old)
	require.ErrorContains(t, err, "attach.version is 2")
}

// queries are questions about n requests.
func queries(n int) (out []*kvportv1.Query) {
	for i := range n {
		out = append(out, &kvportv1.Query{Request: fmt.Sprint(i)})
	}
	return out
}

// readPages reads what an engine sends that stores pages: what is accepted is within the limits.
func readPages(t *testing.T, call *kvportv1.AgentCall) {
	t.Helper()
	if m := call.GetAttachPages(); m != nil {
		if a, err := PagesAttachFromProto(m); err == nil {
			require.True(t, a.Bytes() > 0 && a.Bytes() <= MaxArena/int64(a.Pages))
		}
	}
	if m := call.GetPagesGet(); m != nil {
		if g, err := PagesMoveFromProto("pages_get", m, 2); err == nil {
			require.Len(t, g.Offsets, 2*len(g.Keys))
		}
	}
}

// FuzzAgentCall: whatever a process sends, reading it does not panic, and what is accepted is within the
// limits.
func FuzzAgentCall(f *testing.F) {
	f.Add(frames(f, &kvportv1.AgentCall{Id: 1, Call: &kvportv1.AgentCall_Attach{Attach: attachToProto(agentAttach())}}))
	f.Add(frames(f, &kvportv1.AgentCall{Call: &kvportv1.AgentCall_Step{Step: StepToProto(&connector.Step{ID: 1, Computed: []connector.Transfer{
		{Request: "r", Tokens: 16, Blocks: []connector.Block{{ID: 1}}},
	}})}}))
	f.Add(frames(f, &kvportv1.AgentCall{Id: 2, Call: &kvportv1.AgentCall_Match{Match: QueryToProto(&connector.Query{Request: "r", Tokens: 3})}}))
	f.Add(frames(f, &kvportv1.AgentCall{Id: 5, Call: &kvportv1.AgentCall_Match{Match: &kvportv1.Query{Request: "r"}}, Ahead: []*kvportv1.Query{{Request: "s"}}}))
	f.Add(frames(f, &kvportv1.AgentCall{Id: 3, Call: &kvportv1.AgentCall_Finish{Finish: EndToProto(&connector.Ended{Request: "r", Reason: 1})}}))
	f.Add(frames(f, &kvportv1.AgentCall{Id: 1, Call: &kvportv1.AgentCall_AttachPages{AttachPages: agentPages()}}))
	f.Add(frames(f, &kvportv1.AgentCall{Id: 4, Call: &kvportv1.AgentCall_PagesGet{PagesGet: &kvportv1.AgentPagesGet{Keys: make([]byte, 32), Offsets: []uint64{1, 2}}}}))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		for {
			frame, err := ReadFrame(r)
			if err != nil {
				return
			}
			call, err := AgentCallFromFrame(frame)
			if err != nil {
				require.ErrorIs(t, err, ErrMalformed)
				continue
			}
			if m := call.GetAttach(); m != nil {
				if a, err := AttachFromProto(m); err == nil && a.Side == kvportv1.Side_SIDE_WORKER {
					require.NoError(t, a.Layout.Validate([]int64{a.Region}))
				}
			}
			if m := call.GetMatch(); m != nil {
				if q, err := QueryFromProto(m); err == nil {
					require.LessOrEqual(t, q.Computed, q.Tokens)
				}
			}
			if m := call.GetStep(); m != nil {
				_, _ = StepFromProto(m)
			}
			if m := call.GetFinish(); m != nil {
				_, _ = EndFromProto(m)
			}
			readPages(t, call)
		}
	})
}

// Segments of a group may lie between each other's blocks, but have no byte in common.
func TestApart(t *testing.T) {
	segment := func(group uint16, offset, stride, size int64) connector.Segment {
		return connector.Segment{Group: group, Offset: offset, BlockStride: stride, Bytes: size}
	}
	for name, c := range map[string]struct {
		segments []connector.Segment
		overlap  bool
	}{
		"one after the other":   {segments: []connector.Segment{segment(0, 64, 16, 16), segment(0, 0, 16, 16)}},
		"by turns":              {segments: []connector.Segment{segment(0, 16, 32, 16), segment(0, 0, 32, 16)}},
		"by turns, shifted":     {segments: []connector.Segment{segment(0, 0, 32, 16), segment(0, 48, 32, 16)}},
		"memory of two groups":  {segments: []connector.Segment{segment(0, 0, 16, 16), segment(1, 0, 16, 16)}},
		"strides of two sizes":  {segments: []connector.Segment{segment(0, 0, 32, 8), segment(0, 8, 16, 8)}},
		"the same":              {segments: []connector.Segment{segment(0, 0, 16, 16), segment(0, 0, 16, 16)}, overlap: true},
		"the last byte":         {segments: []connector.Segment{segment(0, 0, 32, 17), segment(0, 16, 32, 16)}, overlap: true},
		"the next block":        {segments: []connector.Segment{segment(0, 0, 32, 16), segment(0, 17, 32, 16)}, overlap: true},
		"from a later block on": {segments: []connector.Segment{segment(0, 0, 16, 16), segment(0, 48, 16, 16)}, overlap: true},
		"not the neighbour":     {segments: []connector.Segment{segment(0, 0, 64, 64), segment(0, 256, 16, 16), segment(0, 32, 64, 8)}, overlap: true},
	} {
		l := &connector.Layout{Blocks: 4, Groups: make([]connector.Group, 2), Segments: c.segments}
		err := apart(l)
		require.Equal(t, c.overlap, err != nil, name)
		if err != nil {
			require.ErrorIs(t, err, ErrMalformed)
		}
	}
}

// attachToProto converts an Attach.
func attachToProto(a *Attach) *kvportv1.AgentAttach {
	m := &kvportv1.AgentAttach{Version: AgentVersion, Side: a.Side, Engine: a.Engine}
	if a.Side == kvportv1.Side_SIDE_WORKER {
		m.Rank, m.World, m.Model, m.Shape, m.ShapeText = count(a.Rank), count(a.World), a.Model[:], a.Shape[:], a.ShapeText
		m.Layout, m.Region, m.Hashes = LayoutToProto(&a.Layout), uint64(a.Region), a.Hashes
		m.Events = a.Events
	}
	return m
}

// That neighbours alone are compared where that is enough changes nothing: any pair that overlaps is found.
func TestApartLikeAllPairs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		strides := rapid.SliceOfN(rapid.SampledFrom([]int64{4, 6, 8, 12, 16}), 1, 2).Draw(t, "strides")
		l := &connector.Layout{Blocks: rapid.IntRange(1, 4).Draw(t, "blocks"), Groups: make([]connector.Group, 2)}
		for range rapid.IntRange(2, 8).Draw(t, "segments") {
			s := connector.Segment{
				Group: uint16(rapid.IntRange(0, 1).Draw(t, "group")), Offset: int64(rapid.IntRange(0, 60).Draw(t, "offset")),
				BlockStride: rapid.SampledFrom(strides).Draw(t, "stride"),
			}
			s.Bytes = int64(rapid.IntRange(1, int(min(3, s.BlockStride))).Draw(t, "bytes"))
			l.Segments = append(l.Segments, s)
		}
		err := apart(l)
		for j := range l.Segments {
			for i := range j {
				a, b := &l.Segments[i], &l.Segments[j]
				if a.Group == b.Group && (a.Offset <= b.Offset && overlap(l, i, j) || a.Offset > b.Offset && overlap(l, j, i)) {
					require.ErrorIs(t, err, ErrMalformed)
					return
				}
			}
		}
		require.NoError(t, err)
	})
}

// As many segments as an attach may have, layers that lie between each other's blocks.
func BenchmarkApart(b *testing.B) {
	const segments, size = 20480, 64
	l := &connector.Layout{Blocks: 64, Groups: make([]connector.Group, 1)}
	for i := range int64(segments) {
		l.Segments = append(l.Segments, connector.Segment{Layer: int(i), Offset: i * size, BlockStride: segments * size, Bytes: size})
	}
	for b.Loop() {
		require.NoError(b, apart(l))
	}
}
