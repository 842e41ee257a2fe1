package plugin

import (
	"context"
	"encoding/json"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

type stream = grpc.BidiStreamingServer[kvportv1.SessionRequest, kvportv1.SessionResponse]

// rawPlugin answers as its function says, rules or not.
type rawPlugin struct {
	kvportv1.UnimplementedPluginServer
	answer func(s stream, m *kvportv1.SessionRequest) error
}

func (p *rawPlugin) Session(s stream) error {
	for {
		m, err := s.Recv()
		if err != nil {
			return nil //nolint:nilerr // the host has closed the session
		}
		switch {
		case m.GetOpen() != nil:
			err = s.Send(&kvportv1.SessionResponse{Id: m.GetId(), Result: &kvportv1.SessionResponse_Opened{Opened: &kvportv1.Opened{}}})
		case m.GetClose() != nil:
			err = s.Send(&kvportv1.SessionResponse{Id: m.GetId(), Result: &kvportv1.SessionResponse_Closed{Closed: &kvportv1.Closed{}}})
		default:
			err = p.answer(s, m)
		}
		if err != nil {
			return err
		}
	}
}

func connectTo(t *testing.T, answer func(s stream, m *kvportv1.SessionRequest) error) *Remote {
	t.Helper()
	before := goleak.IgnoreCurrent()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer(wire.ServerOptions()...)
	kvportv1.RegisterPluginServer(server, &rawPlugin{answer: answer})
	go func() { _ = server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///x", append(wire.DialOptions(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return listener.Dial() }))...)
	require.NoError(t, err)
	region, err := shm.Create("kvport-cache", 4096)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, conn.Close())
		server.Stop()
		require.NoError(t, region.Close())
		require.NoError(t, goleak.Find(before))
	})
	return Connect(conn, []Region{{File: region.File(), Size: region.Size()}})
}

func testEnv() connector.Env {
	return connector.Env{Engine: "e", Epoch: 1, Role: connector.RoleBoth, World: 1, Layout: connector.Layout{
		Name: "x", Blocks: 4, Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}},
		Segments: []connector.Segment{{BlockStride: 64, Bytes: 64}},
	}}
}

func matchAnswer(id uint64, tokens ...uint32) *kvportv1.SessionResponse {
	m := &kvportv1.MatchResponse{}
	for _, n := range tokens {
		m.Matches = append(m.Matches, &kvportv1.Match{Tokens: n})
	}
	return &kvportv1.SessionResponse{Id: id, Result: &kvportv1.SessionResponse_Match{Match: m}}
}

func TestSessionSurvivesWrongAnswers(t *testing.T) {
	r := connectTo(t, func(s stream, m *kvportv1.SessionRequest) error {
		id := m.GetId()
		if m.GetMatch() == nil {
			return nil
		}
		switch tokens := m.GetMatch().GetQueries()[0].GetTokens(); tokens {
		case 1: // twice, and to a call that does not exist
			for _, a := range []uint64{id + 1000, id, id} {
				if err := s.Send(matchAnswer(a, 7)); err != nil {
					return err
				}
			}
			return nil
		case 2: // of another kind
			return s.Send(&kvportv1.SessionResponse{Id: id, Result: &kvportv1.SessionResponse_Moved{Moved: &kvportv1.Moved{}}})
		case 3: // too many
			return s.Send(matchAnswer(id, 1, 2))
		case 4:
			return s.Send(&kvportv1.SessionResponse{Id: id, Error: &kvportv1.Error{Code: kvportv1.ErrorCode_ERROR_CODE_BUSY}})
		case 5:
			return nil // never
		default:
			return s.Send(matchAnswer(id, tokens))
		}
	})
	s, err := r.OpenScheduler(t.Context(), testEnv(), json.RawMessage("{}"))
	require.NoError(t, err)
	ask := func(ctx context.Context, tokens int) ([]connector.Match, error) {
		return s.Match(ctx, []connector.Query{{Request: "r", Tokens: tokens}})
	}
	m, err := ask(t.Context(), 1)
	require.NoError(t, err)
	require.Equal(t, 7, m[0].Tokens)
	_, err = ask(t.Context(), 2)
	require.ErrorIs(t, err, wire.ErrMalformed)
	_, err = ask(t.Context(), 3)
	require.ErrorIs(t, err, wire.ErrMalformed)
	_, err = ask(t.Context(), 4)
	require.ErrorIs(t, err, connector.ErrBusy)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = ask(ctx, 5)
	require.ErrorIs(t, err, ErrUnanswered)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	m, err = ask(t.Context(), 60)
	require.NoError(t, err)
	require.Equal(t, 60, m[0].Tokens)
	require.Equal(t, int64(4), r.Violations())
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	_, err = ask(t.Context(), 60)
	require.ErrorIs(t, err, connector.ErrGone)
}

