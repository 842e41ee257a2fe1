package multiconnector

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// errLoading says why a block is not saved: a load still writes it.
var errLoading = fmt.Errorf("the block is being loaded: %w", connector.ErrBusy)

// worker is the composite's worker side of one rank.
type worker struct {
	*Multi
	sides  []connector.Worker
	groups []connector.Group
	close  func() error // acts once

	mu      sync.Mutex
	loading map[blockName]int // blocks that loads may write now
	overdue map[int]int       // by child: saves that have outlived its patience and go on
}

// blockName names a slot of one group.
type blockName struct {
	group uint16
	id    connector.BlockID
}

// Worker joins the worker sides of all children, in their order, of one rank. The result owns them;
// closed, unless nil, is called after they were closed.
func (m *Multi) Worker(sides []connector.Worker, groups []connector.Group, closed func() error) connector.Worker {
	return &worker{
		Multi: m, sides: sides, groups: groups, loading: map[blockName]int{}, overdue: map[int]int{},
		close: sync.OnceValue(func() error {
			return m.closeAll(len(sides), func(i int) error { return sides[i].Close() }, closed)
		}),
	}
}

// Load implements connector.Worker. Every block is asked of the child that it is routed to, and when
// that fails of the others, in order. It returns when no child can write any more.
func (w *worker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	return w.load(ctx, t, kv, nil)
}

func (w *worker) load(ctx context.Context, t *connector.Transfer, kv *connector.KV, arrived *arrivals) error {
	w.mark(t, 1)
	defer w.mark(t, -1)
	l := &loading{worker: w, t: t, kv: kv, arrived: arrived, tried: make([]uint32, len(t.Blocks))}
	if len(t.Extra) > 0 {
		shares, err := unpackShares(t.Extra, len(w.children), len(t.Blocks))
		if err != nil {
			return err
		}
		l.planned(ctx, shares)
	} else {
		l.routed(ctx)
	}
	for len(l.left) > 0 && ctx.Err() == nil {
		before := len(l.left)
		if l.next(ctx); len(l.left) == before && !l.asked {
			break
		}
	}
	failed := append(l.given, l.left...)
	if len(failed) == 0 {
		l.release(ctx)
		return nil
	}
	return blockError(t, failed, errors.Join(l.errs...))
}

// Reshape implements connector.Reshaper: the child that the request is routed to reads. No other is asked when it fails,
// for a ticket of another shape is one child's alone.
func (w *worker) Reshape(ctx context.Context, t *connector.Transfer, from connector.Source, kv *connector.KV) error {
	to := w.routes.get(t.Request)
	if len(to) != 1 {
		return fmt.Errorf("no child has offered blocks of another shape: %w", connector.ErrGone)
	}
	i := to[0].child
	reshaper, ok := connector.As[connector.Reshaper](w.sides[i])
	if !ok {
		return w.children[i].named(fmt.Errorf("cannot %v: %w", connector.CanReshape, connector.ErrIncompatible))
	}
	part := *t
	part.Ticket = w.ticketOf(i, t.Ticket)
	return w.children[i].named(reshaper.Reshape(ctx, &part, from, kv))
}

// release tells the children that keep blocks for this ticket and were not chosen that nothing will
// be fetched from them: by a Load without blocks, so that their producers need not wait for their
// leases to end. Without a route nobody knows who was chosen.
func (l *loading) release(ctx context.Context) {
	if len(l.t.Ticket) == 0 {
		return
	}
	chosen := map[int]bool{}
	for _, tried := range l.tried {
		for i := range l.children {
			chosen[i] = chosen[i] || tried&(1<<i) != 0
		}
	}
	for _, s := range l.routes.get(l.t.Request) {
		chosen[s.child] = true
	}
	for i := range l.children {
		c := &l.children[i]
		if chosen[i] || !c.Role.Loads() || c.Info.Capabilities&connector.CanHold == 0 {
			continue
		}
		if ticket := l.ticketOf(i, l.t.Ticket); ticket != nil {
			_ = l.sides[i].Load(ctx, &connector.Transfer{Request: l.t.Request, From: l.t.From, Ticket: ticket}, l.kv) // or its lease ends
		}
	}
}

