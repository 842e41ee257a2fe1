package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// A frame on the wire: 32 bytes of prefix, header, payload, 8 bytes of digest over all before it. The
// receiver answers each with an acknowledgement of 8 bytes: the number of the frame.
const (
	magic      = 0x6b767031 // "kvp1"
	prefixSize = 32
	digestSize = 8
	// piece is how much is hashed at a time: little enough to be in the cache when it is copied.
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
		return p, fmt.Errorf("what arrived is no frame: %w", connector.ErrIncompatible)
	case header > pipe.MaxHeader || payload > pipe.MaxPayload:
		return p, fmt.Errorf("frame with a header of %d and a payload of %d bytes is too large: %w", header, payload, connector.ErrIncompatible)
	}
	p.header, p.payload = int(header), int(payload)
	return p, nil
}

// frameWriter writes frames to one connection. It keeps its buffers from frame to frame.
type frameWriter struct {
	conn   net.Conn
	vector bool // the connection writes several slices with one system call
	head   []byte
	tail   [digestSize]byte
	hash   xxh3.Hasher
	spans  net.Buffers
}

// write writes one frame from where it lies.
func (w *frameWriter) write(p prefix, header []byte, spans [][]byte) error {
	if cap(w.head) < prefixSize+len(header) {
		w.head = make([]byte, prefixSize+len(header))
	}
	w.head = w.head[:prefixSize+len(header)]
	p.encode(w.head)
	copy(w.head[prefixSize:], header)
	w.hash.Reset()
	_, _ = w.hash.Write(w.head) // never fails
	w.spans = append(w.spans[:0], w.head)
	pending := len(w.head)
	for _, s := range spans {
		for len(s) > 0 {
			n := min(len(s), piece)
			if p.flags&flagDigest != 0 {
				_, _ = w.hash.Write(s[:n])
			}
			w.spans, pending, s = append(w.spans, s[:n]), pending+n, s[n:]
			if pending >= piece {
				if err := w.flush(); err != nil {
					return err
				}
				pending = 0
			}
		}
	}
	binary.LittleEndian.PutUint64(w.tail[:], w.hash.Sum64())
	w.spans = append(w.spans, w.tail[:])
	return w.flush()
}

func (w *frameWriter) flush() error {
	defer func() { w.spans = w.spans[:0] }()
	if w.vector {
		buffers := w.spans // WriteTo eats its receiver
		_, err := buffers.WriteTo(w.conn)
		return err
	}
	for _, s := range w.spans {
		if _, err := w.conn.Write(s); err != nil {
			return err
		}
	}
	return nil
}

// frameReader reads frames from one connection.
type frameReader struct {
	conn   net.Conn
	prefix [prefixSize]byte
	header []byte
	hash   xxh3.Hasher
}

// begin reads prefix and header of the frame whose first byte wait has read. The header is valid until the next call.
func (r *frameReader) begin() (prefix, error) {
	if _, err := io.ReadFull(r.conn, r.prefix[1:]); err != nil {
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
	if _, err := io.ReadFull(r.conn, r.header); err != nil {
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
			if _, err := io.ReadFull(r.conn, s[:n]); err != nil {
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
	if _, err := io.ReadFull(r.conn, to); err != nil {
		return err
	}
	if p.flags&flagDigest != 0 {
		_, _ = r.hash.Write(to)
	}
	return nil
}

// errDamaged says that a frame's digest differs. The connection is given up, and the frame sent anew.
var errDamaged = errors.New("digest of a frame differs")

func (r *frameReader) end() error {
	var sum [digestSize]byte
	if _, err := io.ReadFull(r.conn, sum[:]); err != nil {
		return err
	}
	if binary.LittleEndian.Uint64(sum[:]) != r.hash.Sum64() {
		return fmt.Errorf("%w: %w", errDamaged, connector.ErrCorrupt)
	}
	return nil
}

// wait waits for the first byte of a frame. began says that it came, or a part of what should follow.
func (r *frameReader) wait() (began bool, err error) {
	_, err = r.conn.Read(r.prefix[:1])
	return err == nil, err
}
