package mutants

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/sdk"
)

// peerNet is a network in memory. Its faults are those of pipes.
type peerNet struct {
	mu        sync.Mutex
	listeners map[string]*peerListener
	last      int
	dials     int

	frame func(header []byte, payload []byte) bool // changes a frame on its way; false loses it
	route func(n *peerNet, address string) string  // where a dial leads
	stop  int                                      // frames with a payload that a pipe passes; 0: all
}

type peerListener struct {
	net     *peerNet
	address string
	links   chan pipe.Link
	once    sync.Once
	closed  chan struct{}
}

func newPeerNet() *peerNet { return &peerNet{listeners: map[string]*peerListener{}} }

// Listen implements pipe.Network.
func (n *peerNet) Listen(context.Context) (pipe.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.last++
	l := &peerListener{net: n, address: fmt.Sprintf("peer-%d", n.last), links: make(chan pipe.Link, 16), closed: make(chan struct{})}
	n.listeners[l.address] = l
	return l, nil
}

// Dial implements pipe.Network.
func (n *peerNet) Dial(_ context.Context, address string) (pipe.Link, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dials++
	if n.route != nil {
		address = n.route(n, address)
	}
	l := n.listeners[address]
	if l == nil {
		return pipe.Link{}, fmt.Errorf("dial %q: %w", address, connector.ErrGone)
	}
	there, back := newPeerPipe(n), newPeerPipe(n)
	select {
	case l.links <- pipe.Link{Out: back, In: there}:
		return pipe.Link{Out: there, In: back}, nil
	default:
		return pipe.Link{}, connector.ErrBusy
	}
}

// Address implements pipe.Listener.
func (l *peerListener) Address() string { return l.address }

// Accept implements pipe.Listener.
func (l *peerListener) Accept(ctx context.Context) (pipe.Link, error) {
	select {
	case link := <-l.links:
		return link, nil
	case <-l.closed:
		return pipe.Link{}, pipe.ErrClosed
	case <-ctx.Done():
		return pipe.Link{}, ctx.Err()
	}
}

// Close implements pipe.Listener.
func (l *peerListener) Close() error {
	l.once.Do(func() {
		l.net.mu.Lock()
		defer l.net.mu.Unlock()
		delete(l.net.listeners, l.address)
		close(l.closed)
	})
	return nil
}

// peerPipe is one direction.
type peerPipe struct {
	net    *peerNet
	frames chan [2][]byte
	once   sync.Once
	closed chan struct{}

	mu     sync.Mutex
	passed int
}

func newPeerPipe(n *peerNet) *peerPipe {
	return &peerPipe{net: n, frames: make(chan [2][]byte, 4), closed: make(chan struct{})}
}