// loading is one Load on its way through the children.
type loading struct {
	*worker
	t     *connector.Transfer
	kv    *connector.KV
	tried []uint32 // by block: the children that were asked
	left  []int    // indexes of blocks that have not arrived
	given []int    // blocks that nobody else is asked for
	errs  []error
	asked bool // the last round asked somebody

	arrived *arrivals // nil: layers are not announced
}

// planned runs the shares of a plan.
func (l *loading) planned(ctx context.Context, shares []share) {
	var asks []ask
	for _, s := range shares {
		part := *l.t
		part.From, part.Tokens, part.Extra = s.from, s.tokens, s.extra
		part.Blocks = make([]connector.Block, len(s.indexes))
		for k, i := range s.indexes {
			part.Blocks[k] = l.t.Blocks[i]
		}
		asks = append(asks, ask{s.child, s.indexes, []connector.Transfer{part}})
	}
	l.run(ctx, asks)
}

// routed asks the child that each block is routed to.
func (l *loading) routed(ctx context.Context) {
	to := l.routes.get(l.t.Request)
	by := map[int][]int{}
	for i, end := range ends(l.t, l.groups) {
		child := l.owner(to, end)
		if child >= 0 && !l.children[child].mayHave(&l.t.Blocks[i]) {
			child = l.untried(i)
		}
		if child < 0 || !l.children[child].Role.Loads() {
			l.given = append(l.given, i)
			continue
		}
		by[child] = append(by[child], i)
	}
	l.run(ctx, l.asks(by))
	if len(l.given) > 0 && len(l.errs) == 0 {
		l.errs = append(l.errs, fmt.Errorf("no child that loads can have it: %w", connector.ErrGone))
	}
}

// next asks for what is left each block's next child in order.
func (l *loading) next(ctx context.Context) {
	by := map[int][]int{}
	left := l.left
	l.left = nil
	for _, i := range left {
		child := l.untried(i)
		if child < 0 {
			l.given = append(l.given, i)
			continue
		}
		by[child] = append(by[child], i)
	}
	l.run(ctx, l.asks(by))
}

// untried is the first child that can be asked for a block and was not; -1 if there is none.
func (l *loading) untried(block int) int {
	for i := range l.children {
		c := &l.children[i]
		planner := c.Info.Capabilities&connector.CanPlan != 0 && len(l.t.Extra) > 0 // it loads only what it planned
		if c.Role.Loads() && !planner && c.mayHave(&l.t.Blocks[block]) && l.tried[block]&(1<<i) == 0 {
			return i
		}
	}
	return -1
}

// ask is what one child is asked for.
type ask struct {
	child   int
	indexes []int
	parts   []connector.Transfer
}

func (l *loading) asks(by map[int][]int) []ask {
	var out []ask
	for i := range l.children {
		if len(by[i]) == 0 {
			continue
		}
		parts := pick(l.t, by[i], l.groups)
		for k := range parts {
			parts[k].Extra = nil
		}
		out = append(out, ask{i, by[i], parts})
	}
	return out
}

