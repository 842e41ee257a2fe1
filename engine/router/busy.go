package router

import (
	"time"

	"github.com/kvport/kvport/engine/router/admission"
	"github.com/kvport/kvport/engine/router/policy"
)

// How long requests keep away from instances.
const (
	maxRest = time.Minute // however long an instance that does not serve asks for
	maxBusy = time.Second // likewise, one that has too much to do; an instance that has not refused a request by then has taken it

	// How long an instance may go on counting a request that has ended here: until then a 429 says nothing else.
	settle = 20 * time.Millisecond

	maxSpread  = 50 * time.Millisecond // what waits comes back later than an instance asks for, by a random part of this: routers are not in step
	maxClients = 1024                  // whose refusals are remembered for one instance
)

// busy is what an instance has said about having too much to do. A 429 is about the client whose request got it: the instance may
// limit each client. It is about all if two clients get one and nobody's request is taken between.
type busy struct {
	all     rest             // for everybody
	each    map[uint64]*rest // by client, until a request of the client is taken
	last    uint64           // the client that was refused last, at since
	since   time.Time
	refuses bool // no request that was sent after since has been taken
}

// rest is a time in which requests keep away while as many run as did when one was refused. When it is over one request tries the
// instance, and the others wait for what becomes of it.
type rest struct {
	until  time.Time // zero: there is no rest
	others int       // how many ran when a request was refused
	trial  *policy.Leg
	began  time.Time // when the trial did
	sent   bool      // the trial has been sent
}

// ends is when the next request may come, as far as is known.
func (r *rest) ends() time.Time {
	if r.trial != nil {
		return r.began.Add(maxBusy)
	}
	return r.until
}

// admits reports whether a request may come while others run.
func (r *rest) admits(now time.Time, running int) bool {
	return running < r.others || !now.Before(r.ends())
}

// begins keeps requests away until a time, while as many run.
func (r *rest) begins(now, until time.Time, running int) {
	if now.Before(r.until) {
		running = min(running, r.others)
	}
	if until.Before(r.until) {
		until = r.until
	}
	*r = rest{until: until, others: running}
}

// picked takes note that a request goes to the instance while others run there, and reports whether it tries the instance.
func (r *rest) picked(now time.Time, others int, l *policy.Leg) bool {
	switch {
	case r.until.IsZero() || others < r.others:
		return false
	case r.trial != nil && r.sent: // for longer than maxBusy
		*r = rest{}
		return false
	}
	r.trial, r.began, r.sent = l, now, false
	return true
}

// rests are those that keep a client away.
func (b *busy) rests(client uint64) []*rest {
	if own := b.each[client]; own != nil {
		return []*rest{&b.all, own}
	}
	return []*rest{&b.all}
}

// admits reports whether a request of a client may come while others run.
func (b *busy) admits(now time.Time, client uint64, running int) bool {
	own := b.each[client]
	return b.all.admits(now, running) && (own == nil || own.admits(now, running))
}

// ends is when a client's next request may come, as far as is known; not after now: there is no rest.
func (b *busy) ends(client uint64) (latest time.Time) {
	for _, r := range b.rests(client) {
		if at := r.ends(); at.After(latest) {
			latest = at
		}
	}
	return latest
}

// closes keeps everybody away.
func (b *busy) closes(now, until time.Time) { b.all.begins(now, until, 0) }

// refused takes note of a 429. If it is about everybody, other clients are the first to come back: the next refusal of this one
// may be about itself alone.
func (b *busy) refused(now, until time.Time, client uint64, running int) {
	if b.refuses && b.last != client {
		b.all.begins(now, until, running)
	}
	if !b.all.until.IsZero() {
		until = until.Add(settle)
	}
	if b.each == nil || len(b.each) >= maxClients {
		b.each = map[uint64]*rest{}
	}
	if b.each[client] == nil {
		b.each[client] = &rest{}
	}
	b.each[client].begins(now, until, running)
	b.last, b.since, b.refuses = client, now, true
}

// picked takes note that a request of a client goes there, and reports whether it tries the instance.
func (b *busy) picked(now time.Time, client uint64, others int, l *policy.Leg) (trial bool) {
	for _, r := range b.rests(client) {
		trial = r.picked(now, others, l) || trial
	}
	return trial
}

// sent takes note that a request has been sent.
func (b *busy) sent(client uint64, l *policy.Leg) {
	for _, r := range b.rests(client) {
		r.sent = r.sent || r.trial == l
	}
}

// admitted takes note that the instance has let a request in.
func (b *busy) admitted(picked time.Time, client uint64, l *policy.Leg) {
	if !picked.Before(b.since) {
		b.refuses = false
	}
	if b.all.trial == l {
		b.all = rest{}
	}
	if own := b.each[client]; own != nil && own.trial == l {
		delete(b.each, client)
	}
}

// over takes note that a request has ended. Another may try the instance if nothing is known from this one.
func (b *busy) over(client uint64, l *policy.Leg) {
	for _, r := range b.rests(client) {
		if r.trial == l {
			r.trial = nil
		}
	}
}

// rests keeps new requests away from an instance for a while after it has refused one: those of the same client if it is busy and
// has said so with a 429, else those of all.
func (p *pool) rests(t target, limit time.Duration, busy bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, now := &p.known[t.index], p.now()
	p.stops(t)
	if !busy {
		k.busy.closes(now, now.Add(limit))
		p.wakeAfter(limit)
		return
	}
	running, most := k.load.running(), p.limit(t.index)
	limit = min(limit, maxBusy)
	if (most == 0 || running < most) && t.picked.Sub(k.load.ended) < settle {
		limit = min(limit, settle)
	}
	k.busy.refused(now, now.Add(limit), t.client, running)
	p.wakeAfter(limit)
	p.wakeAfter(limit + settle) // for this client, if the instance is busy for all
}

// wakeAfter wakes the requests that wait for the end of a rest.
func (p *pool) wakeAfter(limit time.Duration) {
	time.AfterFunc(limit+admission.Backoff(0, min(limit, maxSpread), maxSpread), func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.wake()
	})
}

// rest is how long it takes until a client may ask the first instance of a role again that rests, of those that are not in
// tried; 0: none rests that could be asked.
func (p *pool) rest(r role, client uint64, tried map[int]bool) (shortest time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	for i, in := range p.table.instances {
		k := &p.known[i]
		if left := k.busy.ends(client).Sub(now); in.role == r && !tried[i] && in.state <= suspect && k.drains == 0 && left > 0 && (shortest == 0 || left < shortest) {
			shortest = left
		}
	}
	return shortest
}

// admitted takes note that the instance has not refused a request that was sent there.
func (p *pool) admitted(t target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[t.index].busy.admitted(t.picked, t.client, t.leg)
	p.wake()
}
