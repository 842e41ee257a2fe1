// Package sched decides what an engine computes next: which requests run, on which blocks of the
// cache, and what the connector's host is told.
//
// A Scheduler is a pure state machine: it has no clock, no goroutine, no randomness and does no I/O.
// The engine's loop feeds it and carries out what it decides:
//
//	for {
//		Add, Abort, Arriving, Loaded, Saved, Stored, Finished, Released, Lost, LostHold, Answered   what happened meanwhile
//		Questions -> ask the connector -> Answer
//		Schedule  -> step for the host, chunks for the model
//		Commit    <- sampled tokens; -> step for the host
//		Outputs   -> news for the clients
//	}
//
// Requests are served in order of arrival. Running ones come first, decodes before prefills; then
// waiting ones are admitted while there are places, blocks and tokens left in the step. An admitted
// request gets the blocks of all its tokens at once, so that neither a prefill nor a load can get
// stuck half way. A request whose KV is being loaded is parked and takes part again when the load is
// over. When a running request needs one more block and there is none, the newest request loses its
// blocks and starts over with a new match; but if blocks come back on their own, because transfers that
// pin them will end, the request waits instead.
//
// Blocks are published in the prefix cache only when their KV is complete: computed ones in Commit,
// loaded ones in Loaded.
//
// A request has a block table for each group. Of a group with a window only the last blocks are
// needed to go on: earlier ones are given up as soon as they are out of reach, and a hit in the
// prefix cache or a load does without them.
package sched

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/kvcache"
)

// Config is fixed for the life of a scheduler.
type Config struct {
	BlockTokens      int
	Groups           int   // block tables of a request
	Trailing         []int // by group: how many of the last full blocks are needed to go on; 0 or left out: all
	MaxBatchedTokens int   // tokens in one step at most
	MaxSeqs          int   // requests in one step at most
	PrefixCaching    bool
	Role             connector.Role                                            // 0: the engine has no connector
	FailLoads        bool                                                      // end requests whose load failed, instead of recomputing
	LayerWise        bool                                                      // blocks to save are handed over before they are computed
	Published        func(group uint16, block int, r *Request, tokens []int32) // unless nil, is told about each block that the prefix cache has from now on; nothing may be kept of tokens
}

// Stats are totals since the start.
type Stats struct {
	Preemptions  int
	Loads        int // admissions with a load
	FailedLoads  int // loads of which at least one block failed
	Overlapped   int // chunks that were computed while their request's load was under way
	LoadedTokens int // prompt or recomputed tokens that arrived valid
}

// Scheduler is the state machine. It is for one goroutine.
type Scheduler struct {
	cfg     Config
	pool    *kvcache.Pool
	live    map[connector.RequestID]*seq
	queue   []*seq // waiting, loading and ready, by arrival
	running []*seq // by arrival
	arrived uint64

	chunks  []Chunk // what Schedule planned and Commit completes
	step    connector.Step
	handed  map[handle]*handover
	outputs []Output
	stats   Stats
}

// handle names something the host was given and will report the end of.
type handle struct {
	kind    byte // 'l'oad, 's'ave, 'e'nd, 'h'old
	step    uint64
	request connector.RequestID
}

// handover is what is kept for the host until then.
type handover struct {
	seq    *seq
	blocks []connector.Block
	from   int // loads: the tokens that are being filled
	to     int
	stored bool // saves: nobody waits for it any more
}

// New makes a scheduler over an empty cache. Groups below 1 means 1.
func New(cfg Config, pool *kvcache.Pool) *Scheduler {
	cfg.Groups = max(cfg.Groups, 1)
	cfg.Trailing = append(slices.Clip(cfg.Trailing), make([]int, max(0, cfg.Groups-len(cfg.Trailing)))...)
	return &Scheduler{cfg: cfg, pool: pool, step: connector.Step{ID: 1}, live: map[connector.RequestID]*seq{}, handed: map[handle]*handover{}}
}

