package remote

import (
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

const (
	absentTime = time.Minute // from the question to the save: a long prompt is computed
	absentMost = 1 << 16     // keys
)

// absent remembers keys that the server was asked for and did not have. An engine asks for the blocks of a prompt
// before it computes and saves them, so that a save need not ask again, which takes a round trip. Should another
// engine have saved a block meanwhile, it is written twice.
type absent struct {
	mu   sync.Mutex
	keys map[connector.StoreKey]time.Time // when they were asked for
}

// note takes down the keys of a question that were not there.
func (a *absent) note(keys []connector.StoreKey, present map[connector.StoreKey]bool, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.keys == nil || len(a.keys)+len(keys) > absentMost { // they were for nothing, or their time is over
		a.keys = map[connector.StoreKey]time.Time{}
	}
	for _, k := range keys[:min(len(keys), absentMost)] {
		if present[k] {
			delete(a.keys, k)
		} else {
			a.keys[k] = now
		}
	}
}

// take reports whether a key is known not to be there, and forgets it.
func (a *absent) take(k connector.StoreKey, now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	asked, ok := a.keys[k]
	delete(a.keys, k)
	return ok && now.Sub(asked) < absentTime
}
