package agent

import (
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// maxDoubtful bounds the pages that are remembered.
const maxDoubtful = 1 << 16

// doubt remembers pages of which the store had nothing usable, until they are stored again: its word that they are there
// is not taken.
type doubt struct {
	lasts time.Duration // for how long pages are hidden

	mu    sync.Mutex
	pages map[connector.BlockKey]time.Time // until when they are hidden: to an engine they are not there
	more  bool                             // there were more than are remembered
}

func newDoubt(lasts time.Duration) *doubt {
	return &doubt{lasts: lasts, pages: map[connector.BlockKey]time.Time{}}
}

// learn notes which pages the store has and which not. hide: it may go on to say that it has those, and whoever believes
// that waits for a load that fails. After a while it is asked again, since somebody else may have stored them.
func (d *doubt) learn(good, bad []connector.BlockKey, hide bool) {
	var until time.Time
	if hide {
		until = time.Now().Add(d.lasts)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.pages)+len(bad) > maxDoubtful { // some are forgotten, and everything is in doubt
		d.more = true
		clear(d.pages)
	}
	for _, k := range bad {
		if _, known := d.pages[k]; hide || !known { // a put that fails shows nothing about what is there
			d.pages[k] = until
		}
	}
	for _, k := range good {
		delete(d.pages, k)
	}
}

// certain says whether the store can be believed about these pages.
func (d *doubt) certain(keys []connector.BlockKey) bool {
	d.mu.Lock()
	more := d.more
	d.mu.Unlock()
	return !more && !d.any(keys)
}

// any says whether a put must replace one of these pages where the store has it.
func (d *doubt) any(keys []connector.BlockKey) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.ContainsFunc(keys, func(k connector.BlockKey) bool {
		_, doubtful := d.pages[k]
		return doubtful
	})
}

// before counts the leading pages that are not hidden.
func (d *doubt) before(keys []connector.BlockKey) int {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, k := range keys {
		if d.pages[k].After(now) {
			return i
		}
	}
	return len(keys)
}
