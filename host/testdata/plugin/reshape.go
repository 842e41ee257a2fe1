package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

// cutter offers all of a ticket of another shape. Its own tickets say where its blocks are.
type cutter struct{ holder }

// Match implements connector.Scheduler.
func (c *cutter) Match(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
	out, err := c.holder.Match(ctx, qs)
	for i, q := range qs {
		if q.Reshaped > q.Computed {
			out[i] = connector.Match{Tokens: q.Reshaped - q.Computed}
		}
	}
	return out, err
}

// Finish implements connector.Holder.
func (c *cutter) Finish(ctx context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	out, err := c.holder.Finish(ctx, ended)
	for i := range out {
		if out[i].ID != 0 {
			if out[i].Ticket, err = json.Marshal(c.Dir); err != nil {
				return nil, err
			}
		}
	}
	return out, err
}

// reshaper also loads from engines of other shapes: their blocks are files in the folder that the ticket names. Every
// fault but "reshape", "reshape_busy" and "reshape_hide_fence" is a wrong reader.
type reshaper struct {
	*worker
	over atomic.Bool // the producer has heard that all is read
}

// Reshape implements connector.Reshaper.
func (r *reshaper) Reshape(_ context.Context, t *connector.Transfer, from connector.Source, kv *connector.KV) error {
	dir := ""
	if err := json.Unmarshal(t.Ticket, &dir); err != nil {
		return err
	}
	if r.Fault == "reshape_early" { // it says that it is done before it has read
		go func() {
			time.Sleep(20 * time.Millisecond)
			_ = r.read(dir, t, from, kv)
		}()
		return nil
	}
	if r.due("reshape_hide_fence") {
		hideFence(r.Dir)
	}
	if r.due("reshape_busy") { // one block is to be asked for again
		return &connector.BlockError{Blocks: []connector.BlockID{t.Blocks[0].ID}, Err: connector.ErrBusy}
	}
	if r.over.Load() {
		return connector.ErrGone
	}
	r.over.Store(from.Last && r.Fault == "reshape_busy")
	return r.read(dir, t, from, kv)
}

func (r *reshaper) read(dir string, t *connector.Transfer, from connector.Source, kv *connector.KV) error {
	gone := &connector.BlockError{Err: connector.ErrGone}
	rank := from.Rank
	if r.Fault == "reshape_two_ranks" {
		rank = min(rank, 1) // of four it knows two
	}
	for i, b := range t.Blocks {
		if r.Fault == "reshape_modulo" && i >= 4 {
			b.Key = t.Blocks[i-4].Key // the number of the block has two bits
		}
		data, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("%s.%d", b.Key, rank)))
		if err != nil {
			gone.Blocks = append(gone.Blocks, b.ID)
			continue
		}
		spans, err := kv.Spans(b)
		if err != nil {
			return err
		}
		if r.Fault == "reshape_layer" {
			spans[0], spans[1] = spans[1], spans[0]
		}
		for _, s := range spans {
			data = data[r.copy(s, data):]
		}
	}
	if r.Fault == "reshape_elsewhere" { // it numbers blocks in its own way
		gone.Blocks = []connector.BlockID{connector.BlockID(len(t.Blocks))}
	}
	if len(gone.Blocks) > 0 {
		return gone
	}
	return nil
}

// copy copies a block's part in one segment.
func (r *reshaper) copy(to, data []byte) int {
	n := len(to)
	switch r.Fault {
	case "reshape_half": // the second half of a block is the first once more
		copy(to, data[:n/2])
		copy(to[n/2:], data[:n/2])
	case "reshape_offset": // one byte too far
		copy(to, data[1:n])
	case "reshape_short": // the end of it does not come, and it does not notice
		copy(to, data[:n-1])
		to[n-1] = ^data[n-1]
	default:
		copy(to, data)
	}
	return n
}