// Add takes a request in. It refuses one whose id is in use, and one that the cache cannot hold even
// when it is alone.
func (s *Scheduler) Add(req Request) error {
	if s.live[req.ID] != nil {
		return fmt.Errorf("request %s is running already", req.ID)
	}
	if s.handed[handle{'e', s.step.ID, req.ID}] != nil {
		return fmt.Errorf("request %s is just ending, use another id", req.ID) // the host could not tell the two apart
	}
	if need := s.blocksFor(len(req.Prompt)+req.MaxTokens) * s.cfg.Groups; need > s.room() {
		return fmt.Errorf("request %s needs %d blocks, the cache has %d", req.ID, need, s.room())
	}
	s.arrived++
	r := &seq{Request: req, arrival: s.arrived, tokens: slices.Clone(req.Prompt), asked: -1}
	s.live[r.ID] = r
	s.queue = append(s.queue, r)
	if s.cfg.Role != 0 {
		s.step.Arrived = append(s.step.Arrived, connector.Query{Request: r.ID, Tokens: len(r.tokens), Keys: r.Keys})
	}
	return nil
}

// room is how many blocks requests can have.
func (s *Scheduler) room() int { return s.pool.Size() - s.pool.Lost() }

// Abort ends a request in whatever state it is; unknown ids are ignored.
func (s *Scheduler) Abort(id connector.RequestID, reason connector.Reason, err error) {
	r := s.live[id]
	switch {
	case r == nil:
	case r.state != withheld:
		s.end(r, reason, err)
	case reason == connector.ReasonAbort || reason == connector.ReasonError:
		r.last.Reason, r.last.Err, r.last.Ticket = reason, err, nil // nobody waits for it any more
		s.emitLast(r)
	}
}

// Live is the number of requests whose last output is still to come.
func (s *Scheduler) Live() int { return len(s.live) }

// Waiting is the number of requests in the queue, parked ones included.
func (s *Scheduler) Waiting() int { return len(s.queue) }

// Running is the number of requests in the batch.
func (s *Scheduler) Running() int { return len(s.running) }

// Stats gives the totals.
func (s *Scheduler) Stats() Stats { return s.stats }

// Outputs takes the news since the last call.
func (s *Scheduler) Outputs() []Output {
	out := s.outputs
	s.outputs = nil
	return out
}

// Forget empties the prefix cache: what is computed from now on, and brought by loads that begin from
// now on, is all that is found.
func (s *Scheduler) Forget() {
	s.pool.Forget()
	for _, r := range s.queue {
		r.asked, r.private = -1, r.state == loading
	}
}

// Question is what the caller asks the connector; it gives the answer to Answer.
type Question struct {
	Query  connector.Query
	Ticket []byte // signed
}

// Questions lists what must be known before more requests can be admitted. Asking again changes
// nothing; answered ones are left out until the request's local prefix changes.
func (s *Scheduler) Questions() []Question {
	var list []Question
	slots := s.slots()
	for _, r := range s.queue {
		if r.state != waiting || r.match.Later || slots == 0 && !r.Query {
			continue
		}
		if !r.Query {
			slots--
		}
		if hit := s.localHit(r); s.mustAsk(r, hit) {
			list = append(list, s.question(r, hit))
		}
	}
	return list
}

// Tickets lists the queued requests that have a ticket, also those that there is no place for yet: a
// producer keeps what a ticket names for as long as the connector is asked about it (rule LEASE-04).
// Without again it lists those alone that have not been asked about.
func (s *Scheduler) Tickets(again bool) []Question {
	var list []Question
	for _, r := range s.queue {
		if r.state != waiting || r.Ticket == nil || r.match.Later || r.asked >= 0 && !again {
			continue
		}
		if hit := s.localHit(r); s.mayLoad(r, hit) {
			list = append(list, s.question(r, hit))
		}
	}
	return list
}

func (s *Scheduler) question(r *seq, hit int) Question {
	return Question{Query: connector.Query{Request: r.ID, Tokens: len(r.tokens), Keys: r.Keys, Computed: hit}, Ticket: r.Ticket}
}

