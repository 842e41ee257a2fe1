package peer

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// The limits of the table of producers. An address may come from a request's id, which some configs believe although anybody can write one.
const (
	maxProducers = 256 // that have been reached: one that restarts has a new address
	maxStrangers = 64  // that have never been reached
)

// producer finds or makes the client of one address; nil when there are too many or the store closes.
func (s *Store) producer(address string) *producer {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, now := s.producers[address], time.Now()
	if s.ctx.Err() != nil {
		return p
	}
	if p == nil {
		if !s.roomForProducer() {
			if held, due := s.crowded.due(now); due {
				s.log.Warn("too many producers are in use, so another one is not asked", "address", address, "limit", maxProducers, "held_back", held)
			}
			return nil
		}
		p = &producer{store: s, address: address, queue: make(chan *message, askQueue), asked: map[connector.StoreKey]asking{}}
		p.ctx, p.cancel = context.WithCancel(s.ctx)
		s.producers[address] = p
		s.tasks.Go(p.run)
	}
	s.uses++
	p.mu.Lock()
	p.used = s.uses
	p.mu.Unlock()
	return p
}

// How much a producer is needed. Of those that are needed least, the one goes first that was used least recently.
const (
	isDead     = iota // its link has failed, and nobody waits for anything
	isStranger        // it has never been reached
	isIdle            // it has a link, and nobody waits for anything
	isBusy
)

// need is how much a producer is needed.
type need struct {
	*producer
	rank     int
	stranger bool
	used     uint64
}

func (p *producer) need() need {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := need{p, isIdle, !p.met, p.used}
	waits := p.dealing || len(p.queue) > 0 || !p.quiet.IsZero()
	switch {
	case !waits && !p.failed.IsZero():
		n.rank = isDead
	case n.stranger:
		n.rank = isStranger
	case waits:
		n.rank = isBusy
	}
	return n
}

// ranked are the producers that have been reached, and those that never were. The caller holds mu.
func (s *Store) ranked() (met, strangers []need) {
	for _, p := range s.producers {
		if n := p.need(); n.stranger {
			strangers = append(strangers, n)
		} else {
			met = append(met, n)
		}
	}
	return met, strangers
}

func least(all []need) need {
	return slices.MinFunc(all, func(a, b need) int { return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.used, b.used)) })
}

// roomForProducer reports whether another producer can be remembered. It is a stranger at first, and takes the place of another stranger if
// there are too many: any number of addresses that do not answer take no room from those that do. The caller holds mu.
func (s *Store) roomForProducer() bool {
	met, strangers := s.ranked()
	if len(met) >= maxProducers && least(met).rank == isBusy {
		return false
	}
	if len(strangers) >= maxStrangers {
		s.forgetProducer(least(strangers).producer)
	}
	return true
}

// meet takes note that a producer was reached. If there are too many of these, one that nobody needs now is forgotten.
func (s *Store) meet(p *producer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.mu.Lock()
	p.met = true
	p.mu.Unlock()
	met, _ := s.ranked()
	if len(met) <= maxProducers {
		return
	}
	if n := least(met); n.rank != isBusy {
		s.forgetProducer(n.producer)
	}
}

// forgetProducer forgets a producer. What was to be sent to it is not sent. The caller holds mu.
func (s *Store) forgetProducer(p *producer) {
	delete(s.producers, p.address)
	p.mu.Lock()
	p.forgotten = true
	p.mu.Unlock()
	p.cancel()
}

// forgetDead forgets a producer whose link has failed, once that says no more of its blocks.
func (s *Store) forgetDead(p *producer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.mu.Lock()
	failed := p.failed
	p.mu.Unlock()
	if p.need().rank == isDead && time.Since(failed) > forgetGone && s.producers[p.address] == p {
		s.forgetProducer(p)
	}
}

// How often a warning may be said whose cause others can repeat as they like.
const (
	warnEvery = time.Minute
	warnMost  = 8 // in that time
)

// seldom counts warnings of one kind.
type seldom struct {
	mu         sync.Mutex
	since      time.Time
	said, held int
}

// due reports whether one may be said, and how many were held back before it.
func (s *seldom) due(now time.Time) (held int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Sub(s.since) >= warnEvery {
		held, s.held, s.said, s.since = s.held, 0, 0, now
	}
	if s.said == warnMost {
		s.held++
		return 0, false
	}
	s.said++
	return held, true
}
