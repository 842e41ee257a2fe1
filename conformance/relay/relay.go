// Package relay passes TCP connections on and, when asked, does it badly: it delays, cuts, stalls,
// changes bytes, lets connections overtake each other, and leads them elsewhere. It works in this process,
// so tests of networks need neither privileges nor tools, and the same seed hurts the same bytes.
//
// Every fault is counted ([Counts]): a test that hurt nothing has proven nothing.
package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// Relay listens on a port of this machine and passes connections on to a target. Its methods may be
// called at any time, from any goroutine; faults also hold for connections that there are.
type Relay struct {
	listener net.Listener

	mu     sync.Mutex
	rand   *rand.Rand
	target string
	faults faults
	count  Counts
	pairs  map[*pair]struct{}
	latest int // number of the youngest connection whose first byte has passed
	wg     sync.WaitGroup
}

// faults are those that are on. Zero is off. There is one for each direction where the index is one: to the
// server, and from it.
type faults struct {
	delay   [2]time.Duration
	cutAt   [2]int64         // bytes until a connection is cut
	stalled [2]chan struct{} // closed when the direction goes on
	stallAt int64            // bytes from the server until both directions stall
	corrupt [2]int64         // one of about this many bytes is changed
	next    [2]int64         // bytes until the next one is
	piece   int              // bytes that are passed on at once, at most
	shuffle time.Duration    // a connection waits up to that before its first byte
	refuse  bool
}

// Directions.
const (
	sent    = 0 // to the server
	answers = 1 // from the server
)

// Counts says what a relay has done. Faults count when they hurt, not when they are asked for.
type Counts struct {
	Connections int   // that were passed on
	Refused     int   // that Refuse has turned away
	Cuts        int   // that CutAfter and CutSentAfter have cut
	Stalls      int   // pieces that waited because of Stall
	Delayed     int   // pieces that waited because of Delay
	Corrupted   int   // bytes that were changed
	Overtaken   int   // connections whose first byte arrived after that of a younger one
	Passed      int64 // bytes, both ways
	Answered    int64 // the most bytes that came from the server through one connection since the last CutAfter
	Sent        int64 // the most bytes that one connection has sent to the server since the last CutSentAfter
}

// Faults is how often anything was hurt, slow pieces apart.
func (c Counts) Faults() int {
	return c.Refused + c.Cuts + c.Stalls + c.Delayed + c.Corrupted + c.Overtaken
}

// pair is one connection and its continuation.
type pair struct {
	client, server net.Conn
	once           sync.Once
	gone           chan struct{} // closed with both
	passed         [2]int64      // bytes since the last CutSentAfter or CutAfter; under the relay's lock
	begins         time.Time     // when its first byte may pass
	number         int           // of the connection, from 1
	begun          bool          // its first byte has passed; under the relay's lock
}

func (p *pair) close() {
	p.once.Do(func() {
		close(p.gone)
		_ = p.client.Close()
		_ = p.server.Close()
	})
}

// New listens on a free port of this machine and passes connections on to target. The seed chooses the
// bytes that are changed and the order of connections.
func New(target string, seed uint64) (*Relay, error) { return NewAt("127.0.0.1:0", target, seed) }

// NewAt is New at an address of one's own, as HOST:PORT: for programs that tell others a host but choose
// the port themselves. All of 127.0.0.0/8 is this machine.
func NewAt(address, target string, seed uint64) (*Relay, error) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	r := &Relay{listener: l, target: target, rand: rand.New(rand.NewPCG(seed, 0)), pairs: map[*pair]struct{}{}}
	r.wg.Go(r.accept)
	return r, nil
}

// Address is where it listens.
func (r *Relay) Address() string { return r.listener.Addr().String() }

// change changes what is asked for.
func (r *Relay) change(f func(*faults)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(&r.faults)
}

// Lead passes connections that come from now on to another target.
func (r *Relay) Lead(target string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.target = target
}

// Delay lets what the server sends arrive d later.
func (r *Relay) Delay(d time.Duration) { r.change(func(f *faults) { f.delay[answers] = d }) }

// DelaySent is Delay for what is sent to the server.
func (r *Relay) DelaySent(d time.Duration) { r.change(func(f *faults) { f.delay[sent] = d }) }

// Corrupt changes one bit in about one of every n bytes that the server sends, first in one of the next n;
// 0 ends that.
func (r *Relay) Corrupt(n int64) { r.corrupt(answers, n) }

