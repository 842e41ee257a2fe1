package main

import (
	"context"

	"github.com/kvport/kvport/connector"
)

// cutter offers all of a ticket of another shape.
type cutter struct{ holder }

// Match implements connector.Scheduler.
func (c *cutter) Match(_ context.Context, qs []connector.Query) ([]connector.Match, error) {
	out := make([]connector.Match, len(qs))
	for i, q := range qs {
		if q.Reshaped > q.Computed {
			out[i] = connector.Match{Tokens: q.Reshaped - q.Computed}
		}
	}
	return out, nil
}

// reshaper also loads from engines of another shape: it writes the number of the token into each byte of the
// first segment, and leaves out the last block.
type reshaper struct{ *worker }

// Reshape implements connector.Reshaper.
func (r *reshaper) Reshape(_ context.Context, t *connector.Transfer, kv *connector.KV) error {
	last := len(t.Blocks) - 1
	for i, b := range t.Blocks[:last] {
		for at := range kv.View(0, b.ID) {
			kv.View(0, b.ID)[at] = byte(t.From/16 + i)
		}
	}
	return &connector.BlockError{Blocks: []connector.BlockID{t.Blocks[last].ID}, Err: connector.ErrGone}
}
