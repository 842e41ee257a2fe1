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
	instances map[int]*line  // seconds until the first byte, by tokens that waited and were computed
	pairs     map[pair]*line // seconds until the first byte at a decode instance, by tokens that it loaded
	all       [roles]line
	loads     line

	tokens, bytes float64 // of prompts
	count         int     // measurements
}

// pair are the places of a prefill and a decode instance.
type pair struct{ prefill, decode int }

func newRates() rates {
	return rates{instances: map[int]*line{}, pairs: map[pair]*line{}}
}

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
		tokens := l.ahead + float64(l.Compute)
		one(r.instances, l.Place).add(r.count, tokens, seconds)
		r.all[l.role].add(r.count, tokens, seconds)
		return
	}
	_, slope := r.compute(Decode, l.Place)
	seconds = max(0, seconds-slope*l.ahead) // what was computed before it is not part of the loading
	one(r.pairs, pair{l.peer, l.Place}).add(r.count, float64(l.Load), seconds)
	r.loads.add(r.count, float64(l.Load), seconds)
}

// one is the line of an instance or a pair.
func one[K comparable](lines map[K]*line, key K) *line {
	l := lines[key]
	if l == nil {
		l = &line{}
		lines[key] = l
	}
	return l
}

// compute is base and slope of the seconds that an instance takes to compute tokens.
func (r *rates) compute(role Role, place int) (base, slope float64) {
	return r.estimate(r.instances[place], &r.all[role])
}

// load is base and slope of the seconds that a decode instance takes to load tokens from a prefill instance.
func (r *rates) load(prefill, decode int) (base, slope float64) {
	return r.estimate(r.pairs[pair{prefill, decode}], &r.loads)
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
	delete(r.instances, place)
	for is := range r.pairs {
		if is.prefill == place || is.decode == place {
			delete(r.pairs, is)
		}
	}
}
