// Package zmtp speaks ZMTP 3.0, ZeroMQ's protocol, over one connection: as much of it as a publisher, a
// subscriber and the two ends of a request need, without encryption. Unlike the libraries for Go it bounds what
// a peer may send before memory is allocated for it.
package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
)

// The socket types that take part here, as ZMTP names them.
const (
	Pub    = "PUB"
	Sub    = "SUB"
	XSub   = "XSUB"
	Router = "ROUTER"
	Dealer = "DEALER"
	Req    = "REQ"
)

// ErrProtocol says that a peer does not speak ZMTP 3 or exceeds a limit. The connection is of no use any more.
var ErrProtocol = errors.New("zmtp")

// The limits of a peer.
const (
	maxFrames    = 16      // of a message
	maxCommand   = 4 << 10 // bytes of a command
	maxHandshake = 512     // bytes of the READY command
)

// The flags of a frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// Conn is a connection whose handshake is over. One goroutine may receive while others send.
type Conn struct {
	conn  net.Conn
	in    *bufio.Reader
	limit int

	mu sync.Mutex // of writing
}

// Open makes the handshake as a socket of type own. It accepts peers of the given types. limit bounds the bytes of a
// message that is received. The caller sets deadlines and closes conn, also after an error. Errors that are the
// peer's fault wrap ErrProtocol.
func Open(conn net.Conn, limit int, own string, peers ...string) (*Conn, error) {
	c := &Conn{conn: conn, in: bufio.NewReaderSize(conn, 16<<10), limit: limit}
	if _, err := conn.Write(greeting()); err != nil {
		return nil, err
	}
	var theirs [64]byte
	if _, err := io.ReadFull(c.in, theirs[:]); err != nil {
		return nil, err
	}
	if err := checkGreeting(theirs[:]); err != nil {
		return nil, err
	}
	if err := c.sendCommand(ready(own)); err != nil {
		return nil, err
	}
	flags, size, err := c.header()
	if err != nil {
		return nil, err
	}
	if flags&flagCommand == 0 || size > maxHandshake {
		return nil, fmt.Errorf("%w: the handshake is not a READY command", ErrProtocol)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(c.in, body); err != nil {
		return nil, err
	}
	return c, checkReady(body, peers)
}

// greeting is what a connection begins with: signature, version 3.0, mechanism NULL.
func greeting() []byte {
	g := make([]byte, 64)
	g[0], g[9], g[10] = 0xff, 0x7f, 3
	copy(g[12:], "NULL")
	return g
}

func checkGreeting(g []byte) error {
	mechanism := string(bytes.TrimRight(g[12:32], "\x00"))
	switch {
	case g[0] != 0xff || g[9] != 0x7f:
		return fmt.Errorf("%w: the peer does not speak ZMTP", ErrProtocol)
	case g[10] < 3:
		return fmt.Errorf("%w: the peer speaks version %d, want 3", ErrProtocol, g[10])
	case mechanism != "NULL":
		return fmt.Errorf("%w: the peer asks for security mechanism %.20q, only NULL is spoken", ErrProtocol, mechanism)
	}
	return nil
}

// ready is the command that ends the handshake.
func ready(socket string) []byte {
	b := append([]byte{5}, "READY"...)
	for _, property := range [][2]string{{"Socket-Type", socket}, {"Identity", ""}} {
		b = append(append(b, byte(len(property[0]))), property[0]...)
		b = append(binary.BigEndian.AppendUint32(b, uint32(len(property[1]))), property[1]...)
	}
	return b
}

// checkReady reads a READY command and sees to it that the peer's type fits.
func checkReady(body []byte, peers []string) error {
	name, rest, ok := shortString(body)
	if !ok || name != "READY" {
		return fmt.Errorf("%w: the peer answers the handshake with %.40q", ErrProtocol, name)
	}
	for len(rest) > 0 {
		var property string
		if property, rest, ok = shortString(rest); !ok || len(rest) < 4 {
			return fmt.Errorf("%w: the handshake is cut short", ErrProtocol)
		}
		size := binary.BigEndian.Uint32(rest)
		if rest = rest[4:]; uint64(size) > uint64(len(rest)) {
			return fmt.Errorf("%w: the handshake is cut short", ErrProtocol)
		}
		if value := string(rest[:size]); property == "Socket-Type" {
			if !slices.Contains(peers, value) {
				return fmt.Errorf("%w: the peer is a socket of type %.10q, want one of %q", ErrProtocol, value, peers)
			}
			return nil
		}
		rest = rest[size:]
	}
	return fmt.Errorf("%w: the peer does not say its socket type", ErrProtocol)
}

// shortString reads a text behind its length in one byte.
func shortString(b []byte) (text string, rest []byte, ok bool) {
	if len(b) == 0 || len(b) < 1+int(b[0]) {
		return "", nil, false
	}
	n := 1 + int(b[0])
	return string(b[1:n]), b[n:], true
}

// Receive waits for the next message and returns its frames, which the caller owns. A subscription is a message of
// one frame, whichever way the peer sends it: 1 or 0, for its end, and then the topic. Errors that are the peer's
// fault wrap ErrProtocol.
func (c *Conn) Receive() ([][]byte, error) {
	var frames [][]byte
	room := c.limit
	for {
		flags, size, err := c.header()
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if frame, err := c.command(flags, size); err != nil || frame != nil {
				return [][]byte{frame}, err
			}
			continue
		}
		if len(frames) == maxFrames || size > uint64(room) {
			return nil, fmt.Errorf("%w: a message has over %d bytes or %d frames", ErrProtocol, c.limit, maxFrames)
		}
		room -= int(size)
		frame := make([]byte, size)
		if _, err := io.ReadFull(c.in, frame); err != nil {
			return nil, unexpected(err)
		}
		if frames = append(frames, frame); flags&flagMore == 0 {
			return frames, nil
		}
	}
}

