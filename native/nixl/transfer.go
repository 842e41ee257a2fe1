package nixl

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
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
