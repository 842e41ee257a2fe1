package sdk

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"sync"
	"sync/atomic"
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

func TestDescribeAndHeartbeat(t *testing.T) {
	p := newPeer(t, (&scripted{}).plugin())
	m, err := p.client.Describe(t.Context(), &kvportv1.DescribeRequest{})
	require.NoError(t, err)
	info, err := wire.InfoFromProto(m)
	require.NoError(t, err)
	require.Equal(t, connector.Info{Name: "Scripted", Scope: connector.ScopeNode, Capabilities: connector.CanHold}, info)

	m, err = p.client.Describe(t.Context(), &kvportv1.DescribeRequest{Config: []byte(`"panic"`)})
	require.NoError(t, err)
	_, err = wire.InfoFromProto(m)
	require.ErrorIs(t, err, ErrPanic)
	beat, err := p.client.Heartbeat(t.Context(), &kvportv1.HeartbeatRequest{Sequence: 8})
	require.NoError(t, err)
	require.EqualValues(t, 8, beat.GetSequence())
	require.EqualValues(t, 1, beat.GetPanics())
}

func TestSchedulerCalls(t *testing.T) {
	s := &scripted{
		match: func(_ context.Context, qs []connector.Query) ([]connector.Match, error) {
			return []connector.Match{{Tokens: len(qs[0].Keys)}}, nil
		},
		consumed: func(context.Context) ([]connector.HoldID, error) { return []connector.HoldID{4, 5}, nil },
		plan:     func(step *connector.Step) *connector.Plan { return &connector.Plan{Loads: step.Admitted} },
	}
	p := newPeer(t, s.plugin())
	l := p.session()
	opened := l.call(openCall(kvportv1.Side_SIDE_SCHEDULER)).GetOpened()
	require.Equal(t, connector.CanPlan|connector.CanHold|connector.CanReset, wire.CapabilitiesFromProto(opened.GetCapabilities()))

	require.EqualValues(t, 3, l.call(matchCall(connector.Query{Tokens: 12, Keys: keys(3)})).GetMatch().GetMatches()[0].GetTokens())
	step := wire.StepToProto(&connector.Step{Admitted: []connector.Transfer{{Request: "r", Tokens: 4}}})
	plan, err := wire.PlanFromProto(l.call(&kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Plan{Plan: step}}).GetPlan())
	require.NoError(t, err)
	require.Equal(t, []connector.Transfer{{Request: "r", Tokens: 4}}, plan.Loads)
	ended := wire.EndedToProto([]connector.Ended{{Reason: connector.ReasonStop, Tokens: 9}})
	holds, err := wire.HoldsFromProto(l.call(&kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Finish{Finish: ended}}).GetFinish(), 1)
	require.NoError(t, err)
	require.Equal(t, []connector.Hold{{ID: 9, TTL: time.Second, Ticket: []byte("t")}}, holds)
	consumed := l.call(&kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Consumed{}}).GetConsumed()
	require.Equal(t, []uint64{4, 5}, consumed.GetHolds())
	require.True(t, l.call(&kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Reset_{}}).GetReset_().GetEmptied())
	require.ErrorIs(t, wire.ErrorFromProto(l.call(loadCall()).GetError()), connector.ErrIncompatible)

	require.NotNil(t, l.call(closeCall()).GetClosed())
	require.EqualValues(t, 1, s.closed.Load())
	_, err = l.stream.Recv()
	require.Error(t, err, "the session is over")
}

// bare has no optional interface.
type bare struct{ connector.Scheduler }

func TestMissingCapabilities(t *testing.T) {
	s := &scripted{}
	plugin := s.plugin()
	plugin.Scheduler = func(context.Context, connector.Env, json.RawMessage) (connector.Scheduler, error) {
		return bare{s}, nil
	}
	plugin.Worker = nil
	p := newPeer(t, plugin)
	l := p.session()
	require.Empty(t, l.call(openCall(kvportv1.Side_SIDE_SCHEDULER)).GetOpened().GetCapabilities())
	for want, m := range map[string]*kvportv1.SessionRequest{
		"cannot plan":  {Call: &kvportv1.SessionRequest_Plan{}},
		"cannot hold":  {Call: &kvportv1.SessionRequest_Finish{}},
		"cannot reset": {Call: &kvportv1.SessionRequest_Reset_{}},
	} {
		err := wire.ErrorFromProto(l.call(m).GetError())
		require.ErrorIs(t, err, connector.ErrIncompatible)
		require.ErrorContains(t, err, want)
	}
	w := p.session()
	require.ErrorContains(t, wire.ErrorFromProto(w.call(openCall(kvportv1.Side_SIDE_WORKER, wire.Region{FD: 0, Size: 1})).GetError()), "region 0 of 1 bytes")
}

