package peer

import (
	"time"

	"github.com/kvport/kvport/pipe"
)

// silentFor is how long a consumer must be silent before its link is closed in favour of a new one. The
// consumer dials again when it needs something.
const silentFor = 10 * time.Second

// consumerLink is the link of a consumer that has connected; Store.mu guards its fields.
type consumerLink struct {
	pipe.Link
	spoken bool      // it has sent a message
	busy   bool      // its message is being answered
	heard  time.Time // the time of the last message or of its answer, and before that the time when the link began
}

// enter adds a new link. If there are too many, it closes one that has never sent anything, or nothing for
// a long time; if there is no such link, it refuses the new one.
func (s *Store) enter(c *consumerLink) (ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.heard = time.Now()
	if len(s.links) >= maxLinks {
		silent := s.silent(c.heard.Add(-silentFor))
		if silent == nil {
			return false
		}
		delete(s.links, silent)
		s.tasks.Go(func() { _ = silent.Close() }) // this ends the serve of that link
	}
	s.links[c] = struct{}{}
	return true
}

// silent returns the link that has been silent for longest, and prefers links that have never sent
// anything. It returns nil if all links were active recently. The caller holds s.mu.
func (s *Store) silent(since time.Time) (oldest *consumerLink) {
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

// hear records that a consumer's message came, or was answered.
func (s *Store) hear(c *consumerLink, busy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.spoken, c.busy, c.heard = true, busy, time.Now()
}

func (s *Store) left(c *consumerLink) {
	_ = c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.links, c)
}
