package relay

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = time.Minute

// echo is a server that answers with what it gets.
func echo(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		wg.Wait()
	})
	return l.Addr().String()
}

func between(t *testing.T, seed uint64) *Relay {
	t.Helper()
	target := echo(t)
	r, err := New(target, seed)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	return r
}

func dial(t *testing.T, r *Relay) net.Conn {
	t.Helper()
	c, err := new(net.Dialer).DialContext(t.Context(), "tcp", r.Address())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
	return c
}

// say sends bytes and gives what comes back, as far as it comes.
func say(c net.Conn, data []byte) ([]byte, error) {
	if _, err := c.Write(data); err != nil {
		return nil, err
	}
	back := make([]byte, len(data))
	n, err := io.ReadFull(c, back)
	return back[:n], err
}

func TestPasses(t *testing.T) {
	r := between(t, 1)
	data := bytes.Repeat([]byte("0123456789"), 100_000)
	c := dial(t, r)
	go func() { _, _ = c.Write(data) }()
	back := make([]byte, len(data))
	_, err := io.ReadFull(c, back)
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, back))
	n := int64(len(data))
	require.Equal(t, Counts{Connections: 1, Passed: 2 * n, Answered: n, Sent: n}, r.Count())
}

// The most that one connection passes is counted from the last CutAfter, and for each direction.
func TestMost(t *testing.T) {
	r := between(t, 1)
	c, other := dial(t, r), dial(t, r)
	for n, conn := range map[int]net.Conn{70: c, 90: other} {
		_, err := say(conn, make([]byte, n))
		require.NoError(t, err)
	}
	require.EqualValues(t, 90, r.Count().Answered)
	r.CutAfter(0)
	_, err := say(c, make([]byte, 20))
	require.NoError(t, err)
	require.EqualValues(t, 20, r.Count().Answered)
	require.EqualValues(t, 90, r.Count().Sent)
	r.CutSentAfter(0)
	require.Zero(t, r.Count().Sent)
}

func TestDrip(t *testing.T) {
	r := between(t, 1)
	r.Drip(1)
	data := bytes.Repeat([]byte("drop"), 100)
	back, err := say(dial(t, r), data)
	require.NoError(t, err)
	require.Equal(t, data, back)
}

func TestDelay(t *testing.T) {
	r := between(t, 1)
	const delay = 60 * time.Millisecond
	r.Delay(delay)
	began := time.Now()
	_, err := say(dial(t, r), []byte("slow"))
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(began), delay)
	require.Positive(t, r.Count().Delayed)
}

func TestCut(t *testing.T) {
	r := between(t, 1)
	for n, set := range []func(int64){r.CutAfter, r.CutSentAfter} {
		c := dial(t, r)
		_, err := say(c, make([]byte, 100))
		require.NoError(t, err)
		set(30) // counts from now on
		back, err := say(c, make([]byte, 100))
		require.Error(t, err)
		require.LessOrEqual(t, len(back), 30)
		require.Equal(t, n+1, r.Cuts())
		set(0)
	}
	_, err := say(dial(t, r), make([]byte, 100))
	require.NoError(t, err)
}

// Bytes that are changed are so by the seed.
func TestCorrupt(t *testing.T) {
	var first []byte
	for range 2 {
		r := between(t, 7)
		r.Corrupt(50)
		data := make([]byte, 1000)
		back, err := say(dial(t, r), data)
		require.NoError(t, err)
		changed := 0
		for _, b := range back {
			if b != 0 {
				changed++
			}
		}
		require.Equal(t, changed, r.Count().Corrupted)
		require.Greater(t, changed, 3)
		require.Less(t, changed, 200)
		if first == nil {
			first = back
		}
		require.Equal(t, first, back)
	}
}

// In a stalled direction nothing arrives, not even the end of a connection; when it continues, what was held back arrives.
func TestStall(t *testing.T) {
	r := between(t, 1)
	c := dial(t, r)
	_, err := say(c, []byte("hello"))
	require.NoError(t, err)
	r.Stall(false, true)
	_, err = c.Write([]byte("again"))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return r.Count().Stalls == 1 }, patience, time.Millisecond)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	late := dial(t, r) // new connections are taken
	require.NoError(t, late.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	_, err = say(late, []byte("x"))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	r.Stall(false, false)
	back := make([]byte, 5)
	_, err = io.ReadFull(c, back)
	require.NoError(t, err)
	require.Equal(t, "again", string(back))
	r.Stall(true, true)
	require.NoError(t, c.Close()) // Close of the relay does not wait for it
}

// A later connection passes an earlier one, and no connection loses its own order.
func TestShuffle(t *testing.T) {
	r := between(t, 3)
	r.Shuffle(100 * time.Millisecond)
	var wg sync.WaitGroup
	for n := range 12 {
		c := dial(t, r)
		wg.Go(func() {
			data := bytes.Repeat([]byte{byte(n)}, 1000)
			back, err := say(c, data)
			if err == nil && !bytes.Equal(data, back) {
				err = errors.New("another connection's bytes")
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.Positive(t, r.Count().Overtaken)
}

func TestRefuseAndLead(t *testing.T) {
	r := between(t, 1)
	c := dial(t, r)
	_, err := say(c, []byte("here"))
	require.NoError(t, err)
	r.Refuse(true)
	_, err = say(c, []byte("gone"))
	require.Error(t, err)
	_, err = say(dial(t, r), []byte("none"))
	require.Error(t, err)
	require.Positive(t, r.Count().Refused)
	r.Refuse(false)
	r.Lead("127.0.0.1:1")
	_, err = say(dial(t, r), []byte("nobody"))
	require.Error(t, err)
	r.Lead(echo(t))
	_, err = say(dial(t, r), []byte("another"))
	require.NoError(t, err)
}

// StallAfter lets exactly the given number of bytes through.
func TestStallAfter(t *testing.T) {
	r := between(t, 1)
	c := dial(t, r)
	r.StallAfter(30)
	_, err := c.Write(make([]byte, 100))
	require.NoError(t, err)
	_, err = io.ReadFull(c, make([]byte, 30))
	require.NoError(t, err)
	require.Positive(t, r.Count().Stalls)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	r.Stall(false, false)
	_, err = io.ReadFull(c, make([]byte, 70))
	require.NoError(t, err)
}
