package vllmtrace

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
)

// ErrReplay says that a host did something that the shim or the engine could not go on from.
var ErrReplay = errors.New("vllmtrace: replay")

// EventKind says what a host reports.
type EventKind uint8

// The kinds of events, as those of package host.
const (
	Loaded EventKind = 1 + iota
	Saved
	Finished
	Answered
)

// Event is the end of something that was handed to a host.
type Event struct {
	Kind           EventKind
	Request        connector.RequestID
	Blocks, Failed []connector.BlockID
}

// Host is what a shim needs of a host.
type Host interface {
	// Match is asked for every lookup.
	Match(q connector.Query, ticket []byte) connector.Match
	// Step takes what the engine decided; it must not wait.
	Step(s *connector.Step)
	// Next waits for the next event. An error ends the replay.
	Next() (Event, error)
}

// Engine is the memory behind the trace.
type Engine interface {
	// Write does what a forward pass does: it gives every block the content that belongs to it.
	Write(blocks []connector.Block)
	// Wrong gives the blocks that hold something else.
	Wrong(blocks []connector.Block) []connector.BlockID
	// Fail makes the coming load of these blocks fail, until restore is called.
	Fail(blocks []connector.Block) (restore func(), err error)
}

// Options say how a log is replayed.
type Options struct {
	Model connector.Fingerprint
	// Eager lets saves run on behind wait_for_save, as the contract allows: the shim waits only
	// where a block is about to be written, or where the trace knows more than the host may yet.
	Eager bool
}

// Result is what a replay brought.
type Result struct {
	Log           *Log         // the same calls with the host's answers
	Mapped        map[Kind]int // every call of the source, by kind
	Offers        []Offer      // that differ from the trace's
	Loads, Failed int          // loads, and how many of them failed as in the trace
	Saves, Blocks int          // saves, and blocks in them
	Verified      int          // blocks whose bytes were compared
	Waits         int          // for a save, before its block could be written
}

// Offer is one lookup whose answer differs from the recorded one.
type Offer struct {
	Request          string
	Traced, Answered int
	Emptied          bool // a load had left nothing valid, invariant 45
}

// flight is a load that the host carries out.
type flight struct {
	blocks  []connector.Block
	restore func()
	over    bool
	failed  []connector.BlockID
}

// Shim replays a log through a host: it translates each call as an engine-side shim must, and
// records what vLLM would have seen.
type Shim struct {
	host   Host
	engine Engine
	opts   Options
	chains Chains
	source *Log

	src, dst  *state // of the source, and of what we record
	out       Result
	step      connector.Step // that the next build_connector_meta sends
	meta      *MetaCall      // as recorded
	computed  []connector.Transfer
	traced    map[string]*OutputCall // how the trace's loads ended, see fates
	fates     []map[string]*OutputCall
	flights   map[string]*flight
	local     map[string]*AllocCall           // the trace loads them, we compute
	finished  map[string]bool                 // Finished has come
	saves     map[string][]connector.Transfer // under way
	answered  map[string]bool
	lastSeen  *ResultsCall
	invalid   []int
	lastLooks map[string]*LookupCall
}

// Replay runs a log through a host.
func Replay(log *Log, chains Chains, host Host, engine Engine, opts Options) (*Result, error) {
	s := &Shim{
		host: host, engine: engine, opts: opts, chains: chains, source: log, src: newState(log),
		flights: map[string]*flight{}, local: map[string]*AllocCall{}, finished: map[string]bool{},
		saves: map[string][]connector.Transfer{}, answered: map[string]bool{}, lastLooks: map[string]*LookupCall{},
	}
	s.out.Log, s.out.Mapped = &Log{Async: true}, map[Kind]int{}
	s.dst = newState(s.out.Log)
	s.readFates()
	handlers := s.handlers()
	for i := range log.Calls {
		c := &log.Calls[i]
		handle, ok := handlers[c.Kind]
		if !ok {
			return &s.out, fmt.Errorf("%w: call %d: nothing is known to do for %s", ErrReplay, i, c.Kind)
		}
		if err := handle(c); err != nil {
			return &s.out, fmt.Errorf("%w: call %d, %s: %w", ErrReplay, i, c.Kind, err)
		}
		s.src.apply(c)
		s.out.Mapped[c.Kind]++
	}
	return &s.out, nil
}

