package sdk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// maxCalls bounds the calls of one session that run at once. What exceeds it is answered ErrBusy.
const maxCalls = 1024

// session is one stream: one side of one engine rank.
//
// Readers take messages off the stream and off the ring, and never wait for the connector. Worker calls, Consumed,
// Renewals, Stats and Events run each on a goroutine of their own; all other calls of a scheduler run one after the
// other, in the order in which they arrived, on the lane.
type session struct {
	server *Server
	stream grpc.BidiStreamingServer[kvportv1.SessionRequest, kvportv1.SessionResponse]
	log    *slog.Logger
	life   context.Context    //nolint:containedctx // of all calls
	cancel context.CancelFunc // ends life
	lane   chan func()
	closed chan struct{} // the side was closed on request
	ended  chan error    // how its readers ended
	ring   atomic.Pointer[ring]

	sending sync.Mutex // stream.Send is not safe for concurrent use

	mu      sync.Mutex
	running map[uint64]*call
	calls   sync.WaitGroup // those that are running, but for Close
	closer  sync.WaitGroup // Close
	side    *side          // nil until opened
	opening bool
	closing bool
}

// call is one request that was not answered yet.
type call struct {
	request *kvportv1.SessionRequest
	cancel  context.CancelFunc
}

func newSession(s *Server, stream grpc.BidiStreamingServer[kvportv1.SessionRequest, kvportv1.SessionResponse]) *session {
	return &session{
		server: s, stream: stream, log: s.log,
		lane: make(chan func(), maxCalls), closed: make(chan struct{}), ended: make(chan error, 4), running: map[uint64]*call{},
	}
}

// run serves the session to its end. The order of the ends matters: calls first, then the side,
// then its memory.
func (s *session) run() error {
	ctx, cancel := context.WithCancel(s.stream.Context())
	defer cancel()
	s.life, s.cancel = ctx, cancel
	var laneDone sync.WaitGroup
	laneDone.Go(func() {
		for serve := range s.lane {
			serve()
		}
	})
	go func() { s.ended <- s.read(ctx) }()
	var err error
	select {
	case err = <-s.ended:
	case <-s.closed: // the reader ends with the stream, when we return
	}
	s.cancel()
	s.mu.Lock()
	s.closing = true // a reader that still runs starts nothing any more
	s.mu.Unlock()
	s.calls.Wait()
	s.closer.Wait()
	s.closeRing()
	close(s.lane)
	laneDone.Wait()
	if s.side != nil {
		if e := s.server.call(s.side.log, "close", s.side.close); e != nil {
			s.log.Error("side closed with an error", "error", e)
		}
	}
	return err
}

// logger is the side's, once there is one.
func (s *session) logger() *slog.Logger {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.side != nil {
		return s.side.log
	}
	return s.log
}

// read takes messages until the stream ends or the peer breaks the protocol.
func (s *session) read(ctx context.Context) error {
	for {
		m, err := s.stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if err := s.take(ctx, m); err != nil {
			return err
		}
	}
}

// take starts one call, or answers it if it cannot be started. An error ends the session.
func (s *session) take(ctx context.Context, m *kvportv1.SessionRequest) error {
	err := s.accept(ctx, m)
	switch {
	case errors.Is(err, wire.ErrMalformed):
		return s.malformed(err)
	case ctx.Err() != nil: // the session is over, nobody may write to the stream
		return ctx.Err()
	case err != nil:
		s.send(&kvportv1.SessionResponse{Id: m.GetId(), Error: wire.ErrorToProto(err)})
	}
	return nil
}

// malformed is how a session ends whose host broke the protocol.
func (s *session) malformed(err error) error {
	s.log.Error("session ended: the host broke the protocol", "error", err)
	return status.Error(codes.InvalidArgument, err.Error())
}

