package tracker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// key names one thing that must be answered exactly once.
type key struct {
	kind    EventKind
	request connector.RequestID
	step    uint64
}

// world drives a Tracker as a host, an engine and a plugin at their worst would, and checks every
// invariant after every input. Everything follows from the seed.
type world struct {
	t    *testing.T
	rng  *rand.Rand
	b    *Tracker
	cfg  Config
	now  time.Time
	log  []string
	gen  uint64 // the newest
	live bool   // gen takes calls
	dead bool   // gen went down and is not reaped

	asks     map[CallID]Ask
	plans    map[CallID]Plan
	moves    map[CallID]Move // started, and the plugin may still touch the blocks
	silent   map[CallID]bool // moves whose connection is lost
	looked   map[CallID]Ask  // that the host answers by itself
	copied   map[CallID]Move // that it loads by itself, whatever becomes of the plugin
	alone    int             // of those how many came
	finishes map[CallID]Finish
	resets   map[CallID]bool // not over; true: the plugin works on it
	stored   map[CallID]bool // resets during which something was saved
	doomed   bool            // the tracker requires the end of the generation

	due    map[key]int // how often it must be told: 1
	told   map[key]int
	blocks map[key][]connector.BlockID
	holds  map[connector.HoldID]key
	held   map[key]bool
	later  map[connector.RequestID]bool
	ended  map[connector.RequestID]bool
	open   []connector.RequestID
	steps  uint64

	computing uint64 // the last step
	nextID    int
	block     connector.BlockID
	planned   map[key]bool // waits for a plan
	last      connector.HoldID
	events    int
	emptied   bool // what the plugin answers to a reset
	empty     int  // resets that went well
}

func newWorld(t *testing.T, seed uint64) *world {
	rng := rand.New(rand.NewPCG(seed, 7))
	caps := connector.Capability(0)
	if rng.IntN(3) == 0 {
		caps |= connector.CanPlan
	}
	if rng.IntN(2) == 0 {
		caps |= connector.CanHold
	}
	if rng.IntN(4) > 0 {
		caps |= connector.CanReset
	}
	cfg := testConfig()
	if rng.IntN(2) == 0 {
		cfg.Slots = 1 + rng.IntN(8)
	}
	cfg.Can, cfg.Ranks, cfg.Role = caps, 1+rng.IntN(3), connector.Role(1+rng.IntN(3))
	cfg.Placed = seed%2 == 0
	return &world{
		t: t, rng: rng, b: New(cfg), cfg: cfg, now: time.Unix(0, 0),
		asks: map[CallID]Ask{}, plans: map[CallID]Plan{}, moves: map[CallID]Move{}, silent: map[CallID]bool{},
		looked: map[CallID]Ask{}, copied: map[CallID]Move{}, finishes: map[CallID]Finish{}, due: map[key]int{}, told: map[key]int{}, blocks: map[key][]connector.BlockID{},
		holds: map[connector.HoldID]key{}, held: map[key]bool{}, later: map[connector.RequestID]bool{},
		ended: map[connector.RequestID]bool{}, resets: map[CallID]bool{}, stored: map[CallID]bool{}, planned: map[key]bool{},
	}
}

func testConfig() Config {
	return Config{
		Ranks: 1, Role: connector.RoleBoth,
		Groups:     []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}},
		BlockBytes: []int64{1 << 20},
		Later:      2 * time.Second, Fresh: 100 * time.Millisecond, Transfer: 5 * time.Second, TransferPerGiB: time.Second,
		Save: 30 * time.Second, Plan: 2 * time.Second, Finish: 5 * time.Second, Grace: 500 * time.Millisecond,
		Hold: 30 * time.Second, HoldMax: time.Minute, BackoffMin: 5 * time.Millisecond, BackoffMax: 200 * time.Millisecond,
		CorruptKeys: 8, Layers: 2,
	}
}

// do checks and notes what the tracker asks for.
func (w *world) do(input string, actions []Action) {
	w.log = append(w.log, fmt.Sprintf("%s %s", w.now.Sub(time.Unix(0, 0)), input))
	for _, a := range actions {
		w.log = append(w.log, "    "+describe(a))
	}
	for _, a := range actions {
		if e, tells := a.(Tell); tells {
			w.tell(&e.Event)
		} else {
			w.act(a)
		}
	}
	if due, ok := w.b.Next(); ok && len(w.b.ops) > 0 {
		require.False(w.t, due.IsZero())
	}
}

