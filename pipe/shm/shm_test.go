package shm

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/pipetest"
)

// dialTo makes this test binary a process that dials and sends until it is killed.
const dialTo = "KVPORT_TEST_DIAL"

func TestMain(m *testing.M) {
	if address := os.Getenv(dialTo); address != "" {
		os.Exit(sendForever(address))
	}
	if os.Getenv(listenOnly) != "" {
		os.Exit(listenForever())
	}
	goleak.VerifyTestMain(m)
}

func sendForever(address string) int {
	link, err := new(Network).Dial(context.Background(), address)
	for i := uint64(0); err == nil; i++ {
		err = link.Out.Send(context.Background(), binary.LittleEndian.AppendUint64(nil, i), [][]byte{content(i, 3<<20)})
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

func content(seed uint64, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b) // never fails
	return b
}

func TestPipe(t *testing.T) {
	for _, n := range []*Network{{}, {Ring: minData, Dir: filepath.Join(t.TempDir(), "new")}} {
		for _, dialerSends := range []bool{true, false} {
			t.Run(fmt.Sprintf("ring %d, dialer sends %v", n.Ring, dialerSends), func(t *testing.T) {
				pipetest.Run(t, pipetest.Harness{Bound: defaultRing, Open: func(t pipetest.T) pipetest.Ends {
					a, b := pipetest.Pair(t, n, n)
					if !dialerSends {
						a, b = b, a
					}
					return pipetest.Ends{Out: a.Out, In: b.In, Kill: func() {
						if s, ok := a.Out.(*sender); ok {
							_ = s.end.conn.Close()
						}
					}}
				}})
			})
		}
	}
}

// TestProcessKilled: a real process, killed while it sends, leaves whole frames and then ErrGone.
func TestProcessKilled(t *testing.T) {
	l, err := new(Network).Listen(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	self, err := os.Executable()
	require.NoError(t, err)
	for round := range uint64(3) {
		child := exec.CommandContext(t.Context(), self)
		child.Env = append(os.Environ(), dialTo+"="+l.Address())
		require.NoError(t, child.Start())
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		link, err := l.Accept(ctx)
		require.NoError(t, err)
		for i := uint64(0); err == nil; i++ {
			var header, payload []byte
			header, payload, err = pipe.Receive(ctx, link.In)
			if err == nil {
				require.Equal(t, i, binary.LittleEndian.Uint64(header))
				require.True(t, bytes.Equal(content(i, 3<<20), payload), "frame %d is damaged", i)
			}
			if i == 3+round {
				require.NoError(t, child.Process.Kill())
			}
		}
		require.ErrorIs(t, err, connector.ErrGone)
		cancel()
		require.Error(t, child.Wait())
		require.ErrorIs(t, link.Out.Send(t.Context(), nil, nil), connector.ErrGone)
		require.NoError(t, link.Close())
	}
}

// Whatever connects that does not speak the protocol, and whatever it sends, the listener continues.
func TestStrangers(t *testing.T) {
	n := &Network{}
	l, err := n.Listen(t.Context())
	require.NoError(t, err)
	hello := binary.LittleEndian.AppendUint32(nil, helloMagic)
	hello = binary.LittleEndian.AppendUint32(hello, helloVersion)
	for _, rubbish := range [][]byte{nil, []byte("GET / HTTP/1.1\r\n\r\n"), binary.LittleEndian.AppendUint64(hello, minData), binary.LittleEndian.AppendUint64(hello, 5)} {
		conn, err := net.Dial("unix", l.Address())
		require.NoError(t, err)
		_, err = conn.Write(rubbish)
		require.NoError(t, err)
		if rubbish != nil {
			require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Minute)))
			_, err = conn.Read(make([]byte, 1))
			require.Error(t, err)
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
		}
		require.NoError(t, conn.Close())
	}
	d, err := n.Dial(t.Context(), l.Address())
	require.NoError(t, err)
	a, err := l.Accept(t.Context())
	require.NoError(t, err)
	require.NoError(t, d.Close())
	require.NoError(t, a.Close())
	require.NoError(t, l.Close())
	_, err = os.Stat(filepath.Dir(l.Address()))
	require.ErrorIs(t, err, os.ErrNotExist, "a listener's own folder is left behind")
	_, err = n.Dial(t.Context(), l.Address())
	require.ErrorIs(t, err, connector.ErrGone)
	_, err = (&Network{Ring: 3}).Listen(t.Context())
	require.ErrorIs(t, err, connector.ErrIncompatible)
}