// accept starts one call or says why not. ErrMalformed means that the peer broke the protocol.
func (s *session) accept(ctx context.Context, m *kvportv1.SessionRequest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, first := m.GetCall().(*kvportv1.SessionRequest_Open)
	switch {
	case m.GetId() == 0 || s.running[m.GetId()] != nil:
		return fmt.Errorf("call id %d is 0 or in use: %w", m.GetId(), wire.ErrMalformed)
	case m.GetCall() == nil:
		return fmt.Errorf("call %d is of an unknown kind: %w", m.GetId(), wire.ErrMalformed)
	case first == s.opening:
		return fmt.Errorf("the first message, and no other, must be Open: %w", wire.ErrMalformed)
	}
	if cancel, ok := m.GetCall().(*kvportv1.SessionRequest_Cancel); ok {
		if c := s.running[cancel.Cancel.GetCall()]; c != nil {
			c.cancel()
		}
		return nil
	}
	s.opening = true
	switch {
	case s.closing:
		return fmt.Errorf("the side is closing: %w", connector.ErrGone)
	case len(s.running) >= maxCalls:
		return fmt.Errorf("%d calls are running: %w", len(s.running), connector.ErrBusy)
	}
	s.start(ctx, m)
	return nil
}

// start runs one call where it belongs. The caller holds the lock.
func (s *session) start(ctx context.Context, m *kvportv1.SessionRequest) {
	ctx, cancel := wire.WithTimeout(ctx, m.GetTimeoutUs())
	c := &call{request: m, cancel: cancel}
	s.running[m.GetId()] = c
	switch m.GetCall().(type) {
	case *kvportv1.SessionRequest_Close:
		s.closing = true
		s.closer.Go(func() { s.serveClose(c) })
	case *kvportv1.SessionRequest_Match, *kvportv1.SessionRequest_Plan, *kvportv1.SessionRequest_Finish, *kvportv1.SessionRequest_Reset_:
		s.calls.Add(1)
		s.lane <- func() { s.serve(ctx, c) } // never full: it holds as many as may run
	default:
		s.calls.Add(1)
		go s.serve(ctx, c)
	}
}

// serve runs one call and answers it.
func (s *session) serve(ctx context.Context, c *call) {
	defer s.calls.Done()
	answer := &kvportv1.SessionResponse{}
	err := ctx.Err() // it may have been cancelled while it waited for its turn
	if err == nil {
		err = s.server.call(s.logger(), callName(c.request), func() error { return s.dispatch(ctx, c, answer) })
	}
	s.finish(c, answer, err)
}

// serveClose ends the long polls, waits for the other calls and closes the side.
func (s *session) serveClose(c *call) {
	s.mu.Lock()
	for _, other := range s.running {
		if beside(other.request) {
			other.cancel()
		}
	}
	s.mu.Unlock()
	s.calls.Wait()
	s.mu.Lock()
	side := s.side
	s.side = nil
	s.mu.Unlock()
	s.closeRing() // before the answer: the host may use its memory for another session then
	fault.Crash("sdk.close")
	var err error
	if side != nil {
		err = s.server.call(side.log, "close", side.close)
	}
	s.finish(c, &kvportv1.SessionResponse{Result: &kvportv1.SessionResponse_Closed{Closed: &kvportv1.Closed{}}}, err)
	close(s.closed)
}

// finish answers a call, once.
func (s *session) finish(c *call, answer *kvportv1.SessionResponse, err error) {
	c.cancel()
	s.mu.Lock()
	delete(s.running, c.request.GetId())
	s.mu.Unlock()
	fault.Crash("sdk.answer")
	answer.Id = c.request.GetId()
	if err != nil {
		answer.Error, answer.Result = wire.ErrorToProto(err), nil
	} else if size := proto.Size(answer); size > wire.MaxMessage {
		err := fmt.Errorf("answer to %s has %d bytes, limit %d: %w", callName(c.request), size, wire.MaxMessage, connector.ErrIncompatible)
		answer.Error, answer.Result = wire.ErrorToProto(err), nil
	}
	s.send(answer)
}

// send answers over the ring, or over the stream if there is none or no room in it. An error means that
// the session is over, which a reader notices too.
func (s *session) send(m *kvportv1.SessionResponse) {
	if m.GetOpened() == nil && s.sendRing(m) {
		return
	}
	s.sending.Lock()
	defer s.sending.Unlock()
	if err := s.stream.Send(m); err != nil {
		s.log.Debug("answer was not sent: the stream is over", "id", m.GetId(), "error", err)
		s.cancel()
	}
}