// run loads from several children at once and notes what did not arrive.
func (l *loading) run(ctx context.Context, asks []ask) {
	l.asked = len(asks) > 0
	blocks := 0
	for i := range asks {
		blocks += len(asks[i].indexes)
	}
	if blocks < len(l.t.Blocks) {
		l.arrived = nil // it lacks some, or others are asked for a part
	}
	if l.arrived != nil {
		l.arrived = l.arrived.of(len(asks))
	}
	bad := make([]map[connector.Block]bool, len(asks))
	errs := make([]error, len(asks))
	l.together(len(asks), func(i int) {
		if l.arrived != nil {
			bad[i], errs[i] = l.oneByLayer(ctx, &asks[i], l.arrived.from(i))
		} else {
			bad[i], errs[i] = l.one(ctx, &asks[i])
		}
	})
	for i := range asks {
		c := &l.children[asks[i].child]
		for _, k := range asks[i].indexes {
			l.tried[k] |= 1 << asks[i].child
			switch {
			case !bad[i][l.t.Blocks[k]]:
			case c.Fail, l.arrived.begun():
				l.given = append(l.given, k)
			default:
				l.left = append(l.left, k)
			}
		}
		if errs[i] == nil {
			continue
		}
		l.stored.lost(asks[i].child, l.t.Blocks)
		if c.Fail {
			errs[i] = errors.Join(errs[i], ErrFail)
		}
		l.errs = append(l.errs, c.named(errs[i]))
	}
}

// one loads the parts of one child, one after the other.
func (l *loading) one(ctx context.Context, a *ask) (bad map[connector.Block]bool, err error) {
	return eachPart(a.parts, func(part *connector.Transfer) error {
		part.Ticket = l.ticketOf(a.child, l.t.Ticket)
		return l.sides[a.child].Load(ctx, part, l.kv)
	})
}

// eachPart moves the parts of one child, one after the other, and gives the blocks that failed.
func eachPart(parts []connector.Transfer, move func(*connector.Transfer) error) (bad map[connector.Block]bool, err error) {
	bad = map[connector.Block]bool{}
	for i := range parts {
		failed := move(&parts[i])
		if failed != nil {
			err = failed
		}
		for _, b := range failedBlocks(&parts[i], failed) {
			bad[b] = true
		}
	}
	return bad, err
}

// failedBlocks are the blocks of a part that an error means.
func failedBlocks(part *connector.Transfer, err error) []connector.Block {
	if err == nil {
		return nil
	}
	var some *connector.BlockError
	if !errors.As(err, &some) || len(some.Blocks) == 0 {
		return part.Blocks
	}
	named := map[connector.BlockID]bool{}
	for _, id := range some.Blocks {
		named[id] = true
	}
	var out []connector.Block
	for _, b := range part.Blocks {
		if named[b.ID] {
			out = append(out, b)
		}
	}
	if len(out) < len(named) {
		return part.Blocks // it names others: nothing it says is worth anything
	}
	return out
}

// blockError names blocks of t. If it is all of them it says so with the cause alone.
func blockError(t *connector.Transfer, indexes []int, cause error) error {
	if cause == nil {
		cause = connector.ErrGone
	}
	var some *connector.BlockError // a child's, which names fewer
	if len(indexes) == len(t.Blocks) && !errors.As(cause, &some) {
		return cause
	}
	failed := &connector.BlockError{Err: cause}
	seen := map[connector.BlockID]bool{}
	for _, i := range indexes {
		if id := t.Blocks[i].ID; !seen[id] {
			seen[id] = true
			failed.Blocks = append(failed.Blocks, id)
		}
	}
	return failed
}

func (w *worker) mark(t *connector.Transfer, by int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, b := range t.Blocks {
		name := blockName{b.Group, b.ID}
		if w.loading[name] += by; w.loading[name] == 0 {
			delete(w.loading, name)
		}
	}
}

// Close implements connector.Worker.
func (w *worker) Close() error { return w.close() }

// Save implements connector.Worker. Every child whose role saves gets the blocks, all at once. A
// block counts as stored if a child has it that consumers reach (one of scope node or shared), or any
// child where there is none such. A block that a load still writes is not stored.
func (w *worker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	return w.SaveTelling(ctx, t, kv, func() {})
}

