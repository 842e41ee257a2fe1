package wire

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// AgentVersion is the version of the protocol between an agent and the processes of an engine.
const AgentVersion = 1

const (
	// frameHead is the length that goes before each frame.
	frameHead = 4
	// firstRoom is allocated for a frame before its bytes have arrived, at most.
	firstRoom = 64 << 10
)

// Attach is the first message of a process of a foreign engine.
type Attach struct {
	Side         kvportv1.Side
	Engine       string
	Rank, World  int
	Model, Shape connector.Fingerprint // ranks only, as all below
	ShapeText    string
	Layout       connector.Layout
	Region       int64 // bytes
	Hashes       string
	Events       bool // the scheduler asks which blocks come and go
}

// ReadFrame reads one frame of the agent protocol. It allocates as the bytes arrive, not for what the
// peer says. io.EOF is the end between two frames; a frame that is cut off is io.ErrUnexpectedEOF, one
// beyond MaxMessage wraps ErrMalformed.
func ReadFrame(r io.Reader) ([]byte, error) {
	var head [frameHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	size := binary.LittleEndian.Uint32(head[:])
	if size == 0 || size > MaxMessage {
		return nil, malformed("frame of %d bytes, want 1..%d", size, MaxMessage)
	}
	var frame bytes.Buffer
	frame.Grow(min(int(size), firstRoom) + bytes.MinRead) // CopyN asks for that much before it sees the end
	_, err := io.CopyN(&frame, r, int64(size))
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return frame.Bytes(), err
}

// AgentFrame encodes a message of the agent protocol with its length before it.
func AgentFrame(m proto.Message) ([]byte, error) {
	out, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, frameHead, 256), m)
	if err != nil {
		return nil, fmt.Errorf("frame: %w", err)
	}
	if len(out)-frameHead > MaxMessage {
		return nil, malformed("frame of %d bytes, limit %d", len(out)-frameHead, MaxMessage)
	}
	binary.LittleEndian.PutUint32(out, uint32(len(out)-frameHead))
	return out, nil
}

// AgentCallFromFrame decodes what a process of an engine sent. One that holds no call this build
// knows, or whose id does not fit the call, wraps ErrMalformed.
func AgentCallFromFrame(frame []byte) (*kvportv1.AgentCall, error) {
	m := &kvportv1.AgentCall{}
	if err := CheckSize(frame, m.ProtoReflect().Descriptor()); err != nil {
		return nil, err
	}
	if err := proto.Unmarshal(frame, m); err != nil {
		return nil, fmt.Errorf("call: %w: %w", err, ErrMalformed)
	}
	if m.GetCall() == nil {
		return nil, malformed("call %d is of no known kind", m.GetId())
	}
	if _, step := m.GetCall().(*kvportv1.AgentCall_Step); step != (m.GetId() == 0) {
		return nil, malformed("a %T has id %d: a step has none, every other call has one", m.GetCall(), m.GetId())
	}
	if len(m.GetLayerWise()) > 0 && m.GetStep() == nil {
		return nil, malformed("a %T with layer_wise: only a step begins loads", m.GetCall())
	}
	if err := checkAhead(m); err != nil {
		return nil, err
	}
	return m, nil
}

// MaxAhead is how many questions a match may bring ahead: the loads of other requests wait while they are taken in.
const MaxAhead = 63

// checkAhead refuses questions ahead beside anything but the match of a request, and probes among them: those wait for
// answers of their own. A request has one question in a call: of two, it would not be said which one is answered. And a
// ticket counts as used once it was asked with.
func checkAhead(m *kvportv1.AgentCall) error {
	if len(m.GetAhead()) == 0 {
		return nil
	}
	first := m.GetMatch().GetRequest()
	if first == "" {
		return malformed("a %T with ahead: only the match of a request brings others", m.GetCall())
	}
	if n := len(m.GetAhead()); n > MaxAhead {
		return malformed("%d questions ahead, at most %d", n, MaxAhead)
	}
	seen := map[string]bool{first: true}
	for i, q := range m.GetAhead() {
		id := q.GetRequest()
		if id == "" {
			return malformed("ahead[%d].request is empty", i)
		}
		if len(q.GetTicket()) > 0 {
			return malformed("ahead[%d] has a ticket, which comes with the engine's own question", i)
		}
		if seen[id] {
			return malformed("ahead[%d].request is %q, which the call asks about already", i, id)
		}
		seen[id] = true
	}
	return nil
}