func TestWorkerSeesTheHostsMemory(t *testing.T) {
	s := &scripted{move: func(_ context.Context, tr *connector.Transfer, kv *connector.KV) error {
		spans, err := kv.Spans(tr.Blocks[0])
		if err == nil {
			spans[0][0]++
		}
		return err
	}}
	p := newPeer(t, s.plugin())
	l, region := p.worker()
	region.Bytes()[3*32] = 41
	require.NotNil(t, l.call(loadCall(connector.Block{Key: connector.BlockKey{1}, ID: 3})).GetMoved())
	require.Equal(t, byte(42), region.Bytes()[3*32])

	again := p.session() // the same memory a second time is the same mapping
	require.NotNil(t, again.call(openCall(kvportv1.Side_SIDE_WORKER, wire.Region{FD: int(region.File().Fd()), Size: region.Size()})).GetOpened())
	require.Len(t, p.server.regions.mapped, 1)
	require.NotNil(t, again.call(closeCall()).GetClosed())
	require.NotNil(t, l.call(loadCall(connector.Block{ID: 3})).GetMoved(), "still mapped for the other session")

	for _, b := range []connector.Block{{ID: 8}, {ID: 1, Group: 1}} {
		require.ErrorIs(t, wire.ErrorFromProto(l.call(loadCall(b)).GetError()), connector.ErrIncompatible)
	}
	require.ErrorIs(t, wire.ErrorFromProto(l.call(matchCall()).GetError()), connector.ErrIncompatible)
}

// registering is a worker that asks for its cache early.
type registering struct {
	*scripted
	register func(context.Context, *connector.KV) error
}

func (r *registering) RegisterKV(ctx context.Context, kv *connector.KV) error {
	return r.register(ctx, kv)
}

func TestRegisterer(t *testing.T) {
	var registered *connector.KV
	r := &registering{scripted: &scripted{}}
	r.move = func(_ context.Context, _ *connector.Transfer, kv *connector.KV) error {
		require.Same(t, registered, kv)
		return nil
	}
	plugin := r.plugin()
	plugin.Worker = func(context.Context, connector.Env, json.RawMessage) (connector.Worker, error) { return r, nil }
	p := newPeer(t, plugin)

	r.register = func(context.Context, *connector.KV) error { return errors.New("no such device") }
	region, err := shm.Create("test", 8*testBlock)
	require.NoError(t, err)
	defer region.Close()
	l := p.session()
	refused := l.call(openCall(kvportv1.Side_SIDE_WORKER, wire.Region{FD: int(region.File().Fd()), Size: region.Size()})).GetError()
	require.ErrorContains(t, wire.ErrorFromProto(refused), "no such device")
	require.EqualValues(t, 1, r.closed.Load())
	require.Empty(t, p.server.regions.mapped)

	r.register = func(_ context.Context, kv *connector.KV) error {
		require.Nil(t, registered, "it is called once")
		registered = kv
		return nil
	}
	l, _ = p.worker()
	require.NotNil(t, registered, "before any transfer")
	require.NotNil(t, l.call(loadCall(connector.Block{ID: 3})).GetMoved())
	require.NotNil(t, l.call(loadCall(connector.Block{ID: 4})).GetMoved())
}

func TestOpenRefusesWrongMemory(t *testing.T) {
	p := newPeer(t, (&scripted{}).plugin())
	region, err := shm.Create("test", 8*testBlock)
	require.NoError(t, err)
	defer region.Close()
	file, err := os.CreateTemp(t.TempDir(), "x")
	require.NoError(t, err)
	defer file.Close()
	require.NoError(t, file.Truncate(8*testBlock))
	good := wire.Region{FD: int(region.File().Fd()), Size: 8 * testBlock}
	for name, regions := range map[string][]wire.Region{
		"size": {{FD: good.FD, Size: good.Size + 1}}, "file": {{FD: int(file.Fd()), Size: good.Size}},
		"closed": {{FD: 1 << 20, Size: good.Size}}, "second": {good, {FD: 1 << 20, Size: 1}},
	} {
		l := p.session()
		err := wire.ErrorFromProto(l.call(openCall(kvportv1.Side_SIDE_WORKER, regions...)).GetError())
		require.ErrorIs(t, err, connector.ErrIncompatible, name)
		require.ErrorContains(t, err, "fd ", name)
	}
	require.Empty(t, p.server.regions.mapped)
}

