package nixl

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"
)

// Request says what a transfer is to move: Local[i] from or to Remote[i], which must be of equal length.
type Request struct {
	Op     Op
	Peer   string   // the name that AddPeer returned; the agent's own for its own memory and for files
	Local  []Region // within registered memory of this agent
	Remote []Region // within registered memory of the peer; regions that touch are best merged into one
	// LocalKind and RemoteKind are where they are; DRAM if not set.
	LocalKind, RemoteKind Kind
	// Backend is the one to use; with nil NIXL chooses among those that both ends have.
	Backend *Backend
	// Notify, if it is not empty, is sent to the peer when all of it has been moved.
	Notify []byte
}

// check finds what NIXL would report without saying where.
func (r *Request) check() error {
	if r.Op != Read && r.Op != Write {
		return fmt.Errorf("%v: %w", r.Op, ErrInvalid)
	}
	if len(r.Local) == 0 || len(r.Local) != len(r.Remote) {
		return fmt.Errorf("%d local and %d remote regions: %w", len(r.Local), len(r.Remote), ErrInvalid)
	}
	for i, l := range r.Local {
		if l.Len == 0 || l.Len != r.Remote[i].Len {
			return fmt.Errorf("region %d has %d bytes here and %d at the peer: %w", i, l.Len, r.Remote[i].Len, ErrInvalid)
		}
	}
	return nil
}

// known finds out whether NIXL knows the peer and the local memory: it reports both as ErrBackend.
func (a *Agent) known(r *Request) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, ok := a.peers[r.Peer]; !ok && r.Peer != a.name {
		return fmt.Errorf("no such peer was added: %w", ErrNotFound)
	}
	for i, l := range r.Local {
		if !a.registered(r.LocalKind, l) {
			return fmt.Errorf("local region %d is not within registered %v: %w", i, r.LocalKind, ErrNotFound)
		}
	}
	return nil
}

// registered says whether r is within registered memory; the caller holds a.mu.
func (a *Agent) registered(kind Kind, r Region) bool {
	for m := range a.memories {
		if m.kind != kind {
			continue
		}
		for _, have := range m.regions {
			if have.Device == r.Device && r.Addr >= have.Addr && r.Len <= have.Len && r.Addr-have.Addr <= have.Len-r.Len {
				return true
			}
		}
	}
	return false
}

// Transfer is a prepared read or write.
type Transfer struct {
	agent  *Agent
	what   string
	mu     sync.Mutex
	handle handle // nil: closed
	flying bool   // posted and not seen to have ended
}

// Prepare prepares a transfer. It moves nothing yet; the caller closes it. It costs some 20 us and
// 0.2 us a region, so keep a transfer that will be wanted again.
func (a *Agent) Prepare(r Request) (*Transfer, error) {
	what := fmt.Sprintf("%v of %d regions with peer %q", r.Op, len(r.Local), r.Peer)
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	if err := r.check(); err != nil {
		return nil, fmt.Errorf("nixl: prepare %s: %w", what, err)
	}
	r.Notify = bytes.Clone(r.Notify)
	if err := a.known(&r); err != nil {
		return nil, fmt.Errorf("nixl: prepare %s: %w", what, err)
	}
	h, err := a.lib.prepare(a.handle, &r)
	if err != nil {
		return nil, fmt.Errorf("nixl: prepare %s: %w (or the peer's metadata does not have these regions; NIXL says more on stderr)", what, err)
	}
	t := &Transfer{agent: a, what: what, handle: h}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.transfers[t] = struct{}{}
	return t, nil
}

// Post starts the transfer and reports whether it has ended already, as it often has between processes of
// one host. A transfer that has ended may be posted again.
func (t *Transfer) Post() (done bool, err error) {
	return t.call("post", func() (bool, error) {
		if t.flying {
			return false, ErrInFlight
		}
		done, err := t.agent.lib.post(t.agent.handle, t.handle)
		t.flying = err == nil && !done
		return done, err
	})
}

// Poll makes progress and reports whether the transfer has ended: for a read, that the data is here; for
// a write, that it is at the peer. Without a transfer in flight it reports true.
func (t *Transfer) Poll() (done bool, err error) {
	return t.call("poll", func() (bool, error) {
		if !t.flying {
			return true, nil
		}
		done, err := t.agent.lib.poll(t.agent.handle, t.handle)
		t.flying = err == nil && !done
		return done, err
	})
}

