package pipe

import (
	"errors"
	"math"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvport/kvport/connector"
)

func TestCheck(t *testing.T) {
	require.NoError(t, Check(0, 0))
	require.NoError(t, Check(MaxHeader, MaxPayload))
	for _, c := range []struct {
		header  int
		payload int64
	}{{MaxHeader + 1, 0}, {-1, 0}, {0, MaxPayload + 1}, {0, -1}, {0, math.MaxInt64}} {
		require.ErrorIs(t, Check(c.header, c.payload), connector.ErrIncompatible, "%+v", c)
	}
}

func TestAsk(t *testing.T) {
	header := []byte("h")
	give := func(spans [][]byte, err error) Place {
		return func(h []byte, size int) ([][]byte, error) {
			require.Equal(t, header, h)
			require.Equal(t, 3, size)
			return spans, err
		}
	}
	spans, err := Ask(give([][]byte{make([]byte, 1), nil, make([]byte, 2)}, nil), header, 3)
	require.NoError(t, err)
	require.Equal(t, 3, Size(spans))
	_, err = Ask(give([][]byte{make([]byte, 4)}, nil), header, 3)
	require.ErrorIs(t, err, connector.ErrIncompatible)
	no := errors.New("no room")
	_, err = Ask(give(nil, no), header, 3)
	require.ErrorIs(t, err, no)
}

// Copy is append and cut: where the borders of the spans lie does not matter.
func TestCopy(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lengths := rapid.SliceOfN(rapid.IntRange(0, 5), 0, 6)
		var to, from [][]byte
		var sent, got []byte
		for i, n := range lengths.Draw(t, "from") {
			b := make([]byte, n)
			for j := range b {
				b[j] = byte(1 + 10*i + j)
			}
			from, sent = append(from, b), append(sent, b...)
		}
		for _, n := range lengths.Draw(t, "to") {
			to = append(to, make([]byte, n))
		}
		n := Copy(to, from)
		require.Equal(t, min(Size(to), Size(from)), n)
		for _, b := range to {
			got = append(got, b...)
		}
		require.Equal(t, string(sent[:n]), string(got[:n]))
	})
}

func TestIsLoopback(t *testing.T) {
	for host, want := range map[string]bool{"localhost": true, "127.0.0.1": true, "127.1.2.3": true, "::1": true, "": false, "0.0.0.0": false, "10.0.0.1": false, "example.org": false, "127.0.0.1:0": false} {
		require.Equal(t, want, IsLoopback(host), host)
	}
}

// A Side without TLS listens only where this host alone can reach it, and returns an address with the port
// that it really has.
func TestSide(t *testing.T) {
	for address, fits := range map[string]bool{"": true, "127.0.0.1:0": true, "0.0.0.0:0": false} {
		l, err := (&Side{Address: address}).Listen(t.Context())
		if !fits {
			require.ErrorIs(t, err, connector.ErrIncompatible, address)
			require.ErrorContains(t, err, "TLS certificates")
			continue
		}
		require.NoError(t, err)
		_, port, err := net.SplitHostPort(l.Addr().String())
		require.NoError(t, err)
		for advertise, want := range map[string]string{"": l.Addr().String(), "host:0": "host:" + port, "host:7": "host:7", "odd": "odd"} {
			require.Equal(t, want, (&Side{Advertise: advertise}).Reach(l.Addr()))
		}
		require.NoError(t, l.Close())
		_, err = new(Side).Dial(t.Context(), l.Addr().String())
		require.ErrorIs(t, err, connector.ErrGone)
	}
}
