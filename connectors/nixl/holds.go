package nixl

import (
	"crypto/rand"
	"crypto/subtle"
	"fmt"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// holds are the finished requests whose blocks stay for a consumer.
//
// A hold ends here before it ends at the host: its lease begins before the host hears of it. So whoever
// is told, after a read, that the hold is still there has read what was held.
type holds struct {
	world int
	lease time.Duration
	now   func() time.Time

	mu   sync.Mutex
	last connector.HoldID
	open map[connector.HoldID]*hold
	over []connector.HoldID // consumed, to be reported
	wake chan struct{}
	late int // questions about holds that were not there
}

type hold struct {
	ended   connector.Ended
	secret  [secretSize]byte
	expires time.Time
	fetched map[int]bool // ranks
}

func newHolds(world int, lease time.Duration) *holds {
	return &holds{world: world, lease: lease, now: time.Now, open: map[connector.HoldID]*hold{}, wake: make(chan struct{}, 1)}
}

// add takes on the blocks of an ended request.
func (h *holds) add(e connector.Ended) (connector.HoldID, []byte) {
	n := &hold{ended: e, fetched: map[int]bool{}}
	_, _ = rand.Read(n.secret[:]) // never fails
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.now()
	n.expires = now.Add(h.lease)
	for id, old := range h.open {
		if !now.Before(old.expires) {
			delete(h.open, id)
		}
	}
	h.last++
	h.open[h.last] = n
	return h.last, n.secret[:]
}

// get finds a hold that has not ended. Errors wrap connector.ErrGone.
func (h *holds) get(id connector.HoldID, secret []byte) (*hold, error) {
	n := h.open[id]
	switch {
	case n == nil:
		h.late++
		return nil, fmt.Errorf("hold %d is not there: it was consumed, has expired, or never was: %w", id, connector.ErrGone)
	case subtle.ConstantTimeCompare(secret, n.secret[:]) != 1:
		h.late++
		return nil, fmt.Errorf("hold %d has another secret: %w", id, connector.ErrGone)
	case !h.now().Before(n.expires):
		h.late++
		delete(h.open, id)
		return nil, fmt.Errorf("hold %d has expired: %w", id, connector.ErrGone)
	}
	return n, nil
}

// find is what a hold keeps. The Ended is not to be changed.
func (h *holds) find(id connector.HoldID, secret []byte) (connector.Ended, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.get(id, secret)
	if err != nil {
		return connector.Ended{}, err
	}
	return n.ended, nil
}

// done notes that a rank has read what it wants. That there is no error says that the hold is still there.
func (h *holds) done(id connector.HoldID, secret []byte, rank int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.get(id, secret)
	if err != nil {
		return err
	}
	if n.fetched[rank] = true; len(n.fetched) < h.world {
		return nil
	}
	delete(h.open, id)
	h.over = append(h.over, id)
	select {
	case h.wake <- struct{}{}:
	default:
	}
	return nil
}

// take is what was consumed since the last call.
func (h *holds) take() []connector.HoldID {
	h.mu.Lock()
	defer h.mu.Unlock()
	over := h.over
	h.over = nil
	return over
}
