package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/pipe"
)

// The limits of what peers may cost.
const (
	maxLinks    = 256                    // accepted links at the same time
	maxWant     = 2048                   // keys of one request
	maxAsked    = 1 << 17                // outstanding keys of one producer
	askQueue    = 64                     // requests that wait to be sent to one producer
	redialAfter = 250 * time.Millisecond // after a failure
	forgetGone  = 2 * time.Second        // after this time a producer is asked again for a block that it did not have
)

// Store is the Store below FromPipe: one buffer for what this engine saves and what arrives from
// others, a server for consumers, and a client for each producer.
type Store struct {
	peers    pipe.Peers
	log      *slog.Logger
	memory   *lookupbuffer.Memory
	holds    *holdTable
	pushes   pushes
	layered  bool         // its layers are counted
	partial  atomic.Int64 // bytes of blocks of which some parts have arrived
	layers   atomic.Int64 // bytes of blocks whose layers are being pushed
	pushing  *pushing
	coming   *coming
	counts   counts
	listener pipe.Listener // nil if this engine does not save

	ctx    context.Context //nolint:containedctx // the store's life
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	unreachable, crowded seldom // warnings

	mu        sync.Mutex
	producers map[string]*producer
	uses      uint64                     // of producers
	links     map[*consumerLink]struct{} // accepted and open
}

func newStore(peers pipe.Peers, pool *lookupbuffer.Pool, log *slog.Logger) *Store {
	s := &Store{
		peers: peers, log: log, holds: newHoldTable(), pushing: newPushing(), coming: newComing(), producers: map[string]*producer{}, links: map[*consumerLink]struct{}{},
		pushes: pushes{subscribers: map[*subscriber]struct{}{}, sending: map[connector.StoreKey]struct{}{}},
		memory: lookupbuffer.NewMemory(lookupbuffer.Options{Bytes: peers.Bytes, Keep: true, Spill: pool}),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Lookup implements connector.Store.
func (s *Store) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	return s.memory.Lookup(ctx, runs)
}

// Put implements connector.Store.
func (s *Store) Put(ctx context.Context, items []connector.Item) error {
	return s.memory.Insert(ctx, items)
}

// Get implements connector.Store. It never waits.
func (s *Store) Get(ctx context.Context, items []connector.Item) error {
	failed := &connector.ItemError{}
	for i, it := range items {
		err := ctx.Err()
		if err == nil {
			var found bool
			found, err = s.memory.Read(it.Key, func(data []byte) error {
				if len(data) != it.Size() {
					return fmt.Errorf("block of %d bytes, there is room for %d: %w", len(data), it.Size(), connector.ErrOutdated)
				}
				pipe.Copy(it.Spans, [][]byte{data})
				return nil
			})
			if err == nil && !found {
				err = fmt.Errorf("block is not in the buffer any more: %w", connector.ErrGone)
			}
		}
		if err != nil {
			failed.Items, failed.Err = append(failed.Items, i), err
		}
	}
	if failed.Err != nil {
		return failed
	}
	return nil
}

// Close implements connector.Store.
func (s *Store) Close() error {
	s.cancel()
	var err error
	if s.listener != nil {
		err = s.listener.Close()
	}
	s.tasks.Wait()
	err = errors.Join(err, s.memory.Close())
	if s.peers.Close != nil {
		err = errors.Join(err, s.peers.Close())
	}
	return err
}

// accept serves consumers until the listener is closed.
func (s *Store) accept() {
	for {
		link, err := s.listener.Accept(s.ctx)
		if s.ctx.Err() != nil || errors.Is(err, pipe.ErrClosed) {
			if err == nil {
				_ = link.Close()
			}
			return
		}
		if err != nil {
			s.log.Warn("a consumer could not connect", "error", err)
			if !s.pause(redialAfter) {
				return
			}
			continue
		}
		c := &consumerLink{Link: link}
		if !s.enter(c) {
			s.log.Warn("a consumer was refused because too many are connected", "limit", maxLinks)
			_ = link.Close()
			continue
		}
		s.tasks.Go(func() { s.serve(c) })
	}
}

func (s *Store) pause(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-s.ctx.Done():
		return false
	}
}

// serve answers one consumer until it goes away.
func (s *Store) serve(link *consumerLink) {
	defer s.left(link)
	consumer := &subscriber{out: link.Out, lost: func() { _ = link.Close() }}
	defer s.pushes.remove(consumer)
	for {
		m, err := s.receive(link.In, s.roomForPushed)
		if err == nil && m != nil {
			s.hear(link, true)
			err = s.answer(consumer, m)
			s.hear(link, false)
		}
		switch {
		case err == nil:
			continue
		case s.ctx.Err() == nil && !errors.Is(err, pipe.ErrClosed):
			s.log.Warn("a consumer is gone", "error", err)
		}
		return
	}
}

func (s *Store) answer(to *subscriber, m *message) error {
	out := to.out
	switch m.kind {
	case kindSubscribe:
		return s.pushes.add(to, m.from)
	case kindTaken:
		return s.pushes.confirmed(to, m.bytes)
	case kindWant:
		var gone []connector.StoreKey
		for _, k := range m.keys {
			found, err := s.memory.Read(k, func(data []byte) error {
				s.counts.servedBytes.Add(int64(len(data)))
				return s.send(out, &message{kind: kindBlock, key: k}, data)
			})
			if err != nil {
				return err
			}
			if found {
				s.counts.served.Add(1)
			} else {
				gone = append(gone, k)
			}
		}
		if len(gone) > 0 {
			return s.send(out, &message{kind: kindGone, keys: gone}, nil)
		}
		return nil
	case kindFetched:
		s.holds.fetched(m.hold)
		return nil
	case kindBlock:
		return nil
	case kindPushed:
		s.coming.whole(ticket{hold: m.hold, address: m.from, pushed: true})
		return nil
	}
	return fmt.Errorf("a consumer sent a message of kind %d: %w", m.kind, connector.ErrIncompatible)
}

// send sends one message to a peer that may have stopped receiving.
func (s *Store) send(out pipe.Pipe, m *message, block []byte) error {
	ctx, cancel := context.WithTimeout(s.ctx, s.peers.Patience)
	defer cancel()
	header, payload := m.encode()
	if m.kind == kindBlock {
		payload = block
	}
	return out.Send(ctx, header, [][]byte{payload})
}

// fetch asks for blocks that are not here, each from the first producer that has it, and reports whether
// some are on their way.
func (s *Store) fetch(addresses []string, keys []connector.StoreKey) (waits bool) {
	missing := s.missing(keys)
	for _, address := range addresses {
		if len(missing) == 0 || s.listener != nil && address == s.listener.Address() {
			break
		}
		p := s.producer(address)
		if p == nil {
			continue
		}
		var some bool
		some, missing = p.ask(missing)
		waits = waits || some
	}
	return waits
}

// missing returns the keys of blocks that are not here.
func (s *Store) missing(keys []connector.StoreKey) []connector.StoreKey {
	missing := keys[:0:0]
	for _, k := range keys {
		if !s.has(k) {
			missing = append(missing, k)
		}
	}
	return missing
}

// has reports whether a block is in the buffer.
func (s *Store) has(k connector.StoreKey) bool {
	n, err := s.memory.Lookup(s.ctx, [][]connector.StoreKey{{k}})
	return err == nil && n[0] == 1
}

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
