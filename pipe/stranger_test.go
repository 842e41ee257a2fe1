package pipe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// waiting is an acceptor whose handshakes wait for a byte; met gets the bytes that came.
func waiting(t *testing.T, network, address string) (a *Acceptor, met chan byte) {
	t.Helper()
	inner, err := net.Listen(network, address)
	require.NoError(t, err)
	met = make(chan byte, maxPending)
	a = NewAcceptor(inner, func(_ context.Context, conn net.Conn, _ *Acceptor) error {
		var b [1]byte
		if _, err := io.ReadFull(conn, b[:]); err != nil {
			return err
		}
		met <- b[0]
		return conn.Close()
	})
	return a, met
}

// silentParty makes handshakes of one party that say nothing.
func silentParty(name string, other bool, n int) (all []*handshake) {
	for range n {
		all = append(all, &handshake{party: &party{name, other}})
	}
	return all
}

// Whoever has the most handshakes loses one, and another user of this machine does when it has maxOthers.
func TestExcess(t *testing.T) {
	us := func(n int) []*handshake { return silentParty("user 1", false, n) }
	them := func(n int) []*handshake { return silentParty("user 2", true, n) }
	unknown := func(n int) (all []*handshake) {
		for range n {
			all = append(all, &handshake{})
		}
		return all
	}
	afar := func(i int) []*handshake { return silentParty(fmt.Sprintf("10.0.0.%d", i), false, 1) }
	for name, c := range map[string]struct {
		all  []*handshake
		want int
	}{
		"few":                          {them(maxOthers), -1},
		"not known yet":                {slices.Concat(us(1), unknown(maxPending-1)), -1},
		"too many are not known yet":   {slices.Concat(us(1), them(3), unknown(maxPending-3)), 4},
		"another user":                 {slices.Concat(us(1), them(maxOthers+1)), 1},
		"ours, and another user":       {slices.Concat(them(maxOthers), us(5)), -1},
		"only ours":                    {us(maxPending), -1},
		"too many of ours":             {us(maxPending + 1), 0},
		"many of ours, one from afar":  {slices.Concat(us(maxPending), afar(1)), 0},
		"one from afar, then too many": {slices.Concat(afar(1), us(maxPending)), 1},
		"three users fill it":          {slices.Concat(us(1), silentParty("a", true, 16), silentParty("b", true, 16), silentParty("c", true, 16), them(16)), 1},
	} {
		require.Equal(t, c.want, excess(c.all, nil), name)
	}
}

// A user who connects without end keeps out nobody but itself.
func TestAcceptorKeepsPlacesForOthers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Log("another user is not tried: only the administrator can be somebody else here")
		return
	}
	for {
		began := time.Now()
		kept := placesKept(t)
		if kept || time.Since(began) < handshakeTimeout { // else they may have ended for their time
			require.True(t, kept, "another user has taken a place of ours")
			return
		}
	}
}

// placesKept reports whether handshakes of ours, before and after many of another user, go on.
func placesKept(t *testing.T) (kept bool) {
	a, met := waiting(t, "tcp", "127.0.0.1:0")
	defer a.Close()
	var conns []net.Conn
	defer func() { // before a, which waits for its handshakes
		for _, conn := range conns {
			_ = conn.Close()
		}
	}()
	dial := func(as int) net.Conn {
		conn, err := dialAs(t.Context(), as, a.Addr().String())
		require.NoError(t, err)
		conns = append(conns, conn)
		return conn
	}
	first := dial(os.Getuid())
	for range 3 * maxPending {
		dial(65534)
	}
	for i, conn := range []net.Conn{first, dial(os.Getuid())} {
		if _, err := conn.Write([]byte{byte(i)}); err != nil {
			return false
		}
		_, _ = conn.Read(make([]byte, 1)) // it is over, one way or the other
		select {
		case got := <-met:
			require.EqualValues(t, i, got)
		default:
			return false
		}
	}
	return true
}

// The user at the other end is known by the socket, and nobody is taken for a stranger where the kernel says nothing.
func TestParties(t *testing.T) {
	ours := party{name: fmt.Sprintf("user %d", os.Getuid())}
	for _, network := range []string{"tcp4", "tcp6"} {
		address := map[string]string{"tcp4": "127.0.0.1:0", "tcp6": "[::1]:0"}[network]
		l, err := net.Listen(network, address)
		if network == "tcp6" && err != nil {
			t.Log("this machine has no IPv6")
			continue
		}
		require.NoError(t, err)
		d, err := net.Dial(network, l.Addr().String())
		require.NoError(t, err)
		conn, err := l.Accept()
		require.NoError(t, err)
		require.Equal(t, ours, newParties().of(conn), network)
		unknown := &parties{func(string) ([]byte, error) { return nil, errors.New("no such file") }, map[string]string{}}
		require.Equal(t, party{}, unknown.of(conn), network)
		elsewhere := &parties{func(string) ([]byte, error) { return []byte("  sl  local_address\n"), nil }, map[string]string{}}
		require.Equal(t, party{"nobody", true}, elsewhere.of(conn), network)
		require.NoError(t, errors.Join(d.Close(), conn.Close(), l.Close()))
	}
	remote := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 7), Port: 5}
	require.Equal(t, party{name: "192.0.2.7"}, newParties().of(addressed{remote}))
	require.Equal(t, party{}, newParties().of(addressed{&net.IPAddr{}}))
}

// addressed is a connection that has an address and nothing else.
type addressed struct{ remote net.Addr }

func (a addressed) RemoteAddr() net.Addr           { return a.remote }
func (addressed) LocalAddr() net.Addr              { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 6} }
func (addressed) Read([]byte) (int, error)         { return 0, io.EOF }
func (addressed) Write([]byte) (int, error)        { return 0, io.EOF }
func (addressed) Close() error                     { return nil }
func (addressed) SetDeadline(time.Time) error      { return nil }
func (addressed) SetReadDeadline(time.Time) error  { return nil }
func (addressed) SetWriteDeadline(time.Time) error { return nil }
