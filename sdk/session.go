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

// maxCalls limits the calls of one session that run at the same time. Further calls get ErrBusy.
const maxCalls = 1024

// session is one stream: one side of one engine rank.
//
// Readers take messages off the stream and off the ring, and never wait for the connector. Each worker call
// and each call of Consumed, Renewals, Stats and Events runs on a goroutine of its own. All other calls of
// a scheduler run one after the other on the lane, in the order in which they arrive.
type session struct {
	server *Server
	stream grpc.BidiStreamingServer[kvportv1.SessionRequest, kvportv1.SessionResponse]
	log    *slog.Logger
	life   context.Context    //nolint:containedctx // of all calls
	cancel context.CancelFunc // ends life
	lane   chan func()
	closed chan struct{} // closed when the host has asked to close the side
	ended  chan error    // how its readers ended
	ring   atomic.Pointer[ring]

	sending sync.Mutex // stream.Send is not safe for concurrent use

	mu      sync.Mutex
	running map[uint64]*call
	calls   sync.WaitGroup // the running calls, except Close
	closer  sync.WaitGroup // Close
	side    *side          // nil until opened
	opening bool
	closing bool
}

// call is one request that has not been answered yet.
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

// run serves the session until it ends. Things end in a fixed order: first the calls, then the side, then
// its memory.
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
	case <-s.closed: // the reader ends with the stream, when run returns
	}
	s.cancel()
	s.mu.Lock()
	s.closing = true // a reader that still runs starts no more calls
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

// logger is the side's logger once there is a side.
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

// take starts one call, or answers it if it cannot start. An error ends the session.
func (s *session) take(ctx context.Context, m *kvportv1.SessionRequest) error {
	err := s.accept(ctx, m)
	switch {
	case errors.Is(err, wire.ErrMalformed):
		return s.malformed(err)
	case ctx.Err() != nil: // the session is over, so nobody may write to the stream
		return ctx.Err()
	case err != nil:
		s.send(&kvportv1.SessionResponse{Id: m.GetId(), Error: wire.ErrorToProto(err)})
	}
	return nil
}

// malformed is the error that ends a session if the host breaks the protocol.
func (s *session) malformed(err error) error {
	s.log.Error("session ended: the host broke the protocol", "error", err)
	return status.Error(codes.InvalidArgument, err.Error())
}

// accept starts one call or returns why it cannot. ErrMalformed means that the peer broke the protocol.
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

// start runs one call on its own goroutine or on the lane. The caller holds the lock.
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
	err := ctx.Err() // the call may have been cancelled while it waited
	if err == nil {
		err = s.server.call(s.logger(), wire.CallName(c.request), func() error { return s.dispatch(ctx, c, answer) })
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
	s.closeRing() // before the answer, because the host may then use the ring's memory for another session
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
		err := fmt.Errorf("answer to %s has %d bytes, limit %d: %w", wire.CallName(c.request), size, wire.MaxMessage, connector.ErrIncompatible)
		answer.Error, answer.Result = wire.ErrorToProto(err), nil
	}
	s.send(answer)
}

// send answers over the ring, or over the stream if there is no ring or no room in it. An error means that
// the session is over, which a reader also notices.
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
