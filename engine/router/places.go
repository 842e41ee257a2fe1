package router

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
)

// source says how the router knows of an instance. An instance stays as long as one source names it.
type source uint8

const (
	byFlag source = 1 << iota
	byFile
	byDNS
	byServer    // the engine's server has registered it
	byConnector // the engine's connector has, which says where the engine takes blocks

	byRegistration = byServer | byConnector
)

// spec is an instance as a source names it.
type spec struct {
	role  role
	group string // its replica
	url   *url.URL
	drain bool // it gets no new requests
}

// ErrTooMany says that there are more instances than a router can have.
var ErrTooMany = errors.New("too many instances")

// maxInstances is how many instances a router has at once at most.
const maxInstances = 1024

// identity is what tells an instance from others.
type identity struct {
	role role
	at   string // its base URL in one spelling
}

// placeOf is a base URL in one spelling: a port that goes without saying is left out.
func placeOf(u *url.URL) string {
	usual := map[string]string{"http": ":80", "https": ":443"}[u.Scheme]
	return u.Scheme + "://" + strings.TrimSuffix(strings.ToLower(u.Host), usual) + strings.TrimRight(u.Path, "/")
}

// word is a group in which a source says an instance is.
type word struct {
	by    source
	group string
}

// set makes the instances of a source those of a list: new ones get requests from now on, and those that no source
// names any more get no new ones. If there would be too many, nothing changes.
func (p *pool) set(by source, list []spec) error {
	defer p.changed()
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := p.after(by, list); n > maxInstances {
		return fmt.Errorf("%w: %d, want at most %d", ErrTooMany, n, maxInstances)
	}
	drains, groups := map[int]bool{}, map[int][]string{} // by place; a list may have one twice
	for _, s := range list {
		i := p.claim(s, by)
		drains[i] = drains[i] || s.drain
		groups[i] = append(groups[i], s.group)
	}
	for i := range p.known {
		drain, named := drains[i]
		if named {
			p.regroup(i, by, groups[i])
		} else {
			p.disclaim(i, by)
		}
		p.known[i].drains &^= by
		if drain {
			p.known[i].drains |= by
		}
		p.showUp(i)
	}
	p.wake()
	return nil
}

// taken is how many instances there are, without those that have left and still serve. The caller holds mu.
func (p *pool) taken() (n int) {
	for i := range p.known {
		if p.known[i].sources != 0 {
			n++
		}
	}
	return n
}

// after is how many instances there are once those of a source are those of a list. The caller holds mu.
func (p *pool) after(by source, list []spec) int {
	named := map[identity]bool{}
	for at, i := range p.places {
		if p.known[i].sources&^by != 0 {
			named[at] = true
		}
	}
	for _, s := range list {
		named[identity{s.role, placeOf(s.url)}] = true
	}
	return len(named)
}

// find is the place of an instance; -1 if there is none. The caller holds mu.
func (p *pool) find(r role, u *url.URL) int {
	if i, known := p.places[identity{r, placeOf(u)}]; known {
		return i
	}
	return -1
}

// serves reports whether a URL is that of an instance that has not left: one that does both parts has two places. The
// caller holds mu.
func (p *pool) serves(u *url.URL) bool {
	for r := range roles {
		if i := p.find(r, u); i >= 0 && !p.table.instances[i].left {
			return true
		}
	}
	return false
}

// claim finds an instance or adds it, and notes a source that names it; regroup must follow. The caller holds mu.
func (p *pool) claim(s spec, by source) int {
	i := p.find(s.role, s.url)
	if i < 0 {
		i = p.add(s)
	}
	k, in := &p.known[i], &p.table.instances[i]
	if k.sources == 0 && by != byFlag {
		p.log.Info("instance joins", "instance", s.url.String(), "role", s.role.String())
	}
	k.sources |= by
	if in.left { // and comes back before its last request has ended
		in.left, in.state, in.silence = false, up, 0
		p.metrics.setUp(s.url.String(), s.role, true)
		p.cameBack(i)
	}
	p.watchLocked(i)
	return i
}

// regroup takes the groups in which a source says an instance is, in the order of its list. The first counts of what the
// source says that spoke first, for as long as it says one, so that none resets what is known of the instance again and
// again. The caller holds mu.
func (p *pool) regroup(i int, by source, said []string) {
	k, in := &p.known[i], &p.table.instances[i]
	var words []word
	for _, group := range said {
		if w := (word{by, group}); group != "" && !slices.Contains(words, w) {
			words = append(words, w)
		}
	}
	its := func(w word) bool { return w.by&by != 0 }
	turn := slices.IndexFunc(k.words, its)
	if turn < 0 {
		turn = len(k.words)
	}
	k.words = slices.Insert(slices.DeleteFunc(k.words, its), turn, words...)
	first, others := "", []string(nil)
	for n, w := range k.words {
		switch {
		case n == 0:
			first = w.group
		case w.group != first && !slices.Contains(others, w.group):
			others = append(others, w.group)
		}
	}
	if in.group != first {
		in.group = first
		p.policy.Add(i, in.role.instance(placeOf(p.urls[i]), first))
		p.shares(i)
		p.compare(i)
	}
	ignored := strings.Join(others, " ")
	if ignored != "" && ignored != k.ignored {
		p.log.Warn("instance is named with several groups, the first counts", "instance", p.urls[i].String(), "role", in.role.String(),
			"group", first, "ignored", ignored)
	}
	k.ignored = ignored
}

