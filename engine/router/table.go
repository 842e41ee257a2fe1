package router

// role is the part an instance plays for the router.
type role uint8

const (
	prefill role = iota
	decode
	roles // how many there are
)

// String names the role in logs and metrics.
func (r role) String() string {
	if r == prefill {
		return "prefill"
	}
	return "decode"
}

// state is what the router believes of an instance.
type state uint8

const (
	up       state = iota // also before the first probe: trying is how a router finds out soonest
	suspect               // a request failed there since the last good probe; used when none is up
	draining              // it answers, but takes no new requests
	loading               // it answers, but does not take requests yet
	down                  // it does not answer probes
)

// String names the state in /health.
func (s state) String() string {
	return [...]string{"up", "suspect", "draining", "loading", "down"}[s]
}

// probe is the result of one health check.
type probe uint8

const (
	healthy  probe = iota
	leaving        // 503: the instance drains
	starting       // 503 that says so: its model is still loading
	refused        // nobody listens
	silent         // no answer in time, a broken one, or another status
)

// silences is how many silent probes in a row mean that an instance is down. A busy instance may
// miss one; a refused connection is certain at once. With the defaults of Config one that hangs is down within
// 10 s: three times 1.2 s until a probe, and 2 s for it.
const silences = 3

// table knows the instances and picks among them. It has no clock and does no I/O.
type table struct {
	instances []instance
	next      [roles]int // where the next round of picking starts, an index into instances
}

type instance struct {
	role    role
	state   state
	silence int  // silent probes in a row
	left    bool // it was registered and no longer is; then it is down
}

// hangs reports whether the requests that run on the instance are lost. Those of an instance that
// refuses connections are not: it may be finishing them before it ends, and if it is dead already
// their connections break by themselves.
func (in *instance) hangs() bool { return in.state == down && in.silence >= silences }

// pick chooses an instance of the role that is not in tried: the next one that is up, else the next
// suspect.
func (t *table) pick(r role, tried map[int]bool) (index int, ok bool) {
	return t.pickIf(r, func(i int) bool { return !tried[i] })
}

// pickIf is pick among the instances that may be had.
func (t *table) pickIf(r role, may func(i int) bool) (index int, ok bool) {
	for _, want := range []state{up, suspect} {
		for k := range t.instances {
			i := (t.next[r] + k) % len(t.instances)
			if in := t.instances[i]; in.role == r && in.state == want && may(i) {
				t.next[r] = i + 1
				return i, true
			}
		}
	}
	return 0, false
}

// probed takes the result of a health check and reports whether the state changed.
func (t *table) probed(i int, p probe) (changed bool) {
	in := &t.instances[i]
	before := in.state
	if p != silent {
		in.silence = 0
	}
	switch p {
	case healthy:
		in.state = up
	case leaving:
		in.state = draining
	case starting:
		in.state = loading
	case refused:
		in.state = down
	case silent:
		if in.silence++; in.silence >= silences {
			in.state = down
		}
	}
	return in.state != before
}

// failed takes note that a request to the instance failed in a way that blames it.
func (t *table) failed(i int) {
	if in := &t.instances[i]; in.state == up {
		in.state = suspect
	}
}

// available reports whether pick could return an instance.
func (t *table) available(i int) bool { return t.instances[i].state <= suspect }
