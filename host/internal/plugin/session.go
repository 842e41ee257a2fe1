package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// ErrLost says that a call has no answer because the connection is gone. The plugin may still be
// alive and touch the blocks of the call: they come back when its process has been reaped.
var ErrLost = fmt.Errorf("the connection to the plugin is gone: %w", connector.ErrGone)

// ErrUnanswered says that a plugin has not answered long after it was told to stop. It is hung.
var ErrUnanswered = errors.New("no answer from the plugin")

// reply is one message of a session.
type reply = kvportv1.SessionResponse

// session is one side of one rank on its own stream. Calls are concurrent; each gets exactly one
// answer or ErrLost.
type session struct {
	stream   grpc.BidiStreamingClient[kvportv1.SessionRequest, reply]
	stop     context.CancelFunc
	caps     connector.Capability
	lends    uint32 // slots at a time
	violated func(what string)
	waits    func() time.Duration // how long the plugin could not run; nil: not known

	sending sync.Mutex
	last    atomic.Uint64

	ring    *ring         // nil: none
	useful  usefulness    // of polling it
	ringed  atomic.Bool   // the plugin reads the ring
	parted  atomic.Bool   // the plugin has left the ring, or never had it
	goodbye atomic.Uint64 // id of Close, before whose answer the plugin leaves the ring

	mu     sync.Mutex
	calls  map[uint64]chan *reply // nil once lost
	ending bool                   // the stream has ended
	cause  error

	lost   chan struct{} // closed when no answer will come any more
	closed sync.Once
}

// openSession opens a side. ctx bounds the opening, not the life of the session.
func (r *Remote) openSession(ctx context.Context, open *wire.Open) (*session, error) {
	life, stop := context.WithCancel(context.Background())
	unhook := context.AfterFunc(ctx, stop)
	stream, err := r.client.Session(life)
	if err != nil {
		stop()
		return nil, fmt.Errorf("open session: %w: %w", connector.ErrGone, err)
	}
	s := &session{
		stream: stream, stop: stop, violated: r.violation, ring: r.rings.take(),
		calls: map[uint64]chan *reply{}, lost: make(chan struct{}),
	}
	if r.waits != nil {
		s.waits = r.waits()
	}
	if s.ring != nil {
		open.Ring = s.ring.wire
	}
	go s.read()
	req := &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Open{Open: wire.OpenToProto(open)}}
	answer, err := s.call(ctx, req, 0)
	if err == nil && answer.GetOpened() == nil {
		err = wrongAnswer(req)
	}
	if err == nil {
		s.openRing(answer.GetOpened().GetRing())
	} else if answer != nil {
		s.parted.Store(true) // the side did not open
	}
	if err == nil && !unhook() {
		err = context.Cause(ctx)
	}
	if err != nil {
		stop()
		<-s.lost
		return nil, err
	}
	s.caps, s.lends = wire.CapabilitiesFromProto(answer.GetOpened().GetCapabilities()), answer.GetOpened().GetLends()
	return s, nil
}

func wrongAnswer(req *kvportv1.SessionRequest) error {
	return fmt.Errorf("the answer to %s is of another kind: %w", wire.CallName(req), wire.ErrMalformed)
}

// Capabilities implements connector.Partial.
func (s *session) Capabilities() connector.Capability { return s.caps }

// Gone is closed when no answer will come any more.
func (s *session) Gone() <-chan struct{} { return s.lost }

// forever makes call wait until the plugin has answered or is gone.
const forever time.Duration = -1

// call sends one request and waits for its answer. When ctx is done the plugin is told, and given
// patience more time to answer.
func (s *session) call(ctx context.Context, req *kvportv1.SessionRequest, patience time.Duration) (*reply, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	req.Id, req.TimeoutUs = s.last.Add(1), wire.Timeout(ctx)
	answer := make(chan *reply, 1)
	if !s.expect(req.Id, answer) {
		return nil, s.lostError()
	}
	overRing, err := s.send(req)
	if err != nil {
		s.stop()
		<-s.lost
		return nil, s.lostError()
	}
	if overRing {
		defer s.useful.note(time.Now())
		s.poll(answer)
	}
	select {
	case r := <-answer:
		return r, wire.ErrorFromProto(r.GetError())
	case <-s.lost:
		return s.orLost(answer)
	case <-ctx.Done():
	}
	go s.cancel(req.Id, overRing) // sending blocks when the plugin does not read
	var late <-chan time.Time
	if patience != forever {
		late = time.After(patience)
	}
	select {
	case r := <-answer:
		return r, wire.ErrorFromProto(r.GetError())
	case <-s.lost:
		return s.orLost(answer)
	case <-late:
		return nil, fmt.Errorf("%w: %w", ErrUnanswered, context.Cause(ctx))
	}
}

