package sdk

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/pipe"
)

// wires is a Network for tests: links are pairs of queues, which a test can cut.
type wires struct {
	mu        sync.Mutex
	listeners map[string]chan pipe.Link
	made      []pipe.Link
	dials     int
	refuse    bool
	gate      chan struct{} // until it is closed, who dials receives nothing; nil: it is open
}

type wireListener struct {
	w       *wires
	address string
	links   chan pipe.Link
	once    sync.Once
	closed  chan struct{}
}

func (w *wires) Listen(context.Context) (pipe.Listener, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.listeners == nil {
		w.listeners = map[string]chan pipe.Link{}
	}
	l := &wireListener{w: w, address: fmt.Sprintf("wire-%d", len(w.listeners)), links: make(chan pipe.Link, 8), closed: make(chan struct{})}
	w.listeners[l.address] = l.links
	return l, nil
}

func (w *wires) Dial(_ context.Context, address string) (pipe.Link, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dials++
	links := w.listeners[address]
	if links == nil || w.refuse {
		return pipe.Link{}, connector.ErrGone
	}
	there, back := newStrand(), newStrand()
	back.gate = w.gate
	a, b := pipe.Link{Out: there, In: back}, pipe.Link{Out: back, In: there}
	w.made = append(w.made, a)
	links <- b
	return a, nil
}

// refuses says whether nobody can dial.
func (w *wires) refuses(nobody bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refuse = nobody
}

// dialled is how often somebody has dialled.
func (w *wires) dialled() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dials
}

// open lets who dials from now on receive.
func (w *wires) open() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gate = nil
}

func (w *wires) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.made {
		_ = l.Close()
	}
	w.made = nil
}

func (l *wireListener) Address() string { return l.address }

func (l *wireListener) Accept(ctx context.Context) (pipe.Link, error) {
	select {
	case link := <-l.links:
		return link, nil
	case <-l.closed:
		return pipe.Link{}, pipe.ErrClosed
	case <-ctx.Done():
		return pipe.Link{}, ctx.Err()
	}
}

func (l *wireListener) Close() error {
	l.once.Do(func() {
		close(l.closed)
		l.w.mu.Lock()
		defer l.w.mu.Unlock()
		l.w.listeners[l.address] = nil
	})
	return nil
}

// strand is one direction; a frame passes from hand to hand.
type strand struct {
	frames chan [2][]byte
	once   sync.Once
	closed chan struct{}
	gate   chan struct{}
}

func newStrand() *strand {
	return &strand{frames: make(chan [2][]byte, 1), closed: make(chan struct{})}
}