// call calls do with the transfer locked and its agent kept open.
func (t *Transfer) call(verb string, do func() (bool, error)) (bool, error) {
	if err := t.agent.enter(); err != nil {
		return false, err
	}
	defer t.agent.leave()
	t.mu.Lock()
	defer t.mu.Unlock()
	err := ErrClosed
	if t.handle != nil {
		var done bool
		if done, err = do(); err == nil {
			return done, nil
		}
	}
	return false, fmt.Errorf("nixl: %s a %s: %w", verb, t.what, err)
}

// Wait polls until the transfer has ended or ctx has. A transfer that outlives its context is still in
// flight: wait again, or close it.
func (t *Transfer) Wait(ctx context.Context) error {
	var pace Pace
	var timer *time.Timer
	for i := 0; ; i++ {
		pace.Begin()
		if done, err := t.Poll(); done || err != nil {
			return err
		}
		if i%16 == 0 && ctx.Err() != nil {
			return fmt.Errorf("nixl: wait for a %s: %w", t.what, context.Cause(ctx))
		}
		pause := pace.End()
		if pause == 0 {
			runtime.Gosched()
			continue
		}
		if timer == nil {
			timer = time.NewTimer(pause)
			defer timer.Stop()
		} else {
			timer.Reset(pause)
		}
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
	}
}

// Run is Post and Wait.
func (t *Transfer) Run(ctx context.Context) error {
	if done, err := t.Post(); done || err != nil {
		return err
	}
	return t.Wait(ctx)
}

// Telemetry is what NIXL has measured of a transfer.
type Telemetry struct {
	Post        time.Duration // how long the post took
	Duration    time.Duration // from the post until it was seen to have ended
	Bytes       uint64
	Descriptors uint64 // after NIXL has merged regions that touch
}

// Telemetry returns the figures of the last run. ErrNoTelemetry means that the agent's options do not ask
// for them or that the transfer has not ended.
func (t *Transfer) Telemetry() (Telemetry, error) {
	var out Telemetry
	_, err := t.call("telemetry of", func() (done bool, err error) {
		out, err = t.agent.lib.telemetry(t.agent.handle, t.handle)
		return true, err
	})
	return out, err
}

// Close frees the transfer. One in flight is given up: NIXL asks the transport to stop, which not every
// one can, so memory it was to fill may still change until the peer is removed or has gone. Closing it
// again does nothing.
func (t *Transfer) Close() error {
	a := t.agent
	a.life.RLock()
	defer a.life.RUnlock()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.handle == nil || a.handle == nil {
		return nil
	}
	a.mu.Lock()
	delete(a.transfers, t)
	a.mu.Unlock()
	if err := t.release(); err != nil {
		return fmt.Errorf("nixl: close a %s: %w", t.what, err)
	}
	return nil
}

// release is Close's last part; the caller holds t.mu, or is closing the agent.
func (t *Transfer) release() error {
	h := t.handle
	t.handle, t.flying = nil, false
	return t.agent.lib.release(t.agent.handle, h)
}

// List is the regions of one end of transfers, prepared for many: what a transfer of some of them needs is
// looked up once, and not each time. A cache makes one of all its blocks, and one of each peer's.
type List struct {
	agent   *Agent
	backend *Backend
	peer    string // empty: the agent's own memory
	sizes   []uint64
	handle  handle // nil: closed; guarded by agent.mu
}

// List prepares regions: of the agent itself with an empty peer, which must be registered, or of a peer that
// was added. The backend must not be nil. Regions that touch are not merged. The caller closes the list,
// after the transfers made of it, and a peer's before the peer is removed.
func (a *Agent) List(b *Backend, peer string, kind Kind, regions ...Region) (*List, error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	what := fmt.Sprintf("list %d regions of peer %q", len(regions), peer)
	if b == nil || len(regions) == 0 || slices.ContainsFunc(regions, func(r Region) bool { return r.Len == 0 }) {
		return nil, fmt.Errorf("nixl: %s: it needs a backend, and regions that are not empty: %w", what, ErrInvalid)
	}
	if err := a.listable(peer, kind, regions); err != nil {
		return nil, fmt.Errorf("nixl: %s: %w", what, err)
	}
	h, err := a.lib.list(a.handle, b.handle, peer, kind, regions)
	if err != nil {
		return nil, fmt.Errorf("nixl: %s: %w (or the peer's metadata does not have them)", what, err)
	}
	l := &List{agent: a, backend: b, peer: peer, handle: h, sizes: make([]uint64, len(regions))}
	for i, r := range regions {
		l.sizes[i] = r.Len
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lists[l] = struct{}{}
	return l, nil
}

// listable finds what NIXL would report without saying where.
func (a *Agent) listable(peer string, kind Kind, regions []Region) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if peer != "" {
		if _, ok := a.peers[peer]; !ok && peer != a.name {
			return fmt.Errorf("no such peer was added: %w", ErrNotFound)
		}
		return nil
	}
	for i, r := range regions {
		if !a.registered(kind, r) {
			return fmt.Errorf("region %d is not within registered %v: %w", i, kind, ErrNotFound)
		}
	}
	return nil
}

