package tier

import (
	golist "container/list"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// storeKey is the n-th key of a test.
func storeKey(n uint64) (k connector.StoreKey) {
	binary.LittleEndian.PutUint64(k[:], n+1)
	return k
}

// naive is a policy written down again without any of the ours: on plain Go lists and maps, deciding
// hit or miss for one access.
type naive interface{ access(k uint64) bool }

// hits runs a trace through an index and through a naive policy, which must agree on every access.
func hits(t *testing.T, name string, size int, trace []uint64) int {
	t.Helper()
	x := indexWithoutTwins(t, name, size, trace)
	ref := newNaive(name, size)
	n := 0
	for i, k := range trace {
		id, hit := x.Acquire(storeKey(k), true)
		if hit {
			n++
			x.Release(id)
		} else {
			id, _, err := x.Reserve(storeKey(k))
			if err != nil {
				t.Fatalf("access %d: %v", i, err)
			}
			x.Commit(id, storeKey(k))
		}
		if ref.access(k) != hit { // not require: there are millions
			t.Fatalf("%s of %d: access %d is a hit: %v, not so the naive one", name, size, i, hit)
		}
	}
	require.LessOrEqual(t, x.Len(), size)
	return n
}

// indexWithoutTwins makes an index whose seed gives the keys of a trace different marks: it takes one evicted key for another that has
// the same mark, which the naive policies do not.
func indexWithoutTwins(t *testing.T, name string, size int, trace []uint64) *keyIndex {
	t.Helper()
	for {
		x, err := newKeyIndex(size, name)
		require.NoError(t, err)
		keys := map[uint32]uint64{}
		if !slices.ContainsFunc(trace, func(k uint64) bool {
			s := storeKey(k)
			m := mark(x.table.hashOf(&s), 0)
			other, seen := keys[m]
			keys[m] = k
			return seen && other != k
		}) {
			return x
		}
	}
}

// zipf is a trace of n accesses to keys distributed with exponent s.
func zipf(seed uint64, keys, n int, s float64) []uint64 {
	cumulative := zipfWeights(keys, s)
	rng := rand.New(rand.NewPCG(seed, 0))
	trace := make([]uint64, n)
	for i := range trace {
		at, _ := slices.BinarySearch(cumulative, rng.Float64())
		trace[i] = uint64(min(at, keys-1))
	}
	return trace
}

func zipfWeights(keys int, s float64) []float64 {
	cumulative := make([]float64, keys)
	sum := 0.0
	for i := range cumulative {
		sum += math.Pow(float64(i+1), -s)
		cumulative[i] = sum
	}
	for i := range cumulative {
		cumulative[i] /= sum
	}
	return cumulative
}

// conversations is a trace of many conversations that take turns: each turn reads all blocks so far
// and adds some.
func conversations(seed uint64, people, turns int) []uint64 {
	rng := rand.New(rand.NewPCG(seed, 1))
	length := make([]uint64, people)
	var trace []uint64
	for range people * turns {
		who := rng.IntN(people)
		if rng.IntN(4) > 0 { // most turns come from those who talked lately
			who = who % max(1, people/5)
		}
		for b := range uint64(4) {
			trace = append(trace, b) // the system prompt
		}
		length[who] += 1 + uint64(rng.IntN(4))
		for b := range length[who] {
			trace = append(trace, uint64(who+1)<<32|b)
		}
	}
	return trace
}

func TestPoliciesAgreeWithNaiveOnes(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: nothing here runs beside anything else")
	}
	traces := map[string][]uint64{
		"zipf 0.8": zipf(1, 5000, 60000, 0.8), "zipf 1.0": zipf(2, 5000, 60000, 1.0), "conversations": conversations(3, 60, 12),
	}
	for name, trace := range traces {
		for _, policy := range []string{LRU, ARC, S3FIFO, FIFO} {
			for _, size := range []int{1, 2, 10, 50, 500, 4000} {
				n := hits(t, policy, size, trace)
				t.Logf("%s, %s of %d: %d of %d hits, %.2f%%, the same as the naive one", name, policy, size, n, len(trace), 100*float64(n)/float64(len(trace)))
			}
		}
	}
}

// On independent accesses the hit ratio of LRU is known: Che's approximation (IEEE JSAC 2002), which is
// good to a per mille.
func TestLRUHasTheHitRatioOfTheory(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: nothing here runs beside anything else")
	}
	const keys, size = 20000, 2000
	trace := zipf(4, keys, 600000, 0.8)
	x, err := newKeyIndex(size, LRU)
	require.NoError(t, err)
	hit := 0
	const warm = 100000
	for i, k := range trace {
		if id, ok := x.Acquire(storeKey(k), true); ok {
			x.Release(id)
			if i >= warm {
				hit++
			}
			continue
		}
		id, _, err := x.Reserve(storeKey(k))
		require.NoError(t, err)
		x.Commit(id, storeKey(k))
	}
	got := float64(hit) / float64(len(trace)-warm)
	want := che(keys, size, 0.8)
	t.Logf("measured %.4f, theory %.4f", got, want)
	require.InDelta(t, want, got, 0.005)
}

// che solves sum(1-exp(-p T)) = size for T and gives sum(p (1-exp(-p T))).
func che(keys, size int, s float64) float64 {
	cumulative := zipfWeights(keys, s)
	p := make([]float64, keys)
	for i := range p {
		p[i] = cumulative[i]
		if i > 0 {
			p[i] -= cumulative[i-1]
		}
	}
	filled := func(t float64) (n, hit float64) {
		for _, q := range p {
			present := -math.Expm1(-q * t)
			n, hit = n+present, hit+q*present
		}
		return n, hit
	}
	lo, hi := 0.0, 1e12
	for range 200 {
		mid := (lo + hi) / 2
		if n, _ := filled(mid); n < float64(size) {
			lo = mid
		} else {
			hi = mid
		}
	}
	_, hit := filled(lo)
	return hit
}

