package nixl

import (
	"context"
	"time"

	"github.com/kvport/kvport/connector"
)

// scheduler is the scheduler side: it reads tickets and gives them.
type scheduler struct {
	node  *Node
	env   connector.Env
	leave func() error
}

// Match implements connector.Scheduler. A ticket that has expired meanwhile costs a load that fails.
func (s *scheduler) Match(_ context.Context, qs []connector.Query) ([]connector.Match, error) {
	out := make([]connector.Match, len(qs))
	for i, q := range qs {
		if q.Ticket == nil || !s.env.Role.Loads() {
			continue
		}
		t, err := parseTicket(q.Ticket)
		if err != nil {
			s.env.Log.Debug("ticket is of no use", "request", q.Request, "error", err)
			continue
		}
		if q.Reshaped == 0 && !t.fits(&q, s.env.Layout.Groups[0].BlockTokens) {
			s.env.Log.Debug("ticket is for another prompt", "request", q.Request)
			continue
		}
		end := min(t.Tokens, q.Tokens)
		if q.Reshaped > 0 { // the host has compared the prompts
			end = min(end, q.Reshaped)
		}
		if n := end - q.Computed; n > 0 {
			out[i] = connector.Match{Tokens: n, Async: true}
			if q.Request != "" { // a probe leaves no trace
				s.node.heartbeats.wait(&t)
			}
		}
	}
	return out, nil
}

// Finish implements connector.Holder.
func (s *scheduler) Finish(_ context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	out := make([]connector.Hold, len(ended))
	for i, e := range ended {
		if !e.Remote || s.node.listener == nil || e.Reason == connector.ReasonAbort || e.Reason == connector.ReasonError || !s.whole(&e) {
			continue
		}
		id, secret := s.node.holds.add(e)
		t := ticket{Version: ticketVersion, Address: s.node.address(), Hold: id, Secret: secret, Tokens: e.Tokens, LeaseMS: int64(s.node.config.LeaseMS), Turn: e.Weak}
		s.name(&t, &e)
		data, err := t.encode()
		if err != nil {
			return nil, err
		}
		s.node.holds.seal(id, sumOf(data))
		out[i] = connector.Hold{ID: id, TTL: s.node.config.lease(), Consumers: consumersOf(&e), Ticket: data}
	}
	return out, nil
}

// whole says whether a request's blocks are all that a consumer needs to go on behind them.
func (s *scheduler) whole(e *connector.Ended) bool {
	have := make([]int, len(s.env.Layout.Groups))
	for _, b := range e.Blocks {
		if int(b.Group) >= len(have) {
			return false
		}
		have[b.Group]++
	}
	for i, g := range s.env.Layout.Groups {
		need := (e.Tokens + g.BlockTokens - 1) / g.BlockTokens
		if g.Policy == connector.PolicyTrailing {
			need = min(need, g.Trailing)
		}
		if have[i] < need {
			return false
		}
	}
	return len(e.Blocks) > 0
}

// name adds to a ticket what its blocks are, and where, unless they are too many or nothing keeps them.
func (s *scheduler) name(t *ticket, e *connector.Ended) {
	groups := len(s.env.Layout.Groups)
	lasts := make([][]byte, groups)
	for _, b := range e.Blocks {
		if b.Key != (connector.BlockKey{}) {
			lasts[b.Group] = b.Key[:]
		}
	}
	t.Last = lasts[0]
	ids := packIDs(e.Blocks, groups)
	if e.Weak || len(ids) > maxIDs {
		return
	}
	t.Lasts, t.Life, t.IDs = lasts[1:], s.node.life, ids
	t.Slot = s.node.holds.place(t.Hold)
}

// Consumed implements connector.Holder.
func (s *scheduler) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	for {
		if over := s.node.holds.take(); len(over) > 0 {
			return over, nil
		}
		select {
		case <-s.node.holds.wake:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// renewWait is how long Renewals waits for a consumer's sign of life (rule LEASE-01).
const renewWait = 500 * time.Millisecond

// Renewals implements connector.Leaser.
func (s *scheduler) Renewals(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
	s.node.holds.settle(ended)
	return s.node.holds.renewals(ctx, renewWait)
}

// Reset implements connector.Resetter. All that this engine keeps is held for consumers: their tickets are worth
// nothing from now on, and what they are reading is not confirmed.
func (s *scheduler) Reset(context.Context) (emptied bool, err error) {
	s.node.holds.reset()
	return true, nil
}

// Close implements connector.Scheduler.
func (s *scheduler) Close() error { return s.leave() }
