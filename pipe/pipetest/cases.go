package pipetest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// rig is one pipe under test.
type rig struct {
	T
	Harness
	Ends
	rand *rand.Rand
}

func open(t T, h Harness) *rig {
	h.Bound, h.Large = cmp.Or(h.Bound, defaultBound), cmp.Or(h.Large, defaultLarge)
	r := &rig{T: t, Harness: h, Ends: h.Open(t), rand: rand.New(rand.NewPCG(1, 2))}
	t.Cleanup(func() {
		_ = r.Out.Close()
		_ = r.In.Close()
	})
	return r
}

// memory is n bytes to send from or receive into, filled by the seed.
func (r *rig) memory(n int, seed uint64) []byte {
	var b []byte
	if r.Alloc != nil {
		b = r.Alloc(r.T, n)
	} else {
		b = make([]byte, n)
	}
	content := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)})
	_, _ = content.Read(b) // never fails
	return b
}

// message is a numbered frame.
type message struct {
	header []byte
	spans  [][]byte
}

func (r *rig) message(number uint64, sizes ...int) message {
	m := message{header: binary.LittleEndian.AppendUint64(nil, number)}
	for i, n := range sizes {
		m.spans = append(m.spans, r.memory(n, number<<4+uint64(i)))
	}
	return m
}

func (r *rig) send(m message) error { return r.Out.Send(r.Context(), m.header, m.spans) }

// received is a frame that has arrived, in memory of the harness.
type received struct {
	header, payload []byte
	err             error
}

// recv receives a frame. A Recv that hangs is an error after a minute.
func (r *rig) recv(ctx context.Context) received {
	ctx, cancel := context.WithTimeout(ctx, 12*soon)
	defer cancel()
	var got received
	got.err = r.In.Recv(ctx, func(header []byte, size int) ([][]byte, error) {
		got.header, got.payload = bytes.Clone(header), r.memory(size, 0)
		half := size / 2
		return [][]byte{got.payload[:half], nil, got.payload[half:]}, nil
	})
	return got
}

// arrives requires the next frame to be m.
func (r *rig) arrives(m message) {
	ctx, cancel := context.WithTimeout(r.Context(), 2*soon)
	defer cancel()
	got := r.recv(ctx)
	require.NoError(r, got.err)
	require.Equal(r, string(m.header), string(got.header))
	require.True(r, bytes.Equal(bytes.Join(m.spans, nil), got.payload), "the payload of %d bytes differs", len(got.payload))
}

// background runs f and returns a function that waits for its error, which must come soon.
func (r *rig) background(f func() error) (wait func() error) {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return func() error {
		select {
		case err := <-done:
			return err
		case <-time.After(4 * soon):
			require.FailNow(r, "a call does not return")
			return nil
		}
	}
}

// transfer sends frames in the background and requires them to arrive.
func (r *rig) transfer(ms ...message) {
	wait := r.background(func() error {
		for _, m := range ms {
			if err := r.send(m); err != nil {
				return err
			}
		}
		return nil
	})
	for _, m := range ms {
		r.arrives(m)
	}
	require.NoError(r, wait())
}

func bytesArrive(t T, h Harness) {
	r := open(t, h)
	ms := []message{{header: []byte{}, spans: nil}, {header: bytes.Repeat([]byte("h"), pipe.MaxHeader), spans: [][]byte{{1}}}}
	number := uint64(0)
	for _, sizes := range [][]int{{}, {0}, {1}, {0, 1, 0}, {7, 4096, 3}, {65536}, {48 << 10, 48 << 10, 512}, {1 << 20, 1}} {
		number++
		ms = append(ms, r.message(number, sizes...))
	}
	many := make([]int, 300)
	for i := range many {
		many[i] = r.rand.IntN(2000)
	}
	r.transfer(append(ms, r.message(99, many...))...)
}

func inOrder(t T, h Harness) {
	r := open(t, h)
	ms := make([]message, 300)
	for i := range ms {
		ms[i] = r.message(uint64(i), r.rand.IntN(5000))
	}
	r.transfer(ms...)
}

func large(t T, h Harness) {
	r := open(t, h)
	r.transfer(r.message(1, 100), r.message(2, r.Large/3, r.Large-r.Large/3), r.message(3, 100))
}

func spansReturned(t T, h Harness) {
	r := open(t, h)
	const n = 20
	want := make([]message, n)
	for i := range want {
		want[i] = r.message(uint64(i), 50_000)
	}
	wait := r.background(func() error {
		for i := range want {
			again := r.message(uint64(i), 50_000)
			if err := r.send(again); err != nil {
				return err
			}
			clear(again.header)
			clear(again.spans[0])
		}
		return nil
	})
	for _, m := range want {
		r.arrives(m)
	}
	require.NoError(r, wait())
}

