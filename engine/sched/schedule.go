package sched

import (
	"slices"

	"github.com/kvport/kvport/connector"
)

// Chunk is a run of tokens of one request to be computed. The slices belong to the scheduler and are
// valid until Commit.
type Chunk struct {
	Request connector.RequestID
	Tokens  []int32
	Start   int                   // position of the first
	Blocks  [][]connector.BlockID // by group; -1 where a block is not needed any more
	Sample  bool                  // the token after the last one is wanted
	Early   bool                  // the KV before it is still being loaded, layer by layer

	seq *seq
}

// Schedule plans one step: chunks for the model, and what the host must know before they are
// computed (nil if nothing). After chunks were computed Commit or Fail must follow. Without chunks
// there is nothing to do until something happens, or until Questions are answered.
func (s *Scheduler) Schedule() ([]Chunk, *connector.Step) {
	s.chunks = s.chunks[:0]
	budget := s.cfg.MaxBatchedTokens
	for _, r := range slices.Clone(s.running) { // decodes; preemption shortens the list meanwhile
		if r.state == running && r.todo() == 1 && budget > 0 && s.grow(r) {
			budget -= s.plan(r, budget)
		}
	}
	for _, r := range s.running { // prefills
		if r.todo() > 1 && budget > 0 {
			budget -= s.plan(r, budget)
		}
	}
	s.overlap(s.admit(budget))
	return s.chunks, s.takeStep()
}

// plan adds as much of a request to the step as budget allows and returns how much that is.
func (s *Scheduler) plan(r *seq, budget int) int {
	n := s.chunk(r, r.computed, budget, false)
	if full := (r.computed + n) / s.cfg.BlockTokens; s.cfg.LayerWise && s.saves(r, full) {
		s.step.Computing = append(s.step.Computing, s.save(r, full))
		r.handed = full
	}
	return n
}

// chunk adds a request's tokens from a position on to the step, as many as budget allows, and returns how many.
func (s *Scheduler) chunk(r *seq, from, budget int, early bool) int {
	end := min(len(r.tokens), from+budget)
	s.chunks = append(s.chunks, Chunk{
		Request: r.ID, Tokens: r.tokens[from:end], Start: from, Blocks: r.table, Sample: end == len(r.tokens), Early: early, seq: r,
	})
	return end - from
}

// join puts a request that has its blocks into the batch.
func (s *Scheduler) join(r *seq) {
	s.queue, s.running = remove(s.queue, r), insert(s.running, r)
	r.state = running
}

// grow gives a running request the block its next token needs. It preempts newer requests for it,
// unless blocks come back on their own: then, or when the request itself is the newest, it returns
// false.
func (s *Scheduler) grow(r *seq) bool {
	for s.missing(r) > s.pool.Available() {
		if s.pool.Settling() > 0 {
			return false
		}
		victim := s.newest()
		s.preempt(victim)
		if victim == r {
			return false
		}
	}
	s.allocate(r)
	return true
}

// newest is the youngest request that can lose its blocks: one that is being loaded cannot.
func (s *Scheduler) newest() *seq {
	victim := s.running[len(s.running)-1]
	for _, r := range s.queue {
		if r.state == ready && r.arrival > victim.arrival {
			victim = r
		}
	}
	return victim
}

// preempt takes a request's blocks away. It starts over as if it had just arrived with the tokens it
// has by now; sampling is a function of seed and position, so it goes on as it would have.
func (s *Scheduler) preempt(r *seq) {
	s.stats.Preemptions++
	s.release(r)
	s.running = remove(s.running, r)
	if r.state == running {
		s.queue = insert(s.queue, r)
	}
	r.state, r.asked = waiting, -1
	if s.cfg.Role != 0 {
		s.step.Preempted = append(s.step.Preempted, r.ID)
	}
}

// admit brings queued requests into the batch, in order of arrival, while there are places, blocks
// and tokens left. A request that must be asked about first, or whose answer was Later, is passed
// over; one that does not fit keeps those behind it waiting, so that it gets its turn. A cache query needs no place. It
// returns what is left of the budget.
func (s *Scheduler) admit(budget int) (left int) {
	full := s.slots() == 0
	for _, r := range slices.Clone(s.queue) {
		switch {
		case r.Query:
			s.tell(r)
			continue
		case budget == 0:
			continue
		case r.state == ready && len(s.running) < s.cfg.MaxSeqs:
		case r.state != waiting || r.match.Later || full:
			continue
		case s.cfg.Groups*s.blocksFor(len(r.tokens)) > s.room():
			s.end(r, connector.ReasonError, ErrNoRoom)
			continue
		case s.mustAsk(r, s.localHit(r)):
			continue
		case !s.place(r):
			full = true
			continue
		case r.state == loading:
			full = s.slots() == 0
			continue
		}
		s.join(r)
		budget -= s.plan(r, budget)
		full = full || s.slots() == 0
	}
	return budget
}

// tell ends a cache query, unless the connector has yet to answer: it says what a request would get now. It has blocks
// only if they are to be held.
func (s *Scheduler) tell(r *seq) {
	hit := s.localHit(r)
	if r.match.Later || s.mustAsk(r, hit) {
		return
	}
	end, _ := s.offered(r, hit)
	r.local, r.external = hit, end-hit
	if r.Remote = r.Remote && hit > 0; r.Remote {
		s.attach(r, hit)
	}
	s.end(r, connector.ReasonStop, nil)
}

