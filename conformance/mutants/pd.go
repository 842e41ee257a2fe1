package mutants

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// pdConfig is the config of the pair.
type pdConfig struct {
	LeaseMS int `json:"lease_ms,omitempty" jsonschema:"default=1200,minimum=10,description=how long finished blocks wait for their consumer"`
}

// PDReference is a correct pair of a producer that keeps finished blocks in its cache, and of a consumer
// that fetches them from there over TCP. Every message is signed with a secret that the ticket brings, and
// whether the hold was still there is asked after the last block.
func PDReference() connector.Plugin { return (&pdFaults{}).plugin() }

// PDFrugal is another right pair: a consumer is too busy for the first of each two calls and has an error for whoever asks about a producer that is
// gone, and a producer gives numbers of holds again that are over.
func PDFrugal() connector.Plugin { return (&pdFaults{frugal: true}).plugin() }

func (f *pdFaults) plugin() connector.Plugin {
	all := &pdNodes{faults: f, byID: map[pdID]*pdNode{}, dead: map[string]bool{}}
	d := sdk.Definition{Name: "PDReference", Version: "1", Groups: true, Scope: connector.ScopeNode, Capabilities: connector.CanHold | connector.CanReshape}
	return sdk.FromSides(d,
		func(_ context.Context, env connector.Env, c pdConfig) (*pdScheduler, error) {
			n, err := all.join(&env, c)
			return &pdScheduler{node: n, env: env, leave: sync.OnceValue(func() error { return all.leave(n) })}, err
		},
		func(_ context.Context, env connector.Env, c pdConfig) (*pdWorker, error) {
			n, err := all.join(&env, c)
			return &pdWorker{node: n, env: env, leave: sync.OnceValue(func() error { return all.leave(n) })}, err
		})
}

// pdID is one life of an engine.
type pdID struct {
	engine string
	epoch  uint64
}

// pdNodes are those of one process.
type pdNodes struct {
	faults *pdFaults
	mu     sync.Mutex
	byID   map[pdID]*pdNode
	order  []*pdNode
	dead   map[string]bool // addresses, for a fault
}

// pdNode is what both sides of one life of an engine share.
type pdNode struct {
	*pdFaults
	all      *pdNodes
	id       pdID
	lease    time.Duration
	world    int
	size     int // tokens of a block
	sides    int // guarded by pdNodes.mu
	listener net.Listener
	tasks    sync.WaitGroup
	wake     chan struct{}

	mu         sync.Mutex
	caches     map[int]*connector.KV
	conns      map[net.Conn]struct{}
	dialled    int
	holds      map[connector.HoldID]*pdHold
	saved      map[connector.RequestID]pdSaved        // for faults
	owners     map[connector.BlockID]connector.HoldID // for a fault
	last       connector.HoldID
	over       []connector.HoldID
	windows    map[uint64]pdWindow // of a consumer whose producers write
	lastWindow uint64
	scratch    []byte             // for a fault
	reader     pdReader           // for a fault
	alone      sync.Mutex         // for a fault
	rests      bool               // if it is frugal
	flights    singleflight.Group // for a fault
}

type pdHold struct {
	id      connector.HoldID
	ended   connector.Ended
	secret  []byte
	expires time.Time
	fetched map[int]bool      // ranks
	left    int               // loads that it serves
	calls   int               // of Reshape, for a fault
	was     map[pdSlot][]byte // for a fault
	begins  []byte            // for a fault: the first block
}

