package tcp

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/pipe"
)

// Directions of a cutter.
const (
	toListener = iota
	toDialer
)

// cutter passes connections on and cuts all of them once, after a number of bytes in one direction.
type cutter struct {
	inner net.Listener
	tasks sync.WaitGroup

	mu        sync.Mutex
	direction int
	left      int64 // until the cut
	cut       bool
	conns     map[net.Conn]struct{}
}

func newCutter(t *testing.T, to string, direction int, after int64) *cutter {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	c := &cutter{inner: inner, direction: direction, left: after, conns: map[net.Conn]struct{}{}}
	c.tasks.Go(func() {
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
			c.mu.Lock()
			c.conns[in], c.conns[out] = struct{}{}, struct{}{}
			c.mu.Unlock()
			c.tasks.Go(func() { c.copy(out, in, toListener) })
			c.tasks.Go(func() { c.copy(in, out, toDialer) })
		}
	})
	return c
}

func (c *cutter) copy(to, from net.Conn, direction int) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		pass, over := c.take(direction, n)
		if _, failed := to.Write(buf[:pass]); over || failed != nil || err != nil {
			if over {
				c.close()
			}
			return
		}
	}
}

// take is how many of n bytes may pass, and whether the connections are cut after them.
func (c *cutter) take(direction, n int) (pass int, over bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut || direction != c.direction {
		return n, false
	}
	pass = int(min(int64(n), c.left))
	c.left -= int64(pass)
	c.cut = c.left == 0
	return pass, c.cut
}

// close cuts the connections that there are.
func (c *cutter) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.conns {
		_ = conn.Close()
	}
	clear(c.conns)
}

func (c *cutter) end() (cut bool) {
	_ = c.inner.Close()
	c.close()
	c.tasks.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cut
}

// echo sends every frame of every link back, and counts how often each has come.
type echo struct {
	listener pipe.Listener
	tasks    sync.WaitGroup

	mu   sync.Mutex
	came map[string]int
}

func newEcho(t *testing.T, n *Network) *echo {
	t.Helper()
	l, err := n.Listen(t.Context())
	require.NoError(t, err)
	e := &echo{listener: l, came: map[string]int{}}
	ctx, cancel := context.WithCancel(context.Background())
	e.tasks.Go(func() {
		for {
			link, err := l.Accept(ctx)
			if err != nil {
				return
			}
			e.tasks.Go(func() {
				defer link.Close()
				e.serve(ctx, link)
			})
		}
	})
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		cancel()
		e.tasks.Wait()
	})
	return e
}

func (e *echo) serve(ctx context.Context, link pipe.Link) {
	for {
		header, payload, err := pipe.Receive(ctx, link.In)
		if err != nil {
			return
		}
		e.mu.Lock()
		e.came[string(header)]++
		e.mu.Unlock()
		if link.Out.Send(ctx, header, [][]byte{payload}) != nil {
			return
		}
	}
}

func (e *echo) count(header string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.came[header]
}

// carry dials and sends a frame to and fro. It gives an error of the dialer: a frame that is sent over a link that exists
// arrives once, as it is.
func (e *echo) carry(t *testing.T, n *Network, address, name string) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	d, err := n.Dial(ctx, address)
	if err != nil {
		return err
	}
	require.NoError(t, d.Out.Send(ctx, []byte(name), [][]byte{[]byte("pay"), []byte("load")}))
	header, payload, err := pipe.Receive(ctx, d.In)
	require.NoError(t, err)
	require.Equal(t, name, string(header))
	require.Equal(t, "payload", string(payload))
	require.Equal(t, 1, e.count(name))
	require.NoError(t, d.Close())
	return nil
}

// A connection that is cut at any byte, of the handshakes too, loses no frame of a link and delivers none twice; a link
// that could not be made is made the next time. Handshakes with a key are longer and slower: every seventh or eleventh byte
// is tried.
func TestCutAtEveryByte(t *testing.T) {
	for name, c := range map[string]struct {
		network *Network
		step    int64
	}{"plain": {&Network{}, 1}, "link key": {&Network{Key: linkKey(1)}, 7}, "key": {withKey(t), 11}} {
		for direction, towards := range map[int]string{toListener: "listener", toDialer: "dialer"} {
			t.Run(name+" to "+towards, func(t *testing.T) {
				e := newEcho(t, c.network)
				cuts, refused := 0, 0
				for after, cut := int64(1), true; cut; after += c.step {
					by := newCutter(t, e.listener.Address(), direction, after)
					err := e.carry(t, c.network, by.inner.Addr().String(), fmt.Sprint(after))
					if err != nil {
						refused++
						require.NoError(t, e.carry(t, c.network, by.inner.Addr().String(), fmt.Sprint(after, " again")), "after %d bytes, and %v", after, err)
					}
					if cut = by.end(); cut {
						cuts++
					}
				}
				require.Greater(t, cuts, 20)
				require.Positive(t, refused)
				t.Logf("%d cuts, of which %d in a handshake; every frame arrived once", cuts, refused)
			})
		}
	}
}