// orLost prefers an answer that came just before the end.
func (s *session) orLost(answer <-chan *reply) (*reply, error) {
	select {
	case r := <-answer:
		return r, wire.ErrorFromProto(r.GetError())
	default:
		return nil, s.lostError()
	}
}

// cancel tells the plugin to end the wait of a call, by the way that the call went: it must not
// overtake it.
func (s *session) cancel(id uint64, overRing bool) {
	req := &kvportv1.SessionRequest{
		Id:   s.last.Add(1),
		Call: &kvportv1.SessionRequest_Cancel{Cancel: &kvportv1.Cancel{Call: id}},
	}
	if overRing {
		s.insist(req)
	} else {
		_ = s.sendStream(req)
	}
}

// send says whether a request went over the ring.
func (s *session) send(req *kvportv1.SessionRequest) (overRing bool, err error) {
	if _, last := req.GetCall().(*kvportv1.SessionRequest_Close); last {
		s.goodbye.Store(req.GetId())
	} else if s.ringed.Load() {
		sent, err := s.ring.Send(wire.Frame(req))
		if sent || err != nil {
			return sent, s.ringError(err)
		}
	}
	return false, s.sendStream(req)
}

func (s *session) sendStream(req *kvportv1.SessionRequest) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	return s.stream.Send(req)
}

func (s *session) expect(id uint64, answer chan *reply) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls == nil {
		return false
	}
	s.calls[id] = answer
	return true
}

func (s *session) lostError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Errorf("%w: %w", ErrLost, s.cause)
}

// read hands each answer to its call, until the stream ends.
func (s *session) read() {
	for {
		r, err := s.stream.Recv()
		if err != nil {
			s.end(err)
			return
		}
		s.deliver(r)
	}
}

// end lets all calls know that no answer will come. What the plugin has answered before counts.
func (s *session) end(cause error) {
	s.stop()
	s.closeRing()
	s.mu.Lock()
	s.calls, s.cause = nil, cause
	s.mu.Unlock()
	close(s.lost)
}

// deliver hands an answer to its call. It never waits.
func (s *session) deliver(r *reply) {
	s.mu.Lock()
	answer, known := s.calls[r.GetId()]
	delete(s.calls, r.GetId())
	s.mu.Unlock()
	if !known {
		s.violated("answer to a call that does not exist or was answered before")
		return
	}
	if r.GetId() == s.goodbye.Load() {
		s.parted.Store(true)
	}
	answer <- r
}

// closeInTime closes the side; the plugin has ClosePatience in which it could run.
func (s *session) closeInTime() error {
	ctx, cancel := Patient(context.Background(), ClosePatience, s.waits)
	defer cancel()
	return s.close(ctx)
}

// close closes the side and the stream. No call may be running. It gives the plugin until ctx ends.
func (s *session) close(ctx context.Context) (err error) {
	s.closed.Do(func() {
		req := &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Close{Close: &kvportv1.Close{}}}
		if _, err = s.call(ctx, req, 0); errors.Is(err, ErrLost) {
			err = nil // nothing is left to close
		}
		s.stop()
		<-s.lost
	})
	return err
}

// pollLimit is how long a call looks for its answer before it goes to sleep: a sleep and a wake take
// about as long.
const pollLimit = 30 * time.Microsecond

// openRing begins to use the session's ring if the plugin took it.
func (s *session) openRing(taken bool) {
	if s.ring == nil {
		if taken {
			s.violated("the plugin took a ring that it was not offered")
		}
		return
	}
	s.parted.Store(!taken)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !taken || s.ending {
		return
	}
	s.ring.Start(s.answer, func(err error) { _ = s.ringError(err) })
	s.ringed.Store(true)
}

// answer takes one frame.
func (s *session) answer(frame []byte) {
	r := new(reply)
	if err := wire.FromFrame(frame, r); err != nil {
		_ = s.ringError(err)
		return
	}
	s.deliver(r)
}

// ringError ends the session of a plugin that broke its ring.
func (s *session) ringError(err error) error {
	if errors.Is(err, shm.ErrRing) || errors.Is(err, wire.ErrMalformed) {
		s.violated("ring: " + err.Error())
		s.stop()
	}
	return err
}

// closeRing ends the ring when the stream has ended.
func (s *session) closeRing() {
	s.mu.Lock()
	s.ending = true
	s.mu.Unlock()
	if s.ring == nil {
		return
	}
	if err := s.ring.end(s.parted.Load()); err != nil {
		s.violated("ring: " + err.Error())
	}
}

