package mac

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// copyWay is a way to have bytes in another place, or a part of it.
type copyWay struct {
	name string
	run  func(dst, src []byte)
}

// copyWays are the limits and what they bound. The ways that end with "read" are those of somebody who reads the copy next; reading is
// adding, which is about as fast as memory.
func copyWays(m *MAC, c core) []copyWay {
	context := make([]byte, 96)
	var sum [Size]byte
	fused := func(stores Stores) func(dst, src []byte) {
		return func(dst, src []byte) {
			var h Hash
			m.Begin(&h, context)
			h.Copy(dst, src, stores)
			h.Sum(&sum)
		}
	}
	read := func(run func(dst, src []byte)) func(dst, src []byte) {
		return func(dst, src []byte) {
			run(dst, src)
			m.Sum(&sum, nil, dst)
		}
	}
	after := func(dst, src []byte) {
		copy(dst, src)
		m.Sum(&sum, context, dst)
	}
	ways := []copyWay{{"copy", func(dst, src []byte) { copy(dst, src) }}}
	if c.by != portable {
		ways = append(ways, copyWay{"copy-past", func(dst, src []byte) { stream(&src[0], len(src)/line, &dst[0]) }})
	}
	return append(ways, copyWay{"mac", func(_, src []byte) { m.Sum(&sum, context, src) }}, copyWay{"copy-then-mac", after},
		copyWay{"fused", fused(Cached)}, copyWay{"fused-past", fused(NonTemporal)}, copyWay{"copy-then-mac-read", read(after)},
		copyWay{"fused-read", read(fused(Cached))}, copyWay{"fused-past-read", read(fused(NonTemporal))})
}

// BenchmarkCopy has the ways take turns, since other programs disturb a machine for a while, and gives the speed of each in its
// median round, by the time of its thread. Hot has the same bytes each time, cold those of 96 MiB that were used
// longest ago. Landed is hot bytes that come to a cold place.
func BenchmarkCopy(b *testing.B) {
	const span = 96 << 20
	all, err := unix.Mmap(-1, 0, 2*span, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	require.NoError(b, err)
	defer func() { require.NoError(b, unix.Munmap(all)) }()
	from, to := all[:span], all[span:]
	for i := range from {
		from[i] = byte(i * i >> 7)
	}
	for _, c := range cores(b) {
		if c.lanes == 1 {
			continue
		}
		for _, size := range []int{4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20} {
			for _, heat := range []struct {
				name     string
				from, to int
			}{{"hot", size, size}, {"landed", size, span}, {"cold", span, span}} {
				if c.by == portable && size != 64<<10 {
					continue // it is slow, whatever memory does
				}
				b.Run(fmt.Sprintf("%s/%d KiB/%s", c.by, size>>10, heat.name), func(b *testing.B) {
					turns(b, copyWays(prepare(c, &Key{1}), c), to[:heat.to], from[:heat.from], size)
				})
			}
		}
	}
}

// turns measures ways of copying size bytes, in rounds of 4 MiB or more each.
func turns(b *testing.B, ways []copyWay, to, from []byte, size int) {
	now := func() int64 {
		var t unix.Timespec
		require.NoError(b, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t))
		return t.Nano()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	times, at := make([][]int64, len(ways)), 0
	count := max(1, 4<<20/size)
	for b.Loop() {
		for i, way := range ways {
			begin := now()
			for range count {
				here, there := at%len(from), at%len(to)
				way.run(to[there:there+size], from[here:here+size])
				at += size
			}
			times[i] = append(times[i], now()-begin)
		}
	}
	for i, way := range ways {
		slices.Sort(times[i])
		b.ReportMetric(float64(count*size)/float64(times[i][len(times[i])/2]), way.name+"-GB/CPU-s")
	}
}