// CorruptSent is Corrupt for what is sent to the server.
func (r *Relay) CorruptSent(n int64) { r.corrupt(sent, n) }

func (r *Relay) corrupt(direction int, n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults.corrupt[direction] = n
	if n > 0 {
		r.faults.next[direction] = r.rand.Int64N(n)
	}
}

// Drip passes on at most n bytes at a time; 0 ends that.
func (r *Relay) Drip(n int) { r.change(func(f *faults) { f.piece = n }) }

// Shuffle lets each new connection wait up to d before its first byte passes, so that connections overtake
// each other; 0 ends that.
func (r *Relay) Shuffle(d time.Duration) { r.change(func(f *faults) { f.shuffle = d }) }

// Stall stalls the chosen directions: connections stay open, new ones are accepted, and nothing arrives, not even
// the end of a connection. When a direction continues, what was held back arrives.
func (r *Relay) Stall(toServer, fromServer bool) {
	r.change(func(f *faults) {
		f.stallAt = 0
		f.stall(toServer, fromServer)
	})
}

func (f *faults) stall(toServer, fromServer bool) {
	for d, on := range [2]bool{toServer, fromServer} {
		switch stalled := f.stalled[d]; {
		case on && stalled == nil:
			f.stalled[d] = make(chan struct{})
		case !on && stalled != nil:
			close(stalled)
			f.stalled[d] = nil
		}
	}
}

// StallAfter is Stall for both directions, once n more bytes have come from the server, n > 0.
func (r *Relay) StallAfter(n int64) { r.change(func(f *faults) { f.stallAt = n }) }

// CutAfter cuts every connection through which more than that many bytes come from the server from now
// on; 0 ends that.
func (r *Relay) CutAfter(n int64) { r.cutAfter(answers, n) }

// CutSentAfter cuts every connection that sends more than that many bytes to the server from now on; 0 ends
// that.
func (r *Relay) CutSentAfter(n int64) { r.cutAfter(sent, n) }

func (r *Relay) cutAfter(direction int, n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults.cutAt[direction] = n
	for p := range r.pairs {
		p.passed[direction] = 0
	}
	*r.count.most(direction) = 0
}

// most is the count of the most bytes of one connection in a direction.
func (c *Counts) most(direction int) *int64 {
	if direction == sent {
		return &c.Sent
	}
	return &c.Answered
}

// Count is what it has done so far.
func (r *Relay) Count() Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.count
}

// Cuts is Count().Cuts.
func (r *Relay) Cuts() int { return r.Count().Cuts }

// Refuse closes new connections at once and cuts those there are, or ends that.
func (r *Relay) Refuse(refuse bool) {
	r.change(func(f *faults) { f.refuse = refuse })
	if refuse {
		r.Cut()
	}
}

// Cut closes all connections.
func (r *Relay) Cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for p := range r.pairs {
		p.close()
	}
}

// Close closes everything and waits until nothing runs any more.
func (r *Relay) Close() error {
	err := r.listener.Close()
	r.Cut()
	r.wg.Wait()
	return err
}

func (r *Relay) accept() {
	for {
		client, err := r.listener.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				continue
			}
			return
		}
		r.wg.Go(func() { r.pass(client) })
	}
}

// pass connects a client with the server until either goes away.
func (r *Relay) pass(client net.Conn) {
	r.mu.Lock()
	target, refused := r.target, r.faults.refuse
	if refused {
		r.count.Refused++
	}
	r.mu.Unlock()
	if refused {
		_ = client.Close()
		return
	}
	server, err := (&net.Dialer{Timeout: time.Second}).DialContext(context.Background(), "tcp", target)
	if err != nil {
		_ = client.Close()
		return
	}
	p := r.add(client, server)
	var wg sync.WaitGroup
	wg.Go(func() { r.copy(p, server, client, sent) })
	wg.Go(func() { r.copy(p, client, server, answers) })
	wg.Wait()
	r.mu.Lock()
	delete(r.pairs, p)
	r.mu.Unlock()
}

// add notes a pair, and closes it at once if connections are refused by now or the relay is closed.
func (r *Relay) add(client, server net.Conn) *pair {
	p := &pair{client: client, server: server, gone: make(chan struct{})}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.faults.shuffle > 0 {
		p.begins = time.Now().Add(time.Duration(r.rand.Int64N(int64(r.faults.shuffle))))
	}
	r.count.Connections++
	p.number = r.count.Connections
	r.pairs[p] = struct{}{}
	if r.faults.refuse {
		p.close()
	}
	return p
}