// place gives a waiting request all blocks it needs and starts its load, or changes nothing and
// returns false. Beyond its own it leaves a block for each request that has some, to grow into.
func (s *Scheduler) place(r *seq) bool {
	hit := s.localHit(r)
	s.attach(r, hit)
	if s.missing(r)+s.holders() > s.pool.Available() {
		s.release(r)
		return false
	}
	s.allocate(r)
	if r.generated() == 0 {
		r.local, r.external = hit, 0
	}
	if end, held := s.offered(r, hit); end > hit {
		s.load(r, end, held)
	}
	return true
}

// attach gives a waiting request the blocks of the prefix cache that hold its first tokens.
func (s *Scheduler) attach(r *seq, hit int) {
	r.table = make([][]connector.BlockID, s.cfg.Groups)
	for g := range r.table {
		for i, key := range r.Keys[:hit/s.cfg.BlockTokens] {
			id := none
			if i >= s.first(g, hit) {
				id, _ = s.pool.Lookup(uint16(g), key)
				s.pool.Ref(id)
			}
			r.table[g] = append(r.table[g], id)
		}
	}
	r.computed, r.full, r.clean = hit, hit/s.cfg.BlockTokens, len(r.Prompt)+r.MaxTokens // all
}

// offered is where the connector's offer ends, in tokens, and how much of it to load. Whole blocks stay
// whole and leave at least one token to compute. Only a producer that the request has a ticket of can
// offer part of a block: partial blocks have no key.
func (s *Scheduler) offered(r *seq, hit int) (end, held int) {
	all := uint32(1)<<s.cfg.Groups - 1
	everyGroup := r.match.Groups == 0 || r.match.Groups&all == all // no use in some layers' KV alone
	if !s.cfg.Role.Loads() || r.barred || r.asked != hit || r.match.Tokens <= 0 || !everyGroup {
		return hit, hit
	}
	held = min(hit+min(r.match.Tokens, len(r.tokens)), len(r.tokens))
	if r.Ticket != nil && (held%s.cfg.BlockTokens != 0 || held == len(r.tokens)) {
		return min(held, len(r.tokens)-1), held
	}
	return min(held/s.cfg.BlockTokens*s.cfg.BlockTokens, s.maxHit(r)), held
}

// load parks a request until the host has filled its tokens up to one. It has blocks for all of them,
// so that it can compute them if the load fails, but only those are loaded that it needs to go on. The
// producer's last block may hold more than is used of it.
func (s *Scheduler) load(r *seq, to, held int) {
	from := r.computed
	blocks := s.blocks(r, from, to, false)
	s.hand('l', r, &handover{blocks: blocks, from: from, to: to})
	r.tail = r.tailOf(to, held, s.cfg.BlockTokens)
	s.step.Admitted = append(s.step.Admitted, connector.Transfer{Request: r.ID, From: from, Tokens: to - from, Blocks: blocks, Tenant: r.Space.Tenant()})
	s.stats.Loads++
	r.state, r.arriving = loading, nil
}

// missing is the number of blocks a request lacks for the tokens it has, as many in each group.
func (s *Scheduler) missing(r *seq) int {
	return s.cfg.Groups * (s.blocksFor(len(r.tokens)) - len(r.table[0]))
}

// allocate gives a request the blocks it lacks; the caller has made sure that they are there.
func (s *Scheduler) allocate(r *seq) {
	for g := range r.table {
		for len(r.table[g]) < s.blocksFor(len(r.tokens)) {
			id, ok := s.pool.Alloc()
			if !ok {
				return
			}
			r.table[g] = append(r.table[g], id)
		}
	}
}

// release drops a request's references, the tail's first: it is reused first, since a prefix is
// worth more than what follows it.
func (s *Scheduler) release(r *seq) {
	for _, table := range r.table {
		for _, id := range slices.Backward(table) {
			if id != none {
				s.pool.Unref(id)
			}
		}
	}
	r.table, r.computed, r.full = nil, 0, 0
}

// slide drops the blocks that no group needs any more behind the given number of tokens. In a table
// they are always the first ones.
func (s *Scheduler) slide(r *seq, tokens int) {
	for g, table := range r.table {
		for i := s.first(g, tokens) - 1; i >= 0 && table[i] != none; i-- {
			s.pool.Unref(table[i])
			table[i] = none
		}
	}
}

// blocks lists a request's blocks of tokens [from, to), group by group: all that it has, or those
// that it needs to go on behind them. A block that is not full in it has no key.
func (s *Scheduler) blocks(r *seq, from, to int, all bool) []connector.Block {
	var list []connector.Block
	size := s.cfg.BlockTokens
	for g, table := range r.table {
		i := from / size
		if !all {
			i = max(i, s.first(g, to))
		}
		for ; i*size < to; i++ {
			if table[i] == none {
				continue
			}
			b := connector.Block{ID: table[i], Group: uint16(g)}
			if (i+1)*size <= to && i < len(r.Keys) {
				b.Key = r.Keys[i]
			}
			list = append(list, b)
		}
	}
	return list
}
