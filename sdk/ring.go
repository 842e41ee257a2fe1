package sdk

import (
	"errors"
	"fmt"
	"sync"

	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// ring is a session's end of the rings that complement its stream.
type ring struct {
	*shm.RingEnd
	bell *sharedBell
}

// bells are the sockets that wake this process for its rings, each shared by all sessions.
type bells struct {
	mu   sync.Mutex
	open map[int]*sharedBell // by descriptor
}

type sharedBell struct {
	*shm.Bell
	fd, refs int
}

func (b *bells) acquire(fd int) (*sharedBell, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	shared := b.open[fd]
	if shared == nil {
		bell, err := shm.NewBell(fd)
		if err != nil {
			return nil, err
		}
		shared = &sharedBell{Bell: bell, fd: fd}
		b.open[fd] = shared
	}
	shared.refs++
	return shared, nil
}

func (b *bells) release(shared *sharedBell) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if shared.refs--; shared.refs > 0 {
		return nil
	}
	delete(b.open, shared.fd)
	return shared.Close()
}

// openRing begins to read the ring that an Open offers. The session also works without it, only slower, so
// a ring that cannot be opened is not an error.
func (s *session) openRing(want *wire.Ring) bool {
	if want == nil {
		return false
	}
	r, err := s.server.newRing(want)
	if err != nil {
		s.log.Warn("no ring, all messages go over the stream", "error", err)
		return false
	}
	s.ring.Store(r)
	r.Start(s.takeFrame(), s.ringBroken)
	return true
}

func (s *Server) newRing(want *wire.Ring) (*ring, error) {
	if err := fault.Point("sdk.ring"); err != nil {
		return nil, err
	}
	bell, err := s.bells.acquire(want.Bell)
	if err != nil {
		return nil, err
	}
	end, err := shm.NewRingEnd(want.FD, want.Offset, false, bell.Bell)
	if err != nil {
		return nil, errors.Join(err, s.bells.release(bell))
	}
	return &ring{end, bell}, nil
}

// takeFrame takes messages off the ring until the peer breaks the protocol.
func (s *session) takeFrame() func([]byte) {
	over := false
	return func(frame []byte) {
		if over {
			return
		}
		m := new(kvportv1.SessionRequest)
		err := wire.FromFrame(frame, m)
		if err != nil {
			err = s.malformed(err)
		} else {
			err = s.take(s.life, m)
		}
		if err != nil {
			over = true
			s.ended <- err
		}
	}
}

// ringBroken ends the session.
func (s *session) ringBroken(err error) {
	s.ended <- s.malformed(fmt.Errorf("%w: %w", err, wire.ErrMalformed))
}

// sendRing reports whether an answer went over the ring.
func (s *session) sendRing(m *kvportv1.SessionResponse) bool {
	end := s.ring.Load()
	if end == nil {
		return false
	}
	sent, err := end.Send(wire.Frame(m))
	if err != nil { // happens once, because the end is then closed
		s.ringBroken(err)
	}
	return sent
}

// closeRing ends the reading of the ring and unmaps it.
func (s *session) closeRing() {
	r := s.ring.Swap(nil)
	if r == nil {
		return
	}
	if err := errors.Join(r.Close(), s.server.bells.release(r.bell)); err != nil {
		s.log.Error("ring did not close", "error", err)
	}
}
