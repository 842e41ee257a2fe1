package vllmtrace

import (
	"fmt"
	"slices"
)

// Rule checks one numbered invariant of vLLM's connector API.
type Rule struct {
	Number int
	Name   string // of the function, as docs/spec/vllm-invariants.md lists it
	check  func(s *state, c *Call) error
}

// Violation is one call that breaks one rule.
type Violation struct {
	Number int
	At     int // index into Log.Calls
	Err    error
}

// String says what is wrong and where.
func (v Violation) String() string {
	return fmt.Sprintf("invariant %d broken by call %d: %v", v.Number, v.At, v.Err)
}

// Check judges a log by every rule. Each call is seen by all rules before it takes effect.
func Check(log *Log) []Violation {
	var out []Violation
	s := newState(log)
	rules := Rules()
	for i := range log.Calls {
		c := &log.Calls[i]
		for _, r := range rules {
			if err := r.check(s, c); err != nil {
				out = append(out, Violation{Number: r.Number, At: i, Err: fmt.Errorf("%s: %w", c.Kind, err)})
			}
		}
		s.apply(c)
	}
	return out
}

// state is what the calls so far have brought about.
type state struct {
	async     bool
	blockSize int
	inits     map[Side]*InitCall
	register  *RegisterCall
	down      map[Side]bool

	step     int
	meta     *MetaCall // of the current step
	requests map[string]*request
	loading  map[int]string          // blocks that a load may write, and for whom
	saving   map[int]map[string]bool // blocks that a save may read, and for whom
	changed  int                     // counts what may change the answer of a lookup
	places   map[string]place        // of every hash

	worker workerState
	recv   map[string]bool // reported by the worker, not yet by the scheduler side
	send   map[string]bool
}

// place is where in its chain a hash stands.
type place struct {
	index  int
	parent string
}

// workerState is what the worker side's calls of one step have brought about.
type workerState struct {
	preempted, bound, saved bool
	layers                  int
}

// request is what is known of one request.
type request struct {
	ended, told bool
	owed        bool // its blocks are kept until finished_sending
	sent        bool
	both        bool // it ended while a load was running and its blocks were kept
	running     bool
	loaded      bool // an asynchronous load has succeeded
	emptied     bool // a load has left no valid token
	failedAt    int  // valid tokens after a failed load; -1: none has failed
	from        int  // tokens computed before the current step
	table       []int
	fresh       []int // blocks of the table that were not taken from the cache
	hashes      map[int]string
	lookup      *LookupCall
	lookupAt    int // state.changed then
	alloc       *AllocCall
	claimed     bool // the load of alloc has begun
	load        *LoadRef
}

func newState(log *Log) *state {
	return &state{
		async: log.Async, inits: map[Side]*InitCall{}, down: map[Side]bool{}, requests: map[string]*request{},
		loading: map[int]string{}, saving: map[int]map[string]bool{}, places: map[string]place{},
		recv: map[string]bool{}, send: map[string]bool{}, meta: &MetaCall{},
	}
}

// of is what is known of a request; nothing if it never arrived.
func (s *state) of(id string) *request {
	if r := s.requests[id]; r != nil {
		return r
	}
	return &request{failedAt: -1}
}

func (s *state) apply(c *Call) {
	switch b := c.Body.(type) {
	case *InitCall:
		s.inits[c.Side], s.blockSize = b, b.BlockSize
	case *RegisterCall:
		s.register = b
	case *RequestView:
		s.requests[b.ID] = &request{failedAt: -1, hashes: map[int]string{}}
	case *LookupCall:
		r := s.of(b.Request.ID)
		r.lookup, r.lookupAt, r.alloc = b, s.changed, nil
	case *AllocCall:
		s.applyAlloc(b)
	case *MetaCall:
		s.applyMeta(c.Step, b)
	case *ResultsCall:
		s.applyResults(b)
	case *OutputCall:
		s.applyOutput(b)
	case *FinishedCall:
		r := s.of(b.Request.ID)
		r.ended, r.owed, r.running = true, b.Delay, false
		r.both = b.Delay && r.load != nil
	case *BlocksCall:
		if c.Kind == SaveOver {
			s.endSave(b)
		}
	default:
		s.applyWorker(c)
	}
}

func (s *state) endSave(b *BlocksCall) {
	for _, block := range b.Blocks {
		delete(s.saving[block], b.Request)
	}
	s.changed++
}

// applyWorker takes the calls that frame a step of the worker side.
func (s *state) applyWorker(c *Call) {
	switch c.Kind {
	case Preemptions:
		s.worker.preempted = true
	case Bind:
		s.worker.bound = true
	case WaitLayer:
		s.worker.layers++
	case WaitSave:
		s.worker.saved = true
		for _, v := range s.meta.Saves {
			if s.async {
				s.pinSave(v)
			}
		}
	case Clear:
		s.worker = workerState{}
	case Shutdown:
		s.down[c.Side] = true
	default: // nothing changes
	}
}

