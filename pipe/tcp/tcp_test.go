package tcp

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/pipetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func breakConn(p pipe.Pipe) {
	var e *end
	switch p := p.(type) {
	case *sender:
		e = p.end
	case *receiver:
		e = p.end
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.conn != nil {
		_ = e.conn.Close()
	}
}

func withKey(t testing.TB) *Network {
	key := make([]byte, 32)
	_, _ = rand.Read(key)
	config, err := KeyTLS(key)
	require.NoError(t, err)
	return &Network{TLS: config}
}

func TestPipe(t *testing.T) {
	for name, n := range map[string]*Network{"plain": {}, "no digest": {NoDigest: true}, "key": withKey(t), "link key": {Key: linkKey(1)}} {
		for _, dialerSends := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, dialer sends %v", name, dialerSends), func(t *testing.T) {
				pipetest.Run(t, pipetest.Harness{Open: func(t pipetest.T) pipetest.Ends {
					a, b := pipetest.Pair(t, n, n)
					if !dialerSends {
						a, b = b, a
					}
					cuts := 0
					return pipetest.Ends{Out: a.Out, In: b.In, Cut: func() {
						if cuts++; cuts%2 == 0 {
							breakConn(a.Out)
						} else {
							breakConn(b.In)
						}
					}}
				}})
			})
		}
	}
}

// proxy passes bytes on and can hurt them.
type proxy struct {
	inner    net.Listener
	to       string
	mu       sync.Mutex
	conns    []net.Conn
	damageAt int64 // the byte of the stream to change; 0: none
}

func newProxy(t *testing.T, to string) *proxy {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{inner: inner, to: to}
	var tasks sync.WaitGroup
	tasks.Go(func() {
		for {
			in, err := inner.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				_ = in.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, in, out)
			p.mu.Unlock()
			tasks.Go(func() { p.copy(out, in) })
			tasks.Go(func() { p.copy(in, out) })
		}
	})
	t.Cleanup(func() {
		_ = inner.Close()
		p.cut()
		tasks.Wait()
	})
	return p
}

func (p *proxy) copy(to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			p.mu.Lock()
			if p.damageAt > 0 {
				if p.damageAt -= int64(n); p.damageAt <= 0 {
					buf[n-1] ^= 1
					p.damageAt = 0
				}
			}
			p.mu.Unlock()
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

// A bit that changes on the way is noticed, and the frame is sent again.
func TestDamageOnTheWay(t *testing.T) {
	n := &Network{}
	l, err := n.Listen(t.Context())
	require.NoError(t, err)
	defer l.Close()
	p := newProxy(t, l.Address())
	d, err := n.Dial(t.Context(), p.inner.Addr().String())
	require.NoError(t, err)
	defer d.Close()
	a, err := l.Accept(t.Context())
	require.NoError(t, err)
	defer a.Close()
	sent := bytes.Repeat([]byte("payload"), 100_000)
	for _, at := range []int64{0, 10, 40, 100_000, 600_000} {
		p.mu.Lock()
		p.damageAt = at
		p.mu.Unlock()
		done := make(chan error, 1)
		go func() { done <- d.Out.Send(t.Context(), []byte("h"), [][]byte{sent}) }()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		header, payload, err := pipe.Receive(ctx, a.In)
		cancel()
		if err != nil { // the frame's own prefix was hit, so the protocol is broken
			require.ErrorIs(t, err, connector.ErrIncompatible)
			return
		}
		require.Equal(t, "h", string(header))
		require.True(t, bytes.Equal(sent, payload))
		require.NoError(t, <-done)
	}
}

// A peer that does not come back is gone after the patience, at both ends; a peer that refuses is gone at
// once. A busy machine may be late, but not each time.
func TestPeerIsGone(t *testing.T) {
	took := time.Hour
	for range 5 {
		if took = peerIsGone(t); took < defaultPatience {
			break
		}
	}
	require.Less(t, took, defaultPatience)
}

// peerIsGone is how long it takes until both ends know.
func peerIsGone(t *testing.T) (took time.Duration) {
	t.Helper()
	n := &Network{Patience: 300 * time.Millisecond}
	l, err := n.Listen(t.Context())
	require.NoError(t, err)
	p := newProxy(t, l.Address())
	d, err := n.Dial(t.Context(), p.inner.Addr().String())
	require.NoError(t, err)
	a, err := l.Accept(t.Context())
	require.NoError(t, err)
	require.NoError(t, p.inner.Close())
	p.cut()
	began := time.Now()
	require.ErrorIs(t, d.Out.Send(t.Context(), nil, [][]byte{{1}}), connector.ErrGone)
	_, _, err = pipe.Receive(t.Context(), a.In)
	require.ErrorIs(t, err, connector.ErrGone)
	took = time.Since(began)
	require.NoError(t, d.Close())
	require.NoError(t, a.Close())
	require.NoError(t, l.Close())
	_, err = n.Dial(t.Context(), l.Address())
	require.ErrorIs(t, err, connector.ErrGone)
	return took
}

func TestWhoMayListen(t *testing.T) {
	_, err := (&Network{Address: "0.0.0.0:0"}).Listen(t.Context())
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "shared key")
	n := withKey(t)
	n.Address, n.Advertise = "0.0.0.0:0", "node.example:0"
	l, err := n.Listen(t.Context())
	require.NoError(t, err)
	defer l.Close()
	host, port, err := net.SplitHostPort(l.Address())
	require.NoError(t, err)
	require.Equal(t, "node.example", host)
	require.NotEqual(t, "0", port)

	for name, stranger := range map[string]*Network{"no key": {}, "another key": withKey(t)} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		_, err = stranger.Dial(ctx, net.JoinHostPort("127.0.0.1", port))
		cancel()
		require.Error(t, err, name)
	}
	_, err = KeyTLS([]byte("short"))
	require.ErrorIs(t, err, connector.ErrIncompatible)
}

