package tcp

import (
	"fmt"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/pipetest"
)

// sizes are those of real blocks: 1.41 MiB and 8 MiB.
func sizes() []int { return []int{1478656, 8 << 20} }

// BenchmarkRaw is what the pipe is measured against: the same bytes over a plain TCP connection.
func BenchmarkRaw(b *testing.B) {
	for _, size := range sizes() {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(b, err)
			defer l.Close()
			done := make(chan error, 1)
			go func() {
				conn, err := l.Accept()
				if err != nil {
					done <- err
					return
				}
				defer conn.Close()
				to := make([]byte, size)
				for {
					if _, err := io.ReadFull(conn, to); err != nil {
						done <- nil
						return
					}
				}
			}()
			conn, err := net.Dial("tcp", l.Addr().String())
			require.NoError(b, err)
			from := make([]byte, size)
			b.SetBytes(int64(size))
			for b.Loop() {
				_, err := conn.Write(from)
				require.NoError(b, err)
			}
			require.NoError(b, conn.Close())
			require.NoError(b, <-done)
		})
	}
}

// BenchmarkPipe sends blocks of 30 spans, with a digest over each frame and without, two Sends at a time.
func BenchmarkPipe(b *testing.B) {
	for _, digest := range []bool{true, false} {
		for _, size := range sizes() {
			b.Run(fmt.Sprintf("digest=%v/%d", digest, size), func(b *testing.B) {
				n := &Network{NoDigest: !digest}
				d, a := pipetest.Pair(b, n, n)
				to := make([]byte, size)
				done := make(chan error, 1)
				go func() {
					for {
						err := a.In.Recv(b.Context(), func([]byte, int) ([][]byte, error) { return [][]byte{to}, nil })
						if err != nil {
							done <- nil
							return
						}
					}
				}()
				from := make([]byte, size)
				var spans [][]byte
				for at := 0; at < size; at += (size + 29) / 30 {
					spans = append(spans, from[at:min(size, at+(size+29)/30)])
				}
				b.SetBytes(int64(size))
				slots := make(chan error, 2)
				slots <- nil
				slots <- nil
				for b.Loop() {
					require.NoError(b, <-slots)
					go func() { slots <- d.Out.Send(b.Context(), []byte("block"), spans) }()
				}
				require.NoError(b, <-slots)
				require.NoError(b, <-slots)
				require.NoError(b, pipe.Link{Out: d.Out, In: d.In}.Close())
				<-done
			})
		}
	}
}