// Send implements pipe.Pipe.
func (p *peerPipe) Send(ctx context.Context, header []byte, spans [][]byte) error {
	f := [2][]byte{append([]byte(nil), header...), make([]byte, pipe.Size(spans))}
	pipe.Copy([][]byte{f[1]}, spans)
	if len(header) > 10 { // it names a block
		p.mu.Lock()
		p.passed++
		stopped := p.net.stop > 0 && p.passed > p.net.stop
		p.mu.Unlock()
		if stopped || p.net.frame != nil && !p.net.frame(f[0], f[1]) {
			return nil
		}
	}
	select {
	case p.frames <- f:
		return nil
	case <-p.closed:
		return pipe.ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Recv implements pipe.Pipe.
func (p *peerPipe) Recv(ctx context.Context, place pipe.Place) error {
	select {
	case f := <-p.frames:
		spans, err := pipe.Ask(place, f[0], len(f[1]))
		pipe.Copy(spans, [][]byte{f[1]})
		return err
	case <-p.closed:
		return pipe.ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close implements pipe.Pipe.
func (p *peerPipe) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

// PipeReference is a correct connector made of a pipe in memory.
func PipeReference() connector.Plugin { return newPeerNet().plugin() }

func (n *peerNet) plugin() connector.Plugin {
	d := sdk.Definition{Name: "PipeReference", Version: "1", Groups: true}
	return sdk.FromPipe(d, func(context.Context, connector.Env, config) (pipe.Peers, error) {
		return pipe.Peers{Network: n, Wait: time.Second}, nil
	})
}

// peerSides changes what the sides of a plugin do.
type peerSides struct {
	match func(s connector.Scheduler, ctx context.Context, qs []connector.Query) ([]connector.Match, error)
	load  func(w connector.Worker, ctx context.Context, t *connector.Transfer, kv *connector.KV) error
	save  func(w connector.Worker, ctx context.Context, t *connector.Transfer, kv *connector.KV) error
	env   func(*connector.Env)
}

type peerScheduler struct {
	connector.Scheduler
	connector.Holder
	sides *peerSides
}

// Match implements connector.Scheduler.
func (s *peerScheduler) Match(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
	if s.sides.match != nil {
		return s.sides.match(s.Scheduler, ctx, qs)
	}
	return s.Scheduler.Match(ctx, qs)
}

type peerWorker struct {
	connector.Worker
	sides *peerSides
}

// Load implements connector.Worker.
func (w *peerWorker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if w.sides.load != nil {
		return w.sides.load(w.Worker, ctx, t, kv)
	}
	return w.Worker.Load(ctx, t, kv)
}

// Save implements connector.Worker.
func (w *peerWorker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if w.sides.save != nil {
		return w.sides.save(w.Worker, ctx, t, kv)
	}
	return w.Worker.Save(ctx, t, kv)
}

func (s *peerSides) wrap(p connector.Plugin) connector.Plugin {
	scheduler, worker := p.Scheduler, p.Worker
	p.Scheduler = func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
		inner, err := scheduler(ctx, env, raw)
		if err != nil {
			return nil, err
		}
		holder, _ := connector.As[connector.Holder](inner)
		return &peerScheduler{inner, holder, s}, nil
	}
	p.Worker = func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
		if s.env != nil {
			s.env(&env)
		}
		inner, err := worker(ctx, env, raw)
		return &peerWorker{inner, s}, err
	}
	return p
}

func peerMutant(name, caseID string, plant func(*peerNet, *peerSides)) Mutant {
	return Mutant{Name: name, Case: caseID, Plugin: func() connector.Plugin {
		n, s := newPeerNet(), &peerSides{}
		plant(n, s)
		return s.wrap(n.plugin())
	}}
}

// pipeMutants are wrong pipes, and connectors that use a right one wrongly.
func pipeMutants() []Mutant {
	return append(wrongPipes(), wrongPeers()...)
}

func wrongPipes() []Mutant {
	return []Mutant{
		peerMutant("a pipe that changes a byte", "handoff", func(n *peerNet, _ *peerSides) {
			n.frame = func(_, payload []byte) bool {
				payload[len(payload)/2] ^= 1
				return true
			}
		}),
		peerMutant("a pipe that gives a frame the payload of the one before", "handoff-order", func(n *peerNet, _ *peerSides) {
			var mu sync.Mutex
			var before []byte
			n.frame = func(_, payload []byte) bool {
				mu.Lock()
				defer mu.Unlock()
				mine := append([]byte(nil), payload...)
				copy(payload, before)
				before = mine
				return true
			}
		}),
		peerMutant("a pipe that stands still when nobody wants its frames", "handoff-unwanted", func(n *peerNet, _ *peerSides) { n.stop = 12 }),
		peerMutant("a pipe that loses what was sent after it was made anew", "consumer-again", func(n *peerNet, _ *peerSides) {
			n.frame = func(_, _ []byte) bool {
				n.mu.Lock()
				defer n.mu.Unlock()
				return n.dials < 2
			}
		}),
		peerMutant("a network that knows one producer's first address only", "producer-again", func(n *peerNet, _ *peerSides) {
			n.route = func(*peerNet, string) string { return "peer-1" }
		}),
		peerMutant("a network that lets one consumer in", "two-consumers", func(n *peerNet, _ *peerSides) {
			n.route = func(n *peerNet, address string) string {
				if n.dials > 1 {
					return ""
				}
				return address
			}
		}),
		peerMutant("a network that leads every consumer to the newest producer", "two-producers", func(n *peerNet, _ *peerSides) {
			n.route = func(n *peerNet, _ string) string { return fmt.Sprintf("peer-%d", n.last) }
		}),
	}
}

func wrongPeers() []Mutant {
	return []Mutant{
		peerMutant("a consumer that waits for a producer that has ended", "producer-gone", func(_ *peerNet, s *peerSides) {
			s.match = func(inner connector.Scheduler, ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
				ms, err := inner.Match(ctx, qs)
				for i := range ms {
					ms[i].Later = ms[i].Tokens == 0
				}
				return ms, err
			}
		}),
		peerMutant("a load that waits for a producer that has ended", "producer-gone-late", func(n *peerNet, s *peerSides) {
			s.load = func(inner connector.Worker, ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
				n.mu.Lock()
				gone := len(n.listeners) == 0
				n.mu.Unlock()
				if gone {
					<-ctx.Done()
				}
				return inner.Load(ctx, t, kv)
			}
		}),
		peerMutant("a consumer that gives a block to its first request only", "same-prefix", func(_ *peerNet, s *peerSides) {
			loadsOnce(s, false)
		}),
		peerMutant("a consumer that drops blocks before they are placed", "handoff-cancelled", func(_ *peerNet, s *peerSides) {
			loadsOnce(s, true)
		}),
		peerMutant("a producer that keeps what it saved first", "handoff-latest", func(_ *peerNet, s *peerSides) {
			s.save = func(inner connector.Worker, ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
				first := *t
				first.Replace = false
				return inner.Save(ctx, &first, kv)
			}
		}),
		peerMutant("a consumer whose ranks all fetch the first one's part", "handoff-ranks", func(_ *peerNet, s *peerSides) {
			s.env = func(env *connector.Env) {
				if env.Role == connector.RoleConsumer {
					env.Rank = 0
				}
			}
		}),
		peerMutant("a consumer that believes every ticket", "strange-ticket", func(_ *peerNet, s *peerSides) {
			s.match = func(inner connector.Scheduler, ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
				ms, err := inner.Match(ctx, qs)
				for i, q := range qs {
					if len(q.Ticket) > 0 && ms != nil {
						ms[i] = connector.Match{Tokens: q.Tokens / 4 * 4, Async: true}
					}
				}
				return ms, err
			}
		}),
	}
}

// loadsOnce makes every block fail that a load has named before, a failed or cancelled one too if dropFirst.
func loadsOnce(s *peerSides, dropFirst bool) {
	var mu sync.Mutex
	seen := map[connector.BlockKey]bool{}
	s.load = func(inner connector.Worker, ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
		mu.Lock()
		defer mu.Unlock()
		for _, b := range t.Blocks {
			if seen[b.Key] {
				return fmt.Errorf("taken: %w", connector.ErrGone)
			}
		}
		err := inner.Load(ctx, t, kv)
		for _, b := range t.Blocks {
			seen[b.Key] = err == nil || dropFirst && errors.Is(err, context.Canceled)
		}
		return err
	}
}
