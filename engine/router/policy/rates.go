package policy

// line learns seconds as base + slope x tokens from what was measured: least squares with weights that decay.
type line struct {
	n, x, y, xx, xy float64 // sums over measurements; the newest counts 1, each older one keep times the next
	base, slope     float64 // what follows from them; neither is negative
	at              int     // number of the last measurement, of all that the policy has taken
}

// keep is what a measurement counts of the next one: about the last 40 count.
const keep = 0.975

// add takes a measurement.
func (l *line) add(at int, tokens, seconds float64) {
	l.at = at
	l.n = keep*l.n + 1
	l.x = keep*l.x + tokens
	l.y = keep*l.y + seconds
	l.xx = keep*l.xx + tokens*tokens
	l.xy = keep*l.xy + tokens*seconds
	l.base, l.slope = l.fit()
}

// known reports whether there are measurements.
func (l *line) known() bool { return l.n > 0 }

// fit is base and slope.
func (l *line) fit() (base, slope float64) {
	meanX, meanY := l.x/l.n, l.y/l.n
	variance := l.xx/l.n - meanX*meanX
	switch {
	case meanX <= 0:
		return meanY, 0
	case variance <= 1e-3*meanX*meanX: // all of one length
		return 0, meanY / meanX
	}
	slope = max(0, (l.xy/l.n-meanX*meanY)/variance)
	base = meanY - slope*meanX
	if base < 0 {
		return 0, l.xy / l.xx
	}
	return base, slope
}

// rates is what was learnt from answers: about instances, about pairs, and about all of a kind together, which
// counts where one instance or pair was measured seldom.
type rates struct {
	instances places[*line]         // seconds until the first byte, by tokens that waited and were computed
	pairs     places[places[*line]] // by decode and then by prefill instance: seconds until the first byte there, by tokens loaded by ticket
	stores    places[[2]*line]      // of its node, and of one that instances share: seconds that are not for computing, by tokens loaded from there
	all       [roles]line
	loads     line
	fetches   [2]line // from stores of a node, and from one that instances share

	tokens, bytes float64 // of prompts
	count         int     // measurements
}

// places has something for each place. A choice asks for hundreds of pairs, which maps would take most of its time for.
type places[T any] []T

// at is what there is for a place.
func (p places[T]) at(place int) (is T) {
	if place < len(p) {
		return p[place]
	}
	return is
}

// of is where it is, after room was made for it.
func (p *places[T]) of(place int) *T {
	if missing := place + 1 - len(*p); missing > 0 {
		*p = append(*p, make([]T, missing)...)
	}
	return &(*p)[place]
}

// unmeasured is what it costs to load a token from a store, beside computing it, as long as nobody has measured that.
const unmeasured = 0.5

// How much the measurements of all instances of a kind together count beside those of one of them: as many
// measurements as together says, and more the longer the one was not measured. Half of what was measured at one
// instance is forgotten while stale others were taken elsewhere, so that a slow one is tried again.
const (
	together = 2
	stale    = 1000
)

// perByte is how many tokens a byte of a prompt's text makes; a quarter until it is known.
func (r *rates) perByte() float64 {
	if r.bytes == 0 {
		return 0.25
	}
	return r.tokens / r.bytes
}

// length takes note of the tokens and bytes of a prompt.
func (r *rates) length(tokens, bytes int) {
	if bytes > 0 {
		r.tokens, r.bytes = keep*r.tokens+float64(min(tokens, bytes)), keep*r.bytes+float64(bytes)
	}
}

// answered takes the time that a leg took.
func (r *rates) answered(l *Leg, seconds float64) {
	r.count++
	if l.peer == None {
		if r.fetched(l, seconds) {
			return
		}
		tokens := l.ahead + float64(l.Compute)
		seconds = max(0, seconds-r.fetch(l.role, l.Place, l.Hit))
		one(r.instances.of(l.Place)).add(r.count, tokens, seconds)
		r.all[l.role].add(r.count, tokens, seconds)
		return
	}
	_, slope := r.compute(Decode, l.Place)
	seconds = max(0, seconds-slope*l.ahead) // what was computed before it is not part of the loading
	one(r.pairs.of(l.Place).of(l.peer)).add(r.count, float64(l.Load), seconds)
	r.loads.add(r.count, float64(l.Load), seconds)
}

// fetched takes the time of a leg as that of loading from a store, if more was to be loaded from there than computed, and
// reports whether it was, so that it is not taken for that of computing. What counts is what was expected, so that a store that does not have it is a slow one.
func (r *rates) fetched(l *Leg, seconds float64) bool {
	tokens := l.ahead + float64(max(0, l.prompt-l.Hit.Tokens()))
	node, shared := l.Hit.stored()
	if float64(node+shared) <= tokens {
		return false
	}
	if !r.all[l.role].known() {
		return true // how much of it was computing nobody can tell, so nothing is learnt
	}
	kind := 0
	if shared > node {
		kind = 1
	}
	base, slope := r.compute(l.role, l.Place)
	seconds = max(0, seconds-base-slope*tokens)
	one(&r.stores.of(l.Place)[kind]).add(r.count, float64(node+shared), seconds)
	r.fetches[kind].add(r.count, float64(node+shared), seconds)
	r.all[l.role].at = r.count // this way to serve a request was measured, too
	return true
}

// one is the line of an instance, a pair or a store, which is made for the first measurement.
func one(l **line) *line {
	if *l == nil {
		*l = &line{}
	}
	return *l
}

// compute is base and slope of the seconds that an instance takes to compute tokens.
func (r *rates) compute(role Role, place int) (base, slope float64) {
	return r.estimate(r.instances.at(place), &r.all[role])
}

// load is base and slope of the seconds that a decode instance takes to load tokens from a prefill instance.
func (r *rates) load(prefill, decode int) (base, slope float64) {
	return r.estimate(r.pairs.at(decode).at(prefill), &r.loads)
}

// fetch is the seconds that an instance takes to load what a hit has in stores.
func (r *rates) fetch(role Role, place int, h Hit) (seconds float64) {
	node, shared := h.stored()
	for kind, tokens := range [2]int{node, shared} {
		if tokens == 0 {
			continue
		}
		var base, slope float64
		if all := &r.fetches[kind]; all.known() {
			base, slope = r.estimate(r.stores.at(place)[kind], all)
		} else {
			_, slope = r.compute(role, place)
			slope *= unmeasured
		}
		seconds += base + slope*float64(tokens)
	}
	return seconds
}

// saved is how many tokens of a hit an instance need not compute, less those that it could compute while it loads.
func (r *rates) saved(role Role, place int, h Hit) float64 {
	node, shared := h.stored()
	stored := float64(node + shared)
	if stored == 0 {
		return float64(h.Engine)
	}
	lost := unmeasured * stored
	if _, slope := r.compute(role, place); slope > 0 {
		lost = r.fetch(role, place, h) / slope
	}
	return float64(h.Engine) + max(0, stored-lost)
}

// estimate is between what was measured at one and at all.
func (r *rates) estimate(one, all *line) (base, slope float64) {
	if one == nil {
		return all.base, all.slope
	}
	n := one.n / (1 + float64(r.count-one.at)/stale)
	w := n / (n + together)
	return w*one.base + (1-w)*all.base, w*one.slope + (1-w)*all.slope
}

// remove forgets an instance and its pairs.
func (r *rates) remove(place int) {
	*r.instances.of(place) = nil
	*r.pairs.of(place) = nil
	for decode := range r.pairs {
		if its := r.pairs[decode]; place < len(its) {
			its[place] = nil
		}
	}
	*r.stores.of(place) = [2]*line{}
}
