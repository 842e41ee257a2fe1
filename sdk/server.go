package sdk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// Server is the plugin end of the protocol, for one connector. [Serve] runs it in a process of its own;
// tests register it on their own connection.
type Server struct {
	kvportv1.UnimplementedPluginServer
	plugin  connector.Plugin
	log     *slog.Logger
	regions regions
	bells   bells
	panics  atomic.Uint64

	mu       sync.Mutex
	stopped  bool
	sessions sync.WaitGroup
}

// NewServer makes the server of a connector. A nil log drops everything.
func NewServer(p connector.Plugin, log *slog.Logger) *Server {
	return &Server{
		plugin: p, log: cmp.Or(log, slog.New(slog.DiscardHandler)),
		regions: regions{mapped: map[fileID]*sharedRegion{}}, bells: bells{open: map[int]*sharedBell{}},
	}
}

// Panics counts the panics of the connector that were recovered.
func (s *Server) Panics() uint64 { return s.panics.Load() }

// Stop refuses new sessions and waits until the open ones have ended and closed their sides. It does not
// end a session itself: closing the connection does that.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		s.sessions.Wait()
		close(done)
	}()
	return await(ctx, done)
}

// Describe implements kvportv1.PluginServer.
func (s *Server) Describe(ctx context.Context, m *kvportv1.DescribeRequest) (*kvportv1.DescribeResponse, error) {
	fault.Crash("sdk.describe")
	var info connector.Info
	err := s.call(s.log, "describe", func() (err error) {
		switch {
		case len(m.GetConfig()) > wire.MaxConfig:
			return fmt.Errorf("config has %d bytes, limit %d: %w", len(m.GetConfig()), wire.MaxConfig, wire.ErrMalformed)
		case s.plugin.Describe == nil:
			return fmt.Errorf("connector %s has no Describe: %w", s.plugin.Name, connector.ErrIncompatible)
		}
		info, err = s.plugin.Describe(ctx, m.GetConfig())
		return err
	})
	if err != nil {
		return &kvportv1.DescribeResponse{Error: wire.ErrorToProto(err)}, nil
	}
	return wire.InfoToProto(&info), nil
}

// Heartbeat implements kvportv1.PluginServer.
func (s *Server) Heartbeat(_ context.Context, m *kvportv1.HeartbeatRequest) (*kvportv1.HeartbeatResponse, error) {
	fault.Crash("sdk.heartbeat")
	return &kvportv1.HeartbeatResponse{Sequence: m.GetSequence(), Panics: s.panics.Load()}, nil
}

// Session implements kvportv1.PluginServer for one side of one engine rank. It returns when the side has
// closed, the stream has ended or the peer has broken the protocol. No call of the session is then running.
func (s *Server) Session(stream grpc.BidiStreamingServer[kvportv1.SessionRequest, kvportv1.SessionResponse]) error {
	s.mu.Lock()
	stopped := s.stopped
	if !stopped {
		s.sessions.Add(1)
	}
	s.mu.Unlock()
	if stopped {
		return status.Error(codes.Unavailable, "the plugin is stopping")
	}
	defer s.sessions.Done()
	return newSession(s, stream).run()
}

// call runs code of the connector and counts its panics, no matter where they were recovered.
func (s *Server) call(log *slog.Logger, what string, call func() error) error {
	err := wire.Guard(log, what, call)
	if errors.Is(err, ErrPanic) {
		s.panics.Add(1)
	}
	return err
}
