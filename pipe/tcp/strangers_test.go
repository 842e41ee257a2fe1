package tcp

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/pipetest"
)

func linkKey(b byte) connector.Secret { return bytes.Repeat([]byte{b}, 32) }

// keyed is a listener with a key.
func keyed(t *testing.T) (*Network, *listener) {
	t.Helper()
	n := &Network{Key: linkKey(1)}
	l, err := n.Listen(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	return n, l.(*listener)
}

func raw(t *testing.T, address string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(time.Minute)))
	return conn
}

func (l *listener) known() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.links)
}

// unproven is a hello, a nonce, an address and a wrong proof.
func unproven(h *hello, address string) []byte {
	b := append(h.encode(), make([]byte, 32)...)
	return append(append(append(b, byte(len(address))), address...), make([]byte, 32)...)
}

// A peer that has no key, or another one, gets no link, leaves nothing behind, and does not keep others
// out.
func TestKeyedListenerRefusesStrangers(t *testing.T) {
	n, l := keyed(t)
	for name, stranger := range map[string]*Network{"no key": {}, "another key": {Key: linkKey(2)}} {
		_, err := stranger.Dial(t.Context(), l.Address())
		require.ErrorIs(t, err, connector.ErrIncompatible, name)
		require.ErrorContains(t, err, "key", name)
	}

	hellos := map[string][]byte{
		"without a key": (&hello{link: linkID{1}, outward: true}).encode(),
		"no proof":      (&hello{link: linkID{1}, outward: true, keyed: true}).encode(),
		"wrong proof":   unproven(&hello{link: linkID{1}, keyed: true}, l.Address()),
		"of a link":     unproven(&hello{link: linkID{1}, keyed: true, again: true}, l.Address()),
		"elsewhere":     unproven(&hello{link: linkID{1}, keyed: true}, ""),
	}
	for name, h := range hellos {
		conn := raw(t, l.Address())
		_, err := conn.Write(h)
		require.NoError(t, err, name)
		if name == "no proof" {
			require.NoError(t, conn.(*net.TCPConn).CloseWrite())
		}
		answer, _ := io.ReadAll(conn) // it ends, although this end waits
		require.GreaterOrEqual(t, len(answer), answerSize, name)
		require.NotContains(t, []byte{verdictNew, verdictAgain, verdictUnknown}, answer[4], name)
		require.LessOrEqual(t, len(answer), answerSize+1+32+32, "%s: only a verdict, a nonce and the listener's proof", name)
		require.Zero(t, l.known(), name)
	}

	for range 300 { // more than may shake hands at the same time
		raw(t, l.Address())
	}
	d, err := n.Dial(t.Context(), l.Address())
	require.NoError(t, err)
	a, err := l.Accept(t.Context())
	require.NoError(t, err)
	require.NoError(t, d.Close())
	require.NoError(t, a.Close())
}

// A dialer gives nothing to a listener that does not have the key.
func TestKeyedDialerRefusesStrangers(t *testing.T) {
	n := &Network{Key: linkKey(1)}
	for name, l := range map[string]*Network{"no key": {}, "another key": {Key: linkKey(2)}} {
		l, err := l.Listen(t.Context())
		require.NoError(t, err)
		_, err = n.Dial(t.Context(), l.Address())
		require.ErrorIs(t, err, connector.ErrIncompatible, name)
		require.NoError(t, l.Close())
	}
	answerNew := func(conn net.Conn) { _, _ = conn.Write(encodeAnswer(verdictNew, 0)) }
	guess := func(conn net.Conn) {
		_, _ = conn.Write(append(append(encodeAnswer(verdictProve, 0), 1), make([]byte, 32+32+answerSize)...))
	}
	for name, serve := range map[string]func(net.Conn){"a link without a proof": answerNew, "a guess": guess} {
		inner, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		done := make(chan struct{})
		go func() {
			defer close(done)
			conn, err := inner.Accept()
			if err != nil {
				return
			}
			serve(conn)
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}()
		_, err = n.Dial(t.Context(), inner.Addr().String())
		require.ErrorIs(t, err, connector.ErrIncompatible, name)
		<-done
		require.NoError(t, inner.Close())
	}
}

// Peers of version 1, which had no keys, and this version tell each other so.
func TestFirstVersion(t *testing.T) {
	n, l := keyed(t)
	first := (&hello{link: linkID{1}, outward: true}).encode()
	first[4] = 1
	conn := raw(t, l.Address())
	_, err := conn.Write(first)
	require.NoError(t, err)
	answer, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Equal(t, encodeAnswer(verdictVersion, keyedVersion), answer)

	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer inner.Close()
	done := make(chan struct{})
	go func() { // as version 1 answers
		defer close(done)
		conn, err := inner.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		b := make([]byte, helloSize)
		if _, err := io.ReadFull(conn, b); err == nil && binary.LittleEndian.Uint32(b) == helloMagic && b[4] != 1 {
			_, _ = conn.Write(encodeAnswer(verdictVersion, 0))
		}
	}()
	_, err = n.Dial(t.Context(), inner.Addr().String())
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "peer speaks version 1")
	<-done
}

func descriptors(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

// A link of which only one connection comes costs nothing for long, and costs no complete link.
func TestHalfLinks(t *testing.T) {
	for name, n := range map[string]*Network{"plain": {}, "link key": {Key: linkKey(1)}} {
		t.Run(name, func(t *testing.T) {
			inner, err := n.Listen(t.Context())
			require.NoError(t, err)
			l := inner.(*listener)
			defer l.Close()
			whole, other := pipetest.Pair(t, n, n)
			before := descriptors(t)
			for i := range 500 {
				var id linkID
				binary.LittleEndian.PutUint32(id[:], uint32(i)+1)
				conn, _, err := n.connect(t.Context(), l.Address(), hello{link: id, outward: i%2 == 0})
				require.NoError(t, err)
				require.NoError(t, conn.Close())
			}
			require.Eventually(t, func() bool { return l.known() == 0 && descriptors(t) <= before }, 60*time.Second, 50*time.Millisecond,
				"the descriptors of half links stay")
			d, err := n.Dial(t.Context(), l.Address())
			require.NoError(t, err)
			a, err := l.Accept(t.Context())
			require.NoError(t, err)
			require.NoError(t, d.Close())
			require.NoError(t, a.Close())
			sent := make(chan error, 1)
			go func() { sent <- whole.Out.Send(t.Context(), nil, [][]byte{{1}}) }()
			_, payload, err := pipe.Receive(t.Context(), other.In)
			require.NoError(t, err)
			require.Equal(t, []byte{1}, payload)
			require.NoError(t, <-sent)
		})
	}
}
