package remote

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/kvport/kvport/connector"
)

// eachBatch runs do for every batch of the items, at most parallel at once, and returns when all have ended.
// The error is a *connector.ItemError that names the failed items.
func eachBatch(items []connector.Item, parallel int, do func([]connector.Item) []error) error {
	ends := batches(items)
	errs := make([]error, len(items))
	var next atomic.Int64
	work := func() {
		for b := int(next.Add(1)) - 1; b < len(ends); b = int(next.Add(1)) - 1 {
			begin := 0
			if b > 0 {
				begin = ends[b-1]
			}
			copy(errs[begin:ends[b]], do(items[begin:ends[b]]))
		}
	}
	var wg sync.WaitGroup
	for range min(parallel, len(ends)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	failed := &connector.ItemError{}
	for i, err := range errs {
		if err != nil {
			failed.Items = append(failed.Items, i)
			failed.Err = firstOf(failed.Err, err)
		}
	}
	if len(failed.Items) == 0 {
		return nil
	}
	return failed
}

// batches divides items so that each part has at most batchBytes, or one item. It gives the ends.
func batches(items []connector.Item) (ends []int) {
	size := 0
	for i, it := range items {
		if size += it.Size(); size > batchBytes && i > 0 && (len(ends) == 0 || ends[len(ends)-1] < i) {
			ends, size = append(ends, i), it.Size()
		}
	}
	if len(items) > 0 {
		ends = append(ends, len(items))
	}
	return ends
}

// firstOf keeps one error of many, corruption before any other: it is what must not be overlooked.
func firstOf(have, err error) error {
	if have == nil || errors.Is(err, connector.ErrCorrupt) && !errors.Is(have, connector.ErrCorrupt) {
		return err
	}
	return have
}
