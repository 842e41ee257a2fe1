package nixl

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/subtle"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// holds are the finished requests whose blocks stay for a consumer.
//
// A hold ends here before it ends at the host: its lease begins before the host learns about it, and a
// consumer's heartbeat extends it only after the host has extended its own (rule LEASE-02). So a consumer
// that is told after its read that the hold still exists has read blocks that were held.
type holds struct {
	world int
	lease time.Duration
	now   func() time.Time

	mu   sync.Mutex
	last connector.HoldID
	open map[connector.HoldID]*hold
	next time.Time          // none of them expires before it
	over []connector.HoldID // consumed, to be reported
	wake chan struct{}

	told    map[readName]time.Time    // reads that were confirmed
	beaten  map[connector.HoldID]bool // consumers were heard of since the last renewal
	beat    chan struct{}
	offered []connector.HoldID // that the last answer of renewals named
	askedAt time.Time
	turns   []connector.HoldID // weak ones, the oldest first; some may be over
	board   *board             // nil: none
	tally   *tally
}

type hold struct {
	ended   connector.Ended
	secret  [secretSize]byte
	expires time.Time
	fetched map[int]int // by rank: its reads that are not part of a whole load yet
	loads   int         // whole ones
	slot    int         // of the board; 0: none
	sum     ticketSum   // of its ticket
}

func newHolds(world int, lease time.Duration, t *tally) *holds {
	return &holds{world: world, lease: lease, tally: t, now: time.Now, open: map[connector.HoldID]*hold{}, wake: make(chan struct{}, 1), beaten: map[connector.HoldID]bool{}, told: map[readName]time.Time{}, beat: make(chan struct{}, 1)}
}

// add takes on the blocks of an ended request.
func (h *holds) add(e connector.Ended) (connector.HoldID, []byte) {
	n := &hold{ended: e, fetched: map[int]int{}}
	_, _ = rand.Read(n.secret[:]) // never fails
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.now()
	n.expires = now.Add(h.leaseOf(&e))
	h.sweep(now)
	if len(h.open) == 0 || n.expires.Before(h.next) {
		h.next = n.expires
	}
	h.last++
	h.open[h.last] = n
	if e.Weak {
		h.remember(h.last)
	}
	return h.last, n.secret[:]
}

// sweep ends what has expired. Leases only become longer, so it has nothing to look at before next. The caller holds mu.
func (h *holds) sweep(now time.Time) {
	if now.Before(h.next) {
		return
	}
	first := true
	for id, n := range h.open {
		if !now.Before(n.expires) {
			h.end(id)
			if n.loads == 0 {
				h.tally.count("holds_expired_total", 1)
			}
		} else if first || n.expires.Before(h.next) {
			h.next, first = n.expires, false
		}
	}
}

// place gives a hold a slot of the board; 0: there is none. Weak holds have none: nothing keeps their blocks.
func (h *holds) place(id connector.HoldID) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.open[id]
	if n == nil || n.ended.Weak {
		return 0
	}
	n.slot = h.board.take()
	return n.slot
}

// seal says what a hold's ticket is.
func (h *holds) seal(id connector.HoldID, sum ticketSum) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := h.open[id]; n != nil {
		n.sum = sum
		h.board.set(n.slot, sum, n.expires)
	}
}

// end forgets a hold, after everybody who looks at the board can see that. The caller holds mu.
func (h *holds) end(id connector.HoldID) {
	if n := h.open[id]; n != nil {
		h.board.clear(n.slot)
		delete(h.open, id)
	}
}

// shut ends the board.
func (h *holds) shut() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := h.board
	h.board = nil
	for _, n := range h.open {
		n.slot = 0
	}
	return b.close()
}

// verify makes sure that a question is about the ticket that was given. Errors wrap connector.ErrGone.
func (h *holds) verify(q *question) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.get(q.Hold, q.Secret)
	if err == nil {
		err = n.gave(q.Sum)
	}
	return err
}

// gave reports a ticket that is not the hold's own; nil stands for one that was not believed anything.
func (n *hold) gave(sum []byte) error {
	if len(sum) > 0 && !bytes.Equal(sum, n.sum[:]) {
		return fmt.Errorf("the ticket was changed on its way: %w", connector.ErrGone)
	}
	return nil
}