// Make makes a transfer of regions of two lists: here[i] of the agent's own from or to there[i] of the
// peer's, by their places, which must be of equal length. NIXL merges what touches at both ends. The caller
// closes the transfer.
func (l *List) Make(op Op, remote *List, here, there []int32) (*Transfer, error) {
	a := l.agent
	what := fmt.Sprintf("%v of %d listed regions with peer %q", op, len(here), remote.peer)
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	a.mu.Lock()
	defer a.mu.Unlock()
	if l.handle == nil || remote.handle == nil {
		return nil, fmt.Errorf("nixl: make a %s: a list is %w", what, ErrClosed)
	}
	ours, theirs := listed{l, here}, listed{remote, there}
	err := ours.fit(theirs)
	if err == nil && op != Read && op != Write {
		err = ErrInvalid
	}
	var h handle
	if err == nil {
		h, err = a.lib.makeTransfer(a.handle, op, ours, theirs)
	}
	if err != nil {
		return nil, fmt.Errorf("nixl: make a %s: %w", what, err)
	}
	t := &Transfer{agent: a, what: what, handle: h}
	a.transfers[t] = struct{}{}
	return t, nil
}

// listed is some regions of a list, by their places.
type listed struct {
	*List
	places []int32
}

// fit makes sure that regions of the agent's own and of a peer's go together.
func (l listed) fit(remote listed) error {
	if remote.agent != l.agent || l.peer != "" || remote.peer == "" || len(l.places) == 0 || len(l.places) != len(remote.places) {
		return fmt.Errorf("it needs a list of its own, one of a peer, and as many places in each: %w", ErrInvalid)
	}
	for i := range l.places {
		x, y := int(l.places[i]), int(remote.places[i])
		if x < 0 || x >= len(l.sizes) || y < 0 || y >= len(remote.sizes) || l.sizes[x] != remote.sizes[y] {
			return fmt.Errorf("places %d and %d do not fit: %w", x, y, ErrInvalid)
		}
	}
	return nil
}

// Close frees the list. Closing it again does nothing.
func (l *List) Close() error {
	a := l.agent
	a.life.RLock()
	defer a.life.RUnlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if l.handle == nil || a.handle == nil {
		return nil
	}
	delete(a.lists, l)
	return l.release()
}

// release is Close's last part.
func (l *List) release() error {
	h := l.handle
	l.handle = nil
	if err := l.agent.lib.freeList(l.agent.handle, h); err != nil {
		return fmt.Errorf("nixl: close a list of %d regions: %w", len(l.sizes), err)
	}
	return nil
}

// Pace says how often to call what makes progress: Poll, or Notifications at the end that is read or written.
// Over TCP the bytes move within these calls, at both ends, and whoever pauses lets the other wait for room in a
// socket. A call that moves bytes takes longer than one that finds nothing to do. The zero value is a beginning.
type Pace struct {
	begun  time.Time
	least  time.Duration // that a call took
	worked time.Time     // the last call that did something
}

const (
	// spin is how long nothing may happen before there are pauses, and maxPause their longest: between calls
	// a sixteenth of the time in which nothing has happened passes.
	spin     = 500 * time.Microsecond
	maxPause = 200 * time.Microsecond
	// busier is how many times as long as the shortest a call takes that did something.
	busier = 4
)

// Begin must be called before each call.
func (p *Pace) Begin() {
	p.begun = time.Now()
	if p.worked.IsZero() {
		p.worked = p.begun
	}
}

// End must be called after it. It says how long to pause; 0 means to yield to others and then call again.
func (p *Pace) End() time.Duration {
	now := time.Now()
	took := max(now.Sub(p.begun), 1)
	switch {
	case p.least == 0 || took < p.least:
		p.least = took
	case took >= busier*p.least:
		p.worked = now
	}
	idle := now.Sub(p.worked)
	if idle < spin {
		return 0
	}
	return min(idle/16, maxPause)
}
