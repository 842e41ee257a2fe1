package multiconnector

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/kvport/kvport/connector"
)

// share is what one child has to do with a planned transfer.
type share struct {
	child        int
	from, tokens int
	extra        []byte
	indexes      []int // of the transfer's blocks
}

// Plan implements connector.Planner. Each Planner among the children sees the blocks that are routed
// to it; the others load what was routed to them and save everything. Every transfer of the answer
// carries in Extra which child does what with which block.
func (s *scheduler) Plan(ctx context.Context, step *connector.Step) (*connector.Plan, error) {
	plans := make([]*connector.Plan, len(s.lanes))
	s.together(len(s.lanes), func(i int) { plans[i] = s.planOf(ctx, i, s.stepOf(i, step)) })
	loads, saves := make([][]share, len(step.Admitted)), make([][]share, len(step.Computed))
	for i, p := range plans {
		assign(loads, step.Admitted, p.Loads, i)
		assign(saves, step.Computed, p.Saves, i)
	}
	for i := range step.Ended {
		if s.caps&connector.CanHold == 0 {
			s.routes.forget(step.Ended[i].Request)
		}
	}
	return &connector.Plan{Loads: compose(step.Admitted, loads), Saves: compose(step.Computed, saves)}, nil
}

// stepOf is the step as one child sees it.
func (s *scheduler) stepOf(child int, step *connector.Step) *connector.Step {
	own := *step
	own.Arrived, own.Admitted = make([]connector.Query, len(step.Arrived)), nil
	for i, q := range step.Arrived {
		q.Ticket = s.ticketOf(child, q.Ticket)
		own.Arrived[i] = q
	}
	for i := range step.Admitted {
		t := &step.Admitted[i]
		var mine []int
		to := s.routes.get(t.Request)
		for k, end := range ends(t, s.groups) {
			if s.owner(to, end) == child {
				mine = append(mine, k)
			}
		}
		for _, part := range pick(t, mine, s.groups) {
			part.Ticket = s.ticketOf(child, t.Ticket)
			own.Admitted = append(own.Admitted, part)
		}
	}
	if !s.children[child].Role.Saves() {
		own.Computed = nil
	}
	return &own
}

// owner is the child that loads a block first: the one it is routed to, else the first that loads.
func (m *Multi) owner(to route, end int) int {
	if child, ok := to.first(end); ok {
		return child
	}
	for i := range m.children {
		if m.children[i].Role.Loads() {
			return i
		}
	}
	return -1
}

// planOf is the plan of one child. A child that fails does nothing in this step.
func (s *scheduler) planOf(ctx context.Context, child int, own *connector.Step) *connector.Plan {
	l := s.lanes[child]
	planner, can := connector.As[connector.Planner](l.side)
	if !can {
		return &connector.Plan{Loads: own.Admitted, Saves: own.Computed}
	}
	plan, err := try(ctx, l, l.child.Patience, func(ctx context.Context) (*connector.Plan, error) { return planner.Plan(ctx, own) })
	if err != nil || plan == nil {
		return &connector.Plan{}
	}
	return plan
}

// assign finds the transfers that one child's planned ones belong to. What belongs to none, or names
// a block twice, is left out.
func assign(to [][]share, transfers, planned []connector.Transfer, child int) {
	for p := range planned {
		for i := range transfers {
			if transfers[i].Request != planned[p].Request {
				continue
			}
			if at := indexes(&transfers[i], planned[p].Blocks); at != nil {
				to[i] = append(to[i], share{child, planned[p].From, planned[p].Tokens, planned[p].Extra, at})
				break
			}
		}
	}
}

// indexes gives the places of some blocks in a transfer, in order; nil if one is not there.
func indexes(t *connector.Transfer, blocks []connector.Block) []int {
	out := make([]int, 0, len(blocks))
	i := 0
	for _, b := range blocks {
		for i < len(t.Blocks) && (t.Blocks[i].ID != b.ID || t.Blocks[i].Group != b.Group) {
			i++
		}
		if i == len(t.Blocks) {
			return nil
		}
		out = append(out, i)
		i++
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

// compose makes one transfer of what the children want of each.
func compose(transfers []connector.Transfer, shares [][]share) []connector.Transfer {
	var out []connector.Transfer
	for i := range transfers {
		if len(shares[i]) == 0 {
			continue
		}
		t := transfers[i]
		place := make([]int, len(t.Blocks)) // in the new transfer, from 1
		for _, s := range shares[i] {
			for _, k := range s.indexes {
				place[k] = 1
			}
		}
		blocks := make([]connector.Block, 0, len(t.Blocks))
		for k := range place {
			if place[k] > 0 {
				blocks = append(blocks, t.Blocks[k])
				place[k] = len(blocks)
			}
		}
		for _, s := range shares[i] {
			for n, k := range s.indexes {
				s.indexes[n] = place[k] - 1
			}
		}
		t.Blocks, t.Extra = blocks, packShares(shares[i])
		out = append(out, t)
	}
	return out
}

// errExtra says that a planned transfer does not carry what this composite's Planner gave it.
var errExtra = fmt.Errorf("the plan's extra bytes are not a composite's: %w", connector.ErrIncompatible)

// packShares writes shares as Extra: unsigned varints, with the child's bytes after their length.
func packShares(shares []share) []byte {
	out := []byte{ticketVersion}
	num := func(v int) { out = binary.AppendUvarint(out, uint64(v)) }
	for _, s := range shares {
		num(s.child)
		num(s.from)
		num(s.tokens)
		num(len(s.extra))
		out = append(out, s.extra...)
		num(len(s.indexes))
		for _, k := range s.indexes {
			num(k)
		}
	}
	return out
}

// unpackShares reads them for a transfer of n blocks.
func unpackShares(extra []byte, children, n int) ([]share, error) {
	if len(extra) == 0 || extra[0] != ticketVersion {
		return nil, errExtra
	}
	r := varints{rest: extra[1:]}
	var out []share
	for len(r.rest) > 0 && !r.bad {
		s := share{child: r.below(children), from: r.below(math.MaxInt32), tokens: r.below(math.MaxInt32)}
		s.extra = r.bytes()
		for range r.below(n + 1) {
			s.indexes = append(s.indexes, r.below(n))
		}
		out = append(out, s)
	}
	if r.bad {
		return nil, errExtra
	}
	return out, nil
}

// varints reads unsigned varints until one is missing or too large.
type varints struct {
	rest []byte
	bad  bool
}

func (r *varints) below(limit int) int {
	v, n := binary.Uvarint(r.rest)
	if n <= 0 || v >= uint64(limit) {
		r.bad, r.rest = true, nil
		return 0
	}
	r.rest = r.rest[n:]
	return int(v)
}

func (r *varints) bytes() []byte {
	n := r.below(len(r.rest) + 1)
	if n == 0 {
		return nil
	}
	if n > len(r.rest) {
		r.bad, r.rest = true, nil
		return nil
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}
