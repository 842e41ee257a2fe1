package wire

import (
	"time"

	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// Limits of an engine's page store.
const (
	MaxPageSegments = 1 << 12                   // segments of a page
	MaxPages        = 1 << 16                   // pages of the agent's own memory
	MaxPageRegions  = 16                        // pieces of the engine's memory
	maxPageTokens   = MaxTokens / MaxBlocks / 2 // tokens of a page: MaxBlocks of them are one prompt
)

// AttachPages is the first message of an engine that only stores pages.
type AttachPages struct {
	Engine       string
	Model, Shape connector.Fingerprint
	ShapeText    string
	Hashes       string
	Tokens       int     // of a page
	Lengths      []int64 // of the segments of a page, in bytes, in order
	Pages        int     // of the agent's own memory
}

// Bytes is the size of a page.
func (a *AttachPages) Bytes() int64 {
	var n int64
	for _, l := range a.Lengths {
		n += l
	}
	return n
}

// PagesAttachFromProto converts an AttachPages. Errors wrap ErrMalformed and name the field.
func PagesAttachFromProto(m *kvportv1.AgentAttachPages) (*AttachPages, error) {
	if m.GetVersion() != AgentVersion {
		return nil, malformed("attach_pages.version is %d, this agent speaks %d: use engine shim and kvport of one release", m.GetVersion(), AgentVersion)
	}
	a := &AttachPages{
		Engine: m.GetEngine(), ShapeText: text(m.GetShapeText()), Hashes: m.GetHashes(),
		Tokens: int(m.GetPageTokens()), Pages: int(m.GetPages()),
	}
	for _, s := range []struct{ name, value string }{{"attach_pages.engine", a.Engine}, {"attach_pages.hashes", a.Hashes}} {
		if s.value == "" {
			return nil, malformed("%s is empty", s.name)
		}
		if err := short(s.name, s.value, MaxName); err != nil {
			return nil, err
		}
	}
	if len(m.GetModel()) != len(a.Model) || len(m.GetShape()) != len(a.Shape) {
		return nil, malformed("attach_pages: model has %d bytes and shape %d, want %d", len(m.GetModel()), len(m.GetShape()), len(a.Model))
	}
	copy(a.Model[:], m.GetModel())
	copy(a.Shape[:], m.GetShape())
	return a, a.size(m)
}

// size reads how large pages are and how many have room.
func (a *AttachPages) size(m *kvportv1.AgentAttachPages) error {
	if a.Tokens <= 0 || a.Tokens > maxPageTokens {
		return malformed("attach_pages.page_tokens is %d, want 1..%d", m.GetPageTokens(), maxPageTokens)
	}
	if a.Pages < 2 || a.Pages > MaxPages {
		return malformed("attach_pages.pages is %d, want 2..%d", m.GetPages(), MaxPages)
	}
	if n := len(m.GetLengths()); n == 0 || n > MaxPageSegments {
		return malformed("attach_pages.lengths has %d segments, want 1..%d", n, MaxPageSegments)
	}
	for i, l := range m.GetLengths() {
		if l == 0 || l > MaxArena/MaxPages {
			return malformed("attach_pages.lengths[%d] is %d bytes, want 1..%d", i, l, MaxArena/MaxPages)
		}
		a.Lengths = append(a.Lengths, int64(l))
	}
	if n := a.Bytes(); n > MaxArena/int64(a.Pages) {
		return malformed("attach_pages: %d pages of %d bytes are more than %d bytes", a.Pages, n, int64(MaxArena))
	}
	return nil
}

// PageKeysFromProto takes keys apart. Errors wrap ErrMalformed and name the field.
func PageKeysFromProto(field string, raw []byte) ([]connector.BlockKey, error) {
	const size = len(connector.BlockKey{})
	if len(raw) == 0 || len(raw)%size != 0 || len(raw)/size > MaxBlocks {
		return nil, malformed("%s.keys has %d bytes, want %d for each of 1..%d pages", field, len(raw), size, MaxBlocks)
	}
	keys := make([]connector.BlockKey, len(raw)/size)
	for i := range keys {
		copy(keys[i][:], raw[i*size:])
		if keys[i] == (connector.BlockKey{}) {
			return nil, malformed("%s.keys[%d] is zero", field, i)
		}
	}
	return keys, nil
}

// PagesMove is a put or a get.
type PagesMove struct {
	Keys     []connector.BlockKey
	Region   int
	Offsets  []int64 // of each segment of each page
	Deadline time.Duration
}

// PagesMoveFromProto converts a put or a get for pages of that many segments. field is its name. Errors wrap
// ErrMalformed and name the field.
func PagesMoveFromProto(field string, m interface {
	GetKeys() []byte
	GetRegion() uint32
	GetOffsets() []uint64
	GetDeadlineMs() uint32
}, segments int,
) (*PagesMove, error) {
	keys, err := PageKeysFromProto(field, m.GetKeys())
	if err != nil {
		return nil, err
	}
	if m.GetRegion() >= MaxPageRegions {
		return nil, malformed("%s.region is %d, limit %d", field, m.GetRegion(), MaxPageRegions)
	}
	if len(m.GetOffsets()) != len(keys)*segments {
		return nil, malformed("%s.offsets has %d numbers for %d pages of %d segments", field, len(m.GetOffsets()), len(keys), segments)
	}
	out := &PagesMove{Keys: keys, Region: int(m.GetRegion()), Offsets: make([]int64, len(m.GetOffsets())), Deadline: milliseconds(m.GetDeadlineMs())}
	for i, o := range m.GetOffsets() {
		if o > MaxArena {
			return nil, malformed("%s.offsets[%d] is %d, limit %d", field, i, o, int64(MaxArena))
		}
		out.Offsets[i] = int64(o)
	}
	return out, nil
}

// PagesDeadline is a deadline of an exists.
func PagesDeadline(m *kvportv1.AgentPagesExists) time.Duration {
	return milliseconds(m.GetDeadlineMs())
}

func milliseconds(n uint32) time.Duration { return time.Duration(n) * time.Millisecond }
