package kvevents

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/kvport/kvport/internal/zmtp"
)

// maxMessage bounds a message of a publisher, in bytes.
const maxMessage = 8 << 20

// Sink gets what a subscription learns. One goroutine calls it.
type Sink interface {
	// From says that the next events to be applied are those of the batch with this number: at the beginning, and after
	// Lost. 0 means that all is known from then on, since the engine had nothing before.
	From(seq uint64)
	// Apply takes events in order. The sink may keep them.
	Apply(events []Event)
	// Lost says that events are missing: nothing is known any more of what the engine has, apart from what Apply
	// is given afterwards.
	Lost()
}

// Counted is what a subscription counts.
type Counted string

// What is counted.
const (
	CountedEvents   Counted = "events"   // events that were applied
	CountedGaps     Counted = "gaps"     // places where batches were missing
	CountedReplays  Counted = "replays"  // replays that were asked for
	CountedReplayed Counted = "replayed" // batches that came so
	CountedLost     Counted = "lost"     // times when nothing was known any more, since a gap could not be filled or the connection ended
	CountedInvalid  Counted = "invalid"  // messages that were no events
)

// Subscription follows one publisher, of vLLM or of kvport. A publisher that starts again, breaks or lies costs what
// is known of it and nothing else: its memory is bounded, and it is asked again after ever longer pauses. One goroutine
// calls Run.
type Subscription struct {
	Place Place // where to connect to
	Sink  Sink
	Log   *slog.Logger
	Count func(what Counted, n int)
	Dial  func(ctx context.Context, network, address string) (net.Conn, error) // nil: net.Dialer

	pause func(ctx context.Context, d time.Duration) // of tests
	now   func() time.Time                           // of tests
	user  int                                        // this process's; tests have others
	told  map[string]bool                            // what the log has as a warning since all was well
}

// The pauses of a subscription.
const (
	firstPause   = 100 * time.Millisecond // before it connects again, doubled
	longestPause = 10 * time.Second
	settled      = 10 * time.Second // without a fault, after which the first pause is short again
	replayPause  = time.Second      // between two replays
	silence      = 10 * time.Second // of a publisher in a replay
	replayTime   = 2 * time.Minute  // of a whole replay
)

// Run follows the publisher until ctx ends. An error is one of Place, before anything was tried.
func (s *Subscription) Run(ctx context.Context) error {
	events, err := zmtp.ParseEndpoint(s.Place.Endpoint)
	if err != nil {
		return fmt.Errorf("endpoint: %w", err)
	}
	var replays *zmtp.Endpoint
	if s.Place.ReplayEndpoint != "" {
		e, err := zmtp.ParseEndpoint(s.Place.ReplayEndpoint)
		if err != nil {
			return fmt.Errorf("replay_endpoint: %w", err)
		}
		replays = &e
	}
	s.begin()
	wait := firstPause
	for {
		f := newFollower(s, replays)
		err := s.follow(ctx, events, f)
		f.order.Close()
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the connection broke because ctx has ended
		}
		if !f.well.IsZero() && s.now().Sub(f.well) >= settled {
			clear(s.told)
			wait = firstPause
		}
		s.tell("KV events of an instance cannot be read, it is tried again", s.Place.Endpoint, err)
		s.pause(ctx, wait)
		wait = min(2*wait, longestPause)
	}
}

// begin sets what Run needs.
func (s *Subscription) begin() {
	if s.pause == nil {
		s.pause = pause
	}
	if s.now == nil {
		s.now = time.Now
	}
	s.user = cmp.Or(s.user, os.Getuid())
	s.told = map[string]bool{}
}

// maxTold is how many warnings the log has until all is well again.
const maxTold = 16

// tell writes to the log what is wrong, as a warning once until all is well again.
func (s *Subscription) tell(message, endpoint string, err error) {
	cause := err.Error()
	if op, is := errors.AsType[*net.OpError](err); is { // without the port, which is another one each time
		cause = op.Op + op.Err.Error()
	}
	level := slog.LevelDebug
	if key := message + cause; !s.told[key] && len(s.told) < maxTold {
		s.told[key] = true
		level = slog.LevelWarn
	}
	s.Log.Log(context.Background(), level, message, "endpoint", endpoint, "err", err)
}