// act notes a call to the plugin, or the end of one.
func (w *world) act(a Action) {
	if gen, call := generationOf(a); call && gen == 0 {
		w.actAlone(a)
		return
	} else if call {
		require.True(w.t, w.live && gen == w.gen, "a call needs a living plugin")
	}
	switch a := a.(type) {
	case Ask:
		w.asks[a.ID] = a
	case Plan:
		w.plans[a.ID] = a
	case Move:
		w.granted(a)
		w.slotted(a)
		w.moves[a.ID] = a
		for id, started := range w.resets {
			w.stored[id] = w.stored[id] || started && a.Kind == Save
		}
	case Finish:
		w.finishes[a.ID] = a
	case Reset:
		require.False(w.t, w.b.Saving(), "a reset does not wait for saves")
		w.resets[a.ID] = true
	case ResetOver:
		w.resetOver(&a)
	case Kill:
		require.Equal(w.t, w.gen, a.Gen)
		w.doomed = true
	}
}

// actAlone notes what the host does without a plugin.
func (w *world) actAlone(a Action) {
	require.True(w.t, w.cfg.Placed, "nothing is placed")
	switch a := a.(type) {
	case Ask:
		require.False(w.t, w.live, "the plugin answers")
		w.looked[a.ID] = a
	case Move:
		require.Equal(w.t, Load, a.Kind)
		require.Empty(w.t, a.Slots)
		require.True(w.t, !w.live || w.cfg.Can&connector.CanPlan != 0, "the plugin loads")
		w.granted(a)
		w.copied[a.ID] = a
	default:
		require.Fail(w.t, "a call needs a living plugin", "%T", a)
	}
}

// answerAlone is the host's answer to a question or a load without a plugin.
func (w *world) answerAlone() {
	if id, ok := pickOne(w, w.looked); ok {
		q := w.looked[id].Query
		delete(w.looked, id)
		m := connector.Match{Tokens: max(0, min(16*w.rng.IntN(8), q.Tokens-q.Computed))}
		_, actions := w.b.Found(w.now, id, m, w.rng.IntN(3) == 0, w.rng.IntN(3) == 0)
		w.do("found", actions)
	}
	if id, ok := pickOne(w, w.copied); ok {
		delete(w.copied, id)
		out := Outcome{Absent: w.rng.IntN(2) == 0}
		if !out.Absent && w.rng.IntN(8) == 0 {
			out.Err = context.DeadlineExceeded
		}
		if !out.Absent && out.Err == nil {
			w.alone++
		}
		w.do("copied", w.b.Moved(w.now, id, out))
	}
}

// generationOf is the generation that a call is for.
func generationOf(a Action) (gen uint64, call bool) {
	switch a := a.(type) {
	case Ask:
		return a.Gen, true
	case Plan:
		return a.Gen, true
	case Move:
		return a.Gen, true
	case Finish:
		return a.Gen, true
	case Reset:
		return a.Gen, true
	}
	return 0, false
}

// granted checks that a call touches only blocks of one transfer that is not over.
func (w *world) granted(m Move) {
	for k, blocks := range w.blocks {
		if k.kind == kindOf(m) && k.request == m.Transfer.Request && w.told[k] == 0 && within(m.Transfer.Blocks, blocks) {
			return
		}
	}
	require.Fail(w.t, "a call touches what it was not granted", "%+v", *m.Transfer)
}

func within(blocks []connector.Block, list []connector.BlockID) bool {
	return !slices.ContainsFunc(blocks, func(b connector.Block) bool { return !slices.Contains(list, b.ID) })
}

func (w *world) tell(e *Event) {
	w.events++
	k := key{e.Kind, e.Request, e.Step}
	switch e.Kind {
	case Arriving:
		return
	case Answered:
		require.True(w.t, w.later[e.Request], "nobody waits for %q", e.Request)
		require.False(w.t, w.ended[e.Request])
		delete(w.later, e.Request)
		return
	case Released:
		k.kind = Finished
		require.True(w.t, w.held[k], "hold of %v", k)
		require.Equal(w.t, w.blocks[k], e.Blocks)
		delete(w.held, k)
		return
	case Finished:
		if e.Held {
			require.Empty(w.t, e.Blocks)
			w.held[k] = true
			w.holds[e.Hold.ID] = k
		} else {
			require.Equal(w.t, w.blocks[k], e.Blocks)
		}
	case Stored:
		w.due[k] = 1 // it may be told, once
	case Loaded, Saved:
		require.Equal(w.t, w.blocks[k], e.Blocks)
		require.Subset(w.t, e.Blocks, e.Failed)
		require.Equal(w.t, len(e.Failed) > 0, e.Err != nil)
		for _, moves := range []map[CallID]Move{w.moves, w.copied} {
			for _, m := range moves {
				require.False(w.t, kindOf(m) == e.Kind && overlap(m.Transfer.Blocks, e.Blocks), "call %d still touches the blocks of %v", m.ID, k)
			}
		}
	}
	w.told[k]++
	require.Equal(w.t, 1, w.told[k], "told twice: %v", k)
	require.Equal(w.t, 1, w.due[k], "never asked: %v", k)
}

