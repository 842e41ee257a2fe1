package multiconnector

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
)

// Save implements connector.Worker. Every child whose role saves gets the blocks, all at once. A
// block counts as stored if a child has it that consumers reach (one of scope node or shared), or any
// child where there is none such. A block that a load still writes is not stored.
func (w *worker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	return w.SaveTelling(ctx, t, kv, func() {})
}

// SaveTelling is Save, which calls promised as soon as everything that a ticket promises is stored and no other
// child is worth waiting for: one that takes longer than its Patience, now or since an earlier Save, goes on alone.
// A ticket promises what the children have that keep finished blocks for consumers, if there are such, else
// every block that is stored as Save says. promised is called once at most, and not where a block has failed.
func (w *worker) SaveTelling(ctx context.Context, t *connector.Transfer, kv *connector.KV, promised func()) error {
	stored := w.twice(t)
	shares, err := w.saves(t, stored)
	if err != nil {
		return err
	}
	busy := w.written(t)
	p := newSaving(w, shares, stored, promised)
	p.told = len(busy) > 0
	p.look()
	var work sync.WaitGroup
	for _, s := range shares {
		indexes, parts := w.partsOf(t, &s, busy)
		work.Go(func() {
			bad, err := w.saveParts(ctx, s.child, parts, kv)
			p.returned(s.child, err, func() {
				for _, i := range indexes {
					stored[i] = stored[i] || !bad[t.Blocks[i]] && (!p.wide || reaches(&w.children[s.child]))
				}
			})
		})
	}
	work.Wait()
	p.end()
	if len(busy) > 0 {
		p.errs = append(p.errs, errLoading)
	}
	failed := without(all(len(t.Blocks)), func(i int) bool { return stored[i] })
	if len(failed) == 0 {
		return nil // what some child could not store, another has
	}
	return blockError(t, failed, errors.Join(p.errs...))
}

// partsOf makes the transfers of one child, less the blocks that loads still write.
func (w *worker) partsOf(t *connector.Transfer, s *share, busy map[int]bool) (indexes []int, parts []connector.Transfer) {
	part := *t
	part.From, part.Tokens, part.Extra, part.Blocks, part.Ticket = s.from, s.tokens, s.extra, nil, nil
	if len(s.extra) == 0 {
		indexes = without(s.indexes, func(i int) bool { return busy[i] })
		if len(indexes) == 0 {
			return nil, nil
		}
		part.Blocks, part.From, part.Tokens = t.Blocks, t.From, t.Tokens
		return indexes, pick(&part, indexes, w.groups)
	}
	if len(busy) > 0 {
		return nil, nil // the child's own bytes may mean any of the blocks
	}
	for _, i := range s.indexes {
		part.Blocks = append(part.Blocks, t.Blocks[i])
	}
	return s.indexes, []connector.Transfer{part}
}

func all(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

// saves says which child gets which blocks.
func (w *worker) saves(t *connector.Transfer, skip []bool) ([]share, error) {
	if len(t.Extra) > 0 {
		return unpackShares(t.Extra, len(w.children), len(t.Blocks))
	}
	var out []share
	for i := range w.children {
		if !w.children[i].Role.Saves() {
			continue
		}
		s := share{child: i, from: t.From, tokens: t.Tokens}
		for k := range t.Blocks {
			if !skip[k] || w.children[i].Info.Scope != connector.ScopeShared {
				s.indexes = append(s.indexes, k)
			}
		}
		if len(s.indexes) > 0 {
			out = append(out, s)
		}
	}
	if len(out) == 0 && len(t.Blocks) > 0 && !slices.Contains(skip, true) {
		return nil, fmt.Errorf("no child saves: %w", connector.ErrGone)
	}
	return out, nil
}

// twice marks the blocks that a child of scope shared was seen to have: none of that scope is sent
// them again. A damaged block is sent to all.
func (w *worker) twice(t *connector.Transfer) []bool {
	skip := make([]bool, len(t.Blocks))
	for i, b := range t.Blocks {
		skip[i] = len(t.Extra) == 0 && !t.Replace && b.Key != (connector.BlockKey{}) && w.seen.any(b.Key)
	}
	return skip
}

// reaches reports whether consumers other than this engine can see what a child stores.
func reaches(c *Child) bool { return c.Info.Scope >= connector.ScopeNode }

func (w *worker) reach(shares []share) bool {
	for _, s := range shares {
		if reaches(&w.children[s.child]) {
			return true
		}
	}
	return false
}

// written are the indexes of the blocks that a load may write now.
func (w *worker) written(t *connector.Transfer) map[int]bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out map[int]bool
	for i, b := range t.Blocks {
		if w.loading[blockName{b.Group, b.ID}] > 0 {
			if out == nil {
				out = map[int]bool{}
			}
			out[i] = true
		}
	}
	return out
}

func without(indexes []int, drop func(int) bool) []int {
	return slices.DeleteFunc(slices.Clone(indexes), drop)
}

func (w *worker) saveParts(ctx context.Context, child int, parts []connector.Transfer, kv *connector.KV) (bad map[connector.Block]bool, err error) {
	bad = map[connector.Block]bool{}
	for i := range parts {
		failed := w.sides[child].Save(ctx, &parts[i], kv)
		if failed != nil {
			err = failed
		}
		for _, b := range failedBlocks(&parts[i], failed) {
			bad[b] = true
		}
	}
	return bad, err
}