// copy passes bytes on in one direction.
func (r *Relay) copy(p *pair, to, from net.Conn, direction int) {
	chunks := make(chan chunk, inFlight)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer p.close()
		r.send(p, to, chunks, direction)
	})
	for more := true; more; {
		buf := make([]byte, chunkBytes)
		n, err := from.Read(buf)
		c := chunk{data: buf[:n]}
		more = err == nil
		if n > 0 {
			c.due, more = r.hurt(p, &c, direction, more)
		}
		chunks <- c
	}
	close(chunks)
	wg.Wait()
}

// chunk is some bytes on their way.
type chunk struct {
	data []byte
	due  time.Time // when they arrive
}

const (
	chunkBytes = 64 << 10
	inFlight   = 256 // chunks of a connection that are held back at most
)

// hurt delays, changes and cuts. It reports whether the connection goes on.
func (r *Relay) hurt(p *pair, c *chunk, direction int, more bool) (due time.Time, goOn bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p.passed[direction] += int64(len(c.data))
	most := r.count.most(direction)
	*most = max(*most, p.passed[direction])
	if limit := r.faults.cutAt[direction]; limit > 0 && p.passed[direction] > limit {
		c.data = c.data[:max(0, len(c.data)-int(p.passed[direction]-limit))]
		r.count.Cuts++
		more = false
	}
	if n := r.faults.corrupt[direction]; n > 0 {
		next := &r.faults.next[direction]
		for ; *next < int64(len(c.data)); *next += 1 + r.rand.Int64N(2*n) {
			c.data[*next] ^= 1 << r.rand.IntN(8)
			r.count.Corrupted++
		}
		*next -= int64(len(c.data))
	}
	due = time.Now()
	if d := r.faults.delay[direction]; d > 0 {
		due = due.Add(d)
		r.count.Delayed++
	}
	if due.Before(p.begins) {
		due = p.begins
	}
	return due, more
}

// send writes chunks when they are due. After a failure it throws the rest away.
func (r *Relay) send(p *pair, to net.Conn, chunks <-chan chunk, direction int) {
	failed := false
	for c := range chunks {
		for len(c.data) > 0 && !failed {
			piece := r.piece(p, &c, direction)
			if piece == nil {
				failed = true
				continue
			}
			if _, err := to.Write(piece); err != nil {
				failed = true
				_ = to.Close()
			}
		}
	}
	if gate := r.gate(direction); gate != nil && !failed { // the end of a connection is held back too
		select {
		case <-gate:
		case <-p.gone:
		}
	}
}

// gate is what a stalled direction waits for; nil: it is not stalled.
func (r *Relay) gate(direction int) chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.faults.stalled[direction]
}

// piece takes what may be written next from a chunk, when it may; nil when the connection is over.
func (r *Relay) piece(p *pair, c *chunk, direction int) []byte {
	if wait := time.Until(c.due); wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-p.gone:
			return nil
		}
	}
	for counted := false; ; {
		r.mu.Lock()
		gate, n := r.faults.stalled[direction], len(c.data)
		if gate == nil {
			if r.faults.piece > 0 {
				n = min(n, r.faults.piece)
			}
			n = r.passed(p, n, direction)
			r.mu.Unlock()
			out := c.data[:n]
			c.data = c.data[n:]
			return out
		}
		if !counted {
			r.count.Stalls++
			counted = true
		}
		r.mu.Unlock()
		select {
		case <-gate:
		case <-p.gone:
			return nil
		}
	}
}

// passed counts bytes that are written, and connections that are overtaken. It gives how many are, which
// StallAfter makes fewer. The caller holds mu.
func (r *Relay) passed(p *pair, n, direction int) int {
	if left := r.faults.stallAt; left > 0 && direction == answers {
		n = min(n, int(left))
		if r.faults.stallAt -= int64(n); r.faults.stallAt == 0 {
			r.faults.stall(true, true)
			r.count.Stalls++
		}
	}
	r.count.Passed += int64(n)
	if p.begun {
		return n
	}
	p.begun = true
	if p.number < r.latest {
		r.count.Overtaken++
	}
	r.latest = max(r.latest, p.number)
	return n
}
