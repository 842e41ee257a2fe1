package ucx

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
	"unsafe"
)

// Options are those of a worker. The zero value lets UCX choose.
type Options struct {
	// Transports is UCX's list, as in "tcp" or SharedMemory; empty: UCX_TLS, or all. With tcp in it, as in all,
	// whoever can reach the port that UCX opens can write the memory of this process: see Closed.
	Transports string
	Devices    string // network devices, as in "lo" or "mlx5_0:1"; empty: UCX_NET_DEVICES, or all
	// PeerErrors has requests fail when the peer has died. Without it they hang then, and fewer
	// transports are ruled out.
	PeerErrors bool
}

// Worker is one end.
type Worker struct {
	lib     *library
	options Options

	mu        sync.Mutex // one call into UCX at a time
	context   handle     // nil: closed
	worker    handle
	endpoints map[*Endpoint]struct{}
	memories  map[*Memory]struct{}
	requests  map[*Request]struct{}
}

// NewWorker makes a worker, with a context of its own.
func (l *Library) NewWorker(o Options) (*Worker, error) {
	context, worker, err := l.lib.newWorker(o)
	if err != nil {
		return nil, fmt.Errorf("ucx: make a worker with transports %q on devices %q: %w", o.Transports, o.Devices, err)
	}
	return &Worker{
		lib: l.lib, options: o, context: context, worker: worker,
		endpoints: map[*Endpoint]struct{}{}, memories: map[*Memory]struct{}{}, requests: map[*Request]struct{}{},
	}, nil
}

// do calls f with the worker locked, unless it was closed.
func (w *Worker) do(what string, f func() error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	err := ErrClosed
	if w.context != nil {
		err = f()
	}
	if err != nil {
		return fmt.Errorf("ucx: %s: %w", what, err)
	}
	return nil
}

// Address is what a peer needs to connect to this worker: some hundred bytes.
func (w *Worker) Address() (address []byte, err error) {
	err = w.do("address of a worker", func() (err error) {
		address, err = w.lib.address(w.worker)
		return err
	})
	return address, err
}

// Progress does what there is to do and reports whether that was anything.
func (w *Worker) Progress() (some bool, err error) {
	err = w.do("make progress", func() error {
		some = w.lib.progress(w.worker)
		return nil
	})
	return some, err
}

// FD is a descriptor that poll(2) finds readable when there is something to do, provided that Arm returned
// true before. It stays the worker's.
func (w *Worker) FD() (fd int, err error) {
	err = w.do("descriptor of a worker", func() (err error) {
		fd, err = w.lib.fd(w.worker)
		return err
	})
	return fd, err
}

// Arm gets the descriptor ready. It reports false if there is something to do already: make progress, then
// arm again.
func (w *Worker) Arm() (armed bool, err error) {
	err = w.do("arm a worker", func() (err error) {
		armed, err = w.lib.arm(w.worker)
		return err
	})
	return armed, err
}

// closeWait is how long Close waits for endpoints and requests to end.
const closeWait = time.Second

// Close ends the worker and what belongs to it. Requests that have not ended are given up: they fail with
// ErrClosed, and their buffers are free. Closing it again does nothing.
func (w *Worker) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.context == nil {
		return nil
	}
	var errs []error
	for e := range w.endpoints {
		errs = append(errs, w.closeEndpoint(e))
	}
	for r := range w.requests {
		w.lib.cancel(w.worker, r.handle)
	}
	deadline := time.Now().Add(closeWait)
	for r := range w.requests {
		for done := false; !done; {
			if done, _ = r.poll(); !done && time.Now().After(deadline) {
				errs = append(errs, fmt.Errorf("a request does not end: %w", ErrCanceled))
				r.end(ErrClosed)
				break
			}
		}
	}
	for m := range w.memories {
		errs = append(errs, w.lib.unmap(w.context, m.handle))
		m.handle = nil
	}
	w.lib.freeWorker(w.context, w.worker)
	w.context, w.worker = nil, nil
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("ucx: close a worker: %w", err)
	}
	return nil
}

// Memory is memory that peers may read and write, and that transfers start from and end in without being
// registered each time.
type Memory struct {
	worker *Worker
	handle handle // nil: closed
	addr   uint64
	size   uint64
}