func (s *state) pinSave(v SaveRef) {
	if s.saving[v.Block] == nil {
		s.saving[v.Block] = map[string]bool{}
	}
	s.saving[v.Block][v.Request] = true
}

func (s *state) applyAlloc(b *AllocCall) {
	r := s.of(b.Request.ID)
	known := len(r.table)
	if r.lookup != nil && r.alloc == nil {
		known, r.fresh = r.lookup.Computed/s.blockSize, nil
	}
	r.table = nil
	if len(b.Blocks) > 0 {
		r.table = slices.Clone(b.Blocks[0])
	}
	r.fresh = append(r.fresh, r.table[min(max(known, 0), len(r.table)):]...)
	r.alloc, r.claimed, r.failedAt = b, false, -1
	r.running = b.External == 0
}

func (s *state) applyMeta(step int, b *MetaCall) {
	s.step, s.meta = step, b
	for _, id := range b.Preempted {
		r := s.of(id)
		r.running, r.loaded, r.table, r.fresh, r.alloc, r.lookup = false, false, nil, nil, nil, nil
		s.changed++
	}
	for _, n := range b.New {
		s.of(n.ID).from = n.Computed
	}
	for _, n := range b.Cached {
		r := s.of(n.ID)
		r.from = n.Computed
		if !n.Resumed && len(n.NewBlocks) > 0 {
			r.table = append(r.table, n.NewBlocks[0]...)
			r.fresh = append(r.fresh, n.NewBlocks[0]...)
		}
	}
	for i := range b.Loads {
		l := &b.Loads[i]
		r := s.of(l.Request)
		r.load, r.claimed, r.loaded = l, true, false
		for j, block := range l.Blocks {
			s.loading[block] = l.Request
			s.nameBlock(l.Request, block, l.Hashes[j])
		}
	}
	for _, v := range b.Saves {
		s.nameBlock(v.Request, v.Block, v.Hash)
	}
	for _, id := range b.Finished {
		s.of(id).told = true
	}
}

// nameBlock notes the hash of a request's block, if it does not contradict an earlier one.
func (s *state) nameBlock(id string, block int, hash string) {
	r := s.of(id)
	i := slices.Index(r.table, block)
	if i < 0 || r.hashes == nil {
		return
	}
	r.hashes[i] = hash
	if _, known := s.places[hash]; !known {
		s.places[hash] = place{index: i, parent: r.hashes[i-1]}
	}
}

func (s *state) applyResults(b *ResultsCall) {
	for _, id := range b.Recving {
		s.recv[id] = true
	}
	for _, id := range b.Sending {
		s.send[id] = true
	}
}

func (s *state) applyOutput(b *OutputCall) {
	if b.Saved > 0 || len(b.Recving)+len(b.Invalid)+len(b.Failed) > 0 {
		s.changed++
	}
	for _, id := range b.Recving {
		delete(s.recv, id)
		s.endLoad(id, b)
	}
	for _, id := range b.Sending {
		delete(s.send, id)
		r := s.of(id)
		r.owed, r.sent = false, true
	}
}

// endLoad notes how the load of a request went.
func (s *state) endLoad(id string, b *OutputCall) {
	r := s.of(id)
	if r.load == nil {
		return
	}
	valid := len(r.load.Blocks)
	for i, block := range r.load.Blocks {
		delete(s.loading, block)
		if slices.Contains(b.Invalid, block) || slices.Contains(b.Failed, id) {
			valid = min(valid, i)
		}
	}
	if valid == len(r.load.Blocks) {
		r.loaded = true
	} else {
		r.failedAt = valid * s.blockSize
		if r.lookup != nil && !slices.Contains(b.Failed, id) {
			r.failedAt += r.lookup.Computed
		}
		if r.failedAt == 0 {
			r.emptied, r.table, r.fresh, r.alloc = true, nil, nil, nil
		}
	}
	r.load = nil
}

// taken are the blocks that a call gives to a request and that did not come from the cache; all are
// the blocks of its table.
func (s *state) taken(c *Call) (id string, fresh, all []int) {
	b, ok := c.Body.(*AllocCall)
	if !ok || len(b.Blocks) == 0 {
		return "", nil, nil
	}
	r := s.of(b.Request.ID)
	known := len(r.table)
	if r.lookup != nil && r.alloc == nil {
		known = max(r.lookup.Computed/s.blockSize, 0)
	}
	return b.Request.ID, b.Blocks[0][min(known, len(b.Blocks[0])):], b.Blocks[0]
}