// SaveTelling is Save, which calls promised as soon as everything that a ticket promises is stored and no other
// child is worth waiting for: one that takes longer than its Patience, now or since an earlier Save, goes on alone.
// A ticket promises what the children have that keep finished blocks for consumers, if there are such, else
// every block that is stored as Save says. promised is called once at most, and not where a block has failed.
func (w *worker) SaveTelling(ctx context.Context, t *connector.Transfer, kv *connector.KV, promised func()) error {
	return w.save(t, promised, func(child int, part *connector.Transfer) error { return w.sides[child].Save(ctx, part, kv) })
}

// save saves by a function that moves one child's part.
func (w *worker) save(t *connector.Transfer, promised func(), move func(child int, part *connector.Transfer) error) error {
	stored := make([]bool, len(t.Blocks))
	shares, err := w.saves(t)
	if err != nil {
		return err
	}
	busy := w.written(t)
	p := newSaving(w, shares, stored, promised)
	p.told = len(busy) > 0 || t.Replace
	stale := make([]bool, len(t.Blocks)) // a child may still have what was to be replaced
	p.look()
	w.together(len(shares), func(k int) {
		s := &shares[k]
		indexes, parts := w.partsOf(t, s, busy)
		bad, err := eachPart(parts, func(part *connector.Transfer) error { return move(s.child, part) })
		w.note(t, s.child, indexes, bad)
		p.returned(s.child, err, func() {
			for _, i := range indexes {
				stored[i] = stored[i] || !bad[t.Blocks[i]] && (!p.wide || reaches(&w.children[s.child]))
				stale[i] = stale[i] || t.Replace && bad[t.Blocks[i]] && !errors.Is(err, connector.ErrDeclined)
			}
		})
	})
	p.end()
	if len(busy) > 0 {
		p.errs = append(p.errs, errLoading)
	}
	var failed []int
	for i, ok := range stored {
		if !ok || stale[i] {
			failed = append(failed, i)
		}
	}
	if len(failed) == 0 {
		return nil // what some child could not store, another has
	}
	return blockError(t, failed, errors.Join(p.errs...))
}

// note remembers what a shared store has been sent, for tickets.
func (w *worker) note(t *connector.Transfer, child int, indexes []int, bad map[connector.Block]bool) {
	if !w.children[child].isSharedStore() {
		return
	}
	var keys []connector.BlockKey
	for _, i := range indexes {
		if b := t.Blocks[i]; !bad[b] && b.Key != (connector.BlockKey{}) {
			keys = append(keys, b.Key)
		}
	}
	w.stored.add(child, keys)
}

// partsOf makes the transfers of one child, less the blocks that loads still write.
func (w *worker) partsOf(t *connector.Transfer, s *share, busy map[int]bool) (indexes []int, parts []connector.Transfer) {
	part := *t
	part.From, part.Tokens, part.Extra, part.Blocks, part.Ticket = s.from, s.tokens, s.extra, nil, nil
	if len(s.extra) == 0 {
		indexes = slices.DeleteFunc(slices.Clone(s.indexes), func(i int) bool { return busy[i] })
		if len(indexes) == 0 {
			return nil, nil
		}
		part.Blocks, part.From, part.Tokens = t.Blocks, t.From, t.Tokens
		return indexes, pick(&part, indexes, w.groups)
	}
	if len(busy) > 0 {
		return nil, nil // the child's own bytes may mean any of the blocks
	}
	for _, i := range s.indexes {
		part.Blocks = append(part.Blocks, t.Blocks[i])
	}
	return s.indexes, []connector.Transfer{part}
}

// saves says which child gets which blocks: every one that saves gets all. Whether a store has a block already is its own matter: what it
// said of that in an earlier Match may be over, since another engine may have reset it.
func (w *worker) saves(t *connector.Transfer) ([]share, error) {
	if len(t.Extra) > 0 {
		return unpackShares(t.Extra, len(w.children), len(t.Blocks))
	}
	var out []share
	for i := range w.children {
		if !w.children[i].Role.Saves() {
			continue
		}
		s := share{child: i, from: t.From, tokens: t.Tokens}
		for k := range t.Blocks {
			s.indexes = append(s.indexes, k)
		}
		if len(s.indexes) > 0 {
			out = append(out, s)
		}
	}
	if len(out) == 0 && len(t.Blocks) > 0 {
		return nil, fmt.Errorf("no child saves: %w", connector.ErrGone)
	}
	return out, nil
}

