package router

import (
	"encoding/json"
	"net/url"
	"time"

	"github.com/kvport/kvport/engine/router/policy"
)

// kind is what the router sends to an instance.
type kind uint8

const (
	generation kind = iota // a request for tokens, of a prefill or a decode instance
	cacheQuery
	tokenizing // of a prompt whose blocks are looked up
	listing    // of models
)

// counts reports whether it counts among the requests that run on the instance: if it is one of max_in_flight there, as kvport
// serve counts them. The others, and health checks, are answered however many requests run.
func (k kind) counts() bool { return k != listing }

// kindOf is what a choice is for.
func kindOf(r *policy.Request) kind {
	if r.NoWork {
		return listing
	}
	return generation
}

// inFlight is how many requests run on one instance at once. An instance that does both parts has two places and one of
// these.
type inFlight struct {
	legs  [roles]int
	both  bool      // it does both parts
	said  int       // how many there may be, as its /health says; 0: it does not say
	ended time.Time // when the last of them ended
}

// untilSaid is how many requests an instance gets at once whose /health has not been read yet.
const untilSaid = 16

func (f *inFlight) running() int { return f.legs[prefill] + f.legs[decode] }

// parseLimit reads from a body of /health how many requests may run at once; 0: it does not say.
func parseLimit(body []byte) int {
	var h struct {
		MaxInFlight int `json:"max_in_flight"`
	}
	if json.Unmarshal(body, &h) != nil {
		return 0
	}
	return max(0, h.MaxInFlight)
}

// limit is how many requests may run on the instance at a place; 0: any number. The caller holds mu.
func (p *pool) limit(i int) int {
	said := p.known[i].load.said
	if said == 0 || p.mostEach == 0 {
		return max(said, p.mostEach)
	}
	return min(said, p.mostEach)
}

// isFull reports whether as many requests run on the instance at a place as may. An instance that does both parts computes no
// prompt for another in its last slot: a request has a slot on its decode instance meanwhile, so that it would take both
// instances, and another request neither. The caller holds mu.
func (p *pool) isFull(i int) bool {
	limit, load := p.limit(i), p.known[i].load
	if limit == 0 {
		return false
	}
	if load.both && p.table.instances[i].role == prefill {
		limit--
	}
	return load.running() >= limit
}

// full reports whether an instance of a role, of those that are not in tried, could serve if fewer requests ran there.
func (p *pool) full(r role, tried map[int]bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	for i, in := range p.table.instances {
		if in.role == r && !tried[i] && p.table.available(i) && p.known[i].serves(now) && p.isFull(i) {
			return true
		}
	}
	return false
}

// room is how many requests may run at once, so that each finds a decode instance that is not full, and most at most:
// what these take together, and what still runs on those that take no new ones.
func (p *pool) room(most int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, sum, some := p.now(), 0, false
	for i, in := range p.table.instances {
		if p.urls[i] == nil || in.role != decode {
			continue
		}
		if !p.table.available(i) || !p.known[i].serves(now) {
			sum += p.known[i].load.legs[decode]
			continue
		}
		limit := p.limit(i)
		if limit == 0 {
			return most
		}
		sum, some = sum+min(max(0, limit-p.known[i].load.legs[prefill]), most), true
	}
	if !some { // requests learn at once that there is none
		return most
	}
	return min(sum, most)
}

// saysLimit takes how many requests an instance says may run there at once. The caller holds mu.
func (p *pool) saysLimit(i, limit int) {
	if l := p.known[i].load; l.said != limit {
		l.said = limit
		p.wake()
	}
}

// begins takes note that something is sent to an instance, whose place is kept until leave. The caller holds mu.
func (p *pool) begins(i int, what kind) {
	p.known[i].users++
	if what.counts() {
		p.known[i].load.legs[p.table.instances[i].role]++
	}
}

// asks takes note that something that no client has sent goes to an instance, until over is called. It does nothing if the
// instance has left.
func (p *pool) asks(i int, u *url.URL, what kind) (over func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.urls[i] != u {
		return func() {}
	}
	p.begins(i, what)
	return func() {
		p.mu.Lock()
		p.ended(i, what)
		p.known[i].load.ended = p.now()
		p.wake()
		p.mu.Unlock()
		p.leave([]int{i})
		p.changed() // on an instance that does both parts it may have had the place of a request that waits in the queue
	}
}

// stops takes note that a request no longer runs on the instance; it reports whether it did. The caller holds mu.
func (p *pool) stops(t target) bool {
	if t.stopped == nil || *t.stopped {
		return false
	}
	*t.stopped = true
	return p.ended(t.index, t.kind)
}

// ended takes note that what began no longer runs on an instance, and reports whether it counted. The caller holds mu.
func (p *pool) ended(i int, what kind) bool {
	if what.counts() {
		p.known[i].load.legs[p.table.instances[i].role]--
	}
	return what.counts()
}
