package ticket

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// What a Guard remembers at most.
const (
	maxUses    = 1 << 16
	maxEngines = 1 << 12
	// minMemory is how long a ticket with a short lease is remembered: producers renew leases.
	minMemory = 10 * time.Minute
)

// Guard refuses tickets that are genuine but not, or no longer, for us. It remembers a bounded
// number of tickets: one is forgotten a while after its lease, when its producer has released the
// blocks anyway, or when too many newer ones came. It is safe for concurrent use.
type Guard struct {
	model, shape connector.Fingerprint
	base         connector.Fingerprint // zero: only tickets of the same shape
	unverified   bool                  // tickets of other shapes with that base are accepted

	mu      sync.Mutex
	byNonce map[[16]byte]*seen
	order   []*seen // by first sight
	uses    int
	epochs  map[string]uint64 // of each engine, the newest seen
}

// seen is one ticket that was used.
type seen struct {
	nonce [16]byte
	by    map[connector.RequestID]struct{}
	first time.Time
	keep  time.Duration
}

// NewGuard makes the guard of an engine with the given fingerprints.
func NewGuard(model, shape connector.Fingerprint) *Guard {
	return &Guard{model: model, shape: shape, byNonce: map[[16]byte]*seen{}, epochs: map[string]uint64{}}
}

// Reshape makes the guard accept tickets of other shapes with that base, too, if blocks that nothing verifies
// are accepted, and else refuse them for that (rule RESHAPE-01). It must be called before the first Check.
func (g *Guard) Reshape(base connector.Fingerprint, unverified bool) {
	g.base, g.unverified = base, unverified
}

// fits reports why the blocks of a ticket are of no use here.
func (g *Guard) fits(e *Envelope) error {
	if e.Model != g.model {
		return fmt.Errorf("ticket of engine %q: model %v, ours is %v: %w", e.Engine, e.Model, g.model, connector.ErrIncompatible)
	}
	none := connector.Fingerprint{}
	var why string
	switch {
	case e.Shape == g.shape:
		return nil
	case g.base != none && e.Cut.Base == g.base && e.Lease > 0:
		if g.unverified {
			return nil
		}
		return fmt.Errorf("ticket of engine %q: shape %v, ours is %v: %w: %w", e.Engine, e.Shape, g.shape, ErrUnverified, connector.ErrIncompatible)
	case g.base == none && e.Cut.Base == none:
		why = "neither it nor we can cut blocks"
	case g.base == none:
		why = "we cannot cut blocks"
	case e.Cut.Base == none:
		why = "it cannot cut blocks"
	default:
		why = "more than block size and ranks differs"
	}
	return fmt.Errorf("ticket of engine %q: shape %v, ours is %v, and %s: %w", e.Engine, e.Shape, g.shape, why, connector.ErrIncompatible)
}

// Check counts one use of a ticket by a request of ours. The same request may check it again at no
// cost, since it is matched many times; requests need unique ids. A refusal wraps ErrIncompatible (and
// ErrUnverified, if that is all), ErrStale or ErrReplayed and uses nothing up.
func (g *Guard) Check(e *Envelope, request connector.RequestID) error {
	if err := g.fits(e); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now() // only ever subtracted from another of this process
	g.forget(now)
	if newest, known := g.epochs[e.Engine]; known && e.Epoch < newest {
		return fmt.Errorf("engine %q: %w", e.Engine, ErrStale)
	}
	s := g.byNonce[e.Nonce]
	if s == nil {
		s = &seen{nonce: e.Nonce, by: map[connector.RequestID]struct{}{}, first: now, keep: max(minMemory, 2*min(e.Lease, 24*time.Hour))}
		g.byNonce[e.Nonce], g.order = s, append(g.order, s)
	}
	if _, again := s.by[request]; again {
		return nil
	}
	if len(s.by) >= max(1, e.Consumers) {
		return fmt.Errorf("engine %q, hold %d: %w", e.Engine, e.Hold, ErrReplayed)
	}
	s.by[request] = struct{}{}
	g.uses++
	g.sawEpoch(e)
	return nil
}

// sawEpoch moves an engine on to its newest life. When there are too many engines some other one is
// forgotten, which costs no more than noticing its stale tickets late.
func (g *Guard) sawEpoch(e *Envelope) {
	if _, known := g.epochs[e.Engine]; !known && len(g.epochs) >= maxEngines {
		for engine := range g.epochs {
			delete(g.epochs, engine)
			break
		}
	}
	g.epochs[e.Engine] = e.Epoch
}

// forget drops the tickets that are over, and the oldest while there are too many.
func (g *Guard) forget(now time.Time) {
	for len(g.order) > 0 {
		s := g.order[0]
		if g.uses < maxUses && now.Sub(s.first) <= s.keep {
			return
		}
		g.order = g.order[1:]
		delete(g.byNonce, s.nonce)
		g.uses -= len(s.by)
	}
}