// pause waits, unless ctx ends first.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// dial connects to one of the publisher's endpoints. The connection ends with ctx; release ends it before.
func (s *Subscription) dial(ctx context.Context, e zmtp.Endpoint, own string, peers ...string) (z *zmtp.Conn, conn net.Conn, release func(), err error) {
	dial := s.Dial
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	short, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	if conn, err = dial(short, e.Network, e.Address); err != nil {
		return nil, nil, nil, err
	}
	if err = s.admits(conn); err != nil {
		_ = conn.Close()
		return nil, nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	release = func() {
		stop()
		_ = conn.Close()
	}
	if err = conn.SetDeadline(time.Now().Add(handshakeTime)); err == nil {
		z, err = zmtp.Open(conn, maxMessage, own, peers...)
	}
	if err != nil {
		release()
		return nil, nil, nil, err
	}
	return z, conn, release, conn.SetDeadline(time.Time{})
}

// admits refuses a socket at which another user's process listens, if an instance has named it.
func (s *Subscription) admits(conn net.Conn) error {
	socket, ok := conn.(*net.UnixConn)
	if !ok || !s.Place.own {
		return nil
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	var peer *syscall.Ucred
	control := raw.Control(func(fd uintptr) {
		peer, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err := errors.Join(control, err); err != nil {
		return err
	}
	if int(peer.Uid) != s.user {
		return fmt.Errorf("a process of user %d listens there, this one is of user %d", peer.Uid, s.user)
	}
	return nil
}

// follow reads events over one connection until it ends. What was published before it comes by a replay.
func (s *Subscription) follow(ctx context.Context, e zmtp.Endpoint, f *follower) error {
	z, _, release, err := s.dial(ctx, e, zmtp.Sub, zmtp.Pub)
	if err != nil {
		return err
	}
	defer release()
	if err := z.Send([]byte("\x01" + s.Place.Topic)); err != nil {
		return err
	}
	f.well = s.now()
	if f.replays != nil {
		if err := f.replay(ctx); err != nil {
			return err
		}
	}
	for {
		frames, err := z.Receive()
		if err != nil {
			return err
		}
		seq, payload, err := parts(frames)
		if err == nil {
			err = f.live(ctx, seq, payload)
		}
		if err != nil {
			s.Count(CountedInvalid, 1)
			return err
		}
	}
}

// parts takes a message of a publisher apart: topic, number, batch.
func parts(frames [][]byte) (seq uint64, payload []byte, err error) {
	if len(frames) != 3 || len(frames[1]) != sequenceLength {
		return 0, nil, fmt.Errorf("%w: a message has %d frames, want topic, number and events", ErrFormat, len(frames))
	}
	return binary.BigEndian.Uint64(frames[1]), frames[2], nil
}

// follower reads one connection.
type follower struct {
	s       *Subscription
	order   Order
	replays *zmtp.Endpoint // nil: there are none
	asked   time.Time      // when a replay was asked for last
	well    time.Time      // since when nothing was wrong; zero: there was no connection
}

func newFollower(s *Subscription, replays *zmtp.Endpoint) *follower {
	return &follower{s: s, replays: replays, order: Order{Sink: s.Sink, Count: s.Count}}
}

// live takes a batch that was just published.
func (f *follower) live(ctx context.Context, seq uint64, payload []byte) error {
	var fill func() error
	if f.replays != nil {
		fill = func() error { return f.fill(ctx) }
	}
	return f.order.Live(seq, f.reads(payload), fill)
}

// fill asks for what is missing.
func (f *follower) fill(ctx context.Context) error {
	if rest := replayPause - f.s.now().Sub(f.asked); rest > 0 { // one whose numbers jump is not asked all the time
		f.s.pause(ctx, rest)
	}
	return f.replay(ctx)
}

// reads gives the events of a batch.
func (f *follower) reads(payload []byte) func() ([]Event, error) {
	return func() ([]Event, error) {
		events, err := Decode(payload)
		if err != nil {
			f.s.tell("a batch of KV events cannot be read, what was known of the instance is forgotten", f.s.Place.Endpoint, err)
			f.well = f.s.now()
		}
		return events, err
	}
}

// replay asks for the next batch and all behind it, and applies them. That a replay is not to be had is not an
// error: what is missing stays missing.
func (f *follower) replay(ctx context.Context) error {
	f.asked = f.s.now()
	f.s.Count(CountedReplays, 1)
	ctx, cancel := context.WithTimeout(ctx, replayTime)
	defer cancel()
	z, conn, release, err := f.s.dial(ctx, *f.replays, zmtp.Dealer, zmtp.Router)
	if err != nil {
		f.s.tell("KV events that were missed cannot be had", f.s.Place.ReplayEndpoint, err)
		return nil
	}
	defer release()
	if err := z.Send(nil, binary.BigEndian.AppendUint64(nil, f.order.Next())); err != nil {
		return nil
	}
	for {
		_ = conn.SetReadDeadline(time.Now().Add(silence)) // the read fails if this does
		frames, err := z.Receive()
		if errors.Is(err, zmtp.ErrProtocol) {
			return err
		}
		if err != nil {
			f.s.tell("a replay of KV events broke off", f.s.Place.ReplayEndpoint, err)
			return nil
		}
		if len(frames) > 0 && len(frames[0]) == 0 {
			frames = frames[1:]
		}
		if len(frames) == 2 { // of vLLM before topics were repeated here
			frames = append([][]byte{nil}, frames...)
		}
		seq, payload, err := parts(frames)
		switch {
		case err != nil:
			return err
		case seq == endOfReplay:
			return nil
		}
		f.order.Replayed(seq, f.reads(payload))
	}
}
