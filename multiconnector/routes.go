package multiconnector

import (
	"sync"

	"github.com/kvport/kvport/connector"
)

// maxRoutes bounds what is remembered of requests: beyond it all is forgotten. A route avoids
// asking children that cannot answer; without one, every child is asked in order.
const maxRoutes = 1 << 14

// route says which child has which piece of one request's prefix, by the last Match.
type route struct {
	segments []segment
}

// segment is a piece of a prefix that one child has: up to end, in tokens from 0.
type segment struct {
	child, end int
}

// routes are what the scheduler side tells the workers. Both are in one process.
type routes struct {
	mu      sync.Mutex
	request map[connector.RequestID]route
}

func (r *routes) set(id connector.RequestID, to route) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, known := r.request[id]; !known && len(r.request) >= maxRoutes {
		clear(r.request)
	}
	r.request[id] = to
}

func (r *routes) get(id connector.RequestID) route {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.request[id]
}

func (r *routes) forget(ids ...connector.RequestID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range ids {
		delete(r.request, id)
	}
}

func (r *routes) clear() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.request)
}

// first is the child that a block ending at token end is routed to; ok is false without a route.
func (r route) first(end int) (child int, ok bool) {
	for _, s := range r.segments {
		if end <= s.end {
			return s.child, true
		}
	}
	return 0, false
}

// maxSeen bounds the keys that are remembered of what children have: beyond it all are forgotten.
const maxSeen = 1 << 16

// seen is what children of scope shared were seen to have.
type seen struct {
	mu   sync.Mutex
	keys map[connector.BlockKey]uint32 // the children, as bits
}

func (s *seen) add(child int, keys []connector.BlockKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys == nil || len(s.keys)+len(keys) > maxSeen {
		s.keys = map[connector.BlockKey]uint32{}
	}
	for _, k := range keys {
		s.keys[k] |= 1 << child
	}
}

// lost forgets that a child has some blocks: it failed to load them.
func (s *seen) lost(child int, blocks []connector.Block) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range blocks {
		if s.keys[b.Key] != 0 {
			s.keys[b.Key] &^= 1 << child
		}
	}
}

// any reports whether a child has a block.
func (s *seen) any(k connector.BlockKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keys[k] != 0
}

func (s *seen) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.keys)
}
