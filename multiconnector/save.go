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
	stored := make([]bool, len(t.Blocks))
	there := w.twice(t)
	shares, err := w.saves(t, there)
	if err != nil {
		return err
	}
	wide := w.reach(shares)
	var mu sync.Mutex
	var work sync.WaitGroup
	var errs []error
	loads := w.written(t)
	for _, s := range shares {
		part := *t
		part.From, part.Tokens, part.Extra, part.Blocks, part.Ticket = s.from, s.tokens, s.extra, nil, nil
		for _, i := range s.indexes {
			part.Blocks = append(part.Blocks, t.Blocks[i])
		}
		parts := []connector.Transfer{part}
		indexes := s.indexes
		if len(s.extra) == 0 {
			indexes = without(s.indexes, loads)
			parts = pick(t, indexes, w.groups)
			for k := range parts {
				parts[k].Extra = nil
			}
		} else if len(loads) > 0 {
			continue // its bytes may mean any of the blocks
		}
		work.Go(func() {
			bad, err := w.saveParts(ctx, s.child, parts, kv)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, w.children[s.child].named(err))
			}
			for _, i := range indexes {
				stored[i] = stored[i] || !bad[t.Blocks[i]] && (!wide || reaches(&w.children[s.child]))
			}
		})
	}
	work.Wait()
	var failed []int
	for i := range stored {
		if !stored[i] && (len(t.Extra) > 0 || !there[i]) {
			failed = append(failed, i)
		}
	}
	if len(loads) > 0 {
		errs = append(errs, errLoading)
	}
	if len(failed) == 0 {
		return nil // what some child could not store, another has
	}
	return blockError(t, failed, errors.Join(errs...))
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
		skip[i] = !t.Replace && b.Key != (connector.BlockKey{}) && w.seen.any(b.Key)
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

func without(indexes []int, drop map[int]bool) []int {
	if len(drop) == 0 {
		return indexes
	}
	var out []int
	for _, i := range indexes {
		if !drop[i] {
			out = append(out, i)
		}
	}
	return out
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
