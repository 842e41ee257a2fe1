package plugin

import (
	"errors"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

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