// Whatever connects that does not speak the protocol, the listener continues.
func TestStrangers(t *testing.T) {
	n := &Network{}
	l, err := n.Listen(t.Context())
	require.NoError(t, err)
	defer l.Close()
	for _, rubbish := range [][]byte{nil, []byte("GET / HTTP/1.1\r\nHost: example\r\n\r\n"), bytes.Repeat([]byte{0xff}, 4096)} {
		conn, err := net.Dial("tcp", l.Address())
		require.NoError(t, err)
		_, _ = conn.Write(rubbish)
		if rubbish == nil {
			require.NoError(t, conn.Close())
			continue
		}
		_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
		_, _ = io.Copy(io.Discard, conn)
		_ = conn.Close()
	}
	d, err := n.Dial(t.Context(), l.Address())
	require.NoError(t, err)
	a, err := l.Accept(t.Context())
	require.NoError(t, err)
	require.NoError(t, d.Close())
	require.NoError(t, a.Close())
}

func FuzzFrame(f *testing.F) {
	good := make([]byte, prefixSize)
	(&prefix{flags: flagDigest, number: 1, header: 2, payload: 3}).encode(good)
	f.Add(good)
	f.Add(bytes.Repeat([]byte{0xff}, prefixSize))
	f.Add(append((&hello{link: linkID{1}, outward: true}).encode(), 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= prefixSize {
			if p, err := parsePrefix(b[:prefixSize]); err == nil {
				require.NoError(t, pipe.Check(p.header, int64(p.payload)))
				again := make([]byte, prefixSize)
				p.encode(again)
				require.Equal(t, b[:prefixSize], again)
			} else {
				require.ErrorIs(t, err, connector.ErrIncompatible)
			}
		}
		if h, err := parseHello(b); err == nil {
			require.Equal(t, b, h.encode())
		} else {
			require.ErrorIs(t, err, connector.ErrIncompatible)
		}
	})
}

// A frame is acknowledged soon even if another one has begun to arrive that nobody receives, and also if
// the receiver closes before that.
func TestLateAcknowledgement(t *testing.T) {
	n := &Network{}
	for try := range 10 {
		closes := try%2 == 1
		d, a := pipetest.Pair(t, n, n)
		type sent struct {
			header string
			err    error
		}
		ends := make(chan sent, 2)
		for _, header := range []string{"a", "b"} {
			go func() { ends <- sent{header, d.Out.Send(t.Context(), []byte(header), [][]byte{make([]byte, 100)})} }()
		}
		header, _, err := pipe.Receive(t.Context(), a.In)
		require.NoError(t, err)
		if closes {
			require.NoError(t, a.In.Close())
		}
		results := map[string]error{}
		for range 2 {
			select {
			case s := <-ends:
				results[s.header] = s.err
			case <-time.After(time.Minute):
				require.FailNow(t, "a Send does not end")
			}
			if !closes && len(results) == 1 {
				require.Contains(t, results, string(header), "the other one was not received")
				_, _, err = pipe.Receive(t.Context(), a.In)
				require.NoError(t, err)
			}
		}
		require.NoError(t, results[string(header)])
		delete(results, string(header))
		for _, err := range results {
			if closes {
				require.ErrorIs(t, err, pipe.ErrClosed)
			} else {
				require.NoError(t, err)
			}
		}
	}
}
