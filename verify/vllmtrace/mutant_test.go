package vllmtrace

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// editor changes a log.
type editor struct {
	t   *testing.T
	log *Log
}

// find is the index of the first call at or behind i that fits.
func (e *editor) find(i int, fits func(c *Call) bool) int {
	e.t.Helper()
	for ; i < len(e.log.Calls); i++ {
		if fits(&e.log.Calls[i]) {
			return i
		}
	}
	require.FailNow(e.t, "no such call in the trace")
	return 0
}

func (e *editor) kind(i int, k Kind) int {
	e.t.Helper()
	return e.find(i, func(c *Call) bool { return c.Kind == k })
}

func (e *editor) insert(i int, c Call) { e.log.Calls = slices.Insert(e.log.Calls, i, c) }
func (e *editor) remove(i int)         { e.log.Calls = slices.Delete(e.log.Calls, i, i+1) }

// again repeats a call at another place.
func (e *editor) again(i, at int) { e.insert(at, e.log.Calls[i]) }

// body is the arguments of the first call at or behind i that has some of this type and fits.
func body[T any](e *editor, i int, fits func(*T) bool) (*T, int) {
	e.t.Helper()
	at := e.find(i, func(c *Call) bool { b, ok := c.Body.(*T); return ok && fits(b) })
	b, _ := e.log.Calls[at].Body.(*T)
	return b, at
}

func any1[T any](*T) bool { return true }

func (e *editor) load() (*MetaCall, int) {
	return body(e, 0, func(b *MetaCall) bool { return len(b.Loads) > 0 })
}

func (e *editor) lookup() (*LookupCall, int) {
	return body(e, 0, func(b *LookupCall) bool { return b.Tokens > 0 })
}

// saves adds the moments at which a host's saves are over, one step after they began.
func (e *editor) saves() {
	e.log.Async = true
	for i := 0; i < len(e.log.Calls); i++ {
		m, ok := e.log.Calls[i].Body.(*MetaCall)
		if !ok || len(m.Saves) == 0 {
			continue
		}
		at := e.kind(i, WaitSave) + 1
		for _, v := range m.Saves {
			e.insert(at, Call{Side: ShimSide, Kind: SaveOver, Body: &BlocksCall{Request: v.Request, Blocks: []int{v.Block}}})
		}
	}
}

// mutant is one planted violation.
type mutant struct {
	number int
	name   string
	trace  string
	plant  func(e *editor)
}

func mutants() []mutant {
	return slices.Concat(startMutants(), lookupMutants(), stepMutants(), reportMutants(), endMutants(), hostMutants())
}

func startMutants() []mutant {
	return []mutant{
		{1, "a second scheduler side", "async", func(e *editor) { e.again(e.kind(0, Init), e.kind(0, BuildMeta)) }},
		{1, "called before it was made", "async", func(e *editor) { e.remove(e.kind(0, Init)) }},
		{2, "two engine ids", "async", func(e *editor) {
			b, _ := body(e, 0, any1[InitCall])
			b.EngineID = "other"
		}},
		{3, "registered twice", "async", func(e *editor) { i := e.kind(0, Register); e.again(i, i) }},
		{4, "layers overlap", "async", func(e *editor) {
			b, _ := body(e, 0, any1[RegisterCall])
			b.LayerOffsets[1], b.LayerOffsets[2] = 12288, 24576
		}},
		{4, "beyond the storage", "async", func(e *editor) {
			b, _ := body(e, 0, any1[RegisterCall])
			b.StorageBytes -= 4096
		}},
	}
}

