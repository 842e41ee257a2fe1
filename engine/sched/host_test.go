package sched

import (
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
)

// op is something the host has to report the end of.
type op struct {
	kind     byte // l, s, e, h, a(nswer)
	step     uint64
	transfer connector.Transfer
	ended    connector.Ended
	request  connector.RequestID
	client   *client    // the one that had the id then
	want     [][]uint64 // content that must not change while it is pinned
}

// match answers a question: with what the store has, what a ticket promises, or less helpfully.
func (w *world) match(q Question) connector.Match {
	n := w.stored(q.Query)
	if q.Ticket != nil {
		n = q.Query.Tokens
	}
	if w.rng.IntN(6) == 0 {
		w.seen["later"]++
		w.ops = append(w.ops, &op{kind: 'a', request: q.Query.Request})
		return connector.Match{Later: true}
	}
	if w.faults && w.rng.IntN(10) == 0 {
		return connector.Match{Tokens: w.rng.IntN(2 * q.Query.Tokens), Async: true} // a wild claim
	}
	if n <= q.Query.Computed {
		return connector.Match{}
	}
	return connector.Match{Tokens: n - q.Query.Computed, Async: true}
}

// stored is how far a request could go on with what the store has of every group.
func (w *world) stored(q connector.Query) int {
	size := w.cfg.BlockTokens
	for end := len(q.Keys); end > q.Computed/size; end-- {
		whole := true
		for g := range w.cfg.Groups {
			for i := max(q.Computed/size, w.reach(g, end*size)); i < end; i++ {
				whole = whole && w.store[stored{uint16(g), q.Keys[i]}]
			}
		}
		if whole {
			return end * size
		}
	}
	return q.Computed
}

// take gives the host a step: every load starts by spoiling its blocks, everything else remembers
// what its blocks hold.
func (w *world) take(st *connector.Step) error {
	if st == nil {
		return nil
	}
	if w.cfg.Role == 0 {
		return fmt.Errorf("a step without a host")
	}
	if err := w.leaves(st); err != nil {
		return err
	}
	for _, q := range st.Arrived {
		w.clients[q.Request].arrived++
	}
	for _, t := range st.Admitted {
		if err := w.startLoad(st.ID, t); err != nil {
			return err
		}
	}
	for _, t := range st.Computed {
		if !w.cfg.Role.Saves() {
			return fmt.Errorf("save with role %v", w.cfg.Role)
		}
		if err := w.check(t.Request, t.From, t.Tokens, t.Blocks); err != nil {
			return fmt.Errorf("computed: %w", err)
		}
		w.ops = append(w.ops, &op{kind: 's', step: st.ID, request: t.Request, client: w.clients[t.Request], transfer: t, want: w.snapshot(t.Blocks)})
	}
	for _, e := range st.Ended {
		c := w.clients[e.Request]
		if c.ended++; c.arrived != 1 || c.ended != 1 {
			return fmt.Errorf("%s arrived %d times, ended %d times", e.Request, c.arrived, c.ended)
		}
		if err := w.checkEnd(c, e); err != nil {
			return fmt.Errorf("ended: %w", err)
		}
		w.ops = append(w.ops, &op{kind: 'e', step: st.ID, request: e.Request, ended: e, want: w.snapshot(e.Blocks)})
	}
	return nil
}

// checkEnd verifies what an ended request leaves. A cache query leaves something only where it is held, and not for sure.
func (w *world) checkEnd(c *client, e connector.Ended) error {
	if c.req.Query && (e.Weak != e.Remote || e.Remote != (len(e.Blocks) > 0)) {
		return fmt.Errorf("a cache query ends with %+v", e)
	}
	return w.check(e.Request, 0, e.Tokens, e.Blocks)
}

func (w *world) startLoad(step uint64, t connector.Transfer) error {
	if !w.cfg.Role.Loads() || t.Tokens <= 0 || len(t.Blocks) == 0 {
		return fmt.Errorf("load of %d tokens with role %v", t.Tokens, w.cfg.Role)
	}
	if w.clients[t.Request].req.Query {
		return fmt.Errorf("%s: a cache query loads", t.Request)
	}
	if w.clients[t.Request].barred {
		return fmt.Errorf("%s: another load after one that left nothing", t.Request)
	}
	for _, b := range t.Blocks {
		for i := range w.tags[b.ID] {
			w.tags[b.ID][i], w.dirty[b.ID][i] = garbage, false
		}
	}
	w.ops = append(w.ops, &op{kind: 'l', step: step, request: t.Request, client: w.clients[t.Request], transfer: t})
	return nil
}

