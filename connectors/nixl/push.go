package nixl

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/nixl"
)

// maxPush bounds how long a producer writes for one question.
const maxPush = 10 * time.Minute

// pushes are the writes of a producer, by the read that they are for: who asks again because a connection
// has ended waits for the same write, and never starts a second into the same blocks.
type pushes struct {
	mu  sync.Mutex
	all map[readName]*pushed
}

type pushed struct {
	over   chan struct{} // closed when what follows is there
	at     time.Time
	answer *answer
	err    error
}

// once runs do for a question, or gives what it gave for the same.
func (p *pushes) once(q *question, do func() (*answer, error)) (*answer, error) {
	if q.Load == "" {
		return nil, fmt.Errorf("a push has no name: %w", connector.ErrIncompatible)
	}
	name := readName{q.Hold, q.Rank, q.Load, string(q.Secret)}
	p.mu.Lock()
	have := p.all[name]
	if have == nil {
		p.sweep(time.Now())
		mine := &pushed{over: make(chan struct{})}
		p.all[name] = mine
		p.mu.Unlock()
		mine.answer, mine.err = do()
		p.mu.Lock()
		mine.at = time.Now()
		p.mu.Unlock()
		close(mine.over)
		return mine.answer, mine.err
	}
	p.mu.Unlock()
	<-have.over
	return have.answer, have.err
}

// sweep forgets what nobody asks about any more. The caller holds p.mu.
func (p *pushes) sweep(now time.Time) {
	for name, x := range p.all {
		if !x.at.IsZero() && now.Sub(x.at) > doneKept {
			delete(p.all, name)
		}
	}
}

// push writes blocks of a hold to where a consumer asked for them, and says whether they were held until the end.
func (n *Node) push(r *rank, q *question, e *connector.Ended) (*answer, error) {
	local, remote, err := unpackRuns(q.Push.Runs)
	if err == nil {
		err = r.cache().holds(e, local)
	}
	if err != nil {
		return nil, err
	}
	limit := min(time.Duration(q.Push.LimitMS)*time.Millisecond, maxPush)
	ctx, cancel := context.WithTimeout(n.heartbeats.ctx, limit)
	defer cancel()
	m := move{op: nixl.Write, metadata: q.Push.Metadata, local: local, remote: remote}
	m.transport = n.transports.transport(r.backend.Name(), q.Push.Host, q.Push.PID, remote[0].Addr)
	var done read
	if done.err = r.move(ctx, &m, &done); done.err == nil {
		if n.moved != nil {
			n.moved()
		}
		if _, gone := n.holds.find(q.Hold, q.Secret); gone != nil {
			done.err = fmt.Errorf("%w: %w", errStale, gone)
		}
	}
	n.tally.wrote(&done)
	if done.err != nil {
		return nil, done.err
	}
	return &answer{Written: done.bytes}, nil
}

// newPush asks for a landing's bytes.
func newPush(l *landing, limit time.Duration) *push {
	host, _ := os.Hostname() // without one the transport is not told
	return &push{Metadata: l.mapping.metadata, Host: host, PID: os.Getpid(), Runs: packRuns(l.remote, l.local), LimitMS: limit.Milliseconds()}
}

// packRuns puts pairs of runs, from there to here, into few bytes: of each pair the distances from the one
// before, and the length.
func packRuns(from, to []nixl.Region) []byte {
	out := binary.AppendUvarint(nil, uint64(len(from)))
	var f, t uint64
	for i := range from {
		out = binary.AppendVarint(out, int64(from[i].Addr-f))
		out = binary.AppendVarint(out, int64(to[i].Addr-t))
		out = binary.AppendUvarint(out, from[i].Len)
		f, t = from[i].Addr, to[i].Addr
	}
	return out
}

// unpackRuns is packRuns' other end. Errors wrap connector.ErrIncompatible.
func unpackRuns(data []byte) (from, to []nixl.Region, err error) {
	var f, t uint64
	count, data, ok := uvarint(data)
	if !ok || count == 0 || count > uint64(len(data))/3 { // no run takes fewer bytes
		return nil, nil, fmt.Errorf("runs of a push: %d in %d bytes: %w", count, len(data), connector.ErrIncompatible)
	}
	from, to = make([]nixl.Region, count), make([]nixl.Region, count)
	for i := range from {
		df, n := binary.Varint(data)
		dt, m := binary.Varint(data[max(n, 0):])
		if n <= 0 || m <= 0 {
			return nil, nil, fmt.Errorf("runs[%d] of a push is cut: %w", i, connector.ErrIncompatible)
		}
		var size uint64
		if size, data, ok = uvarint(data[n+m:]); !ok || size == 0 || size > math.MaxInt64 {
			return nil, nil, fmt.Errorf("runs[%d] of a push has %d bytes: %w", i, size, connector.ErrIncompatible)
		}
		f, t = f+uint64(df), t+uint64(dt)
		from[i], to[i] = nixl.Region{Addr: f, Len: size}, nixl.Region{Addr: t, Len: size}
	}
	if len(data) > 0 {
		return nil, nil, fmt.Errorf("runs of a push: %d bytes too many: %w", len(data), connector.ErrIncompatible)
	}
	return from, to, nil
}

func uvarint(data []byte) (uint64, []byte, bool) {
	v, n := binary.Uvarint(data)
	if n <= 0 {
		return 0, nil, false
	}
	return v, data[n:], true
}

// holds makes sure that runs of the cache are within blocks that an ended request keeps. Errors wrap
// connector.ErrIncompatible.
func (c *cache) holds(e *connector.Ended, runs []nixl.Region) error {
	type slot struct {
		group uint16
		id    uint64
	}
	kept := map[slot]bool{}
	for _, b := range e.Blocks {
		kept[slot{b.Group, uint64(b.ID)}] = true
	}
	at := 0 // the segment that the run before ended in
	for i, r := range runs {
		for left := r; left.Len > 0; {
			n := uint64(0)
			for range c.segments {
				s := &c.segments[at]
				if id, within, ok := s.find(left.Addr); ok && kept[slot{s.Group, id}] {
					n = min(s.Bytes-within, left.Len)
					break
				}
				at = (at + 1) % len(c.segments)
			}
			if n == 0 {
				return fmt.Errorf("runs[%d] of a push is not within the hold's blocks: %w", i, connector.ErrIncompatible)
			}
			left.Addr, left.Len = left.Addr+n, left.Len-n
		}
	}
	return nil
}

// find is the block whose part of a segment an address is in, and how far in.
func (s *segment) find(addr uint64) (id, within uint64, ok bool) {
	if addr < s.Addr {
		return 0, 0, false
	}
	id, within = (addr-s.Addr)/s.Stride, (addr-s.Addr)%s.Stride
	return id, within, within < s.Bytes
}
