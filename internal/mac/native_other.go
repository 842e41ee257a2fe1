//go:build !amd64

package mac

// available lists the implementations that this machine can run, the fastest first.
func available() []implementation { return []implementation{portable} }

// absorb updates the state with n blocks of the message, which lie stride bytes apart: 0 takes the same block every time.
func (c core) absorb(s *state, p []byte, n, stride int) { absorbPortable(s, p, n, stride, c.lanes) }

// copy is absorb of n blocks that follow one another, which it also writes to dst.
func (c core) copy(s *state, dst, src []byte, n int, _ Stores) {
	c.copyPortable(s, dst[:n*c.rate()], src[:n*c.rate()])
}

// copyPast says that nothing was copied.
func copyPast(_, _ []byte) int { return 0 }
