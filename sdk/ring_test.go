package sdk

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// ringLine is a session with a ring, as a host has it.
type ringLine struct {
	*line
	end     *shm.RingEnd
	answers chan *kvportv1.SessionResponse
	file    *os.File
	bell    *os.File
}

func (p *hostEnd) ringed(side kvportv1.Side) *ringLine {
	file, err := shm.NewRings("test", 1)
	require.NoError(p.t, err)
	require.NoError(p.t, shm.AllocateRing(file, 0))
	own, other, err := shm.NewBells()
	require.NoError(p.t, err)
	bell, err := shm.NewBell(int(own.Fd()))
	require.NoError(p.t, err)
	end, err := shm.NewRingEnd(int(file.Fd()), 0, true, bell)
	require.NoError(p.t, err)
	r := &ringLine{line: p.session(), end: end, answers: make(chan *kvportv1.SessionResponse, 2*maxCalls), file: file, bell: own}
	end.Start(func(frame []byte) {
		m := new(kvportv1.SessionResponse)
		if err := wire.FromFrame(frame, m); err != nil {
			p.t.Error(err)
		}
		r.answers <- m
	}, func(err error) { p.t.Error(err) })
	p.t.Cleanup(func() {
		require.NoError(p.t, end.Close())
		require.NoError(p.t, bell.Close())
		for _, f := range []*os.File{own, other, file} {
			require.NoError(p.t, f.Close())
		}
	})
	open := openCall(side)
	if side == kvportv1.Side_SIDE_WORKER {
		region, err := shm.Create("test", 8*testBlock)
		require.NoError(p.t, err)
		p.t.Cleanup(func() { require.NoError(p.t, region.Close()) })
		open = openCall(side, wire.Region{FD: int(region.File().Fd()), Size: region.Size()})
	}
	open.GetOpen().Ring = &kvportv1.Ring{Fd: uint32(file.Fd()), Bell: uint32(other.Fd())}
	answer := r.call(open)
	require.True(p.t, answer.GetOpened().GetRing(), "%v", answer)
	return r
}

// put sends one call over the ring and gives its id.
func (r *ringLine) put(m *kvportv1.SessionRequest) uint64 {
	r.t.Helper()
	r.id++
	m.Id = r.id
	sent, err := r.end.Send(wire.Frame(m))
	require.NoError(r.t, err)
	require.True(r.t, sent)
	return r.id
}

// get gives the next answer that comes over the ring.
func (r *ringLine) get() *kvportv1.SessionResponse {
	r.t.Helper()
	select {
	case m := <-r.answers:
		return m
	case <-time.After(time.Minute):
		require.Fail(r.t, "no answer over the ring")
		return nil
	}
}

// quiet is a connector whose loads wait for their context, and whose matches find as many tokens as
// there are.
func quiet() *scripted {
	return &scripted{
		match: func(_ context.Context, qs []connector.Query) ([]connector.Match, error) {
			out := make([]connector.Match, len(qs))
			for i, q := range qs {
				out[i].Tokens = q.Tokens
			}
			return out, nil
		},
		move: func(ctx context.Context, t *connector.Transfer, _ *connector.KV) error {
			if t.Request == "wait" {
				<-ctx.Done()
			}
			return ctx.Err()
		},
	}
}

func TestCallsOverTheRing(t *testing.T) {
	s := quiet()
	r := newPeer(t, s.plugin()).ringed(kvportv1.Side_SIDE_SCHEDULER)
	for n := range 300 {
		id := r.put(matchCall(connector.Query{Tokens: n}))
		answer := r.get()
		require.Equal(t, id, answer.GetId())
		require.EqualValues(t, n, answer.GetMatch().GetMatches()[0].GetTokens())
	}
	// A message that is too large for the ring goes over the stream, in one direction or both.
	qs := make([]connector.Query, 4000)
	id := r.send(matchCall(qs...))
	require.Equal(t, id, r.recv().GetId())
	require.Equal(t, r.send(matchCall(connector.Query{Tokens: 3})), r.get().GetId())
	require.NotNil(t, r.call(closeCall()).GetClosed(), "its answer comes over the stream: the ring is left by then")
	require.EqualValues(t, 1, s.closed.Load())
	require.Empty(t, r.answers)
}

