package lookupbuffer

import (
	"fmt"
	"math/bits"
	"sync"
	"syscall"

	"github.com/kvport/kvport/connector"
)

// Pool is host memory for blocks that a [Memory] has no room for. It is a buddy allocator over pages that
// the system provides when they are first written and gets back at Close. It is safe for concurrent use.
type Pool struct {
	mu   sync.Mutex
	data []byte // nil after Close
	free [poolOrders][]int
	at   map[int]int // order of the free piece that begins at an offset
	used int64
}

const (
	poolLeast  = 512 // bytes of the smallest piece
	poolOrders = 40
)

// NewPool makes a pool of size bytes, rounded down to a multiple of 512. It takes address space at once,
// and memory only as blocks come.
func NewPool(size int64) (*Pool, error) {
	size -= size % poolLeast
	if size < poolLeast {
		return nil, fmt.Errorf("pool of %d bytes: %w", size, connector.ErrIncompatible)
	}
	data, err := syscall.Mmap(-1, 0, int(size), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON|syscall.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("pool of %d bytes: %w", size, err)
	}
	p := &Pool{data: data, at: map[int]int{}}
	for from := 0; from < len(data); { // the largest pieces that are aligned and fit
		order := bits.Len(uint(len(data)-from)/poolLeast) - 1
		if from > 0 {
			order = min(order, bits.TrailingZeros(uint(from)/poolLeast))
		}
		p.give(from, order)
		from += poolLeast << order
	}
	return p, nil
}

func (p *Pool) give(from, order int) {
	p.free[order] = append(p.free[order], from)
	p.at[from] = order
}

// piece is memory of a pool.
type piece struct {
	data        []byte
	from, order int
}

// alloc returns n bytes of memory. ok is false if there is no room or the pool is closed.
func (p *Pool) alloc(n int) (_ piece, ok bool) {
	want := 0
	for poolLeast<<want < n {
		want++
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for order := want; order < poolOrders && p.data != nil; order++ {
		from, found := p.pop(order)
		if !found {
			continue
		}
		for order > want {
			order--
			p.give(from+poolLeast<<order, order)
		}
		p.used += poolLeast << want
		return piece{p.data[from : from+n : from+n], from, want}, true
	}
	return piece{}, false
}

// pop takes a free piece of an order. It skips pieces that have been merged into larger ones.
func (p *Pool) pop(order int) (from int, ok bool) {
	for list := p.free[order]; len(list) > 0; list = p.free[order] {
		from = list[len(list)-1]
		p.free[order] = list[:len(list)-1]
		if o, is := p.at[from]; is && o == order {
			delete(p.at, from)
			return from, true
		}
	}
	return 0, false
}

// release gives memory back and merges it with its free neighbours.
func (p *Pool) release(m piece) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.data == nil {
		return
	}
	p.used -= poolLeast << m.order
	from, order := m.from, m.order
	for {
		buddy := from ^ poolLeast<<order
		if o, is := p.at[buddy]; !is || o != order {
			break
		}
		delete(p.at, buddy)
		from, order = min(from, buddy), order+1
	}
	p.give(from, order)
}

// Used is how many bytes blocks take, rounded up to the pool's pieces.
func (p *Pool) Used() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}

// Size is how many bytes the pool has.
func (p *Pool) Size() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return int64(len(p.data))
}

// close gives the memory back to the system. Nobody may use it any more.
func (p *Pool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	data := p.data
	p.data = nil
	if data == nil {
		return nil
	}
	return syscall.Munmap(data)
}