func (a *pdNodes) join(env *connector.Env, c pdConfig) (*pdNode, error) {
	id := pdID{env.Engine, env.Epoch}
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.byID[id]
	if n == nil {
		n = &pdNode{
			pdFaults: a.faults, all: a, id: id, lease: time.Duration(c.LeaseMS) * time.Millisecond, world: max(1, env.World), size: env.Layout.Groups[0].BlockTokens, wake: make(chan struct{}, 1),
			caches: map[int]*connector.KV{}, conns: map[net.Conn]struct{}{}, holds: map[connector.HoldID]*pdHold{}, windows: map[uint64]pdWindow{}, owners: map[connector.BlockID]connector.HoldID{},
			saved: map[connector.RequestID]pdSaved{},
		}
		if env.Role.Saves() {
			l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
			if err != nil {
				return nil, err
			}
			n.listener = l
			n.tasks.Go(n.accept)
		}
		a.byID[id] = n
		a.order = append(a.order, n)
	}
	n.sides++
	return n, nil
}

func (a *pdNodes) leave(n *pdNode) error {
	a.mu.Lock()
	n.sides--
	last := n.sides == 0
	if last {
		delete(a.byID, n.id)
		a.order = slices.DeleteFunc(a.order, func(o *pdNode) bool { return o == n })
	}
	a.mu.Unlock()
	switch {
	case !last:
		return nil
	case n.listener == nil:
		n.hangUp()
		return nil
	case n.servesClosed:
		time.AfterFunc(time.Second, func() { _ = n.close(true) })
		return nil
	}
	return n.close(!n.keepsConnections)
}

// close ends the listener, and the connections with it.
func (n *pdNode) close(all bool) error {
	err := n.listener.Close()
	if all {
		n.hangUp()
	}
	return err
}

// hangUp ends all connections.
func (n *pdNode) hangUp() {
	n.mu.Lock()
	for c := range n.conns {
		_ = c.Close()
	}
	n.mu.Unlock()
	n.tasks.Wait()
}

// pdTurnLoads is how many loads an answer serves.
const pdTurnLoads = 4

// add takes on the blocks of an ended request.
func (n *pdNode) add(e connector.Ended) *pdHold {
	secret := make([]byte, 16)
	if !n.noSecret {
		_, _ = rand.Read(secret) // never fails
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	number := n.number()
	if n.lastSave {
		e.Blocks = n.saved[e.Request].blocks
	}
	lease := n.lease
	if n.shortLease {
		lease /= 8
	}
	h := &pdHold{id: number, ended: e, secret: secret, expires: time.Now().Add(lease), fetched: map[int]bool{}, left: 1}
	if e.Weak {
		h.left = pdTurnLoads
	}
	n.endTurn(h)
	for id, old := range n.holds {
		if n.byRequest && old.ended.Request == e.Request || n.few && id+4 <= n.last || n.byContent && lastKey(&old.ended) == lastKey(&e) {
			delete(n.holds, id)
		}
	}
	n.holds[number] = h
	n.own(h)
	n.snapshot(h)
	return h
}

// lastKey is the key of the last full block of an ended request.
func lastKey(e *connector.Ended) (k connector.BlockKey) {
	for _, b := range e.Blocks {
		if b.Key != (connector.BlockKey{}) {
			k = b.Key
		}
	}
	return k
}

// own notes to which hold slots belong, for a fault. The caller holds mu.
func (n *pdNode) own(h *pdHold) {
	for _, b := range h.ended.Blocks {
		n.owners[b.ID] = h.id
	}
}

// known reports whether the done message of a hold's request finds it: for a fault not if its name contains a colon.
func (n *pdNode) known(h *pdHold) bool {
	name, _, _ := strings.Cut(fmt.Sprintf("%s:%d", h.ended.Request, 1), ":")
	return !n.cutsNames || name == string(h.ended.Request)
}

// number is the number of the next hold. The caller holds mu.
func (n *pdNode) number() connector.HoldID {
	for id := connector.HoldID(1); n.frugal && id <= n.last; id++ {
		if n.holds[id] == nil && !slices.Contains(n.over, id) {
			return id
		}
	}
	n.last++
	if n.sixteen && n.last > 16 {
		n.last = 1
	}
	return n.last
}

// tooBusy reports whether a frugal consumer has no time for a call: each time before it has.
func (n *pdNode) tooBusy() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.rests = n.frugal && !n.rests
	return n.rests
}

