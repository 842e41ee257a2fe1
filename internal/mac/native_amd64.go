package mac

import (
	"unsafe"

	"github.com/klauspost/cpuid/v2"
)

// chunk is how many blocks one lane absorbs before the other does, so that the second finds them in the first level of the cache.
const chunk = 128

// available lists the implementations that this machine can run, the fastest first. VAES with registers of 256 bits does not
// need AVX-512, and golang.org/x/sys/cpu reports it only with AVX-512.
func available() []implementation {
	all := []implementation{portable}
	if cpuid.CPU.Supports(cpuid.AVX2, cpuid.AESNI) {
		all = []implementation{aesni, portable}
		if cpuid.CPU.Supports(cpuid.VAES) {
			all = []implementation{vaes, aesni, portable}
		}
	}
	return all
}

// absorb updates the state with n blocks of the message, which lie stride bytes apart: 0 takes the same block every time.
func (c core) absorb(s *state, p []byte, n, stride int) {
	_ = p[(n-1)*stride+c.rate()-1]
	switch {
	case c.by == portable:
		absorbPortable(s, p, n, stride, c.lanes)
	case c.by == vaes && c.lanes == 2:
		absorbPair(&s[0], &p[0], n, stride)
	default:
		for n > 0 {
			now := min(n, chunk)
			for lane := range c.lanes {
				absorbLane(&s[0][lane], &p[blockSize*lane], now, stride, blockSize*c.lanes)
			}
			n -= now
			p = p[min(now*stride, len(p)):]
		}
	}
}

// What is written past the caches has this alignment, and is written in lines of the cache.
const (
	pastAlign = 32
	line      = 64
)

// copy is absorb of n blocks that follow one another, which it also writes to dst.
func (c core) copy(s *state, dst, src []byte, n int, stores Stores) {
	rate := c.rate()
	dst, src = dst[:n*rate], src[:n*rate]
	past := stores == NonTemporal && uintptr(unsafe.Pointer(&dst[0]))%pastAlign == 0
	switch {
	case c.by == portable:
		c.copyPortable(s, dst, src)
	case c.by == vaes && c.lanes == 2 && past:
		copyPairPast(&s[0], &src[0], n, rate, &dst[0])
	case c.by == vaes && c.lanes == 2:
		copyPair(&s[0], &src[0], n, rate, &dst[0])
	case past:
		c.copyLanesPast(s, dst, src)
	default:
		c.copyLanes(s, dst, src)
	}
}

// copyLanes has one lane after the other absorb and write its halves of the blocks.
func (c core) copyLanes(s *state, dst, src []byte) {
	rate := c.rate()
	for len(src) > 0 {
		size := min(len(src), chunk*rate)
		for lane := range c.lanes {
			at := blockSize * lane
			copyLane(&s[0][lane], &src[at], size/rate, rate, blockSize*c.lanes, &dst[at])
		}
		dst, src = dst[size:], src[size:]
	}
}

// copyLanesPast is copyLanes past the caches: by way of private memory, because a lane alone writes no whole line. If the goroutine
// changes cores before the fence, it passes locked instructions, which order what was written before as well.
func (c core) copyLanesPast(s *state, dst, src []byte) {
	var piece [pieceSize]byte
	for len(src) > 0 {
		size := min(len(src), pieceSize)
		c.copyLanes(s, piece[:size], src[:size])
		lines := size / line
		if lines > 0 {
			stream(&piece[0], lines, &dst[0])
		}
		copy(dst[lines*line:size], piece[lines*line:size])
		dst, src = dst[size:], src[size:]
	}
	fence()
}

// copyPast copies whole lines, and says how many bytes that were.
func copyPast(dst, src []byte) int {
	lines := len(src) / line
	if lines == 0 || available()[0] == portable || uintptr(unsafe.Pointer(&dst[0]))%pastAlign != 0 {
		return 0
	}
	stream(&src[0], lines, &dst[0])
	fence()
	return lines * line
}
