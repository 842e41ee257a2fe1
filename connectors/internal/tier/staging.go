package tier

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// staging keeps blocks that were fetched from the lower tier before somebody asked for them. They are
// no part of the memory tier: a lookup that starts a fetch evicts nothing, so that no other lookup can
// observe it (rule SCHED-02).
type staging struct {
	most int // blocks at the same time

	mu    sync.Mutex
	byKey map[connector.StoreKey]*stage
	order []*stage // the earliest first; some may be gone
	spare [][]byte
}

// stage is one block, on its way until done is closed.
type stage struct {
	key  connector.StoreKey
	data []byte // with its head
	done chan struct{}
	err  error
}

// start makes stages for those of the keys that have none. What was fetched and not asked for goes.
func (g *staging) start(keys []connector.StoreKey, size int) (started []*stage) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.byKey == nil {
		g.byKey = map[connector.StoreKey]*stage{}
	}
	for _, k := range keys {
		if g.byKey[k] != nil {
			continue
		}
		for len(g.byKey) >= g.most && len(g.order) > 0 {
			g.remove(g.order[0])
		}
		s := &stage{key: k, data: g.buffer(size), done: make(chan struct{})}
		g.byKey[k] = s
		g.order = append(g.order, s)
		started = append(started, s)
	}
	return started
}

func (g *staging) buffer(size int) []byte {
	if n := len(g.spare); n > 0 {
		b := g.spare[n-1]
		g.spare = g.spare[:n-1]
		return b
	}
	return make([]byte, size)
}

func (g *staging) remove(s *stage) {
	if g.byKey[s.key] == s {
		delete(g.byKey, s.key)
	}
	if i := slices.Index(g.order, s); i >= 0 {
		g.order = slices.Delete(g.order, i, i+1)
	}
}

// take gives the stage of a key to its only user; nil if there is none.
func (g *staging) take(k connector.StoreKey) *stage {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.byKey[k]
	if s != nil {
		g.remove(s)
	}
	return s
}

// drop forgets what was fetched of a key.
func (g *staging) drop(k connector.StoreKey) { g.take(k) }

func (g *staging) clear() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.byKey, g.order = nil, nil
}

// reuse takes back the memory of a stage that nobody has any more.
func (g *staging) reuse(s *stage) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.spare) < g.most {
		g.spare = append(g.spare, s.data)
	}
}

// prefetch has the next blocks of a run fetched, unless enough is on its way.
func (b *below) prefetch(keys []connector.StoreKey) {
	n := min(len(keys), b.o.Prefetch)
	if n == 0 || !b.o.SameSize {
		return
	}
	started := b.staged.start(keys[:n], int(b.o.SlotBytes)+LowerHeader)
	if len(started) == 0 {
		return
	}
	select {
	case b.ahead <- started:
	default:
		for _, s := range started {
			b.staged.drop(s.key)
			s.err = errAbsent
			close(s.done)
		}
	}
}

// fetch reads ahead.
func (b *below) fetch(ctx context.Context) {
	for {
		var stages []*stage
		select {
		case <-ctx.Done():
			return
		case stages = <-b.ahead:
		}
		for _, s := range stages { // one at a time: the first is wanted first
			s.err = b.lower.Get(ctx, []connector.Item{{Key: s.key, Spans: [][]byte{s.data}}})
			if s.err == nil {
				b.c.prefetches.Add(1)
			}
			close(s.done)
		}
	}
}

// fromStaged serves an item from what was fetched ahead.
func (b *below) fromStaged(ctx context.Context, it connector.Item) bool {
	if b.staged.most == 0 {
		return false
	}
	s := b.staged.take(it.Key)
	if s == nil {
		return false
	}
	select {
	case <-s.done:
	case <-ctx.Done():
		return false
	}
	if s.err != nil || it.Size()+LowerHeader != len(s.data) {
		return false
	}
	defer b.staged.reuse(s)
	if b.arrived(it.Key, s.data[:LowerHeader]) != nil {
		return false
	}
	rest := s.data[LowerHeader:]
	for _, span := range it.Spans {
		rest = rest[copy(span, rest):]
	}
	return true
}

// past reports whether a time in Unix ms is over; 0 is never.
func past(until int64) bool { return until != 0 && until <= time.Now().UnixMilli() }