// describe prints an action without addresses.
func describe(a Action) string {
	switch a := a.(type) {
	case Move:
		return fmt.Sprintf("move %d gen %d rank %d %s %+v", a.ID, a.Gen, a.Rank, a.Kind, *a.Transfer)
	case Plan:
		return fmt.Sprintf("plan %d gen %d %+v", a.ID, a.Gen, *a.Step)
	}
	return fmt.Sprintf("%T %+v", a, a)
}

func kindOf(m Move) EventKind {
	if m.Kind == Load {
		return Loaded
	}
	return Saved
}

func overlap(blocks []connector.Block, ids []connector.BlockID) bool {
	return slices.ContainsFunc(blocks, func(b connector.Block) bool { return slices.Contains(ids, b.ID) })
}

func pickOne[V any](w *world, m map[CallID]V) (CallID, bool) {
	ids := slices.Sorted(maps.Keys(m))
	if len(ids) == 0 {
		return 0, false
	}
	return ids[w.rng.IntN(len(ids))], true
}

func (w *world) transfer(id connector.RequestID) connector.Transfer {
	n := w.rng.IntN(4)
	t := connector.Transfer{Request: id, Tokens: 16 * n}
	for i := range n {
		t.Blocks = append(t.Blocks, connector.Block{Key: connector.BlockKey{1, byte(w.rng.IntN(12)), byte(i)}, ID: w.block})
		w.block++
	}
	return t
}

func (w *world) expect(kind EventKind, id connector.RequestID, blocks []connector.Block) {
	k := key{kind, id, w.steps}
	w.due[k], w.blocks[k] = 1, ids(blocks)
}

// step is the engine deciding something.
func (w *world) step() {
	w.computed()
	w.steps++
	s := &connector.Step{ID: w.steps}
	if w.rng.IntN(2) == 0 || len(w.open) == 0 {
		w.nextID++
		id := connector.RequestID(fmt.Sprint(w.nextID))
		w.open = append(w.open, id)
		s.Arrived = append(s.Arrived, connector.Query{Request: id, Tokens: 100})
	}
	used := map[connector.RequestID]bool{}
	for range w.rng.IntN(3) {
		id := w.open[w.rng.IntN(len(w.open))]
		if used[id] {
			continue
		}
		used[id] = true
		if w.rng.IntN(2) == 0 {
			t := w.transfer(id)
			s.Admitted = append(s.Admitted, t)
			w.expect(Loaded, id, t.Blocks)
		}
		if w.rng.IntN(2) == 0 {
			t := w.transfer(id)
			w.save(s, t)
			w.expect(Saved, id, t.Blocks)
		}
		if w.rng.IntN(6) == 0 {
			s.Preempted = append(s.Preempted, id)
		}
	}
	if w.rng.IntN(3) == 0 {
		w.endOne(s)
	}
	w.give(s)
}

func (w *world) endOne(s *connector.Step) {
	i := w.rng.IntN(len(w.open))
	id := w.open[i]
	w.open = slices.Delete(w.open, i, i+1)
	t := w.transfer(id)
	s.Ended = append(s.Ended, connector.Ended{Request: id, Tokens: t.Tokens, Remote: w.rng.IntN(2) == 0, Blocks: t.Blocks})
	w.expect(Finished, id, t.Blocks)
}

func (w *world) give(s *connector.Step) {
	w.do("step", w.b.Step(w.now, s, nil))
	if w.computing = s.ID; w.steps%2 == 0 {
		w.computed()
	}
	for _, e := range s.Ended {
		w.ended[e.Request] = true
		delete(w.later, e.Request)
	}
}

func (w *world) match() {
	if len(w.open) == 0 {
		return
	}
	q := connector.Query{
		Request: w.open[w.rng.IntN(len(w.open))], Tokens: 1 + w.rng.IntN(100), Keys: make([]connector.BlockKey, w.rng.IntN(7)),
		Computed: 16 * w.rng.IntN(3),
	}
	question := w.b.Query
	if w.rng.IntN(4) == 0 {
		question = w.b.Ahead
	}
	wait, actions := question(w.now, w.bring(q))
	w.do("query", actions)
	if wait && w.rng.IntN(2) == 0 {
		w.answerAsk()
	}
	m := w.b.Match(w.now, q.Request)
	w.offered(&q, m)
	if m.Later {
		w.later[q.Request] = true
	}
}

