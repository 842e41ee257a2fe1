package staged

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/pipetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// oneSided is a mover that writes to the peer's landing memory, as UCX does.
type oneSided struct {
	slots, landing, peer [][]byte
	freed                chan bool
	damage               func(data []byte)
}

func slabs(o Options) [][]byte {
	s := make([][]byte, o.Slots)
	for i := range s {
		s[i] = make([]byte, o.Piece)
	}
	return s
}

func (m *oneSided) Slot(i int) []byte { return m.slots[i] }
func (m *oneSided) Put(_ context.Context, i, n int) error {
	copy(m.peer[i], m.slots[i][:n])
	if m.damage != nil {
		m.damage(m.peer[i][:n])
	}
	return nil
}

func (m *oneSided) Take(_ context.Context, i, n int) ([]byte, error) { return m.landing[i][:n], nil }

func (m *oneSided) Free(clean bool) error {
	m.freed <- clean
	return nil
}

// twoSided is a mover whose Put waits for the peer's Take, as NCCL's does.
type twoSided struct {
	oneSided
	out, in chan []byte
}

func (m *twoSided) Put(ctx context.Context, i, n int) error {
	select {
	case m.out <- bytes.Clone(m.slots[i][:n]):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (m *twoSided) Take(ctx context.Context, i, n int) ([]byte, error) {
	select {
	case b := <-m.in:
		return m.landing[i][:copy(m.landing[i][:n], b)], nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// ends are both ends of a link, with everything that a test changes.
type ends struct {
	a, b  pipe.Link
	conn  net.Conn // a's
	ma    *oneSided
	freed chan bool
}

func pair(t pipetest.T, o Options) ends {
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", l.Addr().String())
	require.NoError(t, err)
	other, err := l.Accept()
	require.NoError(t, err)
	o.Patience = 5 * time.Second
	o.SeedOut, o.SeedIn = 1, 2
	back := o
	back.SeedOut, back.SeedIn = 2, 1
	freed := make(chan bool, 2)
	ma, mb := &oneSided{slots: slabs(o), landing: slabs(o), freed: freed}, &oneSided{slots: slabs(o), landing: slabs(o), freed: freed}
	ma.peer, mb.peer = mb.landing, ma.landing
	var here, there Mover = ma, mb
	if o.Early {
		to, from := make(chan []byte), make(chan []byte)
		here, there = &twoSided{*ma, to, from}, &twoSided{*mb, from, to}
	}
	gone := make(chan struct{}, 2)
	done := func() { gone <- struct{}{} }
	e := ends{a: New(conn, here, o, done), b: New(other, there, back, done), conn: conn, ma: ma, freed: freed}
	t.Cleanup(func() {
		require.NoError(t, errors.Join(e.a.Close(), e.b.Close()))
		for range 2 {
			select {
			case <-gone:
			case <-time.After(time.Minute):
				require.FailNow(t, "a link does not end")
			}
		}
	})
	return e
}

func TestPipe(t *testing.T) {
	for _, o := range []Options{{Room: Room{Piece: 1 << 20, Slots: 8}}, {Room: Room{Piece: 5000, Slots: 1}}, {Room: Room{Piece: 1 << 18, Slots: 3}, Early: true}, {Room: Room{Piece: 1 << 18, Slots: 4}, NoDigest: true}} {
		for _, dialerSends := range []bool{true, false} {
			if testing.Short() && !dialerSends { // the race stage
				continue
			}
			t.Run(fmt.Sprintf("%d slots of %d, early %v, dialer sends %v", o.Slots, o.Piece, o.Early, dialerSends), func(t *testing.T) {
				pipetest.Run(t, pipetest.Harness{Open: func(t pipetest.T) pipetest.Ends {
					e := pair(t, o)
					if dialerSends {
						return pipetest.Ends{Out: e.a.Out, In: e.b.In, Kill: func() { _ = e.conn.Close() }}
					}
					return pipetest.Ends{Out: e.b.Out, In: e.a.In, Kill: func() { _ = e.conn.Close() }}
				}})
			})
		}
	}
}

// A link that both ends close is clean; a link whose peer dies is not.
func TestClean(t *testing.T) {
	e := pair(t, Options{Room: Room{Piece: 1000, Slots: 2}})
	require.NoError(t, errors.Join(e.a.Close(), e.b.Close()))
	require.True(t, <-e.freed)
	require.True(t, <-e.freed)
	e = pair(t, Options{Room: Room{Piece: 1000, Slots: 2}})
	require.NoError(t, e.conn.Close())
	_, _, err := pipe.Receive(t.Context(), e.b.In)
	require.ErrorIs(t, err, connector.ErrGone)
	require.ErrorIs(t, e.b.Out.Send(t.Context(), nil, nil), connector.ErrGone)
	require.NoError(t, errors.Join(e.b.Close(), e.a.Close()))
	require.False(t, <-e.freed)
}

// Bytes that are changed on their way, or in the landing memory afterwards, are never received.
func TestDamage(t *testing.T) {
	e := pair(t, Options{Room: Room{Piece: 1 << 16, Slots: 4}})
	n := 0
	e.ma.damage = func(data []byte) {
		if n++; n == 3 {
			data[len(data)/2] ^= 1
		}
	}
	frame := make([]byte, 5<<16)
	sent := make(chan error, 1)
	go func() { sent <- e.a.Out.Send(t.Context(), nil, [][]byte{frame}) }()
	_, _, err := pipe.Receive(t.Context(), e.b.In)
	require.ErrorIs(t, err, connector.ErrCorrupt)
	<-sent
	_, _, err = pipe.Receive(t.Context(), e.b.In)
	require.Error(t, err, "the link has ended")
}

// A Recv that is cancelled in the middle of a frame loses only that frame.
func TestCancelledInAFrame(t *testing.T) {
	e := pair(t, Options{Room: Room{Piece: 1000, Slots: 2}})
	ctx, cancel := context.WithCancel(t.Context())
	sent := make(chan error, 1)
	go func() {
		err := e.a.Out.Send(ctx, []byte("one"), [][]byte{make([]byte, 10_000)})
		sent <- errors.Join(err, e.a.Out.Send(t.Context(), []byte("two"), [][]byte{make([]byte, 10_000)}))
	}()
	receiving, stop := context.WithCancel(t.Context())
	err := e.b.In.Recv(receiving, func(_ []byte, size int) ([][]byte, error) {
		stop()
		return [][]byte{make([]byte, size)}, nil
	})
	if err != nil { // the frame may have been there already
		require.ErrorIs(t, err, context.Canceled)
	}
	h, payload, err := pipe.Receive(t.Context(), e.b.In)
	require.NoError(t, err)
	require.Equal(t, "two", string(h))
	require.Len(t, payload, 10_000)
	require.NoError(t, <-sent)
	cancel()
}

// Peers that break the rules end the link, with a reason.
func TestStrangeWords(t *testing.T) {
	for _, w := range []*message{
		{kind: messageFree, slot: 1},
		{kind: messageFree, slot: 9},
		{kind: messageTaken},
		{kind: messagePiece, slot: 9, n: 1},
		{kind: messagePiece, slot: 0, n: 1 << 30},
		{kind: messagePiece, slot: 0, n: 10},
		{kind: messageAbort},
		{kind: 99},
	} {
		e := pair(t, Options{Room: Room{Piece: 1000, Slots: 2}})
		_, err := e.conn.Write(w.encode(nil))
		require.NoError(t, err)
		_, _, err = pipe.Receive(t.Context(), e.b.In)
		require.ErrorIs(t, err, connector.ErrIncompatible, "kind %d slot %d", w.kind, w.slot)
	}
}

func FuzzWord(f *testing.F) {
	for _, w := range []*message{{kind: messageFrame, header: []byte("h"), payload: 2, inline: []byte("xy")}, {kind: messagePiece, slot: 1, n: 2, sum: 3}, {kind: messageFree, slot: 4}, {kind: messageBye}} {
		b := w.encode(nil)
		f.Add(b[0], b[messageHead:])
	}
	f.Fuzz(func(t *testing.T, kind byte, body []byte) {
		w, err := parseWord(kind, body)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrIncompatible)
			return
		}
		b := w.encode(nil)
		require.Equal(t, body, append([]byte{}, b[messageHead:]...))
	})
}

func TestExchange(t *testing.T) {
	for name, says := range map[string]string{"nothing": "", "strangers": "GET / HTTP/1.1\r\n", "version": "Gpvk\x09\x00\x00\x00\x00"} {
		t.Run(name, func(t *testing.T) {
			a, b := net.Pipe()
			go func() {
				go func() { _, _ = b.Read(make([]byte, 100)) }()
				_, _ = b.Write([]byte(says))
				_ = b.Close()
			}()
			_, err := Exchange(t.Context(), a, []byte("mine"))
			require.Error(t, err)
			require.NoError(t, a.Close())
		})
	}
}

// TestMeet: two ends of one protocol and room learn each other's seed and hello, and others do not go on.
func TestMeet(t *testing.T) {
	room := Room{Piece: 4096, Slots: 4}
	for _, c := range []struct {
		protocol string
		room     Room
		fits     bool
	}{{"ucx", room, true}, {"nccl", room, false}, {"ucx", Room{Piece: 4096, Slots: 5}, false}} {
		a, b := net.Pipe()
		var theirs Options
		var group sync.WaitGroup
		group.Go(func() {
			var hello []byte
			if hello, theirs, _ = c.room.Meet(t.Context(), &buffered{Conn: b}, c.protocol, []byte("theirs")); c.fits {
				require.Equal(t, "ours", string(hello))
			}
		})
		hello, ours, err := room.Meet(t.Context(), &buffered{Conn: a}, "ucx", []byte("ours"))
		group.Wait()
		require.NoError(t, errors.Join(a.Close(), b.Close()))
		if !c.fits {
			require.ErrorIs(t, err, connector.ErrIncompatible)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, "theirs", string(hello))
		require.Equal(t, Options{Room: room, SeedOut: theirs.SeedIn, SeedIn: theirs.SeedOut}, ours)
	}
}

// buffered writes without waiting for a reader, as a socket does.
type buffered struct{ net.Conn }

func (b *buffered) Write(p []byte) (int, error) {
	go func(p []byte) { _, _ = b.Conn.Write(p) }(bytes.Clone(p))
	return len(p), nil
}

func TestRoom(t *testing.T) {
	defaults := Room{Piece: 4096, Slots: 4}
	for _, c := range []struct {
		named, want Room
		fits        bool
	}{
		{Room{}, defaults, true},
		{Room{Piece: 1}, Room{1, 4}, true},
		{Room{Slots: 1}, Room{4096, 1}, true},
		{Room{1 << 29, 2}, Room{1 << 29, 2}, true},
		{Room{1 << 30, 2}, Room{}, false},
		{Room{Piece: -1}, Room{}, false},
		{Room{Slots: -1}, Room{}, false},
	} {
		got, err := c.named.Settle(defaults)
		if !c.fits {
			require.ErrorIs(t, err, connector.ErrIncompatible, "%+v", c.named)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, c.want, got)
	}
	require.NoError(t, defaults.Agree(defaults))
	require.ErrorIs(t, defaults.Agree(Room{Piece: 4096, Slots: 5}), connector.ErrIncompatible)
	require.Equal(t, defaultPatience, Patience(0))
	require.Equal(t, time.Second, Patience(time.Second))
	one, two := Seed(), Seed()
	require.NotEqual(t, one, two)
}

// FuzzMeet: whatever a peer says, it is refused as incompatible, or it agrees with this end.
func FuzzMeet(f *testing.F) {
	mine := Room{Piece: 4096, Slots: 4}
	said := binary.LittleEndian.AppendUint32([]byte("x1"), uint32(mine.Piece))
	said = binary.LittleEndian.AppendUint32(said, uint32(mine.Slots))
	said = binary.LittleEndian.AppendUint64(said, 7)
	f.Add(said)
	f.Add(append(said, "more"...))
	f.Fuzz(func(t *testing.T, b []byte) {
		var o Options
		theirs, err := mine.met(&o, "x1", b)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrIncompatible)
			return
		}
		require.Equal(t, said[:10], b[:10])
		require.Equal(t, b[len(b)-len(theirs):], theirs)
		require.Equal(t, binary.LittleEndian.Uint64(b[10:]), o.SeedIn)
	})
}
