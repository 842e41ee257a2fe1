package ucx

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"
)

// Request is something that was started.
type Request struct {
	worker  *Worker
	what    string
	receive bool

	// Guarded by worker.mu.
	handle handle // nil: ended
	err    error
	n      int
	tag    uint64
	pinned runtime.Pinner
}

// start starts a request over an endpoint or, where e is nil, on the worker.
func (r *Request) start(e *Endpoint, buffer []byte, begin func() (handle, error)) (*Request, error) {
	if len(buffer) > 0 {
		r.pinned.Pin(unsafe.SliceData(buffer))
	}
	err := r.worker.do(r.what, func() (err error) {
		if e != nil && e.handle == nil {
			return ErrClosed
		}
		if r.handle, err = begin(); r.handle != nil {
			r.worker.requests[r] = struct{}{}
		} else {
			r.pinned.Unpin()
		}
		return err
	})
	if err != nil {
		r.pinned.Unpin()
		return nil, err
	}
	return r, nil
}

// Send starts to send a message. The buffer must not change until the request has ended, which says nothing
// about whether the message has been received.
func (e *Endpoint) Send(message []byte, tag uint64) (*Request, error) {
	r := &Request{worker: e.worker, what: fmt.Sprintf("send %d bytes", len(message))}
	return r.start(e, message, func() (handle, error) {
		return e.worker.lib.send(e.handle, message, tag)
	})
}

// Receive starts to receive into buffer the next message from any peer whose tag equals this one in the bits
// of mask. A longer message ends it with ErrTruncated.
func (w *Worker) Receive(buffer []byte, tag, mask uint64) (*Request, error) {
	r := &Request{worker: w, what: fmt.Sprintf("receive up to %d bytes", len(buffer)), receive: true}
	return r.start(nil, buffer, func() (handle, error) { return w.lib.receive(w.worker, buffer, tag, mask) })
}

// Put starts to write local to the peer's memory at address remote, which key covers. M is the memory that
// local is part of, nil if it is not registered. When the request has ended local may be used again; that
// the bytes are at the peer takes a Flush.
func (e *Endpoint) Put(local []byte, m *Memory, remote uint64, key *Key) (*Request, error) {
	return e.move("put", local, m, remote, key)
}

// Get starts to read the peer's memory at address remote into local. When the request has ended they are
// there.
func (e *Endpoint) Get(local []byte, m *Memory, remote uint64, key *Key) (*Request, error) {
	return e.move("get", local, m, remote, key)
}

func (e *Endpoint) move(verb string, local []byte, m *Memory, remote uint64, key *Key) (*Request, error) {
	what := fmt.Sprintf("%s %d bytes", verb, len(local))
	if len(local) == 0 || key == nil {
		return nil, fmt.Errorf("ucx: %s: %w", what, ErrInvalid)
	}
	r := &Request{worker: e.worker, what: what}
	return r.start(e, local, func() (handle, error) {
		var memory handle
		if m != nil {
			memory = m.handle
		}
		if key.handle == nil || (m != nil && memory == nil) {
			return nil, ErrClosed
		}
		return e.worker.lib.move(e.handle, &movement{get: verb == "get", local: local, memory: memory, remote: remote, key: key.handle})
	})
}

// movement is the arguments of library.move.
type movement struct {
	get    bool
	local  []byte
	memory handle
	remote uint64
	key    handle
}

// Flush starts to wait until all that was put so far over the endpoint is at the peer.
func (e *Endpoint) Flush() (*Request, error) {
	r := &Request{worker: e.worker, what: "flush"}
	return r.start(e, nil, func() (handle, error) { return e.worker.lib.flush(e.handle) })
}

// Poll makes progress and reports whether the request has ended, and how.
func (r *Request) Poll() (done bool, err error) {
	r.worker.mu.Lock()
	defer r.worker.mu.Unlock()
	if done, err = r.poll(); err != nil {
		err = fmt.Errorf("ucx: %s: %w", r.what, err)
	}
	return done, err
}

// poll is Poll; the caller holds worker.mu.
func (r *Request) poll() (bool, error) {
	if r.handle == nil {
		return true, r.err
	}
	done, got, err := r.worker.lib.poll(r.worker.worker, r.handle, r.receive)
	if !done {
		return false, nil
	}
	r.n, r.tag = int(got.n), got.tag
	r.end(err)
	return true, err
}

// end marks the request as ended; the caller holds worker.mu.
func (r *Request) end(err error) {
	r.handle, r.err = nil, err
	r.pinned.Unpin()
	delete(r.worker.requests, r)
}

const (
	// spin is how long Wait polls without a pause, and maxPause how long it pauses from then on, at most:
	// between polls it lets a sixteenth of the time that it has waited pass.
	spin     = 500 * time.Microsecond
	maxPause = 200 * time.Microsecond
)

// Wait polls until the request or ctx has ended. A request that outlives its context goes on: wait again, or
// cancel it.
func (r *Request) Wait(ctx context.Context) error {
	began := time.Now()
	for i := 0; ; i++ {
		if done, err := r.Poll(); done {
			return err
		}
		if i%16 == 0 && ctx.Err() != nil {
			return fmt.Errorf("ucx: %s: %w", r.what, context.Cause(ctx))
		}
		waited := time.Since(began)
		if waited < spin {
			runtime.Gosched()
			continue
		}
		select {
		case <-time.After(min(waited/16, maxPause)):
		case <-ctx.Done():
		}
	}
}

// Cancel asks UCX to give the request up, which it does for receives; wait for it then: it ends with
// ErrCanceled, or as it would have.
func (r *Request) Cancel() {
	r.worker.mu.Lock()
	defer r.worker.mu.Unlock()
	if r.handle != nil {
		r.worker.lib.cancel(r.worker.worker, r.handle)
	}
}

// Received is the length and the tag of the message of a receive that has ended well.
func (r *Request) Received() (n int, tag uint64, err error) {
	r.worker.mu.Lock()
	defer r.worker.mu.Unlock()
	if !r.receive || r.handle != nil || r.err != nil {
		return 0, 0, errors.Join(fmt.Errorf("ucx: %s: nothing was received", r.what), r.err)
	}
	return r.n, r.tag, nil
}

// received is the outcome of a receive.
type received struct{ n, tag uint64 }
