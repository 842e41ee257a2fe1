package redistest

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"
)

// Relay passes TCP connections on to a server and, when asked, does it badly.
type Relay struct {
	listener net.Listener
	target   string

	mu     sync.Mutex
	delay  time.Duration // of what the server sends
	cutAt  int64         // bytes from the server until a connection is cut; 0: never
	cutOut int64         // bytes to the server until a connection is cut; 0: never
	cuts   int
	refuse bool
	pairs  map[*pair]struct{}
	wg     sync.WaitGroup
}

// pair is one connection and its continuation.
type pair struct {
	client, server net.Conn
	once           sync.Once
	sent, received int64 // bytes to and from the server since the last CutSentAfter or CutAfter; under the relay's lock
}

func (p *pair) close() {
	p.once.Do(func() {
		_ = p.client.Close()
		_ = p.server.Close()
	})
}

// NewRelay listens on a free port of this machine and passes connections on to target.
func NewRelay(target string) (*Relay, error) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &Relay{listener: l, target: target, pairs: map[*pair]struct{}{}}
	r.wg.Go(r.accept)
	return r, nil
}

// Address is where it listens.
func (r *Relay) Address() string { return r.listener.Addr().String() }

// Delay lets what the server sends arrive d later.
func (r *Relay) Delay(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.delay = d
}

// CutAfter cuts every connection through which more than that many bytes come from the server from now
// on; 0 ends that.
func (r *Relay) CutAfter(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cutAt = n
	for p := range r.pairs {
		p.received = 0
	}
}

// CutSentAfter cuts every connection that sends more than that many bytes to the server from now on; 0 ends
// that.
func (r *Relay) CutSentAfter(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cutOut = n
	for p := range r.pairs {
		p.sent = 0
	}
}

// Cuts is the number of connections that CutAfter and CutSentAfter have cut.
func (r *Relay) Cuts() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cuts
}

// Refuse closes new connections at once and cuts those there are, or ends that.
func (r *Relay) Refuse(refuse bool) {
	r.mu.Lock()
	r.refuse = refuse
	r.mu.Unlock()
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
	server, err := (&net.Dialer{Timeout: time.Second}).DialContext(context.Background(), "tcp", r.target)
	if err != nil {
		_ = client.Close()
		return
	}
	p := &pair{client: client, server: server}
	r.mu.Lock()
	refused := r.refuse
	r.pairs[p] = struct{}{}
	r.mu.Unlock()
	if refused {
		p.close()
	}
	var wg sync.WaitGroup
	wg.Go(func() { r.copy(p, server, client, false) })
	wg.Go(func() { r.copy(p, client, server, true) })
	wg.Wait()
	r.mu.Lock()
	delete(r.pairs, p)
	r.mu.Unlock()
}

// copy passes bytes on; answers are what the server sends.
func (r *Relay) copy(p *pair, to, from net.Conn, answers bool) {
	chunks := make(chan chunk, inFlight)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer p.close()
		r.send(to, chunks)
	})
	for more := true; more; {
		buf := make([]byte, chunkBytes)
		n, err := from.Read(buf)
		c := chunk{data: buf[:n]}
		more = err == nil
		if n > 0 {
			c.due, more = r.hurt(p, &c, answers, more)
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

// hurt delays what comes from a server, and cuts. It reports whether the connection goes on.
func (r *Relay) hurt(p *pair, c *chunk, answers, more bool) (due time.Time, goOn bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	passed, limit, delay := &p.sent, r.cutOut, time.Duration(0)
	if answers {
		passed, limit, delay = &p.received, r.cutAt, r.delay
	}
	*passed += int64(len(c.data))
	if over := *passed - limit; limit > 0 && over > 0 {
		c.data = c.data[:max(0, len(c.data)-int(over))]
		r.cuts++
		more = false
	}
	return time.Now().Add(delay), more
}

// send writes chunks when they are due. After a failure it throws the rest away.
func (r *Relay) send(to net.Conn, chunks <-chan chunk) {
	failed := false
	for c := range chunks {
		if failed || len(c.data) == 0 {
			continue
		}
		if wait := time.Until(c.due); wait > 0 {
			<-time.After(wait)
		}
		if _, err := to.Write(c.data); err != nil {
			failed = true
			_ = to.Close()
		}
	}
}
