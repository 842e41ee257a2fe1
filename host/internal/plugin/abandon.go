package plugin

import (
	"errors"
	"sync"
)

// ErrAbandoned says that a fence did not come back. The host goes on without what it guards: memory is lost,
// not the service.
var ErrAbandoned = errors.New("a process to which it gave its fence may write its memory for ever")

// AbandonedMemory is what former lives of a plugin have left behind.
type AbandonedMemory struct {
	mu      sync.Mutex
	fences  []*Fence
	spoiled bool // since the memory of the next life was made
}

// Add takes a fence over. Its descriptors stay open: the number of its pipe must not come back, since locks
// of other lives are found by it.
func (a *AbandonedMemory) Add(f *Fence) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fences, a.spoiled = append(a.fences, f), true
}

// Count says how many lives have left memory behind.
func (a *AbandonedMemory) Count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.fences)
}

// Spoil says whether memory was left behind since it was last asked.
func (a *AbandonedMemory) Spoil(yes bool) (was bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	was, a.spoiled = a.spoiled, yes
	return was
}

// Close gives the descriptors back.
func (a *AbandonedMemory) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range a.fences {
		f.close()
	}
	a.fences = nil
}