// find is a hold whose lease runs; nil: there is none. The caller holds mu.
func (n *pdNode) find(q *pdQuestion) *pdHold {
	if n.reaperStops {
		for id := connector.HoldID(1); n.holds[id] != nil && time.Now().After(n.holds[id].expires); id++ {
			delete(n.holds, id)
		}
	}
	if n.slotNames {
		return n.bySlot(q.Slot)
	}
	if n.noGeneration {
		for _, h := range n.holds {
			if time.Now().Before(h.expires) && h.ended.Blocks[0].ID == q.Slot {
				return h
			}
		}
	}
	h := n.holds[q.Hold]
	if h == nil || n.noExpiry || n.reaperStops || time.Now().Before(h.expires) {
		if h != nil && n.renews {
			h.expires = time.Now().Add(n.lease)
		}
		return h
	}
	delete(n.holds, q.Hold)
	return nil
}

// drop ends the holds of prompts that begin as one does: for a fault. The caller holds mu.
func (n *pdNode) drop(alike connector.Ended) {
	for id, h := range n.holds {
		if len(alike.Blocks) > 0 && h.ended.Blocks[0].Key == alike.Blocks[0].Key {
			delete(n.holds, id)
		}
	}
}

// whole notes that a rank has read what it wanted, and says whether a load is over with that. The caller holds mu.
func (n *pdNode) whole(h *pdHold, q *pdQuestion) bool {
	h.calls++
	if q.Reshaped && !n.countsCalls {
		return q.Last || n.manyCalls && h.calls > pdManyCalls
	}
	call := q.Rank
	if q.Reshaped {
		call = len(h.fetched)
	}
	h.fetched[call] = true
	if n.lastRankEnds {
		return q.Rank == n.world-1
	}
	return len(h.fetched) >= n.world || n.firstRankEnds || n.countsReads && h.calls >= n.world
}