func lookupMutants() []mutant {
	return []mutant{
		{10, "another answer to the same question", "async", func(e *editor) {
			b, i := e.lookup()
			other := *b
			other.Tokens -= 32
			c := e.log.Calls[i]
			c.Body = &other
			e.insert(i, c)
		}},
		{11, "negative tokens", "async", func(e *editor) { b, _ := e.lookup(); b.Tokens = -32 }},
		{11, "more than the prompt has", "serve", func(e *editor) { b, _ := e.lookup(); b.Tokens = b.Request.Tokens + 1 }},
		{11, "half a block computed", "async", func(e *editor) { b, _ := e.lookup(); b.Computed -= 7 }},
		{12, "no answer, ever", "async", func(e *editor) {
			b, i := e.lookup()
			b.Tokens, b.Async, b.Later = 0, false, true
			e.log.Calls = append(e.log.Calls[:i+1], e.log.Calls[len(e.log.Calls)-1])
		}},
		{13, "asynchronous nothing", "async", func(e *editor) {
			b, _ := body(e, 0, func(b *LookupCall) bool { return b.Tokens == 0 })
			b.Async = true
		}},
		{14, "asked for a running request", "async", func(e *editor) { e.again(e.kind(0, Lookup), e.kind(0, WaitSave)) }},
		{16, "synchronous, whole prompt", "async", func(e *editor) {
			b, _ := e.lookup()
			b.Tokens, b.Async = b.Request.Tokens-b.Computed, false
		}},
		{17, "took more than was offered", "async", func(e *editor) {
			b, _ := body(e, 0, func(b *AllocCall) bool { return b.External > 0 })
			b.External += 32
		}},
		{18, "a load of no external token", "async", func(e *editor) {
			b, _ := body(e, 0, func(b *AllocCall) bool { return b.External > 0 })
			b.External = 0
		}},
		{19, "allocated twice, loaded twice", "async", func(e *editor) {
			_, i := body(e, 0, func(b *AllocCall) bool { return b.External > 0 })
			e.again(i, i)
			m, _ := e.load()
			m.Loads = append(m.Loads, m.Loads[0])
		}},
		{19, "never loaded", "async", func(e *editor) { m, _ := e.load(); m.Loads = nil }},
		{20, "the wrong blocks", "async", func(e *editor) { m, _ := e.load(); slices.Reverse(m.Loads[0].Blocks) }},
		{21, "loaded without blocks", "async", func(e *editor) {
			_, i := body(e, 0, func(b *AllocCall) bool { return b.External > 0 })
			e.remove(i)
		}},
		{22, "a block that is being loaded is given away", "serve", func(e *editor) {
			m, i := e.load()
			r, _ := body(e, 0, func(b *RequestView) bool { return b.ID != m.Loads[0].Request })
			e.insert(i+1, Call{Side: SchedulerSide, Kind: Alloc, Body: &AllocCall{Request: *r, Blocks: [][]int{{m.Loads[0].Blocks[0]}}}})
		}},
		{45, "offered again after nothing arrived", "async", func(e *editor) {
			m, at := body(e, 0, func(b *MetaCall) bool { return len(b.Loads) > 0 && len(b.Loads[0].Blocks) == 21 })
			_, look := body(e, 0, func(b *LookupCall) bool { return b.Request.ID == m.Loads[0].Request })
			o, end := body(e, at, any1[OutputCall])
			o.Invalid = m.Loads[0].Blocks
			e.again(look, end+1)
		}},
	}
}

func stepMutants() []mutant {
	return []mutant{
		{24, "a step is left out", "async", func(e *editor) { e.remove(e.kind(e.kind(0, BuildMeta)+1, BuildMeta)) }},
		{25, "replaced where it should append", "async", func(e *editor) {
			b, _ := body(e, 0, func(b *MetaCall) bool { return len(b.Cached) > 0 && len(b.Cached[0].NewBlocks) > 0 })
			b.Cached[0].Resumed = true
		}},
		{26, "asynchronous loads before the forward pass", "async", func(e *editor) {
			i := e.kind(0, StartLoad)
			c := e.log.Calls[i]
			e.remove(i)
			e.insert(e.kind(0, WaitLayer), c)
		}},
		{27, "waits for a layer without metadata", "async", func(e *editor) { e.again(e.kind(0, WaitLayer), e.kind(0, Clear)+1) }},
		{28, "sees the new tokens only", "async", func(e *editor) { b, _ := body(e, 0, any1[SaveLayerCall]); b.Shape = []int{8, 3, 32, 128} }},
		{29, "waits twice", "async", func(e *editor) { i := e.kind(0, WaitSave); e.again(i, i) }},
		{29, "does not wait", "async", func(e *editor) { e.remove(e.kind(0, WaitSave)) }},
		{31, "metadata stays", "async", func(e *editor) { e.remove(e.kind(0, Clear)) }},
		{32, "preemptions are handled too late", "async", func(e *editor) {
			i := e.kind(0, Preemptions)
			e.log.Calls[i], e.log.Calls[i+1] = e.log.Calls[i+1], e.log.Calls[i]
		}},
		{51, "the worker is not told", "async", func(e *editor) {
			b, _ := body(e, 0, func(b *MetaCall) bool { return len(b.Finished) > 0 })
			b.Finished = nil
		}},
		{55, "one hash, two places", "async", func(e *editor) {
			b, _ := body(e, 0, func(b *MetaCall) bool { return len(b.Saves) > 1 })
			b.Saves[1].Hash = b.Saves[0].Hash
		}},
		{60, "called after shutdown", "async", func(e *editor) { e.again(e.kind(0, Lookup), len(e.log.Calls)-1) }},
	}
}