// get finds a hold that has not ended. The caller holds mu. Errors wrap connector.ErrGone.
func (h *holds) get(id connector.HoldID, secret []byte) (*hold, error) {
	h.sweep(h.now())
	n := h.open[id]
	switch {
	case n == nil:
		h.tally.count("late_questions_total", 1)
		return nil, fmt.Errorf("hold %d is not there: it was consumed, has expired, or never was: %w", id, connector.ErrGone)
	case subtle.ConstantTimeCompare(secret, n.secret[:]) != 1:
		h.tally.count("late_questions_total", 1)
		return nil, fmt.Errorf("hold %d has another secret: %w", id, connector.ErrGone)
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

// doneKept is how long a confirmed read is remembered, for those that have lost the answer.
const doneKept = 30 * time.Second

// done notes that a rank has read what it asked for. A nil error means that the hold still existed when the
// rank first said so.
func (h *holds) done(q *question, now time.Time) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for load, at := range h.told {
		if now.Sub(at) > doneKept {
			delete(h.told, load)
		}
	}
	name := readName{q.Hold, q.Rank, q.Load, string(q.Secret)}
	if _, again := h.told[name]; again && q.Load != "" {
		return nil
	}
	n, err := h.get(q.Hold, q.Secret)
	if err == nil {
		err = n.gave(q.Sum)
	}
	if err != nil {
		return err
	}
	h.told[name] = now
	h.tally.count("served_bytes_total", float64(q.Bytes))
	if !n.whole(q, h.world) {
		return nil
	}
	if n.loads++; n.loads == 1 {
		h.tally.count("holds_consumed_total", 1)
	}
	if n.loads < n.consumers() {
		n.nextLoad()
	} else {
		h.end(q.Hold)
	}
	h.over = append(h.over, q.Hold)
	signal(h.wake)
	return nil
}

// whole says whether a load is whole now that a rank has read its part: each rank of ours, or, in another shape, the
// last one.
func (n *hold) whole(q *question, world int) bool {
	if q.Reshape {
		return q.Last
	}
	n.fetched[q.Rank]++
	return len(n.fetched) >= world
}

// consumers is how many loads a hold serves.
func (n *hold) consumers() int { return consumersOf(&n.ended) }

// nextLoad leaves of the ranks' reads those that belong to other loads, which may run at the same time.
func (n *hold) nextLoad() {
	for rank := range n.fetched {
		if n.fetched[rank]--; n.fetched[rank] == 0 {
			delete(n.fetched, rank)
		}
	}
}

// reset ends every hold: whoever has its ticket computes, and the host gives the blocks free.
func (h *holds) reset() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(h.open)) {
		h.end(id)
		h.over = append(h.over, id)
	}
	signal(h.wake)
}

// readName is one read of one rank.
type readName struct {
	hold         connector.HoldID
	rank         int
	load, secret string
}

// signal wakes whoever waits for a channel of one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// renew notes that the consumer of a hold is alive.
func (h *holds) renew(id connector.HoldID, secret []byte) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, err := h.get(id, secret)
	if err != nil || n.ended.Weak { // the host keeps nothing that could be renewed
		return err
	}
	h.beaten[id] = true
	signal(h.beat)
	return nil
}

// settle takes the host's word on what the last answer of renewals asked for: all but ended is renewed,
// and was so after that answer was given.
func (h *holds) settle(ended []connector.HoldID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range ended {
		h.end(id)
	}
	for _, id := range h.offered {
		if n := h.open[id]; n != nil && n.expires.Before(h.askedAt.Add(h.lease)) {
			n.expires = h.askedAt.Add(h.lease)
			h.board.set(n.slot, n.sum, n.expires)
		}
	}
	h.offered = nil
}

// renewals are the holds whose consumers were heard of since the last call; nil after wait without any.
func (h *holds) renewals(ctx context.Context, wait time.Duration) ([]connector.HoldID, error) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		h.mu.Lock()
		h.sweep(h.now())
		for id := range h.beaten {
			if h.open[id] != nil {
				h.offered = append(h.offered, id)
			}
		}
		clear(h.beaten)
		asked := slices.Clone(h.offered)
		h.askedAt = h.now()
		h.mu.Unlock()
		if len(asked) > 0 {
			return asked, nil
		}
		select {
		case <-h.beat:
		case <-timer.C:
			return nil, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// take is what was consumed since the last call.
func (h *holds) take() []connector.HoldID {
	h.mu.Lock()
	defer h.mu.Unlock()
	over := h.over
	h.over = nil
	return over
}

const (
	// turnLease is how long the answer of a conversation may be asked for: as long as vLLM's decoder keeps
	// its blocks. Nothing keeps ours; what was reused meanwhile the consumer's host finds by its digests.
	turnLease = 480 * time.Second
	// turnLoads is how many loads an answer serves: as many follow-ups may go on from it. Nothing is kept for them, so
	// it only bounds what hosts remember of a ticket.
	turnLoads = 256
	// maxTurns bounds the answers that are remembered, whose next turn may never come.
	maxTurns = 4096
)

// consumersOf is how many loads the blocks of an ended request serve.
func consumersOf(e *connector.Ended) int {
	if e.Weak {
		return turnLoads
	}
	return 1
}

// leaseOf is how long the blocks of an ended request can be asked for. The caller holds h.mu.
func (h *holds) leaseOf(e *connector.Ended) time.Duration {
	if !e.Weak {
		return h.lease
	}
	return max(h.lease, turnLease)
}

// remember keeps the number of answers within its bound: the oldest is forgotten. The caller holds h.mu.
func (h *holds) remember(id connector.HoldID) {
	h.turns = append(h.turns, id)
	if len(h.turns) > maxTurns {
		h.end(h.turns[0])
		h.turns = h.turns[1:]
	}
}
