package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// query is what a consumer's host asks about a prompt.
func (pr *prompt) query(computed int) connector.Query {
	return connector.Query{
		Request: pr.request, Tokens: len(pr.keys)*blockTokens + 3, Keys: pr.keys, Computed: computed * blockTokens, Ticket: connector.Ticket(pr.hold.Ticket),
	}
}

// offer is how many blocks a consumer is offered beyond those that it has. An answer that stays Later is a
// miss, as hosts have it.
func (d *pd) offer(pr *prompt, computed int) int {
	d.Helper()
	d.asking.Lock()
	defer d.asking.Unlock()
	for w := d.patience(soon); ; d.pause(askAgain) {
		var m connector.Match
		err := d.returns("Match", soon, func(ctx context.Context) error {
			ms, err := d.scheduler.Match(ctx, []connector.Query{pr.query(computed)})
			if err == nil && len(ms) == 1 {
				m = ms[0]
			}
			return err
		})
		again := m.Later || errors.Is(err, connector.ErrBusy)
		switch {
		case again && !w.over():
		case again || err != nil:
			return 0
		case computed*blockTokens+m.Tokens == pr.tokens:
			return (m.Tokens + blockTokens - 1) / blockTokens // with its partial last block
		default:
			return m.Tokens / blockTokens
		}
	}
}

// loading is a load of blocks of a prompt.
type loading struct {
	first, n int           // blocks of the prompt
	ranks    []int         // nil: all
	limit    time.Duration // of the call; 0: a host's deadline
	insists  bool          // as hosts do: the engine asks again while the connector is busy, until the limit
	after    func([]connector.Block)
	now      *pd // its slots may have been reused: a block that is as they are now is lost, and its host can tell
}

// fetch loads blocks of a prompt into slots that are anywhere. A block that is not named as failed must be
// right; fetch gives how many of the first group are.
func (d *pd) fetch(pr *prompt, l loading) (right int, err error) {
	d.Helper()
	at := d.slots(l.n)
	content := pr.content()[:l.first+l.n]
	to := d.place(content[l.first:], at)
	d.wipe(0x33, to...)
	defer d.give(to...)
	if l.limit == 0 {
		l.limit = pdDeadline
	}
	if l.ranks == nil {
		for rank := range d.workers {
			l.ranks = append(l.ranks, rank)
		}
	}
	failed := map[connector.BlockID]bool{}
	t := pr.transfer(l.first, to)
	for _, rank := range l.ranks {
		if e := d.loadOnce(rank, &t, l.limit, l.insists); e != nil {
			err = e
			d.names(e, to, failed)
		}
	}
	if l.after != nil {
		l.after(to)
		return 0, err
	}
	for _, b := range to {
		if failed[b.ID] || len(l.ranks) < len(d.workers) {
			continue
		}
		wrong := d.differs(b)
		if wrong != "" && l.now != nil && l.now.lies(pr, l.first, to, b, d.engine) {
			continue
		}
		if wrong != "" {
			d.Errorf("hold %d: %s, and the load says nothing of it", pr.hold.ID, wrong)
		} else if b.Group == 0 {
			right++
		}
	}
	return right, err
}

// loadOnce is one Load; a Planner is asked as in move.
func (d *pd) loadOnce(rank int, t *connector.Transfer, limit time.Duration, insists bool) error {
	d.Helper()
	return d.returns("Load", limit, func(ctx context.Context) error {
		todo, err := d.planned(ctx, *t, false)
		for i := range todo {
			err = errors.Join(err, whileBusy(ctx, insists, func() error { return d.workers[rank].Load(ctx, &todo[i], d.kv[rank]) }))
		}
		return err
	})
}

// whileBusy makes a call, and if the engine insists again while the connector is busy, until the context ends.
func whileBusy(ctx context.Context, insists bool, call func() error) error {
	for {
		err := call()
		if !insists || !errors.Is(err, connector.ErrBusy) {
			return err
		}
		select {
		case <-time.After(askAgain):
		case <-ctx.Done():
			return err
		}
	}
}

// tooLate reports whether an error says that the time was not enough, or that the connector was busy all the time.
func tooLate(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, connector.ErrBusy)
}

// names notes the blocks that an error says did not arrive.
func (d *pd) names(err error, to []connector.Block, failed map[connector.BlockID]bool) {
	d.Helper()
	known := []error{
		connector.ErrGone, connector.ErrBusy, connector.ErrCorrupt, connector.ErrOutdated, connector.ErrIncompatible, context.Canceled, context.DeadlineExceeded,
	}
	if !slices.ContainsFunc(known, func(k error) bool { return errors.Is(err, k) }) && !d.inst.killed {
		d.Errorf("error %q is none that a host can act on", err)
	}
	var part *connector.BlockError
	if !errors.As(err, &part) {
		for _, b := range to {
			failed[b.ID] = true
		}
		return
	}
	for _, id := range part.Blocks {
		failed[id] = true
	}
}

// try fetches what is offered of a prompt and gives how many blocks arrived.
func (d *pd) try(pr *prompt) int {
	d.Helper()
	n := d.offer(pr, 0)
	if n == 0 {
		return 0
	}
	right, _ := d.fetch(pr, loading{n: min(n, len(pr.content()))})
	return right
}

// take checks that all of a prompt is offered and arrives. A partial last block may be left out.
func (d *pd) take(pr *prompt) {
	d.Helper()
	n := d.offer(pr, 0)
	if n < len(pr.keys) {
		d.missed(pr, nil, "%d blocks of hold %d are offered, want %d", n, pr.hold.ID, len(pr.keys))
		return
	}
	right, err := d.fetch(pr, loading{n: min(n, len(pr.content()))})
	if err != nil {
		d.missed(pr, err, "load of hold %d: %v", pr.hold.ID, err)
		d.FailNow()
	}
	d.equal(n, right, "blocks of hold %d that arrived", pr.hold.ID)
}

// missed fails the case for a hold that could not be fetched. One whose lease was over by then, or a load that
// came to its deadline, says nothing on a machine that was busy.
func (d *pd) missed(pr *prompt, err error, format string, args ...any) {
	d.Helper()
	if pr.over() || errors.Is(err, context.DeadlineExceeded) {
		d.overdue(pr.handed, format, args...)
		return
	}
	d.Errorf(format, args...)
}

// over reports whether a hold's lease is over, or will be before anything can be fetched.
func (pr *prompt) over() bool { return !pr.until.IsZero() && time.Until(pr.until) < aWhile }

// inLease requires that a lease goes on: what is fetched after its end says nothing about the connector.
func (r *rig) inLease(pr *prompt) {
	r.Helper()
	if pr.over() {
		r.inconclusive("the lease of %v of hold %d was over %v after it began, before the case could look", pr.until.Sub(pr.handed).Round(time.Millisecond), pr.hold.ID,
			time.Since(pr.handed).Round(time.Millisecond))
	}
}

// recovers checks that new requests are handed over again in the end.
func (d *pd) recovers(p *pd, through func(*prompt)) {
	d.Helper()
	d.eventually(d.recovery(), func() string {
		p.sweep()
		if !p.room(3) {
			return "no slots are free, since holds of requests that failed are still open"
		}
		pr := p.hand(3, 0)
		if through != nil {
			through(pr)
		}
		if n := d.try(pr); n < 3 {
			return fmt.Sprintf("%d of 3 blocks of a new request arrive", n)
		}
		return ""
	})
}