// Answer is the connector's answer to a question; computed is the question's Computed. A request
// that gets the answer Later is passed over until Answered.
func (s *Scheduler) Answer(id connector.RequestID, computed int, m connector.Match) {
	if r := s.live[id]; r != nil && r.state == waiting {
		r.asked, r.match = computed, m
	}
}

// Answered says that a request whose answer was Later can be asked again.
func (s *Scheduler) Answered(id connector.RequestID) {
	if r := s.live[id]; r != nil && r.match.Later {
		r.asked, r.match = -1, connector.Match{}
	}
}

// Later lists the requests whose answer was Later.
func (s *Scheduler) Later() []connector.RequestID {
	var list []connector.RequestID
	for _, r := range s.queue {
		if r.match.Later {
			list = append(list, r.ID)
		}
	}
	return list
}

// mustAsk reports whether a request cannot be admitted before the connector has been asked.
func (s *Scheduler) mustAsk(r *seq, hit int) bool { return r.asked != hit && s.mayLoad(r, hit) }

// mayLoad reports whether the connector may have more of a request than is there.
func (s *Scheduler) mayLoad(r *seq, hit int) bool {
	more := hit < s.maxHit(r) || r.Ticket != nil && hit < len(r.tokens)-1 // a producer may offer part of a block
	return s.cfg.Role.Loads() && !r.barred && more
}

// maxHit is how many tokens may come from elsewhere in whole blocks: one token at least must be
// computed to have logits to sample from.
func (s *Scheduler) maxHit(r *seq) int {
	return (len(r.tokens) - 1) / s.cfg.BlockTokens * s.cfg.BlockTokens
}

// localHit is the length of the longest prefix of the request, in tokens, of which the prefix cache
// has all that every group needs to go on. Without prefix caching nothing is ever published there.
func (s *Scheduler) localHit(r *seq) int {
	hit, size := 0, s.cfg.BlockTokens
	var row [connector.MaxGroups]int // how many cached blocks follow each other, by group
	for i := range min(s.maxHit(r)/size, len(r.Keys)) {
		whole := true
		for g := range s.cfg.Groups {
			row[g]++
			if _, ok := s.pool.Lookup(uint16(g), r.Keys[i]); !ok {
				row[g] = 0
			}
			whole = whole && row[g] > i-s.first(g, (i+1)*size)
			if row[g] == 0 && s.cfg.Trailing[g] == 0 {
				return hit
			}
		}
		if whole {
			hit = (i + 1) * size
		}
	}
	return hit
}

// first is the first block that a group needs to go on behind the given number of tokens.
func (s *Scheduler) first(group, tokens int) int {
	if n := s.cfg.Trailing[group]; n > 0 {
		return max(0, tokens/s.cfg.BlockTokens-n)
	}
	return 0
}

// slots is how many more requests may get blocks: the batch has MaxSeqs places, and as many
// requests again may be parked, so that loads run ahead of free places.
func (s *Scheduler) slots() int {
	places := s.cfg.MaxSeqs - len(s.running) - s.queued(ready)
	return max(0, min(places, 2*s.cfg.MaxSeqs-s.holders()))
}

// holders is the number of requests that have blocks.
func (s *Scheduler) holders() int { return len(s.running) + s.queued(ready) + s.queued(loading) }

func (s *Scheduler) queued(in state) int {
	n := 0
	for _, r := range s.queue {
		if r.state == in {
			n++
		}
	}
	return n
}

func (s *Scheduler) blocksFor(tokens int) int {
	return (tokens + s.cfg.BlockTokens - 1) / s.cfg.BlockTokens
}

// insert puts a request where its arrival places it.
func insert(list []*seq, r *seq) []*seq {
	at, _ := slices.BinarySearchFunc(list, r, func(a, b *seq) int { return cmp.Compare(a.arrival, b.arrival) })
	return slices.Insert(list, at, r)
}

func remove(list []*seq, r *seq) []*seq {
	return slices.DeleteFunc(list, func(o *seq) bool { return o == r })
}
