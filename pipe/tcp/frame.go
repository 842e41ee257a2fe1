package tcp

import (
	"bufio"
	"crypto/tls"
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
			if err := r.part(p, s[:n]); err != nil {
				return err
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

// A connection begins with the dialer's hello (link, direction, frames delivered) and the listener's answer
// (verdict, frames delivered). If there is a key, the proof begins after the hello: the listener first
// answers verdictProve, both ends prove that they have the key (see [pipe.Prove]), and until that has
// succeeded the listener keeps nothing of the hello. From then on, frames flow in one direction and
// acknowledgements in the other.
//
// Without a key, or with TLS, everything is as in version 1, which had no keys. A peer of version 1 reads a
// hello of version 2, which has the same length, answers verdictVersion, and hangs up.
const (
	helloMagic   = 0x6b767048 // "kvpH"
	plainVersion = 1
	keyedVersion = 2
	helloSize    = 4 + 1 + 1 + 1 + 16 + 8
	answerSize   = 4 + 1 + 8
)

// The listener's verdicts.
const (
	verdictNew     = 1 // the link begins
	verdictAgain   = 2 // the link continues
	verdictUnknown = 3 // the link is over: this end has forgotten it
	verdictVersion = 4 // the listener's version takes the place of the frames; version 1 says 0
	verdictProve   = 5 // the dialer must prove that it has the key
)

type linkID [16]byte

// hello is the dialer's first message.
type hello struct {
	link      linkID
	outward   bool   // the dialer sends on this connection
	keyed     bool   // both ends must prove that they have the key
	again     bool   // the link existed before
	delivered uint64 // frames that the dialer has received on the link, if it is the receiver
}

func (h *hello) encode() []byte {
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, helloSize), helloMagic)
	b = append(b, h.version(), flag(h.outward), flag(h.again))
	b = append(b, h.link[:]...)
	return binary.LittleEndian.AppendUint64(b, h.delivered)
}

func (h *hello) version() byte { return version(h.keyed) }

func version(keyed bool) byte {
	if keyed {
		return keyedVersion
	}
	return plainVersion
}

func flag(set bool) byte {
	if set {
		return 1
	}
	return 0
}

// parseHello reads a hello. Errors wrap connector.ErrIncompatible.
func parseHello(b []byte) (hello, error) {
	if len(b) != helloSize || binary.LittleEndian.Uint32(b) != helloMagic || b[5] > 1 || b[6] > 1 {
		return hello{}, fmt.Errorf("the peer that connected does not speak kvport's protocol: %w", connector.ErrIncompatible)
	}
	if b[4] != plainVersion && b[4] != keyedVersion {
		return hello{}, otherVersion(uint64(b[4]))
	}
	return hello{
		link: linkID(b[7:]), outward: b[5] == 1, keyed: b[4] == keyedVersion, again: b[6] == 1,
		delivered: binary.LittleEndian.Uint64(b[23:]),
	}, nil
}

// otherVersion is the error for a peer that speaks another version of the protocol.
func otherVersion(theirs uint64) error {
	why := "which is unknown here"
	switch theirs {
	case plainVersion:
		why = "which does not prove a link key, but this end requires one: the peer is an older release of the plugin, or has a key_file that this end lacks"
	case keyedVersion:
		why = "which requires a link key, but this end has none: this end has a key_file that the peer lacks, or no key at all"
	}
	return fmt.Errorf("peer speaks version %d, %s: %w", theirs, why, connector.ErrIncompatible)
}

func encodeAnswer(verdict byte, delivered uint64) []byte {
	b := append(binary.LittleEndian.AppendUint32(nil, helloMagic), verdict)
	return binary.LittleEndian.AppendUint64(b, delivered)
}

// readAnswer reads the listener's verdict.
func readAnswer(conn net.Conn) (verdict byte, delivered uint64, err error) {
	var b [answerSize]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return 0, 0, err
	}
	if binary.LittleEndian.Uint32(b[:]) != helloMagic {
		return 0, 0, fmt.Errorf("the listener does not speak kvport's protocol: %w", connector.ErrIncompatible)
	}
	switch verdict = b[4]; verdict {
	case verdictNew, verdictAgain, verdictProve:
		return verdict, binary.LittleEndian.Uint64(b[5:]), nil
	case verdictUnknown:
		return verdict, 0, fmt.Errorf("the peer has forgotten the link: %w", connector.ErrGone)
	case verdictVersion:
		return verdict, 0, otherVersion(max(1, binary.LittleEndian.Uint64(b[5:])))
	}
	return verdict, 0, fmt.Errorf("the peer refused us, verdict %d: %w", verdict, connector.ErrIncompatible)
}

// KeyTLS is [pipe.KeyTLS].
func KeyTLS(key []byte, more ...[]byte) (*tls.Config, error) { return pipe.KeyTLS(key, more...) }