func inPlace(t T, h Harness) {
	r := open(t, h)
	m := r.message(1, 10_000, 5)
	wait := r.background(func() error { return r.send(m) })
	room := r.memory(20_000, 3)
	before := bytes.Clone(room)
	require.NoError(r, r.In.Recv(r.Context(), func(_ []byte, size int) ([][]byte, error) {
		return [][]byte{room[100:5100:5100], room[6000 : 6000+size-5000]}, nil
	}))
	require.NoError(r, wait())
	payload := bytes.Join(m.spans, nil)
	copy(before[100:], payload[:5000])
	copy(before[6000:], payload[5000:])
	require.True(r, bytes.Equal(before, room), "bytes outside the spans were written, or the payload is wrong")
}

func refused(t T, h Harness) {
	r := open(t, h)
	a, b, c := r.message(1, 100_000), r.message(2, 100_000), r.message(3, 10)
	wait := r.background(func() error { return errors.Join(r.send(a), r.send(b), r.send(c)) })
	r.arrives(a)
	no := errors.New("no room for it")
	require.ErrorIs(r, r.In.Recv(r.Context(), func([]byte, int) ([][]byte, error) { return nil, no }), no)
	r.arrives(c)
	require.NoError(r, wait())
}

func wrongRoom(t T, h Harness) {
	r := open(t, h)
	for i, n := range []int{0, 99, 101} {
		m := r.message(uint64(i), 100)
		wait := r.background(func() error { return r.send(m) })
		err := r.In.Recv(r.Context(), func([]byte, int) ([][]byte, error) { return [][]byte{make([]byte, n)}, nil })
		require.ErrorIs(r, err, connector.ErrIncompatible, "room of %d bytes for a frame of 100", n)
		require.NoError(r, wait())
	}
	r.transfer(r.message(9, 100))
}

func tooLarge(t T, h Harness) {
	r := open(t, h)
	require.ErrorIs(r, r.Out.Send(r.Context(), make([]byte, pipe.MaxHeader+1), nil), connector.ErrIncompatible)
	shared := make([]byte, 1<<20) // used so often that the total exceeds the limit, without needing that much memory
	spans := make([][]byte, pipe.MaxPayload>>20+1)
	for i := range spans {
		spans[i] = shared
	}
	require.ErrorIs(r, r.Out.Send(r.Context(), nil, spans), connector.ErrIncompatible)
	r.transfer(r.message(9, 100))
}

func backPressure(t T, h Harness) {
	r := open(t, h)
	const size = 256 << 10
	m := r.message(1, size)
	total := 0
	for {
		ctx, cancel := context.WithTimeout(r.Context(), 4*moment)
		err := r.Out.Send(ctx, m.header, m.spans)
		cancel()
		if err != nil {
			require.ErrorIs(r, err, context.DeadlineExceeded)
			break
		}
		total += size
		require.LessOrEqual(r, total, r.Bound, "the pipe took %d bytes that nobody received", total)
	}
}

func cancelledSend(t T, h Harness) {
	r := open(t, h)
	var sent []message
	for i := range uint64(200) { // fill the pipe, then cancel the Sends that find no room, at different moments
		m := r.message(i, 300_000)
		ctx, cancel := context.WithTimeout(r.Context(), time.Duration(r.rand.IntN(3000))*time.Microsecond)
		err := r.Out.Send(ctx, m.header, m.spans)
		cancel()
		if err == nil {
			sent = append(sent, m)
			continue
		}
		require.ErrorIs(r, err, context.DeadlineExceeded)
		for _, s := range m.spans {
			clear(s) // it is ours again
		}
		if i > 20 && len(sent) < int(i)-10 {
			break
		}
	}
	last := r.message(1000, 10)
	wait := r.background(func() error { return r.send(last) })
	for at := 0; ; { // what was sent arrives in order; a cancelled frame may arrive, but only complete
		got := r.recv(r.Context())
		require.NoError(r, got.err)
		number := binary.LittleEndian.Uint64(got.header)
		if number == 1000 {
			require.Equal(r, len(sent), at, "frames that were sent are missing")
			break
		}
		want := r.message(number, 300_000)
		require.True(r, bytes.Equal(want.spans[0], got.payload), "frame %d arrived damaged", number)
		if at < len(sent) && bytes.Equal(sent[at].header, got.header) {
			at++
		}
	}
	require.NoError(r, wait())
}

func cancelledRecv(t T, h Harness) {
	r := open(t, h)
	for i := range uint64(10) {
		ctx, cancel := context.WithTimeout(r.Context(), moment/10)
		got := r.recv(ctx)
		cancel()
		require.ErrorIs(r, got.err, context.DeadlineExceeded)
		r.transfer(r.message(i, 1000))
	}
	done, cancel := context.WithCancel(r.Context())
	cancel()
	wait := r.background(func() error { return r.send(r.message(77, 5)) })
	require.ErrorIs(r, r.recv(done).err, context.Canceled)
	r.arrives(r.message(77, 5))
	require.NoError(r, wait())
}

