package host

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/internal/wire"
)

const (
	leastLent  = 32                     // slots that a rank would like to have, however small its saves are
	tellWithin = 100 * time.Millisecond // after which the plugin hears what was written, if nothing has to be asked before
)

// pool are the empty slots that the plugin has lent one rank ahead of saves, and what it has to hear about those that it lent before
// (rules PLACE-29 to PLACE-34).
type pool struct {
	low  chan struct{} // there are few slots
	late chan struct{} // the plugin has to hear something

	mu      sync.Mutex
	most    int // that the plugin lends; 0: none
	size    int // blocks of a save, of the largest ones of late
	lent    []place.Loan
	back    []uint64 // serials of slots that are not wanted any more
	written []connector.Block
	round   uint64 // what was lent in a former one is not used
}

func newPool() *pool {
	return &pool{low: make(chan struct{}, 1), late: make(chan struct{}, 1)}
}

// open begins a life of the plugin, which lends that many slots at a time. It knows nothing of what was lent before.
func (p *pool) open(most int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.round++
	p.most, p.lent, p.back, p.written = most, nil, nil, nil
	p.signal()
}

// void gives every slot back, and those that are being written or asked for when they come.
func (p *pool) void() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.round++
	for _, l := range p.lent {
		p.back = append(p.back, l.Serial)
	}
	p.lent = nil
	p.signal()
}

// target is how many slots there should be: none before anything is saved. The caller holds mu.
func (p *pool) target() int {
	if p.size == 0 {
		return 0
	}
	return min(p.most, max(4*p.size, leastLent))
}

// signal wakes whoever calls the plugin, if there is something to say. The caller holds mu.
func (p *pool) signal() {
	to := p.late
	switch {
	case p.most == 0:
		return
	case 2*len(p.lent) < p.target():
		to = p.low
	case len(p.written)+len(p.back) == 0:
		return
	}
	select {
	case to <- struct{}{}:
	default:
	}
}

// take gives slots for a save of n blocks; nil if there are not enough.
func (p *pool) take(n int) (loans []place.Loan, round uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n > p.most {
		return nil, 0
	}
	p.size = max(n, p.size-(p.size+15)/16)
	if n <= len(p.lent) {
		loans, p.lent = slices.Clone(p.lent[:n]), p.lent[n:]
	}
	p.signal()
	return loans, p.round
}

// put notes what has become of slots that were taken: some hold blocks now, some are as empty as they were. What is neither is not the host's
// any more.
func (p *pool) put(round uint64, written []connector.Block, empty []place.Loan) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.written = append(p.written, written...)
	p.written = p.written[max(0, len(p.written)-wire.MaxPlaced):] // of a plugin that does not answer; it finds them itself
	p.restore(round, empty)
	p.signal()
}

// restore takes slots that are lent, or are to be given back. The caller holds mu.
func (p *pool) restore(round uint64, loans []place.Loan) {
	if round == p.round {
		p.lent = append(p.lent, loans...)
		return
	}
	for _, l := range loans {
		p.back = append(p.back, l.Serial)
	}
}

// wait waits until the plugin has to be called; false: ctx has ended.
func (p *pool) wait(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-p.low:
		return true
	case <-p.late:
	}
	select {
	case <-ctx.Done():
		return false
	case <-p.low:
	case <-time.After(tellWithin):
	}
	return true
}

// ask is what the plugin is told and asked. It is as if it had heard that, until unheard.
func (p *pool) ask() (l connector.Lending, round uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l = connector.Lending{Written: p.written, Back: p.back, Want: max(0, p.target()-len(p.lent))}
	p.written, p.back = nil, nil
	return l, p.round
}

// unheard takes back what the plugin was told: the call has failed. Serials that it has heard nevertheless mean nothing to it any more.
func (p *pool) unheard(l *connector.Lending) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.written, p.back = append(l.Written, p.written...), append(l.Back, p.back...)
	p.signal()
}

// answered takes what the plugin has lent. The error says that no honest plugin lends that.
func (p *pool) answered(round uint64, want int, loan *connector.Loan) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(loan.Slots) > want {
		return fmt.Errorf("%d slots are lent, %d were wanted", len(loan.Slots), want)
	}
	loans := make([]place.Loan, len(loan.Slots))
	have := map[place.Slot]bool{}
	for _, l := range p.lent {
		have[l.Slot] = true
	}
	for i, s := range loan.Slots {
		if have[place.Slot(s)] {
			return &place.RefusalError{Slot: place.Slot(s), Reason: place.LentTwice}
		}
		have[place.Slot(s)] = true
		loans[i] = place.Loan{Slot: place.Slot(s), Serial: loan.Serial + uint64(i)}
	}
	p.restore(round, loans)
	return nil
}