// header reads what comes before each frame.
func (c *Conn) header() (flags byte, size uint64, err error) {
	if flags, err = c.in.ReadByte(); err != nil {
		return 0, 0, err
	}
	if flags&flagLong == 0 {
		n, err := c.in.ReadByte()
		return flags, uint64(n), unexpected(err)
	}
	var long [8]byte
	_, err = io.ReadFull(c.in, long[:])
	return flags, binary.BigEndian.Uint64(long[:]), unexpected(err)
}

// unexpected is the error of an end within a message.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// command deals with a command. A subscription is returned as the frame of a message.
func (c *Conn) command(flags byte, size uint64) (frame []byte, err error) {
	if size > maxCommand || flags&flagMore != 0 {
		return nil, fmt.Errorf("%w: a command of %d bytes", ErrProtocol, size)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(c.in, body); err != nil {
		return nil, unexpected(err)
	}
	name, rest, ok := shortString(body)
	switch {
	case !ok:
		return nil, fmt.Errorf("%w: a command without a name", ErrProtocol)
	case name == "SUBSCRIBE":
		return append([]byte{1}, rest...), nil
	case name == "CANCEL":
		return append([]byte{0}, rest...), nil
	case name == "PING" && len(rest) >= 2: // its time to live, and what the answer repeats
		return nil, c.sendCommand(append([]byte("\x04PONG"), rest[2:]...))
	}
	return nil, nil // commands of later versions
}

// Send sends a message.
func (c *Conn) Send(frames ...[]byte) error {
	var out net.Buffers
	for i, frame := range frames {
		flags := byte(0)
		if i < len(frames)-1 {
			flags = flagMore
		}
		out = append(out, frameHeader(flags, len(frame)), frame)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := out.WriteTo(c.conn)
	return err
}

// sendCommand sends a command.
func (c *Conn) sendCommand(body []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.conn.Write(append(frameHeader(flagCommand, len(body)), body...))
	return err
}

func frameHeader(flags byte, size int) []byte {
	if size < 256 {
		return []byte{flags, byte(size)}
	}
	return binary.BigEndian.AppendUint64([]byte{flags | flagLong}, uint64(size))
}
