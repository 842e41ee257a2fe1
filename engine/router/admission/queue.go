// Package admission decides which of a router's requests run, which wait and which are refused. It is pure: it
// has no clock and no goroutine, and the caller passes the time in and holds a lock around each call.
package admission

import (
	"fmt"
	"slices"
	"time"
)

// Config says how many requests there may be. Each number is at least 0.
type Config struct {
	Slots   int // requests that run at once
	Waiting int // requests that wait at once
}

// Limits are what one client may use. A zero means no limit.
type Limits struct {
	InFlight          int // requests that run at once; further ones wait
	RequestsPerMinute int // a bucket that holds those of a minute and is filled steadily
	TokensPerMinute   int // likewise: estimated tokens when a request comes, the real ones when it ends
}

// Reason says why a request is refused.
type Reason string

// The reasons.
const (
	QueueFull    Reason = "queue_full"          // as many requests wait as may
	QueueTimeout Reason = "queue_timeout"       // the request has waited as long as it may
	RequestRate  Reason = "requests_per_minute" // the client has used up its requests
	TokenRate    Reason = "tokens_per_minute"   // the client has used up its tokens
	Bodies       Reason = "bodies"              // the client would hold more than its Share of what others leave
)

// RefusedError is the error of a request that is not served.
type RefusedError struct {
	Reason Reason
	After  time.Duration // when it is worth trying again, as far as can be told
}

// Error names the reason and the time.
func (r *RefusedError) Error() string {
	return fmt.Sprintf("%s: try again after %v", r.Reason, r.After)
}

// AssumedTokens is how long an answer is taken to be whose request does not say it.
const AssumedTokens = 256

// maxClients bounds how many clients are told apart. Those that come when there are as many share one name.
const maxClients = 4096

// longestAfter bounds RefusedError.After, which is a guess where it is long; shortestAfter is what clients can express.
const (
	shortestAfter = time.Second
	longestAfter  = 10 * time.Minute
)

// Queue shares the slots fairly between clients that have something waiting, by deficit round robin: each round gives
// every client one token, and a request starts when its client has as many as it is estimated to cost. What it cost in the end
// counts for what its client has waiting then. A client alone gets all slots. It is not safe for concurrent use.
type Queue struct {
	config  Config
	clients map[string]*client
	ring    []*client // those that have something waiting
	turn    int       // the place in the ring whose turn it is

	running, waiting int
	held             mean // how long a request runs, in seconds
}

// client is what the queue knows of one client.
type client struct {
	name     string
	limits   Limits
	queue    []*Request // those that wait, the oldest first
	running  int
	deficit  int // tokens that its rounds have given the client and that it has not used
	requests bucket
	tokens   bucket
}

// Request is one request from its arrival to its end.
type Request struct {
	client  *client
	tokens  int           // estimated, at least 1
	decided chan struct{} // closed when it runs or is refused while it waits
	refused *RefusedError // set before decided is closed
	started time.Time     // zero: it does not run
	over    bool
}

// Decided is closed when the request runs, or was refused for the sake of another one.
func (r *Request) Decided() <-chan struct{} { return r.decided }

// Refused is why the request does not run, or nil. It is valid once Decided is closed.
func (r *Request) Refused() *RefusedError { return r.refused }

// NewQueue makes an empty queue.
func NewQueue(c Config) *Queue { return &Queue{config: c, clients: map[string]*client{}} }

// SetSlots changes how many requests run at once. Those that run go on.
func (q *Queue) SetSlots(now time.Time, slots int) {
	q.config.Slots = slots
	q.start(now)
}

// Running is how many requests run.
func (q *Queue) Running() int { return q.running }

// Waiting is how many requests wait.
func (q *Queue) Waiting() int { return q.waiting }

