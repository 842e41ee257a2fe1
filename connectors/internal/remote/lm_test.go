package remote

import (
	"encoding/hex"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/lmtest"
	"github.com/kvport/kvport/connector"
)

// These were written by lmcache 0.5.6 itself: ClientMetaMessage(PUT, key, 1000, BINARY, uint8, [1000,0,0,0]) and
// the answer ServerMetaMessage(SUCCESS, 1000, BINARY, uint8, [1000,0,0,0]).
const (
	lmRecordedPut = "01000000e8030000040000000600000000000000e80300000000000000000000000000006b76706f72744031403040" +
		"3037303730373037303730373037303730373037303730373037303730373037303730373037303730373037303730373037303730373037303730373037303740" +
		"75696e7438"
	lmRecordedAnswer = "c8000000e80300000400000006000000e803000000000000000000000000000000000000"
)

func sevens() (k connector.StoreKey) {
	for i := range k {
		k[i] = 7
	}
	return k
}

func TestLMHeaders(t *testing.T) {
	got := ask(lmPut, 1000, sevens())
	require.Len(t, got, lmAskBytes)
	require.Equal(t, lmRecordedPut+strings.Repeat("20", lmAskBytes-len(lmRecordedPut)/2), hex.EncodeToString(got))

	recorded, err := hex.DecodeString(lmRecordedAnswer)
	require.NoError(t, err)
	client, server := net.Pipe()
	defer client.Close()
	go func() {
		defer server.Close()
		_, _ = server.Write(recorded)
		_, _ = server.Write([]byte("HTTP/1.1 400 Bad Request and so on, long enough"))
	}()
	c := &lmConn{Conn: client}
	ok, length, err := c.answer()
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, 1000, length)
	_, _, err = c.answer()
	require.ErrorIs(t, err, errAnswer)
}

// A server that takes connections and says nothing costs each call its own time.
func TestLMSilentServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	accepted := make(chan net.Conn, 16)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
			go func() { _, _ = io.Copy(io.Discard, c) }()
		}
	}()
	s, err := OpenLM(Options{Addresses: []string{l.Addr().String()}, Timeout: 50 * time.Millisecond})
	require.NoError(t, err)
	full, empty := items(2, 100)
	start := time.Now()
	require.ErrorIs(t, s.Get(t.Context(), empty), connector.ErrGone)
	require.ErrorIs(t, s.Put(t.Context(), full), connector.ErrGone)
	n, err := s.Lookup(t.Context(), [][]connector.StoreKey{keysOf(full)})
	require.NoError(t, err)
	require.Zero(t, n[0])
	require.Less(t, time.Since(start), time.Minute)
	require.NoError(t, s.Close())
	require.NoError(t, l.Close())
	<-done
	close(accepted)
	for c := range accepted {
		require.NoError(t, c.Close())
	}
}

// TestLMSendsOnce: a block that another process has sent is sent, since nobody can ask with which key it was made, and is not
// sent again after that.
func TestLMSendsOnce(t *testing.T) {
	address := lmServer(t)
	for range 2 {
		s, err := OpenLM(Options{Addresses: []string{address}})
		require.NoError(t, err)
		for range 3 {
			require.NoError(t, s.Put(t.Context(), []connector.Item{marked(1, 1)}))
		}
		require.Equal(t, uint64(1), s.Stats().Saved)
		require.Equal(t, uint64(2), s.Stats().Known)
		require.NoError(t, s.Close())
	}
}

// TestSentIsBounded: what is remembered of blocks that were sent is bounded.
func TestSentIsBounded(t *testing.T) {
	var s sent
	it := marked(1, 1)
	for n := range sentMost + 10 {
		it.Key = connector.StoreKey{byte(n), byte(n >> 8), byte(n >> 16)}
		s.add(it)
	}
	require.Len(t, s.marks, 10)
	require.True(t, s.has(it))
	require.True(t, s.has(item(1, 100)), "no digests: the server is asked")
}

// lmServer is a server that speaks as much of the protocol as a store needs.
func lmServer(t *testing.T) (address string) {
	t.Helper()
	s, err := lmtest.Start(t.Context(), "")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s.Address
}