// insist sends a message over the ring as soon as there is room.
func (s *session) insist(req *kvportv1.SessionRequest) {
	retry := time.NewTicker(time.Millisecond)
	defer retry.Stop()
	for {
		if sent, err := s.ring.Send(wire.Frame(req)); sent || s.ringError(err) != nil {
			return
		}
		select {
		case <-s.lost:
			return
		case <-retry.C:
		}
	}
}

// poll waits a moment for an answer that comes at once.
func (s *session) poll(answer chan *reply) {
	if s.useful.now() {
		s.ring.Poll(pollLimit, func() bool { return len(answer) > 0 })
	}
}

// usefulness says whether it is worth it to wait busily for the answers of a session: they must have
// come in time of late, and the plugin must have another core.
type usefulness struct {
	mean  atomic.Int64 // of the last calls, in nanoseconds, recent ones more
	calls atomic.Uint32
}

// seldom is how often it is tried although it was of no use.
const seldom = 64

func (u *usefulness) now() bool {
	return runtime.GOMAXPROCS(0) > 1 && (u.mean.Load() < int64(pollLimit) || u.calls.Load()%seldom == 0)
}

// note counts a call that began then and ends now.
func (u *usefulness) note(then time.Time) {
	const weight = 8
	u.calls.Add(1)
	took := min(int64(time.Since(then)), 8*int64(pollLimit))
	u.mean.Add((took - u.mean.Load()) / weight)
}

// maxRings is how many sessions of one plugin process have rings. What is beyond goes over the stream.
const maxRings = 64

// Rings is memory through which the sessions of one plugin process exchange small messages, beside
// their streams (rule RING-01). It takes no room until sides open.
type Rings struct {
	file      *os.File
	bell      *shm.Bell
	bellEnd   *os.File // the plugin's
	mu        sync.Mutex
	taken     [maxRings]bool
	closed    bool
	open      int
	lastClose sync.Cond // open may have become 0
}

// NewRings makes memory for rings.
func NewRings() (_ *Rings, err error) {
	if err := fault.Point("host.rings"); err != nil {
		return nil, err
	}
	r := &Rings{}
	r.lastClose.L = &r.mu
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	if r.file, err = shm.NewRings("kvport-rings", maxRings); err != nil {
		return nil, err
	}
	var own *os.File
	if own, r.bellEnd, err = shm.NewBells(); err != nil {
		return nil, err
	}
	r.bell, err = shm.NewBell(int(own.Fd()))
	return r, errors.Join(err, own.Close())
}

// Close lets go of the memory. It waits for the sessions that use it, whose connection must have ended.
func (r *Rings) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	for r.open > 0 {
		r.lastClose.Wait()
	}
	var errs []error
	if r.bell != nil {
		errs = append(errs, r.bell.Close())
	}
	for _, f := range []*os.File{r.file, r.bellEnd} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// UseRings says that the sides that are opened from now on may have a ring. The plugin must run in
// this process or have inherited the rings under the same descriptor number.
func (r *Remote) UseRings(rings *Rings) {
	r.rings = ringsRef{rings, int(rings.file.Fd()), int(rings.bellEnd.Fd())}
}

// ringsRef are rings as a plugin knows them.
type ringsRef struct {
	rings *Rings // nil: none
	fd    int    // in the plugin
	bell  int    // in the plugin
}

// ring is the host's end of one session's rings.
type ring struct {
	*shm.RingEnd
	of   *Rings
	n    int
	wire *wire.Ring
}

func (r *ring) offset() int64 { return int64(r.n) * shm.RingArea }

// take gives a session a ring; nil where none is free, in which case the session uses the stream.
func (f *ringsRef) take() *ring {
	if f.rings == nil {
		return nil
	}
	f.rings.mu.Lock()
	defer f.rings.mu.Unlock()
	n := slices.Index(f.rings.taken[:], false)
	if n < 0 || f.rings.closed {
		return nil
	}
	r := &ring{of: f.rings, n: n}
	r.wire = &wire.Ring{FD: f.fd, Bell: f.bell, Offset: r.offset()}
	err := shm.AllocateRing(f.rings.file, r.offset())
	if err == nil {
		r.RingEnd, err = shm.NewRingEnd(int(f.rings.file.Fd()), r.offset(), true, f.rings.bell)
	}
	if err != nil {
		return nil
	}
	f.rings.taken[n] = true
	f.rings.open++
	return r
}

// end closes our end. If the plugin has closed its own the area can be used again; else it is lost until
// the process ends.
func (r *ring) end(both bool) error {
	err := r.Close()
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	if both {
		err = errors.Join(err, shm.FreeRing(r.of.file, r.offset()))
		r.of.taken[r.n] = false
	}
	r.of.open--
	r.of.lastClose.Broadcast()
	if err != nil {
		return fmt.Errorf("ring %d: %w", r.n, err)
	}
	return nil
}