// handlers are what each call comes to. Those that only frame a step are recorded as they are: the
// host starts loads and saves itself, and nothing it does depends on a hook of one layer.
func (s *Shim) handlers() map[Kind]func(*Call) error {
	return map[Kind]func(*Call) error{
		Init: s.record, Register: s.record, MemPool: s.record, HostXferOps: s.record, // host.Open
		GetHandshake: s.record, SetHandshake: s.record, FinishedCount: s.record, // the host adds up its ranks itself
		NewRequest: s.newRequest, Lookup: s.lookup, Alloc: s.alloc, BuildMeta: s.buildMeta,
		Preemptions: s.preemptions, Bind: s.bind, StartLoad: s.startLoad, WaitLayer: s.record, SaveLayer: s.record,
		WaitSave: s.waitSave, GetFinished: s.results, TransferResults: s.results, LoadErrors: s.loadErrors,
		Clear: s.record, Output: s.output, RequestFinished: s.requestFinished, Shutdown: s.record, End: s.end,
	}
}

// record writes a call down.
func (s *Shim) record(c *Call) error {
	s.out.Log.Calls = append(s.out.Log.Calls, *c)
	s.dst.apply(c)
	return nil
}

func (s *Shim) recordBody(c *Call, body any) {
	copied := *c
	copied.Body = body
	_ = s.record(&copied)
}

// note records what only a shim sees.
func (s *Shim) note(kind Kind, b *BlocksCall) {
	_ = s.record(&Call{Side: ShimSide, Kind: kind, Step: s.dst.step, Body: b})
}

// readFates looks up how each load of the trace ended, in the order in which they began.
func (s *Shim) readFates() {
	open := map[string]int{} // index into fates
	for _, c := range s.source.Calls {
		switch b := c.Body.(type) {
		case *AllocCall:
			if b.External > 0 {
				open[b.Request.ID] = len(s.fates)
				s.fates = append(s.fates, map[string]*OutputCall{b.Request.ID: nil})
			}
		case *OutputCall:
			for _, id := range b.Recving {
				if i, ok := open[id]; ok {
					s.fates[i][id] = b
				}
			}
		}
	}
}

func (s *Shim) newRequest(c *Call) error {
	b, ok := c.Body.(*RequestView)
	if !ok {
		return errBody
	}
	s.step.Arrived = append(s.step.Arrived, connector.Query{
		Request: connector.RequestID(b.ID), Tokens: b.Prompt, Keys: s.keys(b.ID, b.Hashes),
	})
	return s.record(c)
}

var errBody = errors.New("call without its arguments")

// keys are those of a request's first n full blocks, as far as they are known.
func (s *Shim) keys(id string, n int) []connector.BlockKey {
	chain := s.chains[id]
	keys := make([]connector.BlockKey, 0, n)
	for _, h := range chain[:max(min(n, len(chain)), 0)] {
		keys = append(keys, Key(s.opts.Model, h))
	}
	return keys
}

// blocks are part of a request's table with their keys; a block that is not full has none.
func (s *Shim) blocks(id string, table []int, from, to, full int) []connector.Block {
	keys := s.keys(id, full)
	var out []connector.Block
	for i := from; i < to && i < len(table); i++ {
		b := connector.Block{ID: connector.BlockID(table[i])}
		if i < len(keys) {
			b.Key = keys[i]
		}
		out = append(out, b)
	}
	return out
}

