package sdk

import (
	"time"

	"github.com/kvport/kvport/pipe"
)

// silentFor is how long a consumer has said nothing when its link goes in favour of a new one. It dials again
// when it needs something.
const silentFor = 10 * time.Second

// consumerLink is the link of a consumer that has connected; peerStore.mu guards its fields.
type consumerLink struct {
	pipe.Link
	spoken bool      // it has sent a message
	busy   bool      // its message is being answered
	heard  time.Time // of the last message or its answer; until then of its begin
}

// enter notes a new link. If there are too many one goes that has never said anything, or not for long; if
// there is none the new one is refused.
func (s *peerStore) enter(c *consumerLink) (ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.heard = time.Now()
	if len(s.links) >= maxLinks {
		silent := s.silent(c.heard.Add(-silentFor))
		if silent == nil {
			return false
		}
		delete(s.links, silent)
		s.tasks.Go(func() { _ = silent.Close() }) // which ends its serve
	}
	s.links[c] = struct{}{}
	return true
}

// silent is the link that has been silent for longest, first of those that never said a word: nil if all have
// said something since then. The caller holds s.mu.
func (s *peerStore) silent(since time.Time) (oldest *consumerLink) {
	for c := range s.links {
		if c.busy || c.spoken && c.heard.After(since) {
			continue
		}
		if oldest == nil || !c.spoken && oldest.spoken || c.spoken == oldest.spoken && c.heard.Before(oldest.heard) {
			oldest = c
		}
	}
	return oldest
}

// hear notes that a consumer's message came, or was answered.
func (s *peerStore) hear(c *consumerLink, busy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.spoken, c.busy, c.heard = true, busy, time.Now()
}

func (s *peerStore) left(c *consumerLink) {
	_ = c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.links, c)
}
