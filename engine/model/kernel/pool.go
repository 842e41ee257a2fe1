package kernel

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// pool is a fork-join pool: a step has some two hundred joins a few microseconds apart, so a worker spins
// for a moment before it parks. The caller works too and never waits for a worker that has not begun.
type pool struct {
	workers []worker
	job     atomic.Pointer[job]
	serial  atomic.Uint32 // counts jobs
	closed  atomic.Bool
	done    sync.WaitGroup
}

type worker struct {
	wake   chan struct{} // holds one token
	parked atomic.Bool
	_      [48]byte // workers' flags on different cache lines
}

type job struct {
	run      func(thread, from, to int)
	n, grain int
	next     atomic.Int64 // first index that nobody took
	left     atomic.Int64 // indexes not done
}

// spins is how many loads a worker waits before it parks: a few microseconds. More starves small machines.
const spins = 4000

func newPool(threads int) *pool {
	p := &pool{workers: make([]worker, threads-1)}
	for i := range p.workers {
		p.workers[i].wake = make(chan struct{}, 1)
		p.done.Go(func() { p.work(i) })
	}
	return p
}

func (p *pool) work(i int) {
	seen := uint32(0)
	for {
		p.await(&p.workers[i], seen)
		if p.closed.Load() {
			return
		}
		seen = p.serial.Load()
		if j := p.job.Load(); j != nil {
			j.work(i + 1)
		}
	}
}

// await returns when a job after seen is there.
func (p *pool) await(w *worker, seen uint32) {
	for range spins {
		if p.serial.Load() != seen {
			return
		}
	}
	w.parked.Store(true)
	if p.serial.Load() == seen {
		<-w.wake
	}
	w.parked.Store(false)
}

func (j *job) work(thread int) {
	for {
		from := int(j.next.Add(int64(j.grain))) - j.grain
		if from >= j.n {
			return
		}
		to := min(from+j.grain, j.n)
		j.run(thread, from, to)
		j.left.Add(int64(from - to))
	}
}

func (p *pool) run(n, grain int, f func(thread, from, to int)) {
	if len(p.workers) == 0 || n <= grain {
		f(0, 0, n)
		return
	}
	j := &job{run: f, n: n, grain: grain}
	j.left.Store(int64(n))
	p.job.Store(j)
	p.publish()
	j.work(0)
	for k := 0; j.left.Load() != 0; k++ {
		if k > spins {
			runtime.Gosched()
		}
	}
	p.job.Store(nil) // let the garbage collector have it
}

// publish makes workers look. A worker that parks at this moment sees the new serial or gets a token; a
// token too many makes it look once more.
func (p *pool) publish() {
	p.serial.Add(1)
	for i := range p.workers {
		if w := &p.workers[i]; w.parked.Load() {
			select {
			case w.wake <- struct{}{}:
			default:
			}
		}
	}
}

func (p *pool) close() {
	p.closed.Store(true)
	p.publish()
	p.done.Wait()
}
