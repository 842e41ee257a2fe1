package mac

import "github.com/klauspost/cpuid/v2"

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
