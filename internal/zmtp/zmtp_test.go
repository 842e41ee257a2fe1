package zmtp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// pair opens both ends of a connection.
func pair(t *testing.T, limit int, a, b string) (*Conn, *Conn) {
	x, y := net.Pipe()
	t.Cleanup(func() { _, _ = x.Close(), y.Close() })
	type opened struct {
		c   *Conn
		err error
	}
	other := make(chan opened, 1)
	go func() {
		c, err := Open(&buffered{Conn: y}, limit, b, a)
		other <- opened{c, err}
	}()
	c, err := Open(&buffered{Conn: x}, limit, a, b)
	require.NoError(t, err)
	o := <-other
	require.NoError(t, o.err)
	return c, o.c
}

// buffered makes a pipe of which writes do not wait for reads, as those of sockets do not.
type buffered struct {
	net.Conn
	last chan struct{} // closed when the writes before are through
}

func (b *buffered) Write(p []byte) (int, error) {
	before, done := b.last, make(chan struct{})
	b.last = done
	p = bytes.Clone(p)
	go func() {
		defer close(done)
		if before != nil {
			<-before
		}
		_, _ = b.Conn.Write(p)
	}()
	return len(p), nil
}

func TestMessages(t *testing.T) {
	pub, sub := pair(t, 1000, Pub, Sub)
	long := bytes.Repeat([]byte("x"), 300)
	require.NoError(t, pub.Send([]byte("topic"), nil, long))
	require.NoError(t, pub.Send([]byte("a")))
	got, err := sub.Receive()
	require.NoError(t, err)
	require.Equal(t, [][]byte{[]byte("topic"), {}, long}, got)
	got, err = sub.Receive()
	require.NoError(t, err)
	require.Equal(t, [][]byte{[]byte("a")}, got)

	require.NoError(t, sub.sendCommand([]byte("\x09SUBSCRIBEt")))
	require.NoError(t, sub.sendCommand([]byte("\x06CANCELt")))
	require.NoError(t, sub.sendCommand([]byte("\x05OTHER")))
	require.NoError(t, sub.sendCommand([]byte("\x04PING\x00\x00echo")))
	require.NoError(t, sub.Send([]byte("\x01t")))
	for _, want := range []string{"\x01t", "\x00t", "\x01t"} {
		got, err = pub.Receive()
		require.NoError(t, err)
		require.Equal(t, [][]byte{[]byte(want)}, got)
	}
	flags, size, err := sub.header()
	require.NoError(t, err)
	pong := make([]byte, size)
	_, err = io.ReadFull(sub.in, pong)
	require.NoError(t, err)
	require.Equal(t, byte(flagCommand), flags)
	require.Equal(t, "\x04PONGecho", string(pong))
}

// A peer that says it will send more than allowed is refused before memory is taken for it.
func TestLimits(t *testing.T) {
	for name, raw := range map[string][]byte{
		"long":     append([]byte{flagLong}, bytes.Repeat([]byte{0xff}, 8)...),
		"sum":      append(append([]byte{flagMore, 200}, make([]byte, 200)...), flagMore, 200),
		"frames":   bytes.Repeat([]byte{flagMore, 0}, maxFrames+1),
		"command":  {flagCommand | flagLong, 0, 0, 0, 0, 0xff, 0, 0, 0},
		"nameless": {flagCommand, 1, 9},
	} {
		pub, sub := pair(t, 300, Pub, Sub)
		_, err := sub.conn.Write(raw)
		require.NoError(t, err)
		_, err = pub.Receive()
		require.ErrorIs(t, err, ErrProtocol, name)
	}
}

func TestHandshakes(t *testing.T) {
	plain := greeting()
	copy(plain[12:], "PLAIN")
	old := greeting()
	old[10] = 1
	ok := string(greeting())
	for name, c := range map[string]struct{ raw, message string }{
		"http":     {"HTTP/1.1 400 Bad Request" + strings.Repeat(" ", 64), "does not speak ZMTP"},
		"plain":    {string(plain), `mechanism "PLAIN"`},
		"old":      {string(old), "version 1, want 3"},
		"message":  {ok + "\x00\x01a", "not a READY"},
		"large":    {ok + "\x06\x00\x00\x00\x00\xff\xff\xff\xff", "not a READY"},
		"error":    {ok + "\x04\x06\x05ERROR", `answers the handshake with "ERROR"`},
		"short":    {ok + "\x04\x08\x05READY\x01a", "cut short"},
		"value":    {ok + "\x04\x0c\x05READY\x01a\x00\x00\x00\x09", "cut short"},
		"untyped":  {ok + "\x04\x0c\x05READY\x01a\x00\x00\x00\x00", "does not say its socket type"},
		"mismatch": {ok + "\x04" + string(rune(len(ready(Pub)))) + string(ready(Pub)), `of type "PUB"`},
	} {
		x, y := net.Pipe()
		peer := &buffered{Conn: y}
		_, _ = peer.Write([]byte(c.raw))
		go func() { _, _ = io.Copy(io.Discard, y) }()
		_, err := Open(x, 100, Pub, Sub, XSub)
		require.ErrorIs(t, err, ErrProtocol, name)
		require.ErrorContains(t, err, c.message, name)
		_, _ = x.Close(), y.Close()
	}
	x, y := net.Pipe()
	_ = y.Close()
	_, err := Open(x, 100, Pub, Sub)
	require.Error(t, err)
	require.NotErrorIs(t, err, ErrProtocol)
}

func TestEndpoints(t *testing.T) {
	for text, want := range map[string]Endpoint{
		"ipc:///run/a.sock":    {"unix", "/run/a.sock"},
		"tcp://*:5557":         {"tcp", ":5557"},
		"tcp://127.0.0.1:5557": {"tcp", "127.0.0.1:5557"},
		"tcp://[::1]:5557":     {"tcp", "[::1]:5557"},
	} {
		got, err := ParseEndpoint(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got)
		require.Equal(t, text, got.String())
	}
	for _, text := range []string{"", "ipc://", "ipc://@name", "inproc://a", "tcp://host", "tcp://host:http", "tcp://a:70000", "udp://a:1", "/run/a"} {
		_, err := ParseEndpoint(text)
		require.ErrorContains(t, err, "want ipc://PATH or tcp://HOST:PORT", text)
	}
}

// Whatever a peer sends, Receive ends with a message or an error.
func FuzzReceive(f *testing.F) {
	f.Add([]byte("\x00\x01a\x01\x01b\x00\x01c\x04\x05\x04PING"))
	f.Add([]byte{flagLong, 0, 0, 0, 0, 0, 0, 0, 1, 5})
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := Open(&fed{in: bytes.NewReader(append(append(greeting(), frameHeader(flagCommand, len(ready(Sub)))...), append(ready(Sub), raw...)...))}, 1000, Pub, Sub)
		require.NoError(t, err)
		for {
			frames, err := c.Receive()
			if err != nil {
				require.True(t, errors.Is(err, ErrProtocol) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF), err)
				return
			}
			require.NotEmpty(t, frames)
		}
	})
}

// fed is a connection that has all its input already.
type fed struct {
	net.Conn
	in *bytes.Reader
}

func (f *fed) Read(p []byte) (int, error)       { return f.in.Read(p) }
func (f *fed) Write(p []byte) (int, error)      { return len(p), nil }
func (f *fed) SetReadDeadline(time.Time) error  { return nil }
func (f *fed) SetWriteDeadline(time.Time) error { return nil }
