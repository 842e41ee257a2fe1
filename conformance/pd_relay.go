package conformance

import (
	"bytes"
	"regexp"
	"sync"
	"time"

	"github.com/kvport/kvport/conformance/relay"
)

// A relay is between a consumer and its producer: the address in the ticket is replaced by the relay's,
// as a router or a proxy between two hosts would do it. Nothing of the connector's config changes.

var loopbackAddress = regexp.MustCompile(`127\.0\.0\.1:\d{2,5}`)

// addressIn is where a ticket names an address of this machine in plain text, as its begin and end; nil if
// it does not.
func addressIn(ticket []byte) []int { return loopbackAddress.FindIndex(ticket) }

// between is a relay in front of one producer.
type between struct {
	*relay.Relay
	r *rig
}

// between puts a relay in front of the producer that a ticket names.
func (r *rig) between(pr *prompt) *between {
	r.Helper()
	at := addressIn(pr.hold.Ticket)
	if at == nil {
		r.Skipf("the ticket names no address of this machine (127.0.0.1:PORT) in plain text, so no relay can stand between")
	}
	w, err := relay.New(string(pr.hold.Ticket[at[0]:at[1]]), r.settings.seed)
	r.must(err, "relay")
	r.closers = append(r.closers, w.Close)
	return &between{w, r}
}

// through leads the consumers of a prompt through the relay. It gives the producer's address.
func (w *between) through(pr *prompt) {
	w.r.Helper()
	at := addressIn(pr.hold.Ticket)
	if at == nil {
		w.r.Errorf("a ticket names no address, others of the same producer do")
		w.r.FailNow()
	}
	pr.hold.Ticket = bytes.Join([][]byte{pr.hold.Ticket[:at[0]], []byte(w.Address()), pr.hold.Ticket[at[1]:]}, nil)
}

// leadTo passes new connections on to the producer of a prompt.
func (w *between) leadTo(pr *prompt) {
	w.r.Helper()
	if at := addressIn(pr.hold.Ticket); at != nil {
		w.Lead(string(pr.hold.Ticket[at[0]:at[1]]))
	}
}

// hurts fails the case if a fault has not hurt anything: then it has proven nothing.
func (w *between) hurts(what string, n int) {
	w.r.Helper()
	if n == 0 {
		w.r.Errorf("nothing was %s on its way, so the case has proven nothing", what)
	}
}

// routed is a producer, a consumer and a relay between them, through which two requests were handed over.
func (r *rig) routed() (p, d *pd, w *between) {
	r.Helper()
	p = r.sender(1)
	pr := p.hand(2, 0)
	w = r.between(pr)
	d = p.taker()
	w.through(pr)
	d.take(pr)
	met := w.Count().Passed
	d.take(w.handThrough(p, 2))
	if w.Count().Passed == met {
		r.Skipf("consumers use the address in their ticket to meet at most, so no relay can stand between them and what they fetch")
	}
	p.sweep()
	return p, d, w
}

// handThrough hands a prompt over by the relay.
func (w *between) handThrough(p *pd, full int) *prompt {
	w.r.Helper()
	pr := p.hand(full, 0)
	w.through(pr)
	return pr
}

// halfway runs a try that the relay stops amid what the producer sends, calls then, lets the relay go on,
// and waits for the end. It tries fewer bytes until one was stopped.
func (w *between) halfway(p, d *pd, then func(*prompt)) {
	w.r.Helper()
	w.halfwayOf(p, func(pr *prompt) { d.try(pr) }, then)
}

// halfwayOf is halfway for anything that fetches a prompt.
func (w *between) halfwayOf(p *pd, try, then func(*prompt)) {
	w.r.Helper()
	for most := int64(1200); most > 20; most /= 2 {
		w.Cut() // so that new connections begin
		pr := w.handThrough(p, 4)
		stalls := w.Count().Stalls
		w.StallAfter(1 + w.r.rand.Int64N(most))
		var wg sync.WaitGroup
		done := make(chan struct{})
		wg.Go(func() {
			defer close(done)
			try(pr)
		})
		stopped := w.stalled(stalls, done)
		if stopped {
			then(pr)
		}
		w.Stall(false, false)
		wg.Wait()
		if stopped {
			return
		}
		p.sweep()
	}
	w.r.Errorf("no load could be stopped while the producer was sending")
}

// stalled waits until the relay stalls. It reports false if the attempt ended before that.
func (w *between) stalled(stalls int, done chan struct{}) bool {
	for {
		if w.Count().Stalls > stalls {
			return true
		}
		select {
		case <-done:
			return w.Count().Stalls > stalls
		case <-time.After(time.Millisecond):
		}
	}
}