// Map registers memory, which must stay where it is until the Memory is closed.
func (w *Worker) Map(b []byte) (*Memory, error) {
	if len(b) == 0 {
		return nil, fmt.Errorf("ucx: map nothing: %w", ErrInvalid)
	}
	m := &Memory{worker: w, addr: uint64(uintptr(unsafe.Pointer(&b[0]))), size: uint64(len(b))}
	err := w.do(fmt.Sprintf("map %d bytes", len(b)), func() (err error) {
		m.handle, err = w.lib.mapMemory(w.context, b)
		if err == nil {
			w.memories[m] = struct{}{}
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// Addr is the memory's address in this process, which a peer needs in addition to the key.
func (m *Memory) Addr() uint64 { return m.addr }

// Key is what lets a peer read and write the memory: some ten bytes.
func (m *Memory) Key() (key []byte, err error) {
	err = m.worker.do("key of memory", func() (err error) {
		if m.handle == nil {
			return ErrClosed
		}
		key, err = m.worker.lib.pack(m.worker.context, m.handle)
		return err
	})
	return key, err
}

// Close deregisters the memory. No request may be using it. Over shared memory a peer can reach it even
// then, so what a peer was given the key of must not be used for anything else while that peer may write.
func (m *Memory) Close() error {
	w := m.worker
	w.mu.Lock()
	defer w.mu.Unlock()
	if m.handle == nil {
		return nil
	}
	delete(w.memories, m)
	err := w.lib.unmap(w.context, m.handle)
	m.handle = nil
	if err != nil {
		return fmt.Errorf("ucx: unmap %d bytes: %w", m.size, err)
	}
	return nil
}

// Endpoint is the way to one peer.
type Endpoint struct {
	worker *Worker
	handle handle // nil: closed
	keys   []*Key
}

// Connect makes an endpoint to the worker with an address. It succeeds at once; that the peer cannot be
// reached is an error of requests.
func (w *Worker) Connect(address []byte) (*Endpoint, error) {
	if len(address) == 0 {
		return nil, fmt.Errorf("ucx: connect to no address: %w", ErrInvalid)
	}
	e := &Endpoint{worker: w}
	err := w.do("connect", func() (err error) {
		e.handle, err = w.lib.connect(w.worker, address, w.options.PeerErrors)
		if err == nil {
			w.endpoints[e] = struct{}{}
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return e, nil
}

// Close ends the endpoint: with PeerErrors at once, with the requests on it, so flush it first if what they
// carry matters; otherwise when the peer has taken what was sent, or after a second.
func (e *Endpoint) Close() error {
	w := e.worker
	w.mu.Lock()
	defer w.mu.Unlock()
	if e.handle == nil {
		return nil
	}
	if err := w.closeEndpoint(e); err != nil {
		return fmt.Errorf("ucx: close an endpoint: %w", err)
	}
	return nil
}

// closeEndpoint is Close's last part; the caller holds w.mu.
func (w *Worker) closeEndpoint(e *Endpoint) error {
	delete(w.endpoints, e)
	for _, k := range e.keys {
		w.lib.freeKey(k.handle)
		k.handle = nil
	}
	h, err := w.lib.closeEndpoint(e.handle, w.options.PeerErrors)
	e.handle = nil
	for deadline := time.Now().Add(closeWait); err == nil && h != nil; runtime.Gosched() {
		var done bool
		if done, _, err = w.lib.poll(w.worker, h, false); done {
			break
		}
		if time.Now().After(deadline) {
			return ErrEndpointTimeout
		}
	}
	if errors.Is(err, ErrConnectionReset) || errors.Is(err, ErrNotConnected) || errors.Is(err, ErrEndpointTimeout) {
		return nil // it has gone, which is what was wanted
	}
	return err
}

// Key is a peer's memory, as one endpoint reaches it. It ends with the endpoint.
type Key struct{ handle handle }

// Unpack takes a key that Memory.Key has made at the endpoint's other end.
func (e *Endpoint) Unpack(key []byte) (*Key, error) {
	if len(key) == 0 {
		return nil, fmt.Errorf("ucx: unpack no key: %w", ErrInvalid)
	}
	k := &Key{}
	err := e.worker.do("unpack a key", func() (err error) {
		if e.handle == nil {
			return ErrClosed
		}
		if k.handle, err = e.worker.lib.unpack(e.handle, key); err == nil {
			e.keys = append(e.keys, k)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return k, nil
}
