package fleet

import (
	"time"

	"github.com/kvport/kvport/engine/router"
	"github.com/kvport/kvport/engine/router/policy"
)

// flight is a request on its way.
type flight struct {
	w       *world
	front   *front
	turn    *turn
	ask     *policy.Request
	tried   map[int]bool
	picked  []int
	from    int      // place of the prefill instance that has computed the prompt, or policy.None
	source  *machine // that instance, in that life
	life    int
	prefill *part
	decode  *part
	choices int  // of instances for an attempt
	tries   int  // that decode instances have taken and not answered
	begun   bool // the client has seen a token
}

// part is what one instance has of a request.
type part struct {
	*router.Sending
	at *machine
}

// arrive is a request that comes to a router.
func (w *world) arrive(t *turn) {
	n := 0
	switch w.o.Fault {
	case TwoRouters:
		n = w.rng.IntN(2)
	case TwoRoutersApart:
		n = t.session % 2
	default:
	}
	f := &flight{w: w, front: w.fronts[n], turn: t, tried: map[int]bool{}, from: policy.None}
	f.attempt()
}

// attempt chooses instances and sends the request to the first of them. While decode instances are full it waits, and if none can
// be had otherwise it fails.
func (f *flight) attempt() {
	f.prefill, f.decode = nil, nil
	ok := f.front.choose(f)
	if !ok && f.from != policy.None {
		f.from, f.source = policy.None, nil
		ok = f.front.choose(f)
	}
	if !ok {
		if f.w.Now()-f.turn.at > patience || !f.front.core.Full(f.tried) {
			f.end(false)
			return
		}
		f.w.After(200*time.Millisecond, f.attempt)
		return
	}
	f.choices++
	f.w.chosen(f)
	if f.prefill != nil {
		f.toPrefill()
		return
	}
	f.toDecode()
}

// toPrefill lets a prefill instance compute the prompt, another one if it fails, and none if there is none.
func (f *flight) toPrefill() {
	for f.prefill != nil && !f.reach(f.prefill) {
		f.anotherPrefill()
	}
	if f.prefill == nil {
		f.toDecode()
		return
	}
	p := f.prefill
	p.at.compute(f, func(cached int) {
		p.at.drop(f)
		f.w.computed(f, p, cached)
		f.front.core.Answered(p.Sending, policy.Usage{Prompt: f.turn.prompt, Cached: cached})
		f.front.core.Worked(p.Sending)
		f.front.done(p, false)
		f.prefill, f.from, f.source, f.life = nil, p.Place(), p.at, p.at.life
		f.toDecode()
	})
}

// anotherPrefill chooses another prefill instance after one has failed.
func (f *flight) anotherPrefill() {
	f.w.result.Retries++
	f.front.failed(f.prefill)
	f.prefill = nil
	if s := f.front.core.ChoosePrefill(f.ask, f.decode.Sending, f.tried); s != nil {
		f.prefill = f.front.begins(f, s)
		return
	}
	f.front.core.Unaided(f.decode.Sending)
}

// reach sends a part of the request to its instance. It reports false if that refuses connections.
func (f *flight) reach(p *part) bool {
	f.front.core.Sent(p.Sending)
	f.w.reached(p.at)
	if !p.at.up {
		return false
	}
	p.at.take(f)
	return true
}

// toDecode lets the decode instance load what the prefill instance has, or compute the prompt, and generate.
func (f *flight) toDecode() {
	d := f.decode
	if !f.reach(d) {
		f.retry(d)
		return
	}
	if f.source == nil || !f.source.up || f.source.life != f.life { // nobody has what the ticket promises
		d.at.compute(f, func(cached int) {
			f.w.computed(f, d, cached)
			f.generate()
		})
		return
	}
	held := d.at.cache.held(f.turn.prompted(), 0)
	lacks := f.turn.prompt - held*blockTokens
	d.at.during(loadBase+time.Duration(lacks)*loadToken, func() {
		d.at.store(f, f.turn.prompted())
		f.generate()
	})
}

// generate is the answer, from its first token on.
func (f *flight) generate() {
	d := f.decode
	d.at.during(decodeStep, func() {
		f.front.core.Answered(d.Sending, policy.Usage{}) // a stream does not say how many tokens of its prompt were cached
		f.w.first(f)
		f.begun, f.ask = true, nil // nothing is chosen for it any more
		d.at.busy += decodeStep * time.Duration(f.turn.answer)
		d.at.during(decodeStep*time.Duration(f.turn.answer-1), func() {
			d.at.drop(f)
			d.at.store(f, f.turn.blocks)
			f.front.core.Worked(d.Sending)
			f.front.done(d, false)
			f.decode = nil
			f.end(true)
		})
	})
}

// broke takes note that a machine has died that had a part of the request.
func (f *flight) broke(m *machine) {
	switch {
	case f.prefill != nil && f.prefill.at == m:
		f.anotherPrefill()
		if f.prefill == nil {
			f.toDecode()
			return
		}
		f.toPrefill()
	case f.decode != nil && f.decode.at == m:
		f.tries++
		f.from, f.source = policy.None, nil // a ticket is used once
		f.retry(f.decode)
	}
}

// retry tries another decode instance, unless the client has seen a part of the answer. One that refuses connections costs no try.
func (f *flight) retry(d *part) {
	f.front.failed(d)
	f.decode = nil
	if f.begun || f.tries >= attempts {
		f.end(false)
		return
	}
	f.w.result.Retries++
	f.attempt()
}

// end ends a request.
func (f *flight) end(answered bool) {
	f.front.core.Leave(f.picked)
	if f.w.o.Mutant == RequestLost && !f.w.lost {
		f.w.lost = true
		return
	}
	f.w.ended = f.w.Now()
	if answered {
		f.w.result.Answered++
		f.w.remember(f)
	} else {
		f.w.result.Failed++
	}
	f.w.left--
}