func reportMutants() []mutant {
	sending := func(b *ResultsCall) bool { return len(b.Sending) > 0 }
	received := func(b *OutputCall) bool { return len(b.Recving) > 0 }
	return []mutant{
		{33, "an unknown id", "async", func(e *editor) {
			b, _ := body(e, 0, any1[ResultsCall])
			b.Recving = []string{"nobody"}
		}},
		{33, "sent twice", "async", func(e *editor) {
			b, i := body(e, 0, sending)
			next, _ := body(e, i+1, any1[ResultsCall])
			next.Sending = append(next.Sending, b.Sending...)
		}},
		{34, "a report is lost", "async", func(e *editor) { b, _ := body(e, 0, received); b.Recving = nil }},
		{34, "heard before it was said", "async", func(e *editor) {
			b, _ := body(e, 0, sending)
			o, _ := body(e, 0, any1[OutputCall])
			o.Sending = b.Sending
		}},
		{37, "a failed block that was not loaded", "async", func(e *editor) { b, _ := body(e, 0, any1[OutputCall]); b.Invalid = []int{3} }},
		{37, "failed after it was over", "serve", func(e *editor) {
			b, i := body(e, 0, func(b *OutputCall) bool { return len(b.Invalid) == 2 })
			next, _ := body(e, i+1, any1[OutputCall])
			next.Invalid, b.Invalid = b.Invalid, nil
		}},
		{38, "a load without an end", "async", func(e *editor) {
			b, _ := body(e, 0, func(b *ResultsCall) bool { return len(b.Recving) > 0 })
			o, _ := body(e, 0, received)
			b.Recving, o.Recving = nil, nil
		}},
	}
}

func endMutants() []mutant {
	sending := func(b *ResultsCall) bool { return len(b.Sending) > 0 }
	return []mutant{
		{39, "given away while loading and sending", "async", func(e *editor) {
			m, i := e.load()
			id := m.Loads[0].Request
			a, _ := body(e, 0, func(b *AllocCall) bool { return b.Request.ID == id && b.External > 0 })
			view := RequestView{ID: "other", Tokens: 64}
			e.insert(i+1, Call{Side: SchedulerSide, Kind: RequestFinished, Body: &FinishedCall{Request: a.Request, Blocks: a.Blocks[0], Delay: true}})
			e.insert(i+2, Call{Side: SchedulerSide, Kind: NewRequest, Body: &view})
			e.insert(i+3, Call{Side: SchedulerSide, Kind: Alloc, Body: &AllocCall{Request: view, Blocks: [][]int{a.Blocks[0][:1]}}})
		}},
		{40, "reported for a request that runs", "async", func(e *editor) {
			i := e.kind(0, GetFinished)
			m, _ := body(e, 0, any1[MetaCall])
			r, _ := e.log.Calls[i].Body.(*ResultsCall)
			o, _ := body(e, i, any1[OutputCall])
			r.Recving, o.Recving = []string{m.New[0].ID}, []string{m.New[0].ID}
		}},
		{42, "goes on behind the bad block", "serve", func(e *editor) {
			b, _ := body(e, 0, func(b *AllocCall) bool { return b.External == 0 && b.Request.Computed == 608 })
			b.Request.Computed = 672
		}},
		{44, "failed blocks of two groups", "serve", func(e *editor) {
			for _, c := range e.log.Calls {
				if b, ok := c.Body.(*InitCall); ok && c.Side == SchedulerSide {
					b.Groups = append(b.Groups, b.Groups[0])
				}
			}
		}},
		{46, "somebody runs on an invalid block", "serve", func(e *editor) {
			b, i := body(e, 0, func(b *OutputCall) bool { return len(b.Invalid) > 0 })
			view := RequestView{ID: "other", Tokens: 64}
			e.insert(i, Call{Side: SchedulerSide, Kind: NewRequest, Body: &view})
			e.insert(i+1, Call{Side: SchedulerSide, Kind: Alloc, Body: &AllocCall{Request: view, Blocks: [][]int{b.Invalid[:1]}}})
		}},
		{48, "finished twice", "async", func(e *editor) { i := e.kind(0, RequestFinished); e.again(i, i) }},
		{48, "finished without having arrived", "async", func(e *editor) {
			e.insert(e.kind(0, BuildMeta), Call{Side: SchedulerSide, Kind: RequestFinished, Body: &FinishedCall{Request: RequestView{ID: "nobody"}}})
		}},
		{48, "with blocks of tokens never computed", "async", func(e *editor) {
			b, _ := body(e, 0, any1[FinishedCall])
			b.Request.Computed -= 64
		}},
		{49, "given away while it is kept", "async", func(e *editor) {
			b, i := body(e, 0, func(b *FinishedCall) bool { return len(b.Blocks) > 0 })
			view := RequestView{ID: "other", Tokens: 64}
			e.insert(i+1, Call{Side: SchedulerSide, Kind: NewRequest, Body: &view})
			e.insert(i+2, Call{Side: SchedulerSide, Kind: Alloc, Body: &AllocCall{Request: view, Blocks: [][]int{b.Blocks[:1]}}})
		}},
		{49, "kept for ever", "async", func(e *editor) {
			b, i := body(e, 0, sending)
			o, _ := body(e, i, any1[OutputCall])
			b.Sending, o.Sending = nil, nil
		}},
	}
}

