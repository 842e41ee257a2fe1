package shm

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// A ring is the memory of one direction: a page of control words, followed by a power of two of bytes. Both
// ends map it. head and tail only grow; the sender alone moves head, the receiver alone tail.
type ring struct {
	control *control
	data    []byte
}

// control is the first page of a ring. Words that different ends write are in different cache lines.
type control struct {
	head       atomic.Uint64 // bytes that were written
	sendClosed atomic.Uint32
	sendWaits  atomic.Uint32 // the sender asks for a bell when there is room
	_          [48]byte
	tail       atomic.Uint64 // bytes that were read
	recvClosed atomic.Uint32
	recvWaits  atomic.Uint32 // the receiver asks for a bell when there are bytes
}

// The sizes of a ring, in bytes.
const (
	controlSize = 4096
	minData     = 256 << 10 // more than any header
	maxData     = 1 << 30
)

func newRing(memory []byte) ring {
	return ring{(*control)(unsafe.Pointer(unsafe.SliceData(memory))), memory[controlSize:]} //nolint:gosec // a page is aligned
}

// used is how many bytes are written and not yet read. The other end may have written anything, so an
// impossible number is connector.ErrCorrupt.
func (r *ring) used() (int, error) {
	n := r.control.head.Load() - r.control.tail.Load()
	if n > uint64(len(r.data)) {
		return 0, fmt.Errorf("ring of %d bytes says it holds %d: %w", len(r.data), n, connector.ErrCorrupt)
	}
	return int(n), nil
}

// put copies b to byte at of the stream. The receiver does not see it before head moves.
func (r *ring) put(at uint64, b []byte) {
	i := int(at & uint64(len(r.data)-1))
	n := copy(r.data[i:], b)
	copy(r.data, b[n:])
}

// get copies from byte at of the stream.
func (r *ring) get(at uint64, b []byte) {
	i := int(at & uint64(len(r.data)-1))
	n := copy(b, r.data[i:])
	copy(b[n:], r.data)
}

// The stream consists of chunks: a word with the length, a word with the kind, and the bytes.
const (
	chunkHead  = 8
	frameHead  = 16        // a begin's: length of the header, 4 bytes of 0, length of the payload
	kindBegin  = 1         // frameHead, then the header
	kindMore   = 2         // a part of the payload
	kindAbort  = 3         // the frame ends here: its Send was given up
	reserve    = chunkHead // always left free by begin and more, so that an abort has room
	beginBytes = chunkHead + frameHead
)

// chunk is the head of a chunk.
type chunk struct {
	length int
	kind   uint32
}

func (c chunk) encode() (b [chunkHead]byte) {
	binary.LittleEndian.PutUint32(b[:], uint32(c.length))
	binary.LittleEndian.PutUint32(b[4:], c.kind)
	return b
}

// parseChunk reads the head of a chunk; no more than most bytes are written after it. left is how much is
// still to come of a frame that has begun. Errors wrap connector.ErrCorrupt.
func parseChunk(b []byte, most, left int) (chunk, error) {
	c := chunk{int(binary.LittleEndian.Uint32(b)), binary.LittleEndian.Uint32(b[4:])}
	bad := c.length > most
	switch c.kind {
	case kindBegin:
		bad = bad || left > 0 || c.length < frameHead || c.length > frameHead+pipe.MaxHeader
	case kindMore:
		bad = bad || c.length == 0 || c.length > left
	case kindAbort:
		bad = bad || left == 0 || c.length != 0
	default:
		bad = true
	}
	if bad {
		return chunk{}, fmt.Errorf("chunk of kind %d and %d bytes: %w", c.kind, c.length, connector.ErrCorrupt)
	}
	return c, nil
}

func encodeFrame(header, payload int) (b [frameHead]byte) {
	binary.LittleEndian.PutUint32(b[:], uint32(header))
	binary.LittleEndian.PutUint64(b[8:], uint64(payload))
	return b
}

// parseFrame reads the start of a begin chunk of length bytes. Errors wrap connector.ErrCorrupt or
// ErrIncompatible.
func parseFrame(b []byte, length int) (header, payload int, err error) {
	header = int(binary.LittleEndian.Uint32(b))
	size := binary.LittleEndian.Uint64(b[8:])
	if header+frameHead != length || binary.LittleEndian.Uint32(b[4:]) != 0 || size > pipe.MaxPayload {
		return 0, 0, fmt.Errorf("frame with a header of %d bytes and %d more in a chunk of %d: %w", header, size, length, connector.ErrCorrupt)
	}
	return header, int(size), pipe.Check(header, int64(size))
}