// done notes that a rank has read what it wanted. The caller holds mu.
func (n *pdNode) done(h *pdHold, q *pdQuestion) {
	if !n.whole(h, q) || !n.known(h) {
		return
	}
	switch {
	case n.keepsConsumed:
		if h.fetched[-1] { // reported before
			return
		}
		h.fetched[-1] = true
	case n.reportsBoth:
		time.AfterFunc(50*time.Millisecond, func() {
			n.mu.Lock()
			defer n.mu.Unlock()
			delete(n.holds, h.id)
		})
	case h.left > 1 && !n.wrongCount:
		h.left--
		clear(h.fetched)
	default:
		delete(n.holds, h.id)
	}
	if n.endsAlike {
		n.drop(h.ended)
	}
	n.over = append(n.over, h.id)
	if n.twice {
		n.over = append(n.over, h.id)
	}
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// pdTicket is where a hold can be fetched.
type pdTicket struct {
	Address string            `json:"addr"`
	Engine  string            `json:"engine"`
	Epoch   uint64            `json:"epoch"`
	Hold    connector.HoldID  `json:"hold"`
	Slot    connector.BlockID `json:"slot"` // of the first block; a fault believes it
	Tokens  int               `json:"tokens"`
	Secret  []byte            `json:"secret"`
	World   int               `json:"world"`
	Size    int               `json:"size"` // tokens of a block
	Parts   []int64           `json:"parts"`
}

// pdScheduler is the scheduler side.
type pdScheduler struct {
	node  *pdNode
	env   connector.Env
	leave func() error
}

// Match implements connector.Scheduler.
func (s *pdScheduler) Match(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
	out := make([]connector.Match, len(qs))
	for i, q := range qs {
		var t pdTicket
		if q.Ticket == nil || !s.env.Role.Loads() || json.Unmarshal(q.Ticket, &t) != nil {
			continue
		}
		if s.node.frugal {
			c, err := s.node.dial(ctx, &t)
			if err != nil {
				return nil, err
			}
			c.close()
		}
		end := min(t.Tokens, q.Tokens)
		if q.Reshaped > 0 && !s.node.offersAll {
			end = min(end, q.Reshaped)
		}
		if n := end - q.Computed; n > 0 {
			out[i] = connector.Match{Tokens: n, Async: true}
		}
		if s.node.askedIsTaken {
			_ = s.node.tellDone(ctx, &t, 0)
		}
	}
	return out, nil
}

// Finish implements connector.Holder.
func (s *pdScheduler) Finish(_ context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	n := s.node
	out := make([]connector.Hold, len(ended))
	for i, e := range ended {
		failed := e.Reason == connector.ReasonAbort || e.Reason == connector.ReasonError
		if failed && n.abortsAlike {
			n.mu.Lock()
			n.drop(e)
			n.mu.Unlock()
		}
		if !e.Remote || len(e.Blocks) == 0 || n.listener == nil || failed && !n.freeAborted || e.Weak && n.noWeak {
			continue
		}
		h := n.add(e)
		t := pdTicket{
			Address: n.listener.Addr().String(), Engine: n.id.engine, Epoch: n.id.epoch, Hold: h.id, Slot: e.Blocks[0].ID, Tokens: e.Tokens, Secret: h.secret,
			World: n.world, Size: n.size, Parts: partsOf(&s.env.Layout),
		}
		data, err := json.Marshal(t)
		if err != nil {
			return nil, err
		}
		out[i] = connector.Hold{ID: h.id, TTL: n.lease, Consumers: h.left, Ticket: data}
		if failed {
			out[i].ID = 0
		}
		if n.wrongCount {
			out[i].Consumers = 2
		}
	}
	return out, nil
}

// Consumed implements connector.Holder.
func (s *pdScheduler) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	n := s.node
	for {
		n.mu.Lock()
		over := n.over
		n.over = nil
		n.mu.Unlock()
		if len(over) > 0 && n.reportsOne {
			<-time.After(30 * time.Millisecond)
			n.mu.Lock()
			n.over = nil
			n.mu.Unlock()
			return over[:1], nil
		}
		if len(over) > 0 {
			return over, nil
		}
		select {
		case <-n.wake:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Close implements connector.Scheduler.
func (s *pdScheduler) Close() error { return s.leave() }

// pdWorker is the worker side of one rank.
type pdWorker struct {
	node  *pdNode
	env   connector.Env
	leave func() error
}

// Save implements connector.Worker. The blocks stay where they are.
func (w *pdWorker) Save(_ context.Context, t *connector.Transfer, kv *connector.KV) error {
	w.node.mu.Lock()
	defer w.node.mu.Unlock()
	w.node.caches[w.env.Rank] = kv
	w.node.note(t, kv)
	return nil
}

// pdSaved is the last Save of a request, and the partial block of it.
type pdSaved struct {
	blocks []connector.Block
	tail   []byte
}

// note keeps what was saved, for faults. The caller holds mu.
func (n *pdNode) note(t *connector.Transfer, kv *connector.KV) {
	if !n.lastSave && !n.savedTails {
		return
	}
	s := pdSaved{blocks: slices.Clone(t.Blocks)}
	for _, b := range t.Blocks {
		if spans, err := kv.Spans(b); err == nil && b.Key == (connector.BlockKey{}) {
			s.tail = slices.Concat(spans...)
		}
	}
	n.saved[t.Request] = s
}

// Close implements connector.Worker. Nobody reads the rank's cache any more when it returns.
func (w *pdWorker) Close() error {
	w.node.endRead()
	if !w.node.servesClosed && !w.node.keepsConnections {
		w.node.mu.Lock()
		delete(w.node.caches, w.env.Rank)
		w.node.mu.Unlock()
	}
	return w.leave()
}

// errPDGone says that a hold is not there.
func errPDGone(what string, err error) error {
	return errors.Join(fmt.Errorf("%s: %w", what, connector.ErrGone), err)
}