// check verifies that blocks hold the KV of a request's tokens [from, from+n).
func (w *world) check(id connector.RequestID, from, n int, blocks []connector.Block) error {
	bt, tokens := w.cfg.BlockTokens, w.clients[id].tokens
	for k, first := range w.places(from+n, blocks) {
		b := blocks[k]
		for i := range bt {
			at := first + i
			if at >= from+n {
				break
			}
			if want := tagOf(tokens[:at+1]); w.tags[b.ID][i] != want {
				return fmt.Errorf("%s: block %d of group %d does not hold position %d", id, b.ID, b.Group, at)
			}
		}
	}
	for g := range w.cfg.Groups { // all that is needed to go on is there
		need := (from+n+bt-1)/bt - max(from/bt, w.reach(g, from+n))
		if have := count(blocks, uint16(g)); n > 0 && have < need {
			return fmt.Errorf("%s: %d blocks of group %d, want %d", id, have, g, need)
		}
	}
	return nil
}

// places gives the first position of each block of a transfer: those of a group end where the
// transfer does.
func (w *world) places(end int, blocks []connector.Block) []int {
	list, seen := make([]int, len(blocks)), map[uint16]int{}
	last := (end + w.cfg.BlockTokens - 1) / w.cfg.BlockTokens
	for k, b := range blocks {
		list[k] = (last - count(blocks, b.Group) + seen[b.Group]) * w.cfg.BlockTokens
		seen[b.Group]++
	}
	return list
}

func count(blocks []connector.Block, group uint16) (n int) {
	for _, b := range blocks {
		if b.Group == group {
			n++
		}
	}
	return n
}

func (w *world) snapshot(blocks []connector.Block) (tags [][]uint64) {
	for _, b := range blocks {
		tags = append(tags, slices.Clone(w.tags[b.ID]))
	}
	return tags
}

// report ends one of the host's operations, now and then twice.
func (w *world) report(i int) error {
	o := w.ops[i]
	w.ops = slices.Delete(w.ops, i, i+1)
	blocks := o.transfer.Blocks
	if o.kind == 'e' || o.kind == 'h' {
		blocks = o.ended.Blocks
	}
	if o.want != nil && !slices.EqualFunc(o.want, w.snapshot(blocks), slices.Equal) {
		return fmt.Errorf("%c of %s: a pinned block changed", o.kind, o.request)
	}
	if o.kind == 'l' {
		w.loaded(o)
		w.s.Loaded(o.step, o.request, nil, false, false) // a second report must change nothing
		return nil
	}
	for range 1 + w.rng.IntN(2) {
		switch o.kind {
		case 'a':
			w.s.Answered(o.request)
		case 's':
			if w.rng.IntN(4) == 0 {
				w.s.Stored(o.step, o.request)
			}
			w.s.Saved(o.step, o.request)
			for _, b := range blocks {
				w.store[stored{b.Group, b.Key}] = w.rng.IntN(8) > 0
			}
		case 'e':
			held := len(o.ended.Blocks) > 0 && w.rng.IntN(3) == 0
			w.s.Finished(o.step, o.request, held, []byte("ticket of "+o.request))
			if held {
				w.seen["hold"]++
				w.ops = append(w.ops, &op{kind: 'h', step: o.step, request: o.request, ended: o.ended, want: o.want})
			}
			return nil // the second report must not bring a second hold
		case 'h':
			w.s.Released(o.step, o.request)
		}
	}
	return nil
}

// loaded fills the blocks of a load, or some of them.
func (w *world) loaded(o *op) {
	t, c := o.transfer, o.client
	var failed []connector.BlockID
	unverified := w.rng.IntN(4) == 0
	for k, first := range w.places(t.From+t.Tokens, t.Blocks) {
		b := t.Blocks[k]
		absent := b.Key != connector.BlockKey{} && !w.store[stored{b.Group, b.Key}] && !c.ticketed
		if w.faults && w.rng.IntN(6) == 0 || first >= len(c.tokens) || absent {
			failed = append(failed, b.ID)
			continue
		}
		for i := range w.cfg.BlockTokens {
			if at := first + i; at < t.From+t.Tokens {
				w.tags[b.ID][i] = tagOf(c.tokens[:at+1])
				w.brought(c, b.ID, i, unverified)
				c.unclean[at] = unverified
			}
		}
	}
	if len(failed) > 0 {
		w.seen["failed load"]++
	}
	c.barred = c.barred || len(failed) > 0 && slices.Contains(failed, t.Blocks[0].ID)
	w.s.Loaded(o.step, o.request, failed, w.rng.IntN(2) == 0, unverified)
}