// lookup asks the host. "Later" is what vLLM calls None; vLLM would ask again in its next step, we
// when the host says so.
func (s *Shim) lookup(c *Call) error {
	b, ok := c.Body.(*LookupCall)
	if !ok {
		return errBody
	}
	id := b.Request.ID
	if b.Tokens > 0 {
		size := max(s.dst.blockSize, 1)
		keys := s.keys(id, (b.Computed+b.Tokens)/size)
		stored := func() bool { return !s.saving(keys) }
		if err := s.until(stored); err != nil { // the trace's connector had stored them by now
			return err
		}
	}
	for {
		delete(s.answered, id)
		m := s.host.Match(connector.Query{
			Request: connector.RequestID(id), Tokens: b.Request.Tokens,
			Keys: s.keys(id, b.Request.Hashes), Computed: b.Computed,
		}, nil)
		answer := *b
		answer.Tokens, answer.Async, answer.Later = m.Tokens, m.Async, m.Later
		s.recordBody(c, &answer)
		if !m.Later {
			s.lastLooks[id] = &answer
			if m.Tokens != b.Tokens {
				s.out.Offers = append(s.out.Offers, Offer{id, b.Tokens, m.Tokens, s.dst.of(id).emptied})
			}
			return nil
		}
		for !s.answered[id] {
			if err := s.take(); err != nil {
				return err
			}
		}
	}
}

// saving says that a save of one of these keys is under way.
func (s *Shim) saving(keys []connector.BlockKey) bool {
	for _, list := range s.saves {
		for _, t := range list {
			for _, k := range t.Blocks {
				if slices.Contains(keys, k.Key) {
					return true
				}
			}
		}
	}
	return false
}

// alloc turns an allocation with external tokens into a load, if the host made that offer. Otherwise
// the engine computes what the trace loads.
func (s *Shim) alloc(c *Call) error {
	b, ok := c.Body.(*AllocCall)
	if !ok || len(b.Blocks) != 1 {
		return errBody
	}
	id := b.Request.ID
	if b.External == 0 {
		return s.record(c)
	}
	look := s.lastLooks[id]
	s.traced, s.fates = s.fates[0], s.fates[1:]
	if look == nil || look.Tokens != b.External {
		none := *b
		none.External = 0
		s.local[id] = b
		s.recordBody(c, &none)
		return nil
	}
	size := s.dst.blockSize
	first, end := look.Computed/size, (look.Computed+b.External)/size
	f := &flight{blocks: s.blocks(id, b.Blocks[0], first, end, end)}
	if fate := s.traced[id]; fate != nil && slices.ContainsFunc(f.blocks, func(k connector.Block) bool {
		return slices.Contains(fate.Invalid, int(k.ID)) || slices.Contains(fate.Failed, id)
	}) {
		f.restore = func() {}
	}
	s.flights[id] = f
	s.step.Admitted = append(s.step.Admitted, connector.Transfer{
		Request: connector.RequestID(id), From: look.Computed, Tokens: b.External, Blocks: f.blocks,
	})
	return s.record(c)
}

func (s *Shim) requestFinished(c *Call) error {
	b, ok := c.Body.(*FinishedCall)
	if !ok {
		return errBody
	}
	reason, ok := map[string]connector.Reason{
		"FINISHED_STOPPED": connector.ReasonStop, "FINISHED_LENGTH_CAPPED": connector.ReasonLength,
		"FINISHED_ABORTED": connector.ReasonAbort, "FINISHED_IGNORED": connector.ReasonAbort, "FINISHED_ERROR": connector.ReasonError,
	}[b.Request.Status]
	if !ok {
		return fmt.Errorf("unknown status %q", b.Request.Status)
	}
	id, full := b.Request.ID, b.Request.Computed/s.dst.blockSize
	s.verify(id, s.blocks(id, b.Blocks, 0, full, full))
	s.step.Ended = append(s.step.Ended, connector.Ended{
		Request: connector.RequestID(id), Reason: reason, Tokens: b.Request.Computed,
		Blocks: s.blocks(id, b.Blocks, 0, len(b.Blocks), full),
	})
	kept := *b
	kept.Delay, kept.Params = true, nil
	s.recordBody(c, &kept)
	return nil
}
