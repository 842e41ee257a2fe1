package tcp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// A frame on the wire has a prefix of 32 bytes, the header, the payload, and 8 bytes of digest over all
// that. The receiver answers with acknowledgements of 8 bytes: the number of the last frame that it has.
const (
	magic      = 0x6b767031 // "kvp1"
	prefixSize = 32
	digestSize = 8
	// bufferSize is how many bytes of small parts are read or written together. A larger buffer would copy
	// payload that now goes straight to its place; a smaller one would need a system call for each part of
	// a frame.
	bufferSize = 4 << 10
	// piece is how many bytes are hashed at a time: few enough to be in the CPU's cache when they are
	// copied.
	piece = 256 << 10
)

// Flags of a frame.
const (
	flagClose  = 1 << iota // the last one: the sender has closed
	flagDigest             // the digest covers the payload too, not only prefix and header
)

// prefix is the fixed part of a frame.
type prefix struct {
	flags   uint32
	number  uint64 // of the frame in its direction, from 1
	header  int
	payload int
}

func (p *prefix) encode(to []byte) {
	binary.LittleEndian.PutUint32(to, magic)
	binary.LittleEndian.PutUint32(to[4:], p.flags)
	binary.LittleEndian.PutUint64(to[8:], p.number)
	binary.LittleEndian.PutUint64(to[16:], uint64(p.header))
	binary.LittleEndian.PutUint64(to[24:], uint64(p.payload))
}

// parsePrefix reads the fixed part of a frame. Errors wrap connector.ErrIncompatible.
func parsePrefix(b []byte) (prefix, error) {
	p := prefix{flags: binary.LittleEndian.Uint32(b[4:]), number: binary.LittleEndian.Uint64(b[8:])}
	header, payload := binary.LittleEndian.Uint64(b[16:]), binary.LittleEndian.Uint64(b[24:])
	switch {
	case binary.LittleEndian.Uint32(b) != magic || p.flags&^(flagClose|flagDigest) != 0 || p.number == 0:
		return p, fmt.Errorf("the bytes that arrived are not a frame: %w", connector.ErrIncompatible)
	case header > pipe.MaxHeader || payload > pipe.MaxPayload:
		return p, fmt.Errorf("frame with a header of %d and a payload of %d bytes is too large: %w", header, payload, connector.ErrIncompatible)
	}
	p.header, p.payload = int(header), int(payload)
	return p, nil
}

// frameWriter writes frames to one connection. It keeps its buffers from frame to frame.
type frameWriter struct {
	conn    net.Conn
	gather  *bufio.Writer // nil: the connection writes several slices with one system call
	small   []byte        // heads and tails of frames in spans
	hash    xxh3.Hasher
	spans   net.Buffers // not yet written
	pending int         // bytes of spans
}

func newFrameWriter(conn net.Conn) *frameWriter {
	w := &frameWriter{conn: conn}
	if _, vector := conn.(*net.TCPConn); !vector {
		w.gather = bufio.NewWriterSize(conn, bufferSize)
	}
	return w
}

// add writes one frame, without copying its payload, except for the part that the next flush writes.
func (w *frameWriter) add(p prefix, header []byte, spans [][]byte) error {
	at := len(w.small)
	w.small = append(w.small, make([]byte, prefixSize)...)
	p.encode(w.small[at:])
	w.small = append(w.small, header...)
	w.hash.Reset()
	_, _ = w.hash.Write(w.small[at:]) // never fails
	w.append(w.small[at:])
	for _, s := range spans {
		for len(s) > 0 {
			n := min(len(s), piece)
			if p.flags&flagDigest != 0 {
				_, _ = w.hash.Write(s[:n])
			}
			w.append(s[:n])
			s = s[n:]
			if w.pending >= piece {
				if err := w.flush(); err != nil {
					return err
				}
			}
		}
	}
	at = len(w.small)
	w.small = binary.LittleEndian.AppendUint64(w.small, w.hash.Sum64())
	w.append(w.small[at:])
	return nil
}

func (w *frameWriter) append(b []byte) { w.spans, w.pending = append(w.spans, b), w.pending+len(b) }

// flush writes the buffered bytes and spans.
func (w *frameWriter) flush() error {
	defer func() { w.spans, w.small, w.pending = w.spans[:0], w.small[:0], 0 }()
	if w.gather == nil {
		buffers := w.spans // WriteTo consumes its receiver
		_, err := buffers.WriteTo(w.conn)
		return err
	}
	for _, s := range w.spans {
		if _, err := w.gather.Write(s); err != nil {
			return err
		}
	}
	return w.gather.Flush()
}

// frameReader reads frames from one connection.
type frameReader struct {
	in     *bufio.Reader // nil until the first connection
	prefix [prefixSize]byte
	header []byte
	hash   xxh3.Hasher
}

// begin reads prefix and header of a frame. The header is valid until the next call.
func (r *frameReader) begin() (prefix, error) {
	if _, err := io.ReadFull(r.in, r.prefix[:]); err != nil {
		return prefix{}, err
	}
	p, err := parsePrefix(r.prefix[:])
	if err != nil {
		return p, err
	}
	if cap(r.header) < p.header {
		r.header = make([]byte, p.header)
	}
	r.header = r.header[:p.header]
	if _, err := io.ReadFull(r.in, r.header); err != nil {
		return p, err
	}
	r.hash.Reset()
	_, _ = r.hash.Write(r.prefix[:]) // never fails
	_, _ = r.hash.Write(r.header)
	return p, nil
}

// fill reads the payload into spans and checks the digest.
func (r *frameReader) fill(p *prefix, spans [][]byte) error {
	for _, s := range spans {
		for len(s) > 0 {
			n := min(len(s), piece)
			if _, err := io.ReadFull(r.in, s[:n]); err != nil {
				return err
			}
			if p.flags&flagDigest != 0 {
				_, _ = r.hash.Write(s[:n])
			}
			s = s[n:]
		}
	}
	return r.end()
}

// skip reads the payload of a frame that was refused.
func (r *frameReader) skip(p *prefix) error {
	scratch := make([]byte, min(p.payload, piece))
	for left := p.payload; left > 0; {
		n := min(left, len(scratch))
		if err := r.part(p, scratch[:n]); err != nil {
			return err
		}
		left -= n
	}
	return r.end()
}

func (r *frameReader) part(p *prefix, to []byte) error {
	if _, err := io.ReadFull(r.in, to); err != nil {
		return err
	}
	if p.flags&flagDigest != 0 {
		_, _ = r.hash.Write(to)
	}
	return nil
}

// errDamaged says that a frame's digest differs. The connection is then given up, and the frame is sent
// again.
var errDamaged = errors.New("digest of a frame differs")

func (r *frameReader) end() error {
	var sum [digestSize]byte
	if _, err := io.ReadFull(r.in, sum[:]); err != nil {
		return err
	}
	if binary.LittleEndian.Uint64(sum[:]) != r.hash.Sum64() {
		return fmt.Errorf("%w: %w", errDamaged, connector.ErrCorrupt)
	}
	return nil
}

// wait waits for the first byte of a frame.
func (r *frameReader) wait() error {
	_, err := r.in.Peek(1)
	return err
}

// more reports whether bytes of another frame are here.
func (r *frameReader) more() bool { return r.in != nil && r.in.Buffered() > 0 }
