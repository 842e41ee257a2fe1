package sdk

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
	"github.com/kvport/kvport/verify/testkit"
)

// scripted is a connector whose calls do what a test says.
type scripted struct {
	match    func(context.Context, []connector.Query) ([]connector.Match, error)
	move     func(context.Context, *connector.Transfer, *connector.KV) error
	consumed func(context.Context) ([]connector.HoldID, error)
	plan     func(*connector.Step) *connector.Plan
	closed   atomic.Int32
}

func (s *scripted) Match(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
	return s.match(ctx, qs)
}

func (s *scripted) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	return s.move(ctx, t, kv)
}

func (s *scripted) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	return s.move(ctx, t, kv)
}

func (s *scripted) Plan(_ context.Context, step *connector.Step) (*connector.Plan, error) {
	return s.plan(step), nil
}

func (s *scripted) Finish(_ context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	holds := make([]connector.Hold, len(ended))
	for i, e := range ended {
		holds[i] = connector.Hold{ID: connector.HoldID(e.Tokens), TTL: time.Second, Ticket: []byte("t")}
	}
	return holds, nil
}

func (s *scripted) Consumed(ctx context.Context) ([]connector.HoldID, error) { return s.consumed(ctx) }
func (s *scripted) Reset(context.Context) (bool, error)                      { return true, nil }

func (s *scripted) Close() error {
	s.closed.Add(1)
	return nil
}

func (s *scripted) plugin() connector.Plugin {
	return connector.Plugin{
		Name: "Scripted", Version: "1",
		Describe: func(_ context.Context, config json.RawMessage) (connector.Info, error) {
			if string(config) == `"panic"` {
				panic("describe")
			}
			return connector.Info{Name: "Scripted", Scope: connector.ScopeNode, Capabilities: connector.CanHold}, nil
		},
		Scheduler: func(context.Context, connector.Env, json.RawMessage) (connector.Scheduler, error) { return s, nil },
		Worker:    func(context.Context, connector.Env, json.RawMessage) (connector.Worker, error) { return s, nil },
	}
}

// hostEnd is the host's end of a connection to a Server, as thin as can be.
type hostEnd struct {
	t      *testing.T
	server *Server
	client kvportv1.PluginClient
	log    *testkit.Log
}

func newPeer(t *testing.T, p connector.Plugin) *hostEnd {
	t.Helper()
	log := &testkit.Log{}
	server := NewServer(p, slog.New(slog.NewTextHandler(log, nil)))
	listener := bufconn.Listen(1 << 20)
	g := grpc.NewServer(wire.ServerOptions()...)
	kvportv1.RegisterPluginServer(g, server)
	served := make(chan error, 1)
	go func() { served <- g.Serve(listener) }()
	options := append(wire.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return listener.Dial() }))
	conn, err := grpc.NewClient("passthrough:bufconn", options...)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, conn.Close())
		g.Stop()
		require.NoError(t, <-served)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, server.Stop(ctx), "a session outlived its stream")
		require.Empty(t, server.regions.mapped, "memory is still mapped")
	})
	return &hostEnd{t: t, server: server, client: kvportv1.NewPluginClient(conn), log: log}
}

// line is one session.
type line struct {
	t      *testing.T
	stream grpc.BidiStreamingClient[kvportv1.SessionRequest, kvportv1.SessionResponse]
	id     uint64
}

func (p *hostEnd) session() *line {
	ctx, cancel := context.WithTimeout(p.t.Context(), time.Minute)
	p.t.Cleanup(cancel)
	stream, err := p.client.Session(ctx)
	require.NoError(p.t, err)
	return &line{t: p.t, stream: stream}
}

// send sends one call and gives its id.
func (l *line) send(m *kvportv1.SessionRequest) uint64 {
	l.t.Helper()
	l.id++
	m.Id = l.id
	require.NoError(l.t, l.stream.Send(m))
	return l.id
}

func (l *line) recv() *kvportv1.SessionResponse {
	l.t.Helper()
	m, err := l.stream.Recv()
	require.NoError(l.t, err)
	return m
}

// call sends one call and waits for its answer.
func (l *line) call(m *kvportv1.SessionRequest) *kvportv1.SessionResponse {
	l.t.Helper()
	id := l.send(m)
	answer := l.recv()
	require.Equal(l.t, id, answer.GetId())
	return answer
}

func openCall(side kvportv1.Side, regions ...wire.Region) *kvportv1.SessionRequest {
	return &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Open{Open: wire.OpenToProto(&wire.Open{Side: side, Env: testEnv(0, 1), Regions: regions})}}
}

func loadCall(blocks ...connector.Block) *kvportv1.SessionRequest {
	return &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Load{Load: wire.TransferToProto(&connector.Transfer{Request: "r", Blocks: blocks})}}
}

func matchCall(qs ...connector.Query) *kvportv1.SessionRequest {
	return &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Match{Match: wire.QueriesToProto(qs)}}
}

func closeCall() *kvportv1.SessionRequest {
	return &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Close{Close: &kvportv1.Close{}}}
}

func cancelCall(id uint64) *kvportv1.SessionRequest {
	return &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Cancel{Cancel: &kvportv1.Cancel{Call: id}}}
}

// scheduler and worker open a side.
func (p *hostEnd) scheduler() *line {
	l := p.session()
	require.NotNil(p.t, l.call(openCall(kvportv1.Side_SIDE_SCHEDULER)).GetOpened())
	return l
}

func (p *hostEnd) worker() (*line, *shm.Region) {
	region, err := shm.Create("test", 8*testBlock)
	require.NoError(p.t, err)
	p.t.Cleanup(func() { require.NoError(p.t, region.Close()) })
	l := p.session()
	answer := l.call(openCall(kvportv1.Side_SIDE_WORKER, wire.Region{FD: int(region.File().Fd()), Size: region.Size()}))
	require.NotNil(p.t, answer.GetOpened(), "%v", answer.GetError())
	return l, region
}