func TestPanicsAreAnsweredCountedAndLogged(t *testing.T) {
	s := &scripted{
		match: func(context.Context, []connector.Query) ([]connector.Match, error) { panic("in match") },
		move:  func(context.Context, *connector.Transfer, *connector.KV) error { panic("in load") },
	}
	p := newPeer(t, s.plugin())
	l := p.scheduler()
	for range 3 {
		require.ErrorIs(t, wire.ErrorFromProto(l.call(matchCall()).GetError()), ErrPanic)
	}
	w, _ := p.worker()
	require.ErrorIs(t, wire.ErrorFromProto(w.call(loadCall()).GetError()), ErrPanic)
	require.EqualValues(t, 4, p.server.Panics())
	require.Contains(t, p.log.String(), "in load")
	require.Contains(t, p.log.String(), "server_test.go")
	require.NotNil(t, l.call(&kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Reset_{}}).GetReset_(), "the side goes on")
}

func TestCancelEndsOneCall(t *testing.T) {
	started := make(chan struct{}, 2)
	s := &scripted{move: func(ctx context.Context, tr *connector.Transfer, _ *connector.KV) error {
		if len(tr.Blocks) == 0 {
			return nil
		}
		started <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}}
	l, _ := newPeer(t, s.plugin()).worker()
	first, second := l.send(loadCall(connector.Block{ID: 1})), l.send(loadCall(connector.Block{ID: 2}))
	<-started
	<-started
	require.NotNil(t, l.call(loadCall()).GetMoved(), "others are not held up")
	l.send(cancelCall(99))
	l.send(cancelCall(first))
	answer := l.recv()
	require.Equal(t, first, answer.GetId())
	require.ErrorIs(t, wire.ErrorFromProto(answer.GetError()), context.Canceled)
	l.send(cancelCall(first)) // it is over: nothing happens
	l.send(cancelCall(second))
	require.Equal(t, second, l.recv().GetId())

	timed := loadCall(connector.Block{ID: 3})
	timed.TimeoutUs = 1000
	require.ErrorIs(t, wire.ErrorFromProto(l.call(timed).GetError()), context.DeadlineExceeded)
}

// Calls of a scheduler side run one at a time in the order they came; Consumed does not count.
func TestSchedulerCallsAreSerial(t *testing.T) {
	release, started := make(chan struct{}), make(chan struct{}, 1)
	var running, most atomic.Int32
	var mu sync.Mutex
	var order []int
	s := &scripted{
		match: func(_ context.Context, qs []connector.Query) ([]connector.Match, error) {
			most.Store(max(most.Load(), running.Add(1)))
			defer running.Add(-1)
			if qs[0].Tokens == 0 {
				started <- struct{}{}
				<-release
			}
			mu.Lock()
			defer mu.Unlock()
			order = append(order, qs[0].Tokens)
			return make([]connector.Match, 1), nil
		},
		consumed: func(ctx context.Context) ([]connector.HoldID, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
	}
	l := newPeer(t, s.plugin()).scheduler()
	poll := l.send(&kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Consumed{}})
	var want []int
	for n := range 50 {
		l.send(matchCall(connector.Query{Tokens: n}))
		want = append(want, n)
	}
	<-started
	waiting := l.send(matchCall(connector.Query{Tokens: 1000}))
	l.send(cancelCall(waiting)) // cancelled before its turn: answered, not run
	other := l.send(&kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Consumed{}})
	l.send(cancelCall(other))
	require.Equal(t, other, l.recv().GetId(), "by now the server has read all that came before")
	close(release)
	for range 50 {
		require.Nil(t, l.recv().GetError())
	}
	cancelled := l.recv()
	require.Equal(t, waiting, cancelled.GetId())
	require.ErrorIs(t, wire.ErrorFromProto(cancelled.GetError()), context.Canceled)
	require.Equal(t, want, order)
	require.EqualValues(t, 1, most.Load())
	l.send(closeCall()) // ends the long poll itself
	first, second := l.recv(), l.recv()
	require.Equal(t, poll, first.GetId())
	require.NotNil(t, second.GetClosed())
}

func TestCloseWaitsForCalls(t *testing.T) {
	started, release := make(chan struct{}), make(chan struct{})
	s := &scripted{}
	s.move = func(context.Context, *connector.Transfer, *connector.KV) error {
		close(started)
		<-release
		if s.closed.Load() != 0 {
			return errors.New("closed under a running call")
		}
		return nil
	}
	l, _ := newPeer(t, s.plugin()).worker()
	load := l.send(loadCall())
	<-started
	closing := l.send(closeCall())
	refused := l.call(loadCall())
	require.ErrorIs(t, wire.ErrorFromProto(refused.GetError()), connector.ErrGone, "no new calls")
	close(release)
	done := l.recv()
	require.Equal(t, load, done.GetId())
	require.Nil(t, done.GetError())
	require.Equal(t, closing, l.recv().GetId())
	require.EqualValues(t, 1, s.closed.Load())
}

