package sdk

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
)

// selectPatience is how long a load waits for a block that was there a moment ago.
const selectPatience = time.Second

// FromBuffer makes a connector of a Buffer: producers insert what they compute, and consumers select it. It
// is [FromStore] for backends that give each block out once; what FromStore says about keys, ranks, groups
// and partial blocks also holds here. A load selects only blocks that a match has found. It never waits for
// others: the engine computes them.
func FromBuffer[C any](d Definition, open func(ctx context.Context, env connector.Env, config C) (lookupbuffer.Buffer, error)) connector.Plugin {
	return FromStore(d, func(ctx context.Context, env connector.Env, config C) (connector.Store, error) {
		b, err := open(ctx, env, config)
		if err == nil && b == nil {
			err = fmt.Errorf("open returned no buffer: %w", connector.ErrIncompatible)
		}
		if err != nil {
			return nil, err
		}
		return &bufferStore{b}, nil
	})
}

// bufferStore is a Buffer as a Store.
type bufferStore struct{ buffer lookupbuffer.Buffer }

// Lookup implements connector.Store.
func (s *bufferStore) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	found, err := s.buffer.Lookup(ctx, runs)
	if err == nil && len(found) != len(runs) {
		err = fmt.Errorf("buffer answered %d of %d runs: %w", len(found), len(runs), connector.ErrIncompatible)
	}
	return found, err
}

// Put implements connector.Store.
func (s *bufferStore) Put(ctx context.Context, items []connector.Item) error {
	return s.buffer.Insert(ctx, items)
}

// Get implements connector.Store.
func (s *bufferStore) Get(ctx context.Context, items []connector.Item) error {
	runs := make([][]connector.StoreKey, len(items))
	for i := range items {
		runs[i] = []connector.StoreKey{items[i].Key}
	}
	found, err := s.Lookup(ctx, runs)
	if err != nil {
		return err
	}
	failed := &connector.ItemError{}
	var there []connector.Item
	var places []int
	for i := range items {
		if found[i] == 0 {
			failed.Items, failed.Err = append(failed.Items, i), fmt.Errorf("block is not in the buffer any more: %w", connector.ErrGone)
			continue
		}
		there, places = append(there, items[i]), append(places, i)
	}
	if err := s.take(ctx, there, places, failed); err != nil {
		return err
	}
	if failed.Err != nil {
		return failed
	}
	return nil
}

// take selects items that were there a moment ago. If another load was faster, the items are gone.
func (s *bufferStore) take(ctx context.Context, items []connector.Item, places []int, failed *connector.ItemError) error {
	for len(items) > 0 {
		waiting, cancel := context.WithTimeout(ctx, selectPatience)
		err := s.buffer.DropSelect(waiting, items)
		late := ctx.Err() == nil && waiting.Err() != nil && isDone(err)
		cancel()
		if err == nil {
			return nil
		}
		some, is := errors.AsType[*connector.ItemError](err)
		if !is && late {
			return errTaken()
		}
		if !is {
			return err
		}
		for _, i := range some.Items {
			if i < 0 || i >= len(places) {
				return fmt.Errorf("buffer reported item %d of %d: %w", i, len(places), err)
			}
		}
		var lost []int
		if items, places, lost, err = s.left(ctx, some.Items, items, places, late); err != nil {
			return err
		}
		if len(lost) > 0 {
			failed.Items, failed.Err = append(failed.Items, lost...), some.Err
			if late {
				failed.Err = errTaken()
			}
		}
	}
	return nil
}

// left divides the items that were not filled into those to select again and the places of those that are lost. If some were
// filled within selectPatience, one that is still there was not taken: the buffer is slow, or the machine is busy.
func (s *bufferStore) left(ctx context.Context, missed []int, items []connector.Item, places []int, late bool) (again []connector.Item, at, lost []int, err error) {
	found := make([]int, len(missed))
	if late && len(missed) < len(items) {
		runs := make([][]connector.StoreKey, len(missed))
		for n, i := range missed {
			runs[n] = []connector.StoreKey{items[i].Key}
		}
		if found, err = s.Lookup(ctx, runs); err != nil {
			return nil, nil, nil, err
		}
	}
	for n, i := range missed {
		if found[n] == 0 {
			lost = append(lost, places[i])
			continue
		}
		again, at = append(again, items[i]), append(at, places[i])
	}
	return again, at, lost, nil
}

func errTaken() error { return fmt.Errorf("block was taken by another load: %w", connector.ErrGone) }

// Close implements connector.Store.
func (s *bufferStore) Close() error { return s.buffer.Close() }