// Arrive takes a request of a client. tokens is what it may cost, as far as can be told. The request runs or waits; or
// the error is a *RefusedError. In a full queue it takes the place of the newest request of the client that has most
// waiting, if that one has at least two more than this client.
func (q *Queue) Arrive(now time.Time, name string, limits Limits, tokens int) (*Request, error) {
	c := q.client(now, name)
	c.limits = limits
	defer q.forget(now, c)
	tokens = max(1, tokens)
	c.requests.refill(now, limits.RequestsPerMinute)
	c.tokens.refill(now, limits.TokensPerMinute)
	switch {
	case !c.requests.has(1):
		return nil, &RefusedError{RequestRate, within(c.requests.until(1))}
	case !c.tokens.has(tokens):
		return nil, &RefusedError{TokenRate, within(c.tokens.until(tokens))}
	}
	if q.waiting >= q.config.Waiting && !q.startsAtOnce(c) {
		longest := q.longest()
		if longest == nil || len(longest.queue) < len(c.queue)+2 {
			return nil, &RefusedError{QueueFull, q.after(c)}
		}
		q.refuse(now, longest.queue[len(longest.queue)-1], QueueFull)
	}
	r := &Request{client: c, tokens: tokens, decided: make(chan struct{})}
	c.requests.take(1)
	c.tokens.take(tokens)
	if len(c.queue) == 0 {
		q.ring = append(q.ring, c)
	}
	c.queue = append(c.queue, r)
	q.waiting++
	q.start(now)
	return r, nil
}

// Estimate says what a request that runs may cost, where that was not known when it arrived. If its client does not have as much
// left, the request is taken out, and the error is a *RefusedError. It stays one of the client's requests, since to know its
// tokens has cost something.
func (q *Queue) Estimate(now time.Time, r *Request, tokens int) error {
	c := r.client
	c.tokens.refill(now, c.limits.TokensPerMinute)
	c.tokens.take(-r.tokens)
	if tokens = max(1, tokens); c.tokens.has(tokens) {
		c.tokens.take(tokens)
		r.tokens = tokens
		return nil
	}
	refused := &RefusedError{TokenRate, within(c.tokens.until(tokens))}
	r.over = true
	q.running--
	c.running--
	q.start(now)
	q.forget(now, c)
	return refused
}

// GiveUp refuses a request that has waited for as long as it may. It returns nil if the request runs already, or was
// refused before.
func (q *Queue) GiveUp(now time.Time, r *Request) *RefusedError {
	if !r.started.IsZero() || r.over {
		return nil
	}
	q.refuse(now, r, QueueTimeout)
	q.forget(now, r.client)
	return r.refused
}

// End takes a request out that has ended or whose client has left. used is how many tokens it cost; a negative number
// says that nobody knows, so that the estimate stands. A request that has not run costs nothing. Calls after the first
// do nothing.
func (q *Queue) End(now time.Time, r *Request, used int) {
	switch {
	case r.over:
		return
	case r.started.IsZero():
		q.drop(now, r)
	default:
		r.over = true
		q.running--
		r.client.running--
		q.held.add(now.Sub(r.started).Seconds())
		if used >= 0 {
			r.client.tokens.refill(now, r.client.limits.TokensPerMinute)
			r.client.tokens.take(used - r.tokens)
			if len(r.client.queue) > 0 { // a client outside the ring has no deficit
				r.client.deficit -= used - r.tokens
			}
		}
	}
	q.start(now)
	q.forget(now, r.client)
}

// client finds or makes a client.
func (q *Queue) client(now time.Time, name string) *client {
	c, known := q.clients[name]
	if known {
		return c
	}
	if len(q.clients) >= maxClients {
		for _, other := range q.clients {
			q.forget(now, other)
		}
	}
	if len(q.clients) >= maxClients {
		name = ""
	}
	if c, known = q.clients[name]; !known {
		c = &client{name: name}
		q.clients[name] = c
	}
	return c
}