func (w *world) err() error {
	return []error{
		nil, nil, nil, connector.ErrBusy, connector.ErrGone, connector.ErrCorrupt, errors.New("any"),
	}[w.rng.IntN(7)]
}

func (w *world) answerAsk() {
	id, ok := pickOne(w, w.asks)
	if !ok {
		return
	}
	delete(w.asks, id)
	m := connector.Match{Tokens: w.rng.IntN(120) - 3, Later: w.rng.IntN(4) == 0}
	w.do("matched", w.b.Matched(w.now, id, m, w.err()))
	if w.rng.IntN(5) == 0 {
		w.do("matched again", w.b.Matched(w.now, id, m, nil))
	}
}

func (w *world) answerPlan() {
	id, ok := pickOne(w, w.plans)
	if !ok {
		return
	}
	s := w.plans[id].Step
	delete(w.plans, id)
	plan := &connector.Plan{Loads: w.choose(s.Admitted), Saves: w.choose(s.Computed)}
	w.do("planned", w.b.Planned(w.now, id, plan, w.err()))
}

// choose plans some of what was offered, in parts, twice, or invented.
func (w *world) choose(offered []connector.Transfer) (out []connector.Transfer) {
	for _, t := range offered {
		for range w.rng.IntN(3) {
			p := t
			if n := len(p.Blocks); n > 0 {
				from := w.rng.IntN(n)
				p.From, p.Blocks = p.From+16*from, p.Blocks[from:from+w.rng.IntN(n-from)+1]
				p.Tokens = 16 * len(p.Blocks)
			}
			switch w.rng.IntN(8) {
			case 0:
				p.Blocks = []connector.Block{{ID: 99999}}
			case 1:
				p.Tokens = -5
			}
			out = append(out, p)
		}
	}
	return out
}

func (w *world) answerMove() {
	id, ok := pickOne(w, w.moves)
	if !ok || w.silent[id] {
		return
	}
	m := w.moves[id]
	out := Outcome{Err: w.err(), Layers: w.rng.IntN(w.cfg.Layers + 1)}
	switch w.rng.IntN(6) {
	case 0:
		out = Outcome{Lost: true, Err: connector.ErrGone}
		w.silent[id] = true
	case 1:
		out.Err = &connector.BlockError{Blocks: []connector.BlockID{m.Transfer.Blocks[0].ID}, Err: connector.ErrCorrupt}
	case 2:
		out.Err = &connector.BlockError{Blocks: []connector.BlockID{12345678}, Err: connector.ErrGone}
	case 3:
		out.Corrupt = []connector.BlockID{m.Transfer.Blocks[0].ID}
	}
	if !out.Lost {
		delete(w.moves, id)
	}
	w.perhapsStored(id)
	w.do("moved", w.b.Moved(w.now, id, out))
	w.perhapsAgain(id)
}

// reset empties the caches, with or without a deadline, or gives up one that was begun.
func (w *world) reset() {
	if ids := slices.Sorted(maps.Keys(w.resets)); len(ids) > 0 && w.rng.IntN(3) == 0 {
		w.do("give up a reset", w.b.GiveUpReset(w.now, ids[0], context.Canceled))
		return
	}
	var deadline time.Time
	if w.rng.IntN(2) == 0 {
		deadline = w.now.Add(time.Duration(w.rng.IntN(5000)) * time.Millisecond)
	}
	id, actions := w.b.Reset(w.now, deadline)
	w.resets[id] = false
	w.do("reset", actions)
}

// answerReset is the plugin's answer; a reset that has not started gets none.
func (w *world) answerReset() {
	for _, id := range slices.Sorted(maps.Keys(w.resets)) {
		if w.resets[id] {
			w.emptied = w.rng.IntN(3) > 0
			w.do("reset answered", w.b.ResetAnswered(w.now, id, w.emptied, w.err()))
			w.emptied = false
			return
		}
	}
}

func (w *world) resetOver(a *ResetOver) {
	started, due := w.resets[a.ID]
	require.True(w.t, due, "a reset is over twice")
	delete(w.resets, a.ID)
	require.False(w.t, a.Emptied && (!started || !w.emptied || a.Err != nil || w.stored[a.ID]), "emptied, and it is not")
	if a.Emptied {
		w.empty++
		for _, r := range w.b.requests {
			require.False(w.t, r.match.known, "an answer of before the reset is kept")
		}
	}
}