// A peer that writes arbitrary bytes into the ring causes an error, and no byte outside the spans changes.
func TestHostileRing(t *testing.T) {
	for name, harm := range map[string]func(r ring){
		"head beyond the ring":   func(r ring) { r.control.head.Store(1 << 40) },
		"half a chunk":           func(r ring) { r.control.head.Store(3) },
		"a payload of no frame":  func(r ring) { write(r, chunk{100, kindMore}, 100) },
		"longer than written":    func(r ring) { write(r, chunk{1 << 20, kindBegin}, 50) },
		"an unknown kind":        func(r ring) { write(r, chunk{0, 9}, 0) },
		"a header of any length": func(r ring) { write(r, chunk{frameHead, kindBegin}, frameHead, 0xff, 0xff, 0xff) },
	} {
		t.Run(name, func(t *testing.T) {
			n := &Network{Ring: minData}
			a, b := pipetest.Pair(t, n, n)
			out, ok := a.Out.(*sender)
			require.True(t, ok)
			harm(out.ring)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, _, err := pipe.Receive(ctx, b.In)
			require.ErrorIs(t, err, connector.ErrCorrupt)
		})
	}
}

// write puts a chunk into a ring, like a wrong sender.
func write(r ring, c chunk, n int, content ...byte) {
	head := c.encode()
	r.put(0, append(append(head[:], content...), make([]byte, n-len(content))...))
	r.control.head.Store(uint64(chunkHead + n))
}

func FuzzChunk(f *testing.F) {
	good := chunk{frameHead + 3, kindBegin}.encode()
	frame := encodeFrame(3, 1<<20)
	f.Add(good[:], frame[:], 100, 0)
	f.Add([]byte{0, 0, 0, 0, 3, 0, 0, 0}, frame[:], 0, 5)
	f.Fuzz(func(t *testing.T, head, frame []byte, most, left int) {
		if len(head) < chunkHead || len(frame) < frameHead || left < 0 {
			return
		}
		c, err := parseChunk(head, most, left)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrCorrupt)
			return
		}
		require.LessOrEqual(t, c.length, most)
		again := c.encode()
		require.Equal(t, head[:chunkHead], again[:])
		if c.kind != kindBegin {
			require.LessOrEqual(t, c.length, left)
			return
		}
		header, payload, err := parseFrame(frame, c.length)
		if err == nil {
			require.NoError(t, pipe.Check(header, int64(payload)))
			require.Equal(t, c.length, frameHead+header)
		}
	})
}

func FuzzHello(f *testing.F) {
	hello := binary.LittleEndian.AppendUint32(nil, helloMagic)
	hello = binary.LittleEndian.AppendUint32(hello, helloVersion)
	f.Add(binary.LittleEndian.AppendUint64(hello, minData))
	f.Fuzz(func(t *testing.T, b []byte) {
		ring, err := parseHello(b)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrIncompatible)
			return
		}
		require.NoError(t, checkRing(ring))
	})
}

// BenchmarkPipe sends blocks of 30 spans of the sizes of real ones: 1.41 MiB and 8 MiB.
func BenchmarkPipe(b *testing.B) {
	for _, size := range []int{1478656, 8 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			a, other := pipetest.Pair(b, &Network{}, &Network{})
			to := make([]byte, size)
			done := make(chan error, 1)
			go func() {
				for {
					err := other.In.Recv(b.Context(), func([]byte, int) ([][]byte, error) { return [][]byte{to}, nil })
					if err != nil {
						done <- err
						return
					}
				}
			}()
			from := make([][]byte, 30)
			for i := range from {
				from[i] = make([]byte, size/30+boolInt(i < size%30))
			}
			b.SetBytes(int64(size))
			for b.Loop() {
				require.NoError(b, a.Out.Send(b.Context(), []byte("header"), from))
			}
			require.NoError(b, a.Out.Close())
			require.ErrorIs(b, <-done, pipe.ErrClosed)
		})
	}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
