package nccl

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/kvport/kvport/native/cuda"
	native "github.com/kvport/kvport/native/nccl"
)

// way is one direction of a link: a communicator of two, a stream, and a slot's worth of the GPU's memory.
type way struct {
	machine *machine
	comm    *native.Comm
	stream  cuda.Stream
	staging cuda.Pointer
	peer    int // its rank
	over    sync.Once
}

// mover moves the payload of one link.
type mover struct {
	out, in        *way
	slots, landing []byte
	piece          int
	patience       time.Duration
}

// join makes both communicators of a link. NCCL waits for the peer however long that takes, so a join that
// outlives ctx is left behind and undone when it returns.
func (m *machine) join(ctx context.Context, ids [2]native.ID, dialer bool, patience time.Duration) (*mover, error) {
	type result struct {
		ways [2]*way
		err  error
	}
	joined := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // the current device belongs to the thread, which ends with this goroutine
		var r result
		for i := range ids {
			if r.ways[i], r.err = m.way(ids[i], dialer); r.err != nil {
				break
			}
		}
		joined <- r
	}()
	undo := func(r result) error {
		var errs []error
		for _, w := range r.ways {
			if w != nil {
				errs = append(errs, w.free())
			}
		}
		return errors.Join(errs...)
	}
	select {
	case r := <-joined:
		if r.err != nil {
			return nil, errors.Join(r.err, undo(r))
		}
		mv := &mover{out: r.ways[0], in: r.ways[1], piece: m.room.Piece, patience: patience, slots: make([]byte, m.room.Piece*m.room.Slots), landing: make([]byte, m.room.Piece*m.room.Slots)}
		if !dialer {
			mv.out, mv.in = mv.in, mv.out
		}
		return mv, nil
	case <-ctx.Done():
		go func() { _ = undo(<-joined) }()
		return nil, fmt.Errorf("join the peer: %w", ctx.Err())
	}
}

// way makes one direction. The caller's goroutine is locked to its thread.
func (m *machine) way(id native.ID, dialer bool) (_ *way, err error) {
	w := &way{machine: m}
	rank := 1
	if dialer {
		rank = 0
	}
	w.peer = 1 - rank
	if w.stream, err = m.cuda.NewStream(m.device); err != nil { // it selects the device, which Join needs
		return nil, err
	}
	if w.staging, err = m.cuda.Alloc(m.device, m.room.Piece); err == nil {
		w.comm, err = m.nccl.Join(id, 2, rank)
	}
	if err != nil {
		return nil, errors.Join(err, w.free())
	}
	return w, nil
}

// run starts something on the communicator and waits until the stream has done it. When ctx ends first the
// communicator is aborted, which ends what is on the stream.
func (w *way) run(ctx context.Context, start func(staging unsafe.Pointer) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := start(w.staging); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = w.abort() })
	err := w.machine.cuda.Wait(w.stream)
	if !stop() {
		err = errors.Join(ctx.Err(), err)
	}
	if err == nil {
		err = w.comm.Err()
	}
	return err
}

func (w *way) abort() (err error) {
	w.over.Do(func() {
		if w.comm != nil {
			err = w.comm.Abort()
		}
	})
	return err
}

func (w *way) free() error {
	err := w.abort()
	if w.staging != nil {
		err = errors.Join(err, w.machine.cuda.Free(w.machine.device, w.staging))
	}
	return errors.Join(err, w.machine.cuda.FreeStream(w.stream))
}

// Slot implements staged.Mover.
func (m *mover) Slot(i int) []byte { return m.slots[i*m.piece : (i+1)*m.piece] }

// Put implements staged.Mover. The peer takes the piece as soon as it has been told about it.
func (m *mover) Put(ctx context.Context, i, n int) error {
	ctx, cancel := context.WithTimeout(ctx, m.patience)
	defer cancel()
	w := m.out
	if err := w.machine.cuda.CopyIn(w.machine.device, w.staging, m.Slot(i)[:n]); err != nil {
		return err
	}
	return w.run(ctx, func(staging unsafe.Pointer) error { return w.comm.Send(staging, n, w.peer, w.stream) })
}

// Take implements staged.Mover.
func (m *mover) Take(ctx context.Context, i, n int) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, m.patience)
	defer cancel()
	w, to := m.in, m.landing[i*m.piece:][:n]
	err := w.run(ctx, func(staging unsafe.Pointer) error { return w.comm.Receive(staging, n, w.peer, w.stream) })
	if err != nil {
		return nil, err
	}
	return to, w.machine.cuda.CopyOut(w.machine.device, to, w.staging)
}

// Free implements staged.Mover. What a peer still sends is lost, because it needs a counterpart here.
func (m *mover) Free(bool) error { return errors.Join(m.out.free(), m.in.free()) }