// When the host goes away every call is cancelled, waited for, and then the side is closed.
func TestStreamEndClosesTheSide(t *testing.T) {
	started, ended := make(chan struct{}), make(chan struct{})
	s := &scripted{}
	s.move = func(ctx context.Context, _ *connector.Transfer, _ *connector.KV) error {
		close(started)
		<-ctx.Done()
		if s.closed.Load() == 0 {
			close(ended)
		}
		return ctx.Err()
	}
	p := newPeer(t, s.plugin())
	region, err := shm.Create("test", 8*testBlock)
	require.NoError(t, err)
	defer region.Close()
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := p.client.Session(ctx)
	require.NoError(t, err)
	l := &line{t: t, stream: stream}
	require.NotNil(t, l.call(openCall(kvportv1.Side_SIDE_WORKER, wire.Region{FD: int(region.File().Fd()), Size: region.Size()})).GetOpened())
	l.send(loadCall())
	<-started
	cancel()
	<-ended
	waited, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	require.NoError(t, p.server.Stop(waited))
	require.EqualValues(t, 1, s.closed.Load())
	_, err = p.session().stream.Recv()
	require.Equal(t, codes.Unavailable, status.Code(err), "a stopped server opens nothing")
}

func TestTooManyCallsAreBusy(t *testing.T) {
	release := make(chan struct{})
	s := &scripted{move: func(context.Context, *connector.Transfer, *connector.KV) error {
		<-release
		return nil
	}}
	l, _ := newPeer(t, s.plugin()).worker()
	for range maxCalls {
		l.send(loadCall())
	}
	refused := l.call(loadCall())
	require.ErrorIs(t, wire.ErrorFromProto(refused.GetError()), connector.ErrBusy)
	close(release)
	answered := map[uint64]bool{}
	for range maxCalls {
		m := l.recv()
		require.NotNil(t, m.GetMoved())
		require.False(t, answered[m.GetId()], "answered twice")
		answered[m.GetId()] = true
	}
	require.NotNil(t, l.call(loadCall()).GetMoved())
}

func TestBrokenProtocolEndsTheSession(t *testing.T) {
	block := make(chan struct{})
	defer close(block)
	s := &scripted{match: func(ctx context.Context, _ []connector.Query) ([]connector.Match, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	p := newPeer(t, s.plugin())
	for name, messages := range map[string][]*kvportv1.SessionRequest{
		"no open":     {{Id: 1, Call: matchCall().Call}},
		"cancel only": {{Id: 1, Call: cancelCall(1).Call}},
		"id 0":        {{Call: openCall(kvportv1.Side_SIDE_SCHEDULER).Call}},
		"unknown":     {{Id: 1}},
		"two opens":   {{Id: 1, Call: openCall(kvportv1.Side_SIDE_SCHEDULER).Call}, {Id: 2, Call: openCall(kvportv1.Side_SIDE_SCHEDULER).Call}},
		"id in use":   {{Id: 1, Call: openCall(kvportv1.Side_SIDE_SCHEDULER).Call}, {Id: 2, Call: matchCall().Call}, {Id: 2, Call: matchCall().Call}},
	} {
		l := p.session()
		for _, m := range messages {
			require.NoError(t, l.stream.Send(m))
		}
		err := error(nil)
		for err == nil {
			_, err = l.stream.Recv()
		}
		require.Equal(t, codes.InvalidArgument, status.Code(err), name)
	}
}

// A call that arrives while the side opens, or after it could not be opened, is also answered.
func TestCallsWithoutASide(t *testing.T) {
	opening, release := make(chan struct{}), make(chan struct{})
	s := &scripted{}
	plugin := s.plugin()
	plugin.Scheduler = func(_ context.Context, _ connector.Env, _ json.RawMessage) (connector.Scheduler, error) {
		close(opening)
		<-release
		return nil, connector.ErrBusy
	}
	l := newPeer(t, plugin).session()
	open := l.send(openCall(kvportv1.Side_SIDE_SCHEDULER))
	<-opening
	require.ErrorContains(t, wire.ErrorFromProto(l.call(matchCall()).GetError()), "not open")
	close(release)
	refused := l.recv()
	require.Equal(t, open, refused.GetId())
	require.ErrorIs(t, wire.ErrorFromProto(refused.GetError()), connector.ErrBusy)
	require.NotNil(t, l.call(closeCall()).GetClosed())
	require.Zero(t, s.closed.Load())
}

func TestHugeAnswerIsAnError(t *testing.T) {
	s := &scripted{plan: func(*connector.Step) *connector.Plan {
		return &connector.Plan{Loads: []connector.Transfer{{Extra: make([]byte, wire.MaxMessage+1)}}}
	}}
	l := newPeer(t, s.plugin()).scheduler()
	err := wire.ErrorFromProto(l.call(&kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Plan{}}).GetError())
	require.ErrorContains(t, err, "limit")
	require.True(t, l.call(&kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Reset_{}}).GetReset_().GetEmptied(), "the stream goes on")
}