func (w *strand) Send(ctx context.Context, header []byte, spans [][]byte) error {
	payload := make([]byte, pipe.Size(spans))
	pipe.Copy([][]byte{payload}, spans)
	select {
	case w.frames <- [2][]byte{append([]byte(nil), header...), payload}:
		return nil
	case <-w.closed:
		return pipe.ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *strand) Recv(ctx context.Context, place pipe.Place) error {
	if w.gate != nil {
		select {
		case <-w.gate:
		case <-w.closed:
			return pipe.ErrClosed
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	select {
	case f := <-w.frames:
		spans, err := pipe.Ask(place, f[0], len(f[1]))
		pipe.Copy(spans, [][]byte{f[1]})
		return err
	case <-w.closed:
		return pipe.ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *strand) Close() error {
	w.once.Do(func() { close(w.closed) })
	return nil
}

// peerEngine is one engine's connector with a cache of 8 blocks of 64 bytes.
type peerEngine struct {
	*testing.T
	scheduler connector.Scheduler
	worker    connector.Worker
	kv        *connector.KV
	memory    []byte
}

func (w *wires) engine(t *testing.T, name string, role connector.Role, peers pipe.Peers) *peerEngine {
	t.Helper()
	return w.engineOf(t, name, role, peers, []connector.Segment{{BlockStride: 64, Bytes: 64}})
}

// layered is an engine with three layers.
func (w *wires) layered(t *testing.T, name string, role connector.Role, peers pipe.Peers) *peerEngine {
	t.Helper()
	return w.engineOf(t, name, role, peers, []connector.Segment{
		{BlockStride: 64, Bytes: 16}, {Layer: 2, BlockStride: 64, Offset: 16, Bytes: 32}, {Layer: 1, BlockStride: 64, Offset: 48, Bytes: 16},
	})
}

func (w *wires) engineOf(t *testing.T, name string, role connector.Role, peers pipe.Peers, segments []connector.Segment) *peerEngine {
	t.Helper()
	peers.Network = w
	type config struct{}
	stats := append(PeerStats(), LayerStats()...)
	p := FromPipe(Definition{Name: "PeersConnector", Version: "1", LayerWise: true, Stats: stats}, func(context.Context, connector.Env, config) (pipe.Peers, error) {
		return peers, nil
	})
	e := &peerEngine{T: t, memory: make([]byte, 512)}
	layout := connector.Layout{
		Blocks: 8, Groups: []connector.Group{{BlockTokens: 4, Policy: connector.PolicyAll}},
		Segments: segments,
	}
	env := connector.Env{Engine: name, Epoch: 1, Role: role, World: 1, Layout: layout}
	var err error
	e.kv, err = connector.NewKV(layout, [][]byte{e.memory})
	require.NoError(t, err)
	e.scheduler, err = p.Scheduler(t.Context(), env, nil)
	require.NoError(t, err)
	e.worker, err = p.Worker(t.Context(), env, nil)
	require.NoError(t, err)
	t.Cleanup(e.close)
	return e
}

// count is one of the numbers that the connector reports.
func (e *peerEngine) count(name string) int64 {
	e.Helper()
	source, ok := connector.As[connector.StatsSource](e.scheduler)
	require.True(e, ok)
	stats, err := source.Stats(e.Context())
	require.NoError(e, err)
	i := slices.IndexFunc(stats, func(s connector.Stat) bool { return s.Name == name })
	require.GreaterOrEqual(e, i, 0, name)
	return int64(stats[i].Value)
}

// counts waits until one of the numbers is n: a block is counted after it was sent, when the other end may have it already.
func (e *peerEngine) counts(name string, n int64) {
	e.Helper()
	require.Eventually(e, func() bool { return e.count(name) == n }, time.Minute, time.Millisecond, "%s is not %d", name, n)
}

func (e *peerEngine) close() {
	if e.scheduler != nil {
		require.NoError(e, e.scheduler.Close())
		require.NoError(e, e.worker.Close())
	}
	e.scheduler = nil
}

func blocksAt(first int, keys ...byte) *connector.Transfer {
	t := &connector.Transfer{Request: "r", Tokens: 4 * len(keys)}
	for i, k := range keys {
		t.Blocks = append(t.Blocks, connector.Block{Key: connector.BlockKey{k}, ID: connector.BlockID(first + i)})
	}
	return t
}

// save computes blocks and returns the ticket.
func (e *peerEngine) save(keys ...byte) connector.Ticket {
	e.Helper()
	t := blocksAt(0, keys...)
	for i, k := range keys {
		for j := range 64 {
			e.memory[64*i+j] = k + byte(j)
		}
	}
	require.NoError(e, e.worker.Save(e.Context(), t, e.kv))
	holder, ok := connector.As[connector.Holder](e.scheduler)
	require.True(e, ok)
	holds, err := holder.Finish(e.Context(), []connector.Ended{{Request: "r", Remote: true, Tokens: t.Tokens, Blocks: t.Blocks}})
	require.NoError(e, err)
	require.True(e, holds[0].Weak)
	return holds[0].Ticket
}

func (e *peerEngine) match(request string, ticket connector.Ticket, keys ...byte) connector.Match {
	e.Helper()
	q := connector.Query{Request: connector.RequestID(request), Tokens: 4*len(keys) + 1, Ticket: ticket}
	for _, k := range keys {
		q.Keys = append(q.Keys, connector.BlockKey{k})
	}
	m, err := e.scheduler.Match(e.Context(), []connector.Query{q})
	require.NoError(e, err)
	return m[0]
}

// settled asks until the answer is not Later.
func (e *peerEngine) settled(ticket connector.Ticket, keys ...byte) int {
	e.Helper()
	var m connector.Match
	require.Eventually(e, func() bool {
		m = e.match("r", ticket, keys...)
		return !m.Later
	}, time.Minute, time.Millisecond)
	return m.Tokens / 4
}

func (e *peerEngine) load(ticket connector.Ticket, keys ...byte) {
	e.Helper()
	clear(e.memory)
	t := blocksAt(0, keys...)
	t.Ticket = ticket
	require.NoError(e, e.worker.Load(e.Context(), t, e.kv))
	for i, k := range keys {
		for j := range 64 {
			require.Equal(e, k+byte(j), e.memory[64*i+j])
		}
	}
}

// Two producers, two consumers: each ticket leads to its producer, everybody gets everything.
func TestPipeManyPeers(t *testing.T) {
	w := &wires{}
	p := []*peerEngine{w.engine(t, "p0", connector.RoleProducer, pipe.Peers{}), w.engine(t, "p1", connector.RoleBoth, pipe.Peers{})}
	d := []*peerEngine{w.engine(t, "d0", connector.RoleConsumer, pipe.Peers{}), w.engine(t, "d1", connector.RoleBoth, pipe.Peers{})}
	tickets := []connector.Ticket{p[0].save(1, 2, 3), p[1].save(4, 5, 6)}
	for i, keys := range [][]byte{{1, 2, 3}, {4, 5, 6}} {
		for _, e := range d {
			require.Equal(t, 3, e.settled(tickets[i], keys...))
			e.load(tickets[i], keys...)
			require.Equal(t, 3, e.settled(tickets[i], keys...), "a second request of the prefix")
		}
		holder, _ := connector.As[connector.Holder](p[i].scheduler)
		ids, err := holder.Consumed(t.Context())
		require.NoError(t, err)
		require.Len(t, ids, 1, "one ticket was for one consumer")
	}
	require.Zero(t, p[0].match("r", tickets[1], 4, 5, 6), "a producer never loads")
	require.Equal(t, 4, w.dialled())
	require.Equal(t, 2, d[0].settled(tickets[0], 1, 2, 99), "what the producer lacks ends the prefix")
}

func TestPipeAddressList(t *testing.T) {
	w := &wires{}
	a := w.engine(t, "p0", connector.RoleProducer, pipe.Peers{})
	b := w.engine(t, "p1", connector.RoleProducer, pipe.Peers{})
	a.save(1, 2)
	b.save(1, 2, 3)
	b.save(4)
	d := w.engine(t, "d", connector.RoleConsumer, pipe.Peers{Addresses: []string{"nobody", "wire-0", "wire-1"}})
	require.Equal(t, 4, d.settled(nil, 1, 2, 3, 4))
	d.load(nil, 1, 2, 3, 4)
	probe := d.match("", nil, 9)
	require.Equal(t, connector.Match{}, probe, "a probe asks nobody")
}

// Whatever breaks, a consumer waits no longer than its limit, and the next request works.
func TestPipeBreaks(t *testing.T) {
	w := &wires{}
	p := w.engine(t, "p", connector.RoleProducer, pipe.Peers{})
	d := w.engine(t, "d", connector.RoleConsumer, pipe.Peers{Wait: 5 * time.Second})
	ticket := p.save(1, 2)
	require.Equal(t, 2, d.settled(ticket, 1, 2))
	w.cut()
	ticket = p.save(3, 4)
	require.Eventually(t, func() bool { return d.settled(ticket, 3, 4) == 2 }, time.Minute, 10*time.Millisecond, "after a cut")
	d.load(ticket, 3, 4)

	ticket = p.save(5)
	p.close()
	require.Zero(t, d.settled(ticket, 5), "a producer that is gone is a miss")
	again := w.engine(t, "p", connector.RoleProducer, pipe.Peers{})
	ticket = again.save(5)
	require.Equal(t, 1, d.settled(ticket, 5), "the producer's next life")

	require.Zero(t, d.settled(connector.Ticket("no ticket"), 77))
	require.Zero(t, d.settled(nil, 77))
}

// A consumer's buffer that is too small for everything serves what fits, and never stalls.
func TestPipeSmallBuffer(t *testing.T) {
	w := &wires{}
	p := w.engine(t, "p", connector.RoleProducer, pipe.Peers{})
	d := w.engine(t, "d", connector.RoleConsumer, pipe.Peers{Bytes: 4 * 64, Wait: 2 * time.Second})
	ticket := p.save(1, 2, 3, 4, 5, 6)
	require.Equal(t, 2, d.settled(ticket, 1, 2, 3, 4, 5, 6), "half of the buffer is for one request")
	for range 3 {
		ticket = p.save(11, 12)
		require.Equal(t, 2, d.settled(ticket, 11, 12))
		d.load(ticket, 11, 12)
	}
}

func TestFromBuffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := lookupbuffer.NewMemory(lookupbuffer.Options{Bytes: 1 << 10})
		s := &bufferStore{b}
		item := func(k byte) connector.Item {
			return connector.Item{Key: connector.StoreKey{k}, Spans: [][]byte{{k, k}}}
		}
		require.NoError(t, s.Put(t.Context(), []connector.Item{item(1), item(2)}))
		began := time.Now()
		err := s.Get(t.Context(), []connector.Item{item(1), item(3), item(2)})
		require.ErrorIs(t, err, connector.ErrGone)
		var failed *connector.ItemError
		require.ErrorAs(t, err, &failed)
		require.Equal(t, []int{1}, failed.Items)
		require.Zero(t, time.Since(began), "it does not wait for what nobody promised")
		require.ErrorIs(t, s.Get(t.Context(), []connector.Item{item(1)}), connector.ErrGone, "it was given out")
		require.NoError(t, s.Close())
	})
}

// Whether a connector pushes layers is what its definition says; the numbers that it reports must fit.
func TestLayerWise(t *testing.T) {
	layered := append(PeerStats(), LayerStats()...)
	for _, d := range []Definition{{}, {LayerWise: true}, {Stats: PeerStats()}, {LayerWise: true, Stats: layered}, {LayerWise: true, Stats: PeerStats()}, {Stats: layered}} {
		p := FromPipe(d, func(context.Context, connector.Env, struct{}) (pipe.Peers, error) {
			return pipe.Peers{Network: &wires{}}, nil
		})
		require.Equal(t, d.LayerWise, p.Capabilities&connector.CanLayers != 0)
		info, err := p.Describe(t.Context(), nil)
		if len(d.Stats) > 0 && d.LayerWise != (len(d.Stats) == len(layered)) {
			require.ErrorIs(t, err, connector.ErrIncompatible)
			require.ErrorContains(t, err, "Definition.LayerWise")
			continue
		}
		require.NoError(t, err)
		require.Equal(t, p.Capabilities, info.Capabilities)
		w, err := p.Worker(t.Context(), testEnv(0, 1), nil)
		require.NoError(t, err)
		_, ok := connector.As[connector.LayerWorker](w)
		require.Equal(t, d.LayerWise, ok)
		require.NoError(t, w.Close())
	}

	_, err := FromStore(Definition{LayerWise: true}, func(context.Context, connector.Env, struct{}) (connector.Store, error) { return newMemory(), nil }).Describe(t.Context(), nil)
	require.ErrorIs(t, err, connector.ErrIncompatible, "a Store saves no layers")
}
