// Package storekit has what several stores share: how a call goes over its items, and how a store counts.
package storekit

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/kvport/kvport/connector"
)

// ItemError makes one error of those of the items of a call, nil if there is none. Corruption counts before any
// other error, since it must not be overlooked, and what another version has stored before the rest.
func ItemError(errs []error) error {
	failed := &connector.ItemError{}
	for i, err := range errs {
		if err != nil {
			failed.Items = append(failed.Items, i)
			if failed.Err == nil || weight(err) > weight(failed.Err) {
				failed.Err = err
			}
		}
	}
	if len(failed.Items) == 0 {
		return nil
	}
	return failed
}

// weight says which of two errors counts.
func weight(err error) int {
	switch {
	case errors.Is(err, connector.ErrCorrupt):
		return 2
	case errors.Is(err, connector.ErrOutdated):
		return 1
	}
	return 0
}

// ErrorsOf spreads the error of a call over its n items.
func ErrorsOf(err error, n int) []error {
	errs := make([]error, n)
	if err == nil {
		return errs
	}
	items, ok := errors.AsType[*connector.ItemError](err)
	if !ok || len(items.Items) == 0 {
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	for _, i := range items.Items {
		if i >= 0 && i < n {
			errs[i] = items.Err
		}
	}
	return errs
}

// Each calls do with each item until ctx ends. Its error names the items that failed.
func Each(ctx context.Context, items []connector.Item, do func(connector.Item) error) error {
	errs := make([]error, len(items))
	for i, it := range items {
		if errs[i] = ctx.Err(); errs[i] == nil {
			errs[i] = do(it)
		}
	}
	return ItemError(errs)
}

// Leading counts the keys of each run before the first that is not there.
func Leading(runs [][]connector.StoreKey, there func(connector.StoreKey) bool) []int {
	found := make([]int, len(runs))
	for i, run := range runs {
		for found[i] < len(run) && there(run[found[i]]) {
			found[i]++
		}
	}
	return found
}

// Parallel calls do with 0 to n-1, with that many workers at most, and returns when all calls have ended.
func Parallel(n, workers int, do func(i int)) {
	var next atomic.Int64
	work := func() {
		for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
			do(i)
		}
	}
	var wg sync.WaitGroup
	for range min(workers, n) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}