// hostMutants are of logs whose saves go on behind wait_for_save.
func hostMutants() []mutant {
	return []mutant{
		{32, "written while it is being saved", "async", func(e *editor) {
			e.saves()
			m, _ := body(e, 0, func(b *MetaCall) bool { return len(b.Saves) > 0 })
			v := m.Saves[0]
			e.remove(e.find(0, func(c *Call) bool {
				b, ok := c.Body.(*BlocksCall)
				return ok && c.Kind == SaveOver && b.Request == v.Request && b.Blocks[0] == v.Block
			}))
			next, _ := body(e, 0, func(b *MetaCall) bool { return len(b.Cached) > 0 })
			next.Cached[0].Computed = 0 // the block is written again
		}},
		{36, "sent while it is being saved", "async", func(e *editor) { e.saves(); e.remove(e.kind(0, SaveOver)) }},
		{54, "saved for ever", "async", func(e *editor) { e.saves(); e.remove(e.kind(0, SaveOver)) }},
		{54, "a request without an end", "async", func(e *editor) { e.remove(e.kind(0, RequestFinished)) }},
		{63, "other bytes", "async", func(e *editor) {
			e.insert(len(e.log.Calls)-1, Call{Side: ShimSide, Kind: Verified, Body: &BlocksCall{Request: "a", Blocks: []int{1}, Wrong: []int{1}}})
		}},
		{16, "a host that leaves nothing to compute", "async", func(e *editor) {
			e.saves()
			b, _ := e.lookup()
			b.Tokens = b.Request.Tokens - b.Computed
		}},
	}
}

// Each planted violation is found by the check of its number, and each check finds one.
func TestMutantsAreCaught(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses, nothing that runs in one goroutine; make test runs it")
	}
	caught := map[int]int{}
	for _, m := range mutants() {
		e := &editor{t: t, log: readTrace(t, m.trace)}
		m.plant(e)
		numbers := map[int]bool{}
		require.False(t, m.trace == "serve" && m.number == 45, "the trace breaks it already")
		for _, v := range Check(e.log) {
			numbers[v.Number] = true
		}
		require.True(t, numbers[m.number], "%d, %s: not caught, violations are of %v", m.number, m.name, numbers)
		caught[m.number]++
	}
	for _, r := range Rules() {
		require.Positive(t, caught[r.Number], "%s has no mutant", r.Name)
	}
	t.Logf("%d mutants of %d invariants, all caught", len(mutants()), len(caught))
}

// A log with saves that end later is as good as the recorded one.
func TestLaterSavesAreAllowed(t *testing.T) {
	e := &editor{t: t, log: readTrace(t, "async")}
	e.saves()
	require.Empty(t, Check(e.log))
}