// Both adaptive policies withstand a scan that LRU does not: what is used again stays.
func TestScan(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: nothing here runs beside anything else")
	}
	var trace []uint64
	for round := range uint64(200) {
		for range 4 {
			for hot := range uint64(50) {
				trace = append(trace, hot)
			}
		}
		for once := range uint64(300) {
			trace = append(trace, 1000+round*300+once)
		}
	}
	ratio := map[string]float64{}
	for _, policy := range []string{LRU, ARC, S3FIFO} {
		ratio[policy] = float64(hits(t, policy, 100, trace)) / float64(len(trace))
	}
	t.Log(ratio)
	require.Greater(t, ratio[ARC], ratio[LRU])
	require.Greater(t, ratio[S3FIFO], ratio[LRU])
}

func newNaive(name string, size int) naive {
	switch name {
	case ARC:
		return &naiveARC{c: size, t1: newQueue(), t2: newQueue(), b1: newQueue(), b2: newQueue()}
	case S3FIFO:
		small := max(1, size/10)
		return &naiveS3{size: size, smallSize: small, s: newQueue(), m: newQueue(), g: newQueue(), freq: map[uint64]int{}}
	}
	return &naiveLRU{size: size, q: newQueue(), first: name == FIFO}
}

// queue is a list of keys, youngest first.
type queue struct {
	l  *golist.List
	at map[uint64]*golist.Element
}

func newQueue() *queue             { return &queue{golist.New(), map[uint64]*golist.Element{}} }
func (q *queue) has(k uint64) bool { return q.at[k] != nil }
func (q *queue) len() int          { return q.l.Len() }
func (q *queue) push(k uint64)     { q.at[k] = q.l.PushFront(k) }
func (q *queue) remove(k uint64)   { q.l.Remove(q.at[k]); delete(q.at, k) }
func (q *queue) pop() uint64       { k := q.l.Back().Value.(uint64); q.remove(k); return k }

type naiveLRU struct {
	size  int
	q     *queue
	first bool // in, first out
}

func (p *naiveLRU) access(k uint64) bool {
	hit := p.q.has(k)
	switch {
	case hit && p.first:
		return true
	case hit:
		p.q.remove(k)
	case p.q.len() == p.size:
		p.q.pop()
	}
	p.q.push(k)
	return hit
}

// naiveARC is figure 4 of the paper.
type naiveARC struct {
	c, p           int
	t1, t2, b1, b2 *queue
}

func (a *naiveARC) replace(inB2 bool) {
	if a.t1.len() > 0 && (a.t1.len() > a.p || inB2 && a.t1.len() == a.p) {
		a.b1.push(a.t1.pop())
	} else {
		a.b2.push(a.t2.pop())
	}
}

func (a *naiveARC) access(k uint64) bool {
	switch {
	case a.t1.has(k):
		a.t1.remove(k)
		a.t2.push(k)
		return true
	case a.t2.has(k):
		a.t2.remove(k)
		a.t2.push(k)
		return true
	case a.b1.has(k):
		a.p = min(a.c, a.p+max(1, a.b2.len()/a.b1.len()))
		a.replace(false)
		a.b1.remove(k)
		a.t2.push(k)
		return false
	case a.b2.has(k):
		a.p = max(0, a.p-max(1, a.b1.len()/a.b2.len()))
		a.replace(true)
		a.b2.remove(k)
		a.t2.push(k)
		return false
	}
	l1, all := a.t1.len()+a.b1.len(), a.t1.len()+a.t2.len()+a.b1.len()+a.b2.len()
	switch {
	case l1 == a.c && a.t1.len() < a.c:
		a.b1.pop()
		a.replace(false)
	case l1 == a.c:
		a.t1.pop()
	case all >= a.c:
		if all == 2*a.c {
			a.b2.pop()
		}
		a.replace(false)
	}
	a.t1.push(k)
	return false
}

// naiveS3 is algorithm 1 of the paper.
type naiveS3 struct {
	size, smallSize int
	s, m, g         *queue
	freq            map[uint64]int
}

func (p *naiveS3) access(k uint64) bool {
	if p.s.has(k) || p.m.has(k) {
		p.freq[k] = min(p.freq[k]+1, 3)
		return true
	}
	for p.s.len()+p.m.len() >= p.size {
		if p.s.len() >= p.smallSize {
			p.evictSmall()
		} else {
			p.evictMain()
		}
	}
	if p.g.has(k) {
		p.g.remove(k)
		p.m.push(k)
	} else {
		p.s.push(k)
	}
	p.freq[k] = 0
	return false
}

func (p *naiveS3) evictSmall() {
	for p.s.len() > 0 {
		k := p.s.pop()
		if p.freq[k] > 1 {
			p.freq[k] = 0
			p.m.push(k)
			if p.s.len() < p.smallSize {
				return
			}
			continue
		}
		delete(p.freq, k)
		if ghosts := p.size - p.smallSize; ghosts > 0 {
			if p.g.len() == ghosts {
				p.g.pop()
			}
			p.g.push(k)
		}
		return
	}
}

func (p *naiveS3) evictMain() {
	for p.m.len() > 0 {
		k := p.m.pop()
		if p.freq[k] > 0 {
			p.freq[k]--
			p.m.push(k)
			continue
		}
		delete(p.freq, k)
		return
	}
	p.evictSmall()
}