// forget drops what is known of a client if that says no more than nothing.
func (q *Queue) forget(now time.Time, c *client) {
	c.requests.refill(now, c.limits.RequestsPerMinute)
	c.tokens.refill(now, c.limits.TokensPerMinute)
	if c.running == 0 && len(c.queue) == 0 && c.requests.full() && c.tokens.full() && q.clients[c.name] == c {
		delete(q.clients, c.name)
	}
}

// startsAtOnce reports whether a request of the client need not wait.
func (q *Queue) startsAtOnce(c *client) bool {
	return q.running < q.config.Slots && len(c.queue) == 0 && !c.capped()
}

// capped reports whether the client runs as many requests as it may.
func (c *client) capped() bool { return c.limits.InFlight > 0 && c.running >= c.limits.InFlight }

// longest is the client that has most requests waiting; nil if none waits.
func (q *Queue) longest() *client {
	if len(q.ring) == 0 {
		return nil
	}
	return slices.MaxFunc(q.ring, func(a, b *client) int { return len(a.queue) - len(b.queue) })
}

// refuse takes a waiting request out and tells whoever waits for it.
func (q *Queue) refuse(now time.Time, r *Request, why Reason) {
	q.drop(now, r)
	r.refused = &RefusedError{why, q.after(r.client)}
	close(r.decided)
}

// drop takes a waiting request out, and gives its client back what it paid.
func (q *Queue) drop(now time.Time, r *Request) {
	c := r.client
	r.over = true
	c.queue = slices.DeleteFunc(c.queue, func(other *Request) bool { return other == r })
	q.waiting--
	c.requests.refill(now, c.limits.RequestsPerMinute)
	c.tokens.refill(now, c.limits.TokensPerMinute)
	c.requests.take(-1)
	c.tokens.take(-r.tokens)
	q.leaveRing(c)
}

// leaveRing takes a client out of the ring if nothing of it waits any more.
func (q *Queue) leaveRing(c *client) {
	at := slices.Index(q.ring, c)
	if at < 0 || len(c.queue) > 0 {
		return
	}
	c.deficit = 0
	q.ring = slices.Delete(q.ring, at, at+1)
	if at < q.turn {
		q.turn--
	}
}

// start runs what may run.
func (q *Queue) start(now time.Time) {
	for q.running < q.config.Slots {
		c := q.next()
		if c == nil {
			return
		}
		r := c.queue[0]
		c.queue[0] = nil
		c.queue = c.queue[1:]
		c.deficit -= r.tokens
		c.running++
		q.waiting--
		q.running++
		r.started = now
		close(r.decided)
		q.leaveRing(c)
	}
}

// next is the client whose oldest request is to run; nil if none may. It gives every client that may run something as
// many rounds as the first of them needs.
func (q *Queue) next() *client {
	best, rounds := -1, 0
	for i := range q.ring {
		at := (q.turn + i) % len(q.ring)
		c := q.ring[at]
		if c.capped() {
			continue
		}
		if need := max(0, c.queue[0].tokens-c.deficit); best < 0 || need < rounds {
			best, rounds = at, need
		}
	}
	if best < 0 {
		return nil
	}
	for _, c := range q.ring {
		if !c.capped() {
			c.deficit += rounds
		}
	}
	q.turn = best
	return q.ring[best]
}

// after is about how long a further request of the client would wait: all that would run before it, at the rate at
// which requests have ended.
func (q *Queue) after(c *client) time.Duration {
	own := len(c.queue) + 1
	before := own
	for _, other := range q.ring {
		if other != c {
			before += min(len(other.queue), own)
		}
	}
	seconds := float64(before) / float64(max(1, q.config.Slots)) * q.held.value
	if c.limits.InFlight > 0 {
		seconds = max(seconds, float64(own)/float64(c.limits.InFlight)*q.held.value)
	}
	return within(seconds)
}

// within is a number of seconds as a time that a client can be told.
func within(seconds float64) time.Duration {
	seconds = min(max(seconds, shortestAfter.Seconds()), longestAfter.Seconds())
	return time.Duration(seconds * float64(time.Second))
}
