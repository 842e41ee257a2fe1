package nixl

import "time"

// Pace says how often to call what makes progress: Poll, or Notifications at the end that is read or written.
// Over TCP the bytes move within these calls, at both ends, and whoever pauses lets the other wait for room in a
// socket. A call that moves bytes takes longer than one that finds nothing to do. The zero value is a beginning.
type Pace struct {
	begun  time.Time
	least  time.Duration // that a call took
	worked time.Time     // the last call that did something
}

const (
	// spin is how long nothing may happen before there are pauses, and maxPause their longest: between calls
	// a sixteenth of the time in which nothing has happened passes.
	spin     = 500 * time.Microsecond
	maxPause = 200 * time.Microsecond
	// busier is how many times as long as the shortest a call takes that did something.
	busier = 4
)

// Begin must be called before each call.
func (p *Pace) Begin() {
	p.begun = time.Now()
	if p.worked.IsZero() {
		p.worked = p.begun
	}
}

// End must be called after it. It says how long to pause; 0 means to yield to others and then call again.
func (p *Pace) End() time.Duration {
	now := time.Now()
	took := max(now.Sub(p.begun), 1)
	switch {
	case p.least == 0 || took < p.least:
		p.least = took
	case took >= busier*p.least:
		p.worked = now
	}
	idle := now.Sub(p.worked)
	if idle < spin {
		return 0
	}
	return min(idle/16, maxPause)
}
