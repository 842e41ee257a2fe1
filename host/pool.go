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
	idleAfter  = time.Minute            // after which slots that nobody needs are given back: a user who answers sooner finds them lent
)

// pool are the empty slots that the plugin has lent one rank ahead of saves, and what it has to hear about those that it lent before
// (rules PLACE-29 and PLACE-31 to PLACE-35).
type pool struct {
	low  chan struct{} // there are few slots
	late chan struct{} // the plugin has to hear something
	busy chan struct{} // full while the plugin is asked

	mu      sync.Mutex
	most    int // that the plugin lends; 0: none
	size    int // blocks of a save, of the largest ones of late
	lent    []place.Loan
	out     int      // slots that were taken, and of which nobody has said yet what became of them
	back    []uint64 // serials of slots that are not wanted any more
	written []connector.Block
	round   uint64 // what was lent in a former one is not used
	idle    bool   // nothing was saved since the last look
	failed  bool   // the last call was not answered, or with an error
}

func newPool() *pool {
	return &pool{low: make(chan struct{}, 1), late: make(chan struct{}, 1), busy: make(chan struct{}, 1)}
}

// open begins a life of the plugin, which lends that many slots at a time. It knows nothing of what was lent before. 0: it is about to open, and
// nothing was saved in it.
func (p *pool) open(most int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.round++
	p.most, p.lent, p.out, p.back, p.written, p.failed = most, nil, 0, nil, nil, false
	if most == 0 {
		p.size = 0
	}
	p.signal()
}

// void gives every slot back, and those that are being written or asked for when they come.
func (p *pool) void() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.round++
	p.release()
	p.signal()
}

// release gives every slot back. The caller holds mu.
func (p *pool) release() {
	p.unwanted(p.lent)
	p.lent = nil
}

// unwanted notes slots that are to be given back. The caller holds mu.
func (p *pool) unwanted(loans []place.Loan) {
	for _, l := range loans {
		p.back = append(p.back, l.Serial)
	}
}

// giveBack is unwanted for whoever does not hold mu.
func (p *pool) giveBack(loans []place.Loan) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unwanted(loans)
	p.signal()
}

// rest gives slots back that nobody has needed for a while: they are room that nothing is kept in.
func (p *pool) rest() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.idle {
		p.size = 0
		p.release()
		p.signal()
	}
	p.idle = true
}

// target is how many slots there should be beside those that are being written: none before anything is saved. The caller holds mu.
func (p *pool) target() int {
	if p.size == 0 {
		return 0
	}
	return max(0, min(p.most-p.out, max(4*p.size, leastLent)))
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

// wake is signal for whoever does not hold mu.
func (p *pool) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.signal()
}

// never says whether that many slots are more than are ever lent.
func (p *pool) never(n int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return n > p.most
}

// take gives slots for a save of n blocks; nil if there are not enough.
func (p *pool) take(n int) (loans []place.Loan, round uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n > p.most { // it goes by message, and says nothing about those that do not
		return nil, 0
	}
	p.idle = false
	p.size = max(n, p.size-(p.size+15)/16)
	if n <= len(p.lent) {
		loans, p.lent = slices.Clone(p.lent[:n]), p.lent[n:]
		p.out += n
	}
	p.signal()
	return loans, p.round
}

// put notes what has become of n slots that were taken: some hold blocks now, some are as empty as they were. What is neither is not the
// host's any more.
func (p *pool) put(n int, round uint64, written []connector.Block, empty []place.Loan) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out -= n
	p.wrote(written)
	p.restore(round, empty)
	p.signal()
}

// wrote notes blocks that were written. Of a plugin that does not answer the oldest are forgotten: it finds them itself. The caller holds mu.
func (p *pool) wrote(blocks []connector.Block) {
	p.written = append(p.written, blocks...)
	p.written = p.written[max(0, len(p.written)-wire.MaxPlaced):]
}

// restore takes slots that are lent, or are to be given back. The caller holds mu.
func (p *pool) restore(round uint64, loans []place.Loan) {
	if round == p.round {
		p.lent = append(p.lent, loans...)
		return
	}
	p.unwanted(loans)
}

// wait waits until the plugin has to be called, and gives back what nobody needs at each look; false: ctx has ended.
func (p *pool) wait(ctx context.Context, look <-chan time.Time) bool {
	for told := false; !told; {
		select {
		case <-ctx.Done():
			return false
		case <-p.low:
			return true
		case <-p.late:
			told = true
		case <-look:
			p.rest()
		}
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
	for _, said := range []chan struct{}{p.low, p.late} {
		select {
		case <-said:
		default:
		}
	}
	return l, p.round
}

// unheard takes back what the plugin was told: the call has failed. Serials that it has heard nevertheless mean nothing to it any more.
func (p *pool) unheard(l *connector.Lending) {
	p.mu.Lock()
	defer p.mu.Unlock()
	later := p.written
	p.failed = true
	p.written, p.back = l.Written, append(l.Back, p.back...)
	p.wrote(later)
	p.signal()
}

// hears says whether the plugin has answered the last call: reads that it does not learn of are not told again.
func (p *pool) hears() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.failed
}

// answered takes what the plugin has lent. The error says that no honest plugin lends that.
func (p *pool) answered(round uint64, want int, loan *connector.Loan) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed = false
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
