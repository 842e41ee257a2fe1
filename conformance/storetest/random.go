package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/kvport/kvport/conformance/internal/model"
	"github.com/kvport/kvport/connector"
)

// room is how many bytes of blocks a store must be able to keep for random histories.
const room = 2 << 20

// batch is how many keys a prompt has at most where the blocks of a store are slots; there are four.
const batch = 256

// The times of random histories.
const (
	short     = time.Second // what Cases gives them
	shrinking = 10 * time.Second
	patient   = 10 * time.Second
)

// Random plays random histories of Puts, Gets and Lookups for a while, also at once and cancelled, with keys that share
// bytes, and requires that each answer is one that the rules allow. The same seed makes the same calls. Run plays some of
// seed 1 for a second; a test of an author's own may play more:
//
//	func TestRandomHistories(t *testing.T) { storetest.Random(t, harness, 7, time.Minute) }
func Random(t T, h Harness, seed uint64, budget time.Duration) {
	o := model.Options{Twice: true, Room: room, Block: h.Block}
	if h.Block > 0 {
		o.Most = batch
	}
	for began, n := time.Now(), 0; n < model.Tour || time.Since(began) < budget; n++ {
		if t.Context().Err() != nil {
			return
		}
		history := model.Generate(seed, n, o)
		if f := play(t, h, history); f != nil {
			report(t, h, history, f, fmt.Sprintf("seed %d, history %d", seed, n+1))
			return
		}
	}
}

// failure is a history that failed.
type failure struct {
	violation *model.Violation
	outcomes  []model.Outcome
}

func report(t T, h Harness, history *model.History, f *failure, which string) {
	best, before := f, history.Calls()
	const tries = 3 // it may fail by chance
	small, runs := model.ShrinkWithin(t.Context(), history, shrinking, tries, func(smaller *model.History) bool {
		got := play(t, h, smaller)
		if got == nil || !got.violation.Like(best.violation) {
			return false
		}
		best = got
		return true
	})
	lines := model.Transcript(small, best.outcomes, best.violation)
	t.Errorf("%s\n(a save is a Put, a load a Get, a match a Lookup)\n%s\n%s, shortened from %d calls to %d in %d runs",
		model.Says(small, best.violation), strings.Join(lines, "\n"), which, before, small.Calls(), runs)
	t.FailNow()
}

// play plays a history on a new store and gives what failed.
func play(t T, h Harness, history *model.History) *failure {
	store := h.Open(t)
	p := &player{store: store, history: history, keys: history.BlockKeys("store")}
	judge := model.NewJudge(history.Shape, room)
	f := &failure{}
	for _, step := range history.Steps {
		o := p.do(t.Context(), step)
		f.outcomes = append(f.outcomes, o)
		if f.violation = judge.Step(step, &o); f.violation != nil {
			break
		}
	}
	if f.violation == nil {
		if f.violation = judge.Step(nil, &model.Outcome{Strays: p.late()}); f.violation == nil {
			f = nil
		}
	}
	if f != nil && p.hangs {
		return f // a call is still at work
	}
	if err := store.Close(); err != nil && f == nil {
		return &failure{violation: &model.Violation{Rule: "LIFE-04", Text: fmt.Sprintf("Close: %v", err), Call: -1, Allowed: "no error"}}
	}
	return f
}

// player plays a history.
type player struct {
	store   connector.Store
	history *model.History
	keys    []connector.BlockKey
	hangs   bool

	mu     sync.Mutex
	loaded []*buffer
}

// buffer is the memory of one block: spans, with bytes of nobody's between them.
type buffer struct {
	mem, want []byte
	spans     [][]byte
}

const guard, poison, gap = 0xA5, 0xE1, 24

