package wire

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

func agentPages() *kvportv1.AgentAttachPages {
	return &kvportv1.AgentAttachPages{
		Version: AgentVersion, Engine: "e", Model: bytes.Repeat([]byte{1}, 32), Shape: bytes.Repeat([]byte{2}, 32), ShapeText: "text",
		Hashes: "sglang/sha256", PageTokens: 16, Lengths: []uint64{300, 7}, Pages: 8,
	}
}

func TestPagesAttach(t *testing.T) {
	a, err := PagesAttachFromProto(agentPages())
	require.NoError(t, err)
	want := &AttachPages{
		Engine: "e", Model: connector.Fingerprint(agentPages().GetModel()), Shape: connector.Fingerprint(agentPages().GetShape()), ShapeText: "text",
		Hashes: "sglang/sha256", Tokens: 16, Lengths: []int64{300, 7}, Pages: 8,
	}
	require.Equal(t, want, a)
	require.Equal(t, int64(307), a.Bytes())
	for field, change := range map[string]func(*kvportv1.AgentAttachPages){
		"attach_pages.version":     func(m *kvportv1.AgentAttachPages) { m.Version = 2 },
		"attach_pages.engine":      func(m *kvportv1.AgentAttachPages) { m.Engine = string(make([]byte, MaxName+1)) },
		"attach_pages.hashes":      func(m *kvportv1.AgentAttachPages) { m.Hashes = "" },
		"shape 31":                 func(m *kvportv1.AgentAttachPages) { m.Shape = m.GetShape()[1:] },
		"attach_pages.page_tokens": func(m *kvportv1.AgentAttachPages) { m.PageTokens = maxPageTokens + 1 },
		"attach_pages.pages":       func(m *kvportv1.AgentAttachPages) { m.Pages = MaxPages + 1 },
		"attach_pages.lengths has": func(m *kvportv1.AgentAttachPages) { m.Lengths = make([]uint64, MaxPageSegments+1) },
		"attach_pages.lengths[1]":  func(m *kvportv1.AgentAttachPages) { m.Lengths[1] = MaxArena },
		"are more than": func(m *kvportv1.AgentAttachPages) {
			m.Lengths, m.Pages = []uint64{MaxArena / MaxPages, MaxArena / MaxPages}, MaxPages
		},
	} {
		m := agentPages()
		change(m)
		_, err := PagesAttachFromProto(m)
		require.ErrorIs(t, err, ErrMalformed)
		require.ErrorContains(t, err, field)
	}
}

func TestPagesMove(t *testing.T) {
	keys := bytes.Repeat([]byte{7}, 64)
	m, err := PagesMoveFromProto("pages_put", &kvportv1.AgentPagesPut{Keys: keys, Region: 3, Offsets: []uint64{0, 5, 6, 9}, DeadlineMs: 20}, 2)
	require.NoError(t, err)
	require.Equal(t, &PagesMove{
		Keys: []connector.BlockKey{connector.BlockKey(keys[:32]), connector.BlockKey(keys[32:])}, Region: 3,
		Offsets: []int64{0, 5, 6, 9}, Deadline: 20 * time.Millisecond,
	}, m)
	require.Equal(t, 50*time.Millisecond, PagesDeadline(&kvportv1.AgentPagesExists{DeadlineMs: 50}))
	for field, m := range map[string]*kvportv1.AgentPagesGet{
		"pages_get.keys has 63":      {Keys: keys[1:], Offsets: []uint64{1, 2, 3, 4}},
		"pages_get.keys has 0":       {},
		"pages_get.keys[0]":          {Keys: make([]byte, 32), Offsets: []uint64{1, 2}},
		"pages_get.region":           {Keys: keys, Region: MaxPageRegions, Offsets: []uint64{1, 2, 3, 4}},
		"pages_get.offsets has 3":    {Keys: keys, Offsets: []uint64{1, 2, 3}},
		"pages_get.offsets[3] is 35": {Keys: keys, Offsets: []uint64{1, 2, 3, MaxArena + 1}},
	} {
		_, err := PagesMoveFromProto("pages_get", m, 2)
		require.ErrorIs(t, err, ErrMalformed)
		require.ErrorContains(t, err, field)
	}
}
