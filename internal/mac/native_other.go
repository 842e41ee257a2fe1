//go:build !amd64

package mac

// available lists the implementations that this machine can run, the fastest first.
func available() []implementation { return []implementation{portable} }

// absorb updates the state with n blocks of the message, which lie stride bytes apart: 0 takes the same block every time.
func (c core) absorb(s *state, p []byte, n, stride int) { absorbPortable(s, p, n, stride, c.lanes) }