func TestCancelOverTheRing(t *testing.T) {
	r := newPeer(t, quiet().plugin()).ringed(kvportv1.Side_SIDE_WORKER)
	wait := func() *kvportv1.SessionRequest {
		return &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Load{Load: wire.TransferToProto(&connector.Transfer{Request: "wait"})}}
	}
	first := r.put(wait())
	late := wait()
	late.TimeoutUs = 1000
	require.Equal(t, r.put(late), r.get().GetId(), "its deadline passed")
	require.Equal(t, r.put(loadCall(connector.Block{ID: 1})), r.get().GetId(), "others go on")
	r.put(cancelCall(first))
	answer := r.get()
	require.Equal(t, first, answer.GetId())
	require.ErrorIs(t, wire.ErrorFromProto(answer.GetError()), context.Canceled)
	// The end of the session ends what runs.
	r.put(wait())
	require.NoError(t, r.stream.CloseSend())
	_, err := r.stream.Recv()
	require.Error(t, err)
}

// A host that breaks the ring ends its own session. The other sessions of the process continue.
func TestBrokenRingEndsTheSession(t *testing.T) {
	p := newPeer(t, quiet().plugin())
	good := p.ringed(kvportv1.Side_SIDE_SCHEDULER)
	for name, harm := range map[string]func(r *ringLine){
		"counters": func(r *ringLine) { scribble(t, r.file, 0, 0xff) },
		"garbage": func(r *ringLine) {
			_, err := r.end.Send(5, func(to []byte) ([]byte, error) { return append(to, 0xff, 0xff, 0xff, 0xff, 0xff), nil })
			require.NoError(t, err)
		},
		"nothing":    func(r *ringLine) { _, _ = r.end.Send(0, func(to []byte) ([]byte, error) { return to, nil }) },
		"two opens":  func(r *ringLine) { r.put(openCall(kvportv1.Side_SIDE_SCHEDULER)) },
		"no answers": func(r *ringLine) { scribble(t, r.file, 2048+64, 0x7f); r.put(matchCall(connector.Query{})) },
	} {
		r := p.ringed(kvportv1.Side_SIDE_SCHEDULER)
		harm(r)
		_, err := r.bell.Write([]byte{1}) // whatever the ring says
		require.NoError(t, err)
		for err == nil { // the answer that met the broken ring goes over the stream
			_, err = r.stream.Recv()
		}
		require.Equal(t, codes.InvalidArgument, status.Code(err), "%s: %v", name, err)
		require.Equal(t, good.put(matchCall(connector.Query{Tokens: 3})), good.get().GetId(), name)
	}
	require.NotNil(t, good.call(closeCall()).GetClosed())
}

// scribble writes four bytes of a value over memory at an offset.
func scribble(t *testing.T, file *os.File, at int64, value byte) {
	t.Helper()
	_, err := file.WriteAt(bytes.Repeat([]byte{value}, 4), at)
	require.NoError(t, err)
}

// A ring that cannot be opened is not an error.
func TestRingsThatCannotBeHad(t *testing.T) {
	p := newPeer(t, quiet().plugin())
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	rings, err := shm.NewRings("test", 1)
	require.NoError(t, err)
	defer rings.Close()
	own, other, err := shm.NewBells()
	require.NoError(t, err)
	defer own.Close()
	defer other.Close()
	for name, ring := range map[string]*kvportv1.Ring{
		"nothing there": {Fd: 1 << 20, Bell: 1 << 20},
		"no memory":     {Fd: uint32(null.Fd()), Bell: uint32(other.Fd())},
		"no bell":       {Fd: uint32(rings.Fd()), Bell: uint32(null.Fd())},
		"no such area":  {Fd: uint32(rings.Fd()), Bell: uint32(other.Fd()), Offset: 1 << 40},
	} {
		l := p.session()
		open := openCall(kvportv1.Side_SIDE_SCHEDULER)
		open.GetOpen().Ring = ring
		answer := l.call(open)
		require.NotNil(t, answer.GetOpened(), "%s: %v", name, answer.GetError())
		require.False(t, answer.GetOpened().GetRing(), name)
		require.Equal(t, l.send(matchCall(connector.Query{Tokens: 3})), l.recv().GetId(), name)
	}
	require.Equal(t, 4, strings.Count(p.log.String(), "no ring"))
	require.Empty(t, p.server.bells.open)
	for _, ring := range []*kvportv1.Ring{{Fd: 1 << 31}, {Bell: 1 << 31}, {Offset: 1 << 63}} {
		l := p.session()
		open := openCall(kvportv1.Side_SIDE_SCHEDULER)
		open.GetOpen().Ring = ring
		require.ErrorIs(t, wire.ErrorFromProto(l.call(open).GetError()), connector.ErrIncompatible)
	}
}