// buffer makes the memory of a block, filled with one byte.
func (p *player) buffer(with byte) *buffer {
	g := &p.history.Shape.Groups[0]
	size := gap
	for n := range g.Segments {
		size += int(g.Segment(n)) + gap
	}
	digests := 16 * (g.Segments + 1)
	size += digests + gap
	b := &buffer{mem: bytes.Repeat([]byte{guard}, size)}
	at := gap
	for n := range g.Segments + 1 {
		length := digests
		if n < g.Segments {
			length = int(g.Segment(n))
		}
		span := b.mem[at : at+length : at+length]
		for i := range span {
			span[i] = with
		}
		b.spans = append(b.spans, span)
		at += length + gap
	}
	return b
}

// fill writes the bytes that a block has in a version.
func (p *player) fill(b *buffer, k model.Key, version int) {
	h := fnv.New64a()
	_, _ = h.Write(p.keys[k][:])
	random := rand.New(rand.NewPCG(h.Sum64(), uint64(version))) //nolint:gosec // not negative
	for n, span := range b.spans {
		plain := random.Uint32()%plainIn == 0 && (n > 0 || version == 0) // versions are told apart by the first span
		with := byte(random.Uint32()) * byte(random.Uint32()&1)
		for i := range span {
			if span[i] = with; !plain {
				span[i] = byte(random.Uint32())
			}
		}
	}
}

// plainIn is of how many spans one has bytes that do not look random: every other one of these has zeros.
const plainIn = 8

// do runs the calls of a step at the same time.
func (p *player) do(ctx context.Context, step model.Step) model.Outcome {
	out := model.Outcome{Results: make([]model.Result, len(step))}
	strays := make([][]model.Stray, len(step))
	var wg sync.WaitGroup
	for i := range step {
		wg.Go(func() { out.Results[i], strays[i] = p.call(ctx, &step[i]) })
	}
	wg.Wait()
	for _, s := range strays {
		out.Strays = append(out.Strays, s...)
	}
	for i := range out.Results {
		p.hangs = p.hangs || out.Results[i].Late != ""
	}
	out.Strays = append(out.Strays, p.late()...)
	return out
}

// late is what was written into a block after its call had returned.
func (p *player) late() (out []model.Stray) {
	const most = 256 // blocks that are looked at
	p.loaded = p.loaded[max(0, len(p.loaded)-most):]
	for _, b := range p.loaded {
		if b.want != nil && !bytes.Equal(b.mem, b.want) {
			out = append(out, model.Stray{What: model.Later, Where: "the spans of an earlier Get"})
			break
		}
	}
	return out
}

func (p *player) call(ctx context.Context, c *model.Call) (model.Result, []model.Stray) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	switch {
	case c.Cancel < 0:
		cancel()
	case c.Cancel > 0:
		defer time.AfterFunc(c.Cancel, cancel).Stop()
	}
	refs := c.Blocks(&p.history.Shape)
	buffers := make([]*buffer, len(refs))
	var items []connector.Item
	var index []int
	for n, ref := range refs {
		if ref.Tail {
			continue // a Store never sees it
		}
		buffers[n] = p.buffer(poison)
		if c.Kind == model.Save {
			p.fill(buffers[n], ref.Key, c.Version)
		}
		buffers[n].want = bytes.Clone(buffers[n].mem)
		items = append(items, connector.Item{Key: connector.StoreKey(p.keys[ref.Key]), Replace: c.Replace, Spans: buffers[n].spans})
		index = append(index, n)
	}
	done := make(chan model.Result, 1)
	go func() { done <- p.answer(ctx, c, items, index) }()
	timer := time.NewTimer(patient)
	defer timer.Stop()
	var res model.Result
	select {
	case res = <-done:
	case <-timer.C:
		return model.Result{Late: fmt.Sprintf("a call has not returned after %v", patient)}, nil
	}
	res.Ended = ctx.Err() != nil
	return res, p.look(c, refs, buffers, &res)
}

