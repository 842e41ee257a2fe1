package multiconnector

import (
	"slices"
	"sync"
	"time"
)

// saving is one Save on its way to the children.
type saving struct {
	*worker
	wide     bool // a child stores that consumers reach
	keeps    bool // a child keeps finished blocks for consumers
	promised func()

	mu      sync.Mutex
	stored  []bool // by block
	errs    []error
	running map[int]bool // children that have not returned; true: they have outlived their patience
	told    bool         // what a ticket promises is stored, or will not be told
	timer   *time.Timer  // of the patience, once nothing else is waited for
}

func newSaving(w *worker, shares []share, stored []bool, promised func()) *saving {
	p := &saving{worker: w, promised: promised, stored: stored, wide: w.reach(shares), running: map[int]bool{}}
	for i := range w.children {
		p.keeps = p.keeps || w.children[i].keeps() && w.children[i].Role.Saves()
	}
	for _, s := range shares {
		p.running[s.child] = false
	}
	return p
}

// returned notes that a child has. note is called with mu held.
func (p *saving) returned(child int, err error, note func()) {
	p.mu.Lock()
	if p.running[child] {
		p.late(child, -1)
	}
	delete(p.running, child)
	if err != nil {
		p.errs = append(p.errs, p.children[child].named(err))
		p.told = p.told || p.children[child].keeps()
	}
	note()
	p.mu.Unlock()
	p.look()
}

// look calls promised when the time has come.
func (p *saving) look() {
	p.mu.Lock()
	due := p.due()
	p.mu.Unlock()
	if due {
		p.promised()
	}
}

// due reports, once, that what a ticket promises is stored and that only late children go on. Where others do,
// it starts their time. The caller holds mu.
func (p *saving) due() bool {
	if p.told || len(p.running) == 0 || !p.ready() {
		return false
	}
	patience := time.Duration(0)
	for child := range p.running {
		if p.late(child, 0) == 0 {
			patience = max(patience, p.children[child].Patience)
		}
	}
	if patience == 0 {
		p.told = true
		return true
	}
	if p.timer == nil {
		p.timer = time.AfterFunc(patience, p.outlived)
	}
	return false
}

// ready reports whether everything that a ticket promises is stored. The caller holds mu.
func (p *saving) ready() bool {
	if !p.keeps {
		return !slices.Contains(p.stored, false)
	}
	for child := range p.running {
		if p.children[child].keeps() {
			return false
		}
	}
	return true
}

// outlived marks the children that have not returned in time.
func (p *saving) outlived() {
	p.mu.Lock()
	for child, late := range p.running {
		if !late {
			p.running[child] = true
			p.late(child, 1)
		}
	}
	p.mu.Unlock()
	p.look()
}

// end stops the clock. Every child has returned.
func (p *saving) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.told = true
	if p.timer != nil {
		p.timer.Stop()
	}
}

// late adds to the saves of a child that have outlived its patience and gives their number.
func (w *worker) late(child, more int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.overdue[child] += more
	return w.overdue[child]
}