func manySenders(t T, h Harness) {
	r := open(t, h)
	const senders, each = 8, 25
	var group sync.WaitGroup
	errs := make([]error, senders)
	for s := range senders {
		ms := make([]message, each)
		for i := range ms {
			ms[i] = r.message(uint64(s*each+i), 1000+r.rand.IntN(60_000))
		}
		group.Go(func() {
			for _, m := range ms {
				if errs[s] = r.send(m); errs[s] != nil {
					return
				}
			}
		})
	}
	next := [senders]int{}
	for range senders * each {
		got := r.recv(r.Context())
		require.NoError(r, got.err)
		number := int(binary.LittleEndian.Uint64(got.header))
		s := number / each
		require.Equal(r, next[s], number%each, "sender %d's frames are out of order", s)
		next[s]++
		require.True(r, bytes.Equal(r.memory(len(got.payload), uint64(number)<<4), got.payload), "frame %d is damaged", number)
	}
	group.Wait()
	require.NoError(r, errors.Join(errs...))
}

func closeSender(t T, h Harness) {
	r := open(t, h)
	ms := []message{r.message(1, 1000), r.message(2, 10)}
	wait := r.background(func() error { return errors.Join(r.send(ms[0]), r.send(ms[1]), r.Out.Close()) })
	r.arrives(ms[0])
	r.arrives(ms[1])
	require.NoError(r, wait())
	ctx, cancel := context.WithTimeout(r.Context(), soon)
	defer cancel()
	require.ErrorIs(r, r.recv(ctx).err, pipe.ErrClosed)
	require.ErrorIs(r, r.send(ms[0]), pipe.ErrClosed)
}

func closeReceiver(t T, h Harness) {
	r := open(t, h)
	r.transfer(r.message(1, 10))
	require.NoError(r, r.In.Close())
	ctx, cancel := context.WithTimeout(r.Context(), soon)
	defer cancel()
	var err error
	for i := 0; err == nil; i++ {
		require.Less(r, i*1000, r.Bound, "sends to a closed pipe still succeed")
		err = r.Out.Send(ctx, nil, [][]byte{r.memory(1000, 1)})
	}
	require.NoError(r, ctx.Err(), "a send to a closed pipe waits")
	require.True(r, errors.Is(err, pipe.ErrClosed) || errors.Is(err, connector.ErrGone), "%v", err)
}

func closeWaiting(t T, h Harness) {
	r := open(t, h)
	recv := r.background(func() error { return r.recv(r.Context()).err })
	require.NoError(r, r.In.Close())
	require.ErrorIs(r, recv(), pipe.ErrClosed)

	r = open(t, h)
	m := r.message(1, 512<<10)
	send := r.background(func() error {
		for { // until it is full
			if err := r.send(m); err != nil {
				return err
			}
		}
	})
	require.NoError(r, r.Out.Close())
	require.ErrorIs(r, send(), pipe.ErrClosed)
}

func closeTwice(t T, h Harness) {
	r := open(t, h)
	require.NoError(r, r.Out.Close())
	require.NoError(r, r.Out.Close())
	require.NoError(r, r.In.Close())
	require.NoError(r, r.In.Close())
}

func cut(t T, h Harness) {
	r := open(t, h)
	if r.Cut == nil {
		r.Skipf("the pipe does not restore connections")
	}
	const frames = 60
	wait := r.background(func() error {
		for i := range uint64(frames) {
			if err := r.send(r.message(i, 200_000)); err != nil {
				return fmt.Errorf("frame %d: %w", i, err)
			}
		}
		return nil
	})
	stop := make(chan struct{})
	var cutting sync.WaitGroup
	cutting.Go(func() {
		tick := time.NewTicker(moment / 5)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				r.Cut()
			case <-stop:
				return
			}
		}
	})
	for i := range uint64(frames) {
		if i == frames/2 {
			close(stop)
			cutting.Wait()
		}
		r.arrives(r.message(i, 200_000))
	}
	require.NoError(r, wait())
	ctx, cancel := context.WithTimeout(r.Context(), moment)
	defer cancel()
	require.ErrorIs(r, r.recv(ctx).err, context.DeadlineExceeded, "a frame came twice")
}

func killed(t T, h Harness) {
	r := open(t, h)
	if r.Kill == nil {
		r.Skipf("the sender cannot be killed")
	}
	r.transfer(r.message(1, 1000))
	wait := r.background(func() error {
		for {
			got := r.recv(r.Context())
			if got.err != nil {
				return got.err
			}
			if want := r.message(binary.LittleEndian.Uint64(got.header), 3<<20); !bytes.Equal(want.spans[0], got.payload) {
				return errors.New("a damaged frame arrived")
			}
		}
	})
	sending, cancel := context.WithTimeout(r.Context(), moment)
	defer cancel()
	for i := uint64(2); ; i++ {
		m := r.message(i, 3<<20)
		if r.Out.Send(sending, m.header, m.spans) != nil {
			break
		}
	}
	r.Kill()
	require.ErrorIs(r, wait(), connector.ErrGone)
}