func (w *world) answerFinish() {
	id, ok := pickOne(w, w.finishes)
	if !ok {
		return
	}
	f := w.finishes[id]
	delete(w.finishes, id)
	holds := make([]connector.Hold, len(f.Ended)+w.rng.IntN(8)/7)
	for i := range holds {
		if w.rng.IntN(2) == 0 {
			w.last++
			holds[i] = connector.Hold{ID: w.last - connector.HoldID(w.rng.IntN(8)/7), Consumers: w.rng.IntN(3), TTL: time.Duration(w.rng.IntN(90)) * time.Second, Weak: w.rng.IntN(8) == 0}
		}
	}
	w.do("finished", w.b.FinishAnswered(w.now, id, holds, w.err()))
}

// plugin is the process living and dying.
func (w *world) plugin() {
	switch {
	case w.live && (w.doomed || len(w.silent) > 0 || w.rng.IntN(4) == 0):
		w.live, w.dead = false, true
		clear(w.asks)
		clear(w.plans)
		clear(w.finishes)
		w.do("down", w.b.Down(w.now, w.gen))
	case w.dead:
		w.dead, w.doomed = false, false
		clear(w.moves) // from here on nothing touches a block
		clear(w.silent)
		w.do("reaped", w.b.Reaped(w.now, w.gen))
	case !w.live && w.rng.IntN(4) == 0:
		w.do("broken", w.b.Broken(w.now))
	case !w.live:
		w.gen++
		w.live = true
		w.do("up", w.b.Up(w.now, w.gen))
	}
}

func (w *world) tick() {
	d := time.Duration(w.rng.IntN(300)) * time.Millisecond
	if w.rng.IntN(20) == 0 {
		d *= 20
	}
	w.now = w.now.Add(d)
	w.do("tick", w.b.Tick(w.now))
}

// endHold says that a consumer has come for a hold, or that who kept it is gone.
func (w *world) endHold() {
	ids := []connector.HoldID{connector.HoldID(w.rng.IntN(int(w.last) + 2))}
	if w.rng.IntN(4) == 0 {
		w.do("holds died", w.b.HoldsDied(w.gen, ids, false))
		return
	}
	w.do("consumed", w.b.Consumed(w.gen, ids))
}

func (w *world) run(steps int) {
	for range steps {
		switch w.rng.IntN(13) {
		case 0, 1:
			w.step()
		case 2:
			w.match()
		case 3:
			w.answerAsk()
		case 4:
			w.answerPlan()
		case 5, 6, 7:
			w.answerMove()
		case 8:
			w.answerFinish()
		case 9:
			w.tick()
			w.answerAlone()
		case 10:
			w.endHold()
		case 12:
			if w.rng.IntN(4) == 0 {
				w.reset()
			}
			w.answerReset()
		case 11:
			if w.doomed || w.rng.IntN(4) == 0 {
				w.plugin()
			}
		}
	}
	w.drain()
}

// drain ends everything: time passes, a killed plugin dies, nothing else is needed.
func (w *world) drain() {
	w.computed()
	closed := w.rng.IntN(2) == 0
	for len(w.open) > 0 {
		w.steps++
		s := &connector.Step{ID: w.steps}
		w.endOne(s)
		w.give(s)
	}
	if closed {
		w.do("close", w.b.Close(w.now))
	}
	for range 4000 {
		if w.b.Idle() {
			break
		}
		w.answerAlone()
		if w.dead || w.doomed {
			w.plugin()
		}
		w.now = w.now.Add(100 * time.Millisecond)
		w.do("tick", w.b.Tick(w.now))
		if w.b.state != up && w.rng.IntN(20) == 0 && !w.dead {
			w.plugin()
		}
	}
	require.True(w.t, w.b.Idle(), "something never ends: %d ops, %d endings, %d holds", len(w.b.ops), len(w.b.endings), len(w.b.holds))
	require.Equal(w.t, w.due, w.told)
	require.Empty(w.t, w.held)
	require.Empty(w.t, w.b.Pins())
	require.Zero(w.t, w.b.LandingUsed())
	require.Empty(w.t, w.b.requests)
	for _, c := range w.b.calls {
		require.Fail(w.t, "a call is left", "%+v of %+v", *c, *c.op)
	}
	require.Empty(w.t, w.later)
	for range 2 { // one Save for the wait, one for the plugin
		w.now = w.now.Add(w.cfg.Save)
		w.do("tick", w.b.Tick(w.now))
	}
	require.Empty(w.t, w.resets, "resets that never end")
	for _, r := range w.b.asks {
		require.Fail(w.t, "an ask is left", "of %q", r.id)
	}
}
