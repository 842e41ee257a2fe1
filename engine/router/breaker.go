package router

import "time"

// When an instance is left out, and how long.
const (
	breakAfter   = 5 // failures in a row
	firstPause   = time.Second
	longestPause = 30 * time.Second
)

// breaker leaves an instance out that fails every request, though it may answer its health checks. After
// a pause one request tries it again; each failure of such a trial doubles the pause. Only an answer
// to a request ends that.
type breaker struct {
	failures int           // in a row
	pause    time.Duration // the last one
	until    time.Time     // its end
	trial    bool          // a request tries the instance
}

func (b *breaker) open() bool { return b.failures >= breakAfter }

// admits reports whether a request may go to the instance.
func (b *breaker) admits(now time.Time) bool { return !b.open() || !b.trial && !now.Before(b.until) }

// picked notes that a request goes there.
func (b *breaker) picked() { b.trial = b.open() }

// failed notes that one failed and reports whether the instance is left out from now on.
func (b *breaker) failed(now time.Time) (opened bool) {
	if b.open() && !b.trial {
		return false // it began before the pause
	}
	b.failures++
	if !b.open() {
		return false
	}
	b.pause = min(max(firstPause, 2*b.pause), longestPause)
	b.until, b.trial = now.Add(b.pause), false
	return true
}

// worked notes that a request got its answer and reports whether the instance was left out before.
func (b *breaker) worked() (closed bool) {
	closed = b.open()
	*b = breaker{}
	return closed
}

// released notes that a trial is over without a verdict, or goes well so far: another may follow.
func (b *breaker) released() { b.trial = false }