// AttachFromProto converts an Attach and checks that a rank's layout, with the digests that will be
// added, can lie within its region; that it does is for the agent to see. Errors name the field.
func AttachFromProto(m *kvportv1.AgentAttach) (*Attach, error) {
	if m.GetVersion() != AgentVersion {
		return nil, malformed("attach.version is %d, this agent speaks %d: use engine shim and kvport of one release", m.GetVersion(), AgentVersion)
	}
	a := &Attach{Side: m.GetSide(), Engine: m.GetEngine(), ShapeText: text(m.GetShapeText()), Hashes: m.GetHashes()}
	if a.Engine == "" {
		return nil, malformed("attach.engine is empty")
	}
	for _, s := range []struct{ name, value string }{{"attach.engine", a.Engine}, {"attach.hashes", a.Hashes}} {
		if err := short(s.name, s.value, MaxName); err != nil {
			return nil, err
		}
	}
	if a.Side == kvportv1.Side_SIDE_SCHEDULER {
		return a, nil
	}
	if a.Side != kvportv1.Side_SIDE_WORKER {
		return nil, malformed("attach.side is %d", m.GetSide())
	}
	return a, a.rank(m)
}

// rank reads what only a rank says.
func (a *Attach) rank(m *kvportv1.AgentAttach) error {
	if m.GetWorld() == 0 || m.GetWorld() > MaxWorld || m.GetRank() >= m.GetWorld() {
		return malformed("attach: rank %d of %d, limit %d", m.GetRank(), m.GetWorld(), MaxWorld)
	}
	a.Rank, a.World = int(m.GetRank()), int(m.GetWorld())
	if len(m.GetModel()) != len(a.Model) || len(m.GetShape()) != len(a.Shape) {
		return malformed("attach: model has %d bytes and shape %d, want %d", len(m.GetModel()), len(m.GetShape()), len(a.Model))
	}
	copy(a.Model[:], m.GetModel())
	copy(a.Shape[:], m.GetShape())
	if a.Hashes == "" {
		return malformed("attach.hashes is empty")
	}
	if m.GetRegion() == 0 || m.GetRegion() > math.MaxInt64 {
		return malformed("attach.region is %d bytes", m.GetRegion())
	}
	a.Region, a.Events = int64(m.GetRegion()), m.GetEvents()
	l, err := LayoutFromProto(m.GetLayout())
	if err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	for i := range l.Segments {
		if l.Segments[i].Layer < 0 {
			return malformed("attach: layout.segments[%d].layer is %d: digests are the agent's to add", i, l.Segments[i].Layer)
		}
	}
	a.Layout = *l
	if err := l.Validate([]int64{a.Region}); err != nil {
		return err
	}
	return apart(l)
}

// apart returns an error if two segments of a group have bytes in common: a block's layers would overwrite each
// other. Groups may share memory, because a block belongs to one of them at a time.
func apart(l *connector.Layout) error {
	order := make([]int, len(l.Segments))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int {
		a, b := &l.Segments[i], &l.Segments[j]
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Offset, b.Offset))
	})
	for len(order) > 0 {
		n, even := mixed(l, order)
		for j := range n {
			for i := 0; i < j; i++ {
				if overlap(l, order[i], order[j]) {
					return malformed("attach: layout.segments[%d] and layout.segments[%d] of group %d overlap",
						min(order[i], order[j]), max(order[i], order[j]), l.Segments[order[i]].Group)
				}
				if even {
					i = max(i, j-2) // what lies between the first and the last is apart from the last if its neighbour is
				}
			}
		}
		order = order[n:]
	}
	return nil
}

// mixed counts the segments at the beginning of order whose blocks may lie between those of one another. even says
// that they are the parts of blocks that follow one another: their strides are equal, and all begin within one.
func mixed(l *connector.Layout, order []int) (n int, even bool) {
	first, end := &l.Segments[order[0]], int64(0)
	even = true
	for _, i := range order {
		s := &l.Segments[i]
		if n > 0 && (s.Group != first.Group || s.Offset >= end) {
			break
		}
		n++
		end = max(end, s.Offset+int64(l.Blocks-1)*s.BlockStride+s.Bytes)
		even = even && s.BlockStride == first.BlockStride && s.Offset-first.Offset < s.BlockStride
	}
	return n, even
}

// overlap reports whether two segments, of which i begins first, have bytes in common.
func overlap(l *connector.Layout, i, j int) bool {
	a, b := &l.Segments[i], &l.Segments[j]
	if b.Offset >= a.Offset+int64(l.Blocks-1)*a.BlockStride+a.Bytes {
		return false
	}
	// Distances between their blocks are this one plus multiples of what divides both strides.
	step := gcd(a.BlockStride, b.BlockStride)
	gap := (b.Offset - a.Offset) % step
	return gap < a.Bytes || gap+b.Bytes > step
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