// The end of ctx ends a worker's wait only when the plugin says that it is done with the blocks.
func TestLoadOutlivesItsContext(t *testing.T) {
	canceled := make(chan uint64, 1)
	release := make(chan struct{})
	var load uint64
	r := connectTo(t, func(s stream, m *kvportv1.SessionRequest) error {
		switch {
		case m.GetLoad() != nil:
			load = m.GetId()
		case m.GetCancel() != nil:
			canceled <- m.GetCancel().GetCall()
			<-release
			return s.Send(&kvportv1.SessionResponse{Id: load, Result: &kvportv1.SessionResponse_Moved{Moved: &kvportv1.Moved{}}})
		}
		return nil
	})
	w, err := r.OpenWorker(t.Context(), testEnv(), json.RawMessage("{}"))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- w.Load(ctx, &connector.Transfer{Request: "r", Tokens: 16, Blocks: []connector.Block{{ID: 1}}}, nil)
	}()
	cancel()
	select {
	case <-canceled:
	case err := <-done: // cancelled before it was sent: nothing runs
		require.ErrorIs(t, err, context.Canceled)
		return
	}
	select {
	case <-done:
		require.Fail(t, "returned while the plugin still has the blocks")
	default:
	}
	close(release)
	require.NoError(t, <-done)
	require.NoError(t, w.Close())
}

func TestSessionEndIsLost(t *testing.T) {
	r := connectTo(t, func(stream, *kvportv1.SessionRequest) error { return context.Canceled })
	w, err := r.OpenWorker(t.Context(), testEnv(), json.RawMessage("{}"))
	require.NoError(t, err)
	err = w.Save(t.Context(), &connector.Transfer{Request: "r", Tokens: 16, Blocks: []connector.Block{{ID: 1}}}, nil)
	require.ErrorIs(t, err, connector.ErrGone)
	require.ErrorIs(t, err, ErrLost)
	require.NoError(t, w.Close())
	env := testEnv()
	env.Rank = 7
	_, err = r.OpenWorker(t.Context(), env, json.RawMessage("{}"))
	require.ErrorIs(t, err, connector.ErrIncompatible)
}

// Without a free counter, blocks that are being computed are saved when the last layer is final.
func TestSaveLayersWithoutCounter(t *testing.T) {
	saves := make(chan *kvportv1.Transfer, 4)
	r := connectTo(t, func(s stream, m *kvportv1.SessionRequest) error {
		if m.GetSave() == nil {
			return nil
		}
		saves <- m.GetSave()
		return s.Send(&kvportv1.SessionResponse{Id: m.GetId(), Result: &kvportv1.SessionResponse_Moved{Moved: &kvportv1.Moved{}}})
	})
	w, err := r.OpenWorker(t.Context(), testEnv(), json.RawMessage("{}"))
	require.NoError(t, err)
	p, ok := w.(*workerProxy)
	require.True(t, ok)
	var taken []*shm.Counter
	for c, ok := p.board.Take(); ok; c, ok = p.board.Take() {
		taken = append(taken, c)
	}
	save := &connector.Transfer{Request: "r", Tokens: 16, Blocks: []connector.Block{{ID: 1}}}
	count := &connector.LayerCount{}
	count.GiveUp()
	require.ErrorIs(t, p.SaveLayers(t.Context(), save, nil, count), connector.ErrGone)
	require.Empty(t, saves)
	count = &connector.LayerCount{}
	count.Advance(1)
	require.NoError(t, p.SaveLayers(t.Context(), save, nil, count))
	require.Equal(t, "r", (<-saves).GetRequest())
	for _, c := range taken {
		c.Give()
	}
	require.NoError(t, w.Close())
}