// add gives a new instance a place: one that nobody has any more, if there is one. The caller holds mu.
func (p *pool) add(s spec) int {
	i := len(p.urls)
	if n := len(p.free); n > 0 {
		i, p.free = p.free[n-1], p.free[:n-1]
	} else {
		p.table.instances = append(p.table.instances, instance{})
		p.urls, p.lives, p.known = append(p.urls, nil), append(p.lives, life{}), append(p.known, registered{})
	}
	p.table.instances[i] = instance{role: s.role, group: s.group}
	load := &inFlight{said: untilSaid}
	for r := range roles {
		if other := p.find(r, s.url); other >= 0 {
			load = p.known[other].load
			load.both = true
		}
	}
	p.urls[i], p.lives[i], p.known[i] = s.url, newLife(), registered{at: placeOf(s.url), load: load}
	p.places[identity{s.role, placeOf(s.url)}] = i
	p.policy.Add(i, s.role.instance(placeOf(s.url), s.group))
	p.everPrefill = p.everPrefill || s.role == prefill
	p.metrics.setUp(s.url.String(), s.role, true)
	p.compare(i)
	return i
}

// cameBack forgets what was wrong with an instance before it left. The caller holds mu.
func (p *pool) cameBack(i int) {
	k := &p.known[i]
	k.breaker, k.busy, k.unwell, k.refusal, k.warned = breaker{}, busy{}, "", "", nil
	p.metrics.setBroken(p.urls[i].String(), p.table.instances[i].role, false)
	if p.lives[i].ctx.Err() != nil {
		p.lives[i] = newLife()
	}
}

// disclaim notes that a source, or each of several, does not name an instance any more. Without a source it gets no new requests; its place
// is free when the last request that has picked it has ended. The caller holds mu.
func (p *pool) disclaim(i int, by source) {
	k := &p.known[i]
	if k.sources&by == 0 {
		return
	}
	k.sources &^= by
	k.drains &^= by
	if by&byRegistration != 0 {
		p.unregistered(i, by)
	}
	if k.sources != 0 {
		p.regroup(i, by, nil)
		return
	}
	k.words = nil
	in := &p.table.instances[i]
	in.left, in.state = true, down
	if k.stop != nil {
		k.stop()
		k.stop = nil
	}
	p.metrics.setUp(p.urls[i].String(), in.role, false)
	p.policy.Forget(i) // if it comes back, it may have been started again
	if !p.serves(p.urls[i]) {
		p.blocks.forget(p.urls[i])
	}
	p.log.Info("instance leaves", "instance", p.urls[i].String(), "role", in.role.String(), "requests", k.users)
	p.vacate(i)
}

// vacate forgets an instance that has left and that no request has to do with. Its place cools down until
// nothing else remembers it. The caller holds mu.
func (p *pool) vacate(i int) {
	in := &p.table.instances[i]
	if !in.left || p.known[i].users > 0 || p.urls[i] == nil {
		return
	}
	p.metrics.forget(p.urls[i].String(), in.role)
	for is := range p.misfits {
		if is.prefill == i || is.decode == i {
			delete(p.misfits, is)
		}
	}
	for is := range p.wasted {
		if is.prefill == i || is.decode == i {
			delete(p.wasted, is)
		}
	}
	p.policy.Remove(i)
	p.lives[i].end(nil)
	who := identity{in.role, placeOf(p.urls[i])}
	delete(p.places, who)
	p.known[i].load.both = false
	p.urls[i], p.known[i] = nil, registered{}
	p.cooling[i] = who
}

// leave takes note that a request has ended that picked these instances.
func (p *pool) leave(picked []int) {
	if len(picked) == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, i := range picked {
		p.known[i].users--
		p.vacate(i)
	}
}

// gone are the places of instances that have left, and the instances themselves.
type gone map[int]identity

// recycle makes the places of instances that are forgotten free for others, after forget has dropped what else
// there is about them.
func (p *pool) recycle(forget func(gone)) {
	p.mu.Lock()
	cold := p.cooling
	p.cooling = gone{}
	p.mu.Unlock()
	if len(cold) == 0 {
		return
	}
	forget(cold)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, slices.Sorted(maps.Keys(cold))...)
}

// forget drops the turns that instances hold which are gone.
func (t *turns) forget(places gone) {
	left := map[string]bool{}
	for _, who := range places {
		left[who.at] = left[who.at] || who.role == decode
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for mark, slot := range t.marked.All() {
		if left[t.held[slot].instance] {
			t.drop(mark, slot)
		}
	}
}

// forgetPlaces drops what the router remembers of instances that are gone.
func (r *Router) forgetPlaces(places gone) {
	if r.turns != nil {
		r.turns.forget(places)
	}
	r.asker.forget(places)
}
