package tcp

import (
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/pipetest"
)

// BenchmarkTurns sends the blocks of one transfer over the pipe, eight at a time, and over a plain connection,
// one write for each, in turns, so that what disturbs one disturbs the other. It reports the medians and their
// ratio: 1 is a pipe that costs nothing.
func BenchmarkTurns(b *testing.B) {
	for _, c := range []struct{ block, blocks, spans int }{{48 << 10, 171, 1}, {48 << 10, 171, 24}, {1 << 20, 64, 1}, {1478656, 16, 30}} {
		for _, digest := range []bool{false, true} {
			b.Run(fmt.Sprintf("%dx%d/spans=%d/digest=%v", c.blocks, c.block, c.spans, digest), func(b *testing.B) {
				blocks := make([][][]byte, c.blocks)
				for i := range blocks {
					blocks[i] = slices.Collect(slices.Chunk(make([]byte, c.block), c.block/c.spans))
				}
				ours, plain := newTurn(b, &Network{NoDigest: !digest}, blocks), newPlain(b, c.block/c.spans, blocks, digest)
				var took, work [2][]time.Duration
				for n := 0; b.Loop(); n++ {
					for way := range 2 {
						way = (n + way) % 2
						began, busy := time.Now(), worked(b)
						if way == 0 {
							ours()
						} else {
							plain()
						}
						took[way], work[way] = append(took[way], time.Since(began)), append(work[way], worked(b)-busy)
					}
				}
				b.ReportMetric(median(took[0]), "pipe-us")
				b.ReportMetric(median(took[1]), "plain-us")
				b.ReportMetric(median(took[1])/median(took[0]), "ratio")
				b.ReportMetric(median(work[1])/median(work[0]), "ratio-of-CPU")
			})
		}
	}
}

func median(d []time.Duration) float64 {
	slices.Sort(d)
	return float64(d[len(d)/2].Microseconds())
}

// worked is the CPU time of this process, on which other processes have less influence than on the time of
// a clock.
func worked(b *testing.B) time.Duration {
	var u syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// newTurn is a transfer of blocks over a pipe.
func newTurn(b *testing.B, n *Network, blocks [][][]byte) func() {
	d, a := pipetest.Pair(b, n, n)
	done := make(chan struct{})
	to := make([][][]byte, len(blocks))
	for i, block := range blocks {
		for _, s := range block {
			to[i] = append(to[i], make([]byte, len(s)))
		}
	}
	go func() {
		defer close(done)
		for i := 0; a.In.Recv(b.Context(), func([]byte, int) ([][]byte, error) { return slices.Clone(to[i%len(to)]), nil }) == nil; i++ {
		}
	}()
	b.Cleanup(func() {
		_ = d.Close()
		<-done
	})
	return func() {
		var senders sync.WaitGroup
		for first := range 8 {
			senders.Go(func() {
				for i := first; i < len(blocks); i += 8 {
					if err := d.Out.Send(b.Context(), nil, blocks[i]); err != nil {
						b.Error(err)
					}
				}
			})
		}
		senders.Wait()
	}
}

// newPlain is the same over a plain connection, read span by span; a byte comes back when everything has
// arrived.
func newPlain(b *testing.B, span int, blocks [][][]byte, digest bool) func() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	done := make(chan struct{})
	to := make([]byte, len(blocks)*pipe.Size(blocks[0]))
	var sums [2]uint64
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer func() { _ = conn.Close() }()
		for {
			for part := range slices.Chunk(to, span) {
				if _, err := io.ReadFull(conn, part); err != nil {
					return
				}
				if digest {
					sums[1] ^= xxh3.Hash(part)
				}
			}
			if _, err := conn.Write([]byte{1}); err != nil {
				return
			}
		}
	}()
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(b, err)
	b.Cleanup(func() {
		_ = conn.Close()
		<-done
		_ = l.Close()
	})
	return func() {
		for _, block := range blocks {
			for i := 0; digest && i < len(block); i++ {
				sums[0] ^= xxh3.Hash(block[i])
			}
			parts := net.Buffers(slices.Clone(block))
			if _, err := parts.WriteTo(conn); err != nil {
				b.Error(err)
			}
		}
		if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
			b.Error(err)
		}
	}
}