// reaches reports whether consumers other than this engine can see what a child stores.
func reaches(c *Child) bool { return c.Info.Scope >= connector.ScopeNode }

// written are the indexes of the blocks that a load may write now.
func (w *worker) written(t *connector.Transfer) map[int]bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[int]bool{}
	for i, b := range t.Blocks {
		if w.loading[blockName{b.Group, b.ID}] > 0 {
			out[i] = true
		}
	}
	return out
}

// saving is one Save on its way to the children.
type saving struct {
	*worker
	wide     bool // a child stores that consumers reach
	keeps    bool // a child keeps finished blocks for consumers
	promised func()

	mu      sync.Mutex
	stored  []bool // by block
	errs    []error
	running map[int]bool  // children that have not returned; true: they have outlived their patience
	told    bool          // what a ticket promises is stored, or will not be told
	timed   bool          // the patience has begun: nothing else is waited for
	over    chan struct{} // closed when every child has returned
}

func newSaving(w *worker, shares []share, stored []bool, promised func()) *saving {
	p := &saving{worker: w, promised: promised, stored: stored, running: map[int]bool{}, over: make(chan struct{})}
	for i := range w.children {
		p.keeps = p.keeps || w.children[i].keeps() && w.children[i].Role.Saves()
	}
	for _, s := range shares {
		p.running[s.child] = false
		p.wide = p.wide || reaches(&w.children[s.child])
	}
	return p
}

// returned notes that a child has. note is called with mu held.
func (p *saving) returned(child int, err error, note func()) {
	p.mu.Lock()
	if p.running[child] {
		p.late(child, -1)
	}
	delete(p.running, child)
	if err != nil {
		p.errs = append(p.errs, p.children[child].named(err))
		p.told = p.told || p.children[child].keeps()
	}
	note()
	p.mu.Unlock()
	p.look()
}

// look calls promised when the time has come.
func (p *saving) look() {
	p.mu.Lock()
	due := p.due()
	p.mu.Unlock()
	if due {
		p.promised()
	}
}

// due reports, once, that what a ticket promises is stored and that only late children go on. Where others do,
// it starts their time. The caller holds mu.
func (p *saving) due() bool {
	if p.told || len(p.running) == 0 || !p.ready() {
		return false
	}
	patience := time.Duration(0)
	for child := range p.running {
		if p.late(child, 0) == 0 {
			patience = max(patience, p.children[child].Patience)
		}
	}
	if patience == 0 {
		p.told = true
		return true
	}
	if !p.timed {
		p.timed = true
		p.run.Go(func() {
			if p.run.Wait(context.Background(), p.over, p.run.Now().Add(patience)) != nil {
				p.outlived()
			}
		})
	}
	return false
}

// ready reports whether everything that a ticket promises is stored. The caller holds mu.
func (p *saving) ready() bool {
	if !p.keeps {
		return !slices.Contains(p.stored, false)
	}
	for child := range p.running {
		if p.children[child].keeps() {
			return false
		}
	}
	return true
}

// outlived marks the children that have not returned in time.
func (p *saving) outlived() {
	p.mu.Lock()
	for child, late := range p.running {
		if !late {
			p.running[child] = true
			p.late(child, 1)
		}
	}
	p.mu.Unlock()
	p.look()
}

// end stops the clock. Every child has returned.
func (p *saving) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.told = true
	close(p.over)
}

// late adds to the saves of a child that have outlived its patience and gives their number.
func (w *worker) late(child, more int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.overdue[child] += more
	return w.overdue[child]
}
