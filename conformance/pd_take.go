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

// offer is how many blocks a consumer is offered beyond those that it has.
func (d *pd) offer(pr *prompt, computed int) int {
	d.Helper()
	n := d.asked(pr.query(computed))
	if computed*blockTokens+n == pr.tokens {
		return (n + blockTokens - 1) / blockTokens // with its partial last block
	}
	return n / blockTokens
}

// asked is how many tokens are offered. An error, and an answer that stays Later, are a miss, as hosts have it.
func (d *pd) asked(q connector.Query) int {
	d.Helper()
	d.asking.Lock()
	defer d.asking.Unlock()
	for w := d.patience(soon); ; d.pause(askAgain) {
		var m connector.Match
		err := d.returns("Match", soon, func(ctx context.Context) error {
			ms, err := d.scheduler.Match(ctx, []connector.Query{q})
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
		default:
			return m.Tokens
		}
	}
}

// loading is a load of blocks of a prompt.
type loading struct {
	first, n int           // blocks of the prompt
	ranks    []int         // nil: all
	limit    time.Duration // of the call; 0: a host's deadline
	insists  bool          // as hosts do: the engine asks again while the connector is busy, until the limit
	keyed    bool          // a partial last block does not count
	after    func([]connector.Block)
	now      *pd // its slots may have been reused: a block that is as they are now is lost, and its host can tell
}

// counts reports whether a block that is right counts.
func (l *loading) counts(pr *prompt, b connector.Block) bool {
	return b.Group == 0 && (!l.keyed || slices.Contains(pr.keys, b.Key))
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
	for _, e := range d.loadRanks(&t, &l) {
		if e != nil {
			err = errors.Join(err, e)
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
		} else if l.counts(pr, b) {
			right++
		}
	}
	return right, err
}

// loadRanks is a load as hosts make it: on all of its ranks at once. A Planner is asked before, as in move. It gives the error of each rank.
func (d *pd) loadRanks(t *connector.Transfer, l *loading) []error {
	d.Helper()
	var todo []connector.Transfer
	err := d.returns("Plan", l.limit, func(ctx context.Context) (err error) {
		todo, err = d.planned(ctx, *t, false)
		return err
	})
	if err != nil {
		return []error{err}
	}
	errs, came := make([]error, len(l.ranks)), make([]bool, len(l.ranks))
	together(len(l.ranks), func(i int) {
		errs[i] = d.loadRank(l.ranks[i], todo, l)
		came[i] = true
	})
	if slices.Contains(came, false) {
		d.FailNow() // what waited for that rank has said so, and ended
	}
	return errs
}

// loadRank is the part of a load that one rank has.
func (d *pd) loadRank(rank int, todo []connector.Transfer, l *loading) error {
	d.Helper()
	return d.returns("Load", l.limit, func(ctx context.Context) (err error) {
		for i := range todo {
			t := todo[i] // each rank's own
			err = errors.Join(err, whileBusy(ctx, l.insists, func() error { return d.workers[rank].Load(ctx, &t, d.kv[rank]) }))
		}
		return err
	})
}

// breakOff gives up the load of a prompt after some time, and reports whether anything was offered to load.
func (d *pd) breakOff(pr *prompt, after time.Duration) bool {
	n := min(d.offer(pr, 0), len(pr.content()))
	if n == 0 {
		return false
	}
	_, _ = d.fetch(pr, loading{n: n, limit: max(after, time.Microsecond)})
	return true
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
	began := time.Now()
	n := d.offer(pr, 0)
	switch {
	case n >= len(pr.keys):
	case n == 0 && !pr.over(): // it may be that the answer came too late
		d.overdue(began, "nothing of hold %d is offered, want %d blocks", pr.hold.ID, len(pr.keys))
		return
	default:
		d.missed(pr, nil, "%d blocks of hold %d are offered, want %d", n, pr.hold.ID, len(pr.keys))
		return
	}
	right, err := d.fetch(pr, loading{n: min(n, len(pr.content())), insists: true})
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
func (pr *prompt) over() bool { return !pr.ends.IsZero() && time.Until(pr.ends) < aWhile }

// inLease requires that a lease goes on: what is fetched after its end says nothing about the connector.
func (r *rig) inLease(pr *prompt) {
	r.Helper()
	if pr.over() {
		r.inconclusive("the lease of %v of hold %d was over %v after it began, before the case could look", pr.ends.Sub(pr.handed).Round(time.Millisecond), pr.hold.ID,
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