// answer makes one call of the store.
func (p *player) answer(ctx context.Context, c *model.Call, items []connector.Item, index []int) (res model.Result) {
	var err error
	switch c.Kind {
	case model.Save:
		err = p.store.Put(ctx, items)
	case model.Load:
		err = p.store.Get(ctx, items)
	case model.Match:
		return p.lookup(ctx, c)
	default:
		return res // a store is one life
	}
	blocks := c.Blocks(&p.history.Shape)
	m := model.Moved{Called: true, Err: err, Failed: make([]bool, len(blocks))}
	for n, ref := range blocks {
		m.Failed[n] = ref.Tail
	}
	some, named := errors.AsType[*connector.ItemError](err)
	m.Whole = err != nil && !named
	if named {
		for _, i := range some.Items {
			if i < 0 || i >= len(items) {
				m.Odd = true
				continue
			}
			m.Failed[index[i]] = true
		}
	}
	res.Ranks = []model.Moved{m}
	return res
}

func (p *player) lookup(ctx context.Context, c *model.Call) (res model.Result) {
	runs := make([][]connector.StoreKey, len(c.Queries))
	for i, q := range c.Queries {
		for _, k := range q.Keys[q.Computed:] {
			runs[i] = append(runs[i], connector.StoreKey(p.keys[k]))
		}
	}
	found, err := p.store.Lookup(ctx, runs)
	for _, n := range found {
		res.Answers = append(res.Answers, n*model.BlockTokens)
	}
	res.Err = err
	return res
}

// look says what lies in the blocks of a Get, and what no call may write.
func (p *player) look(c *model.Call, refs []model.Ref, buffers []*buffer, res *model.Result) (strays []model.Stray) {
	if len(res.Ranks) == 0 {
		return nil
	}
	m := &res.Ranks[0]
	if c.Kind == model.Load {
		m.Found = make([]model.Found, len(refs))
	}
	for n, b := range buffers {
		switch {
		case b == nil:
		case c.Kind == model.Save && !bytes.Equal(b.mem, b.want):
			strays = append(strays, model.Stray{What: model.OfSaved, Where: "the spans of a Put"})
		case c.Kind == model.Load:
			if !b.guarded() {
				strays = append(strays, model.Stray{What: model.OfNobody, Where: "beside the spans of a Get"})
			}
			if !m.Whole && !m.Failed[n] {
				m.Found[n] = p.found(b, refs[n])
			}
			b.want = bytes.Clone(b.mem)
			p.keep(b)
		}
	}
	return strays
}

// keep has late look at a block.
func (p *player) keep(b *buffer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.loaded = append(p.loaded, b)
}

// guarded reports whether the bytes between the spans are as they were.
func (b *buffer) guarded() bool {
	at := 0
	for _, span := range b.spans {
		if !bytes.Equal(b.mem[at:at+gap], bytes.Repeat([]byte{guard}, gap)) {
			return false
		}
		at += gap + len(span)
	}
	return bytes.Equal(b.mem[at:], bytes.Repeat([]byte{guard}, gap))
}

// found says what lies in a block.
func (p *player) found(b *buffer, ref model.Ref) model.Found {
	if bytes.Equal(b.mem, b.want) {
		return model.Found{What: model.Untouched}
	}
	want := p.buffer(poison)
	same := func() bool { return bytes.Equal(bytes.Join(want.spans, nil), bytes.Join(b.spans, nil)) }
	for v := range p.history.Versions() {
		if p.fill(want, ref.Key, v); same() {
			return model.Found{What: model.Exact, Ref: ref, Version: v}
		}
		if bytes.Equal(want.spans[0], b.spans[0]) {
			return model.Found{What: model.Torn}
		}
	}
	for k := range p.keys {
		for v := range p.history.Versions() {
			if p.fill(want, model.Key(k), v); same() {
				return model.Found{What: model.Exact, Ref: model.Ref{Key: model.Key(k)}, Version: v}
			}
		}
	}
	return model.Found{What: model.Unknown}
}
