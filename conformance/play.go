package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/kvport/kvport/conformance/internal/model"
	"github.com/kvport/kvport/connector"
)

// stage is a connector of its own, with a backend of its own, on which histories are played.
type stage struct {
	*rig
	ranks     int
	size      int64
	instances []*Instance
	players   []*player
	limits    model.Limits
	bounds    *bounding // of the config; nil: the harness's
	bytes     int64     // of blocks that were saved so far
	usual     bool      // the connector takes no blocks of other numbers of tokens than are usual here
}

// stage starts a connector whose backend is empty.
func (r *rig) stage(ranks int, size int64) *stage {
	r.Helper()
	sub := *r
	sub.closers, sub.opened = nil, map[*engine]bool{}
	h, err := r.settings.fresh()
	if h != nil {
		sub.closers = append(sub.closers, h.Close)
	}
	if err != nil {
		_ = sub.shut()
		r.must(err, "start")
	}
	sub.h, sub.config = seeded{h, r.settings}, h.Config()
	return &stage{rig: &sub, ranks: ranks, size: size}
}

// shut ends what was started. The first error is the one to tell.
func (r *rig) shut() error {
	var errs []error
	for _, v := range slices.Backward(r.closers) {
		errs = append(errs, v())
	}
	r.closers = nil
	return errors.Join(errs...)
}

// words are how the connector's processes ended and what they wrote last, if they ended by themselves.
func (s *stage) words() []string {
	if d, ok := s.harness().(interface{ lastWords() []string }); ok {
		return d.lastWords()
	}
	return nil
}

// begin opens the engines of a history.
func (s *stage) begin(h *model.History, salt string) error {
	if s.usual {
		h.Shape.Tokens = 0
	}
	layout := layoutOf(&h.Shape)
	if s.bounds != nil {
		var err error
		if s.config, s.limits, err = s.bounds.set(s.h.Config(), h.Bounds, layout.BlockBytes(0)); err != nil {
			return err
		}
	}
	keys := h.BlockKeys(salt)
	s.players = nil
	for n := range h.Engines() {
		if n == len(s.instances) {
			i, err := s.h.Start(s.Context(), s.ranks, s.size)
			if err != nil {
				return fmt.Errorf("start: %w", err)
			}
			s.instances = append(s.instances, s.keep(i))
		}
		p := &player{stage: s, number: n, history: h, layout: layout, keys: keys, salt: salt, versions: h.Versions(), turn: make(chan struct{}, 1)}
		err := p.enter()
		if n == 0 && errors.Is(err, connector.ErrIncompatible) && h.Shape.Tokens > 0 { // it need not take blocks of any number of tokens
			s.usual, h.Shape.Tokens = true, 0
			layout = layoutOf(&h.Shape)
			p.layout = layout
			err = p.restart(false)
		}
		if err != nil {
			return err
		}
		s.players = append(s.players, p)
	}
	return nil
}

// end closes the engines of a history.
func (s *stage) end() error {
	var errs []error
	for _, p := range s.players {
		errs = append(errs, p.close())
	}
	s.players = nil
	return errors.Join(errs...)
}

// player is one engine of a history.
type player struct {
	*stage
	number  int
	history *model.History
	layout  connector.Layout
	keys    []connector.BlockKey
	salt    string
	engine  *engine
	mem     []cache
	next    connector.BlockID        // the slot that is used next
	loaded  map[connector.Block]bool // slots, without keys, into which something was loaded last

	versions int // of the bytes of blocks

	turn chan struct{} // of the scheduler side: whoever has put something in
}

// enter opens the sides on the player's instance.
func (p *player) enter() error {
	inst := p.instances[p.number]
	e, err := p.on(inst, setup{world: p.history.Shape.Ranks, layout: &p.layout, config: p.config})
	if err != nil {
		return err
	}
	// The same for all engines and lives of a history.
	e.env.Model = connector.NewFingerprint("conformance model", p.settings.salt, p.salt)
	e.env.Shape = connector.NewFingerprint("conformance shape", p.settings.salt, p.salt)
	p.engine, p.next, p.loaded = e, 0, map[connector.Block]bool{}
	if p.mem, err = e.caches(); err != nil {
		return err
	}
	return p.open()
}

func (p *player) open() error {
	if err := p.openScheduler(); err != nil {
		return err
	}
	return p.openWorkers()
}

func (p *player) openScheduler() error {
	s, err := p.engine.begunScheduler()
	if err != nil {
		return fmt.Errorf("open the scheduler side: %w", err)
	}
	p.engine.scheduler = s
	return nil
}

func (p *player) openWorkers() error {
	for rank := range p.engine.workers {
		w, err := p.engine.begunWorker(rank)
		if err != nil {
			return fmt.Errorf("open the worker side of rank %d: %w", rank, err)
		}
		p.engine.workers[rank] = w
	}
	return nil
}

func (p *player) closeWorkers() error {
	var errs []error
	for rank := range p.engine.workers {
		errs = append(errs, p.engine.closeWorker(rank))
	}
	return errors.Join(errs...)
}

func (p *player) close() error {
	if p.engine == nil {
		return nil
	}
	if err := errors.Join(p.closeWorkers(), p.engine.closeScheduler()); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}

// reopen closes and opens the sides. What an engine's own store keeps must stay only while one of them is open.
func (p *player) reopen() error {
	if p.info.Scope != connector.ScopeEngine {
		return errors.Join(p.close(), p.open())
	}
	if err := errors.Join(p.closeWorkers(), p.openWorkers()); err != nil {
		return err
	}
	return errors.Join(p.engine.closeScheduler(), p.openScheduler())
}

// restart ends the connector, or buries it, and starts it again.
func (p *player) restart(dead bool) error {
	inst := p.instances[p.number]
	err := p.close()
	if dead {
		err = nil // of a side whose process was killed
	} else if err == nil {
		err = inst.Close()
	} else {
		_ = inst.Close()
	}
	if err != nil {
		return fmt.Errorf("end of the connector: %w", err)
	}
	again, err := p.h.Start(p.Context(), p.ranks, p.size)
	if err != nil {
		return fmt.Errorf("start again: %w", err)
	}
	p.instances[p.number] = p.keep(again)
	return p.enter()
}

// kill ends the connector's process with SIGKILL after a while.
func (p *player) kill(after time.Duration) error {
	process := p.engine.inst.Process
	p.engine.inst.killed = true
	p.wait(after)
	if err := syscall.Kill(process.PID(), syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	select {
	case <-process.Done():
		return nil
	case <-p.Context().Done():
		return p.Context().Err()
	}
}

// do runs the calls of a step at the same time and looks at all memory afterwards.
func (s *stage) do(step model.Step) model.Outcome {
	moves := make([]*moving, len(step))
	for i := range step {
		p := s.players[step[i].Engine]
		moves[i] = p.prepare(&step[i])
	}
	out := model.Outcome{Results: make([]model.Result, len(step))}
	killed := map[int]bool{}
	for i := range step {
		if step[i].Kind == model.Kill {
			killed[step[i].Engine] = true
		}
	}
	together(len(step), func(i int) {
		p := s.players[step[i].Engine]
		out.Results[i] = p.call(&step[i], moves[i])
		out.Results[i].Ended = out.Results[i].Ended || killed[step[i].Engine]
	})
	for i := range step {
		if p := s.players[step[i].Engine]; out.Results[i].Late == "" {
			p.look(moves[i], &out.Results[i])
		}
	}
	for _, p := range s.players {
		out.Strays = append(out.Strays, p.strays(moves)...)
	}
	for i := range step {
		if step[i].Kind == model.Kill && out.Results[i].Err == nil {
			out.Results[i].Err = s.players[step[i].Engine].restart(true)
		}
	}
	return out
}

// call runs one call.
func (p *player) call(c *model.Call, m *moving) model.Result {
	switch c.Kind {
	case model.Reopen:
		return model.Result{Err: p.reopen()}
	case model.Restart:
		return model.Result{Err: p.restart(false)}
	case model.Kill:
		return model.Result{Err: p.kill(c.Cancel)}
	case model.Wait:
		p.wait(c.Cancel)
		return model.Result{}
	case model.Save, model.Load, model.Match, model.Reset:
	}
	p.wait(c.After)
	ctx, cancel := context.WithCancel(p.Context())
	defer cancel()
	switch {
	case c.Cancel < 0:
		cancel()
	case c.Cancel > 0:
		timer := time.AfterFunc(c.Cancel, cancel)
		defer timer.Stop()
	}
	done := make(chan model.Result, 1)
	go func() {
		var res model.Result
		switch c.Kind {
		case model.Save, model.Load:
			res = p.transfer(ctx, c, m)
		case model.Match:
			res = p.match(ctx, c)
		default:
			res = p.reset(ctx)
		}
		res.Ended = ctx.Err() != nil
		done <- res
	}()
	return p.returned(ctx, done)
}

// wait lets time pass, unless the case ends.
func (r *rig) wait(d time.Duration) {
	if d <= 0 {
		return
	}
	select {
	case <-time.After(d):
	case <-r.Context().Done():
	}
}

// patient is how long a call may take that nobody cancels.
const patient = 10 * time.Second

// returned waits for a call: not for ever, and not for long when its context has ended.
func (p *player) returned(ctx context.Context, done <-chan model.Result) model.Result {
	timer := time.NewTimer(patient)
	defer timer.Stop()
	what := fmt.Sprintf("a call has not returned after %v", patient)
	select {
	case res := <-done:
		return res
	case <-timer.C:
	case <-ctx.Done():
		what = fmt.Sprintf("a call has not returned %v after its context ended", soon)
	}
	if res, came := awaited(p.rig, done, soon); came {
		return res
	}
	return model.Result{Late: what}
}

// atTurn waits for the other calls of the scheduler side, which come one at a time.
func (p *player) atTurn(ctx context.Context) (leave func(), err error) {
	leave = func() { <-p.turn }
	select {
	case p.turn <- struct{}{}:
		return leave, nil
	default:
	}
	select {
	case p.turn <- struct{}{}:
		return leave, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *player) match(ctx context.Context, c *model.Call) (res model.Result) {
	leave, err := p.atTurn(ctx)
	if err != nil {
		return model.Result{Err: err}
	}
	defer leave()
	queries := make([]connector.Query, len(c.Queries))
	for i, q := range c.Queries {
		keys := make([]connector.BlockKey, len(q.Keys))
		for n, k := range q.Keys {
			keys[n] = p.keys[k]
		}
		queries[i] = query(keys)
		queries[i].Tokens, queries[i].Computed = len(keys)*p.blockTokens()+min(3, p.blockTokens()-1), q.Computed*p.blockTokens()
		if q.Probe {
			queries[i].Request = ""
		}
	}
	for w := p.patience(soon); ; {
		matches, err := p.engine.scheduler.Match(ctx, queries)
		res.Answers, res.Err = res.Answers[:0], err
		later := errors.Is(err, connector.ErrBusy)
		for _, m := range matches {
			later = later || m.Later
			res.Answers = append(res.Answers, p.inBlocks(m.Tokens))
		}
		if !later || ctx.Err() != nil {
			return res
		}
		if w.over() {
			return model.Result{Err: errors.New("no answer but Later")}
		}
		select {
		case <-time.After(askAgain):
		case <-ctx.Done():
		}
	}
}

// blockTokens is the tokens of the history's blocks.
func (p *player) blockTokens() int { return p.layout.Groups[0].BlockTokens }

// inBlocks gives tokens as those of blocks with model.BlockTokens. Those of no whole block stay no whole block.
func (p *player) inBlocks(tokens int) int {
	size := p.blockTokens()
	return tokens/size*model.BlockTokens + min(1, tokens%size)
}

func (p *player) reset(ctx context.Context) (res model.Result) {
	resetter, ok := connector.As[connector.Resetter](p.engine.scheduler)
	if !ok {
		return model.Result{Err: errors.New("the side has no Reset")}
	}
	leave, err := p.atTurn(ctx)
	if err != nil {
		return model.Result{Err: err}
	}
	defer leave()
	res.Emptied, res.Err = resetter.Reset(ctx)
	return res
}

// transfer runs a save or a load on every rank.
func (p *player) transfer(ctx context.Context, c *model.Call, m *moving) model.Result {
	res := model.Result{Ranks: make([]model.Moved, p.history.Shape.Ranks)}
	todo, err := p.plan(ctx, c, m)
	together(len(res.Ranks), func(rank int) {
		moved := &res.Ranks[rank]
		if c.Only > 0 && c.Only-1 != rank {
			return
		}
		moved.Called, moved.Failed = true, make([]bool, len(m.blocks))
		if err != nil {
			moved.Err, moved.Whole = err, true
			return
		}
		planned := map[connector.BlockID]bool{}
		for i := range todo {
			for _, b := range todo[i].Blocks {
				planned[b.ID] = true
			}
			p.noteError(moved, m, p.moveOne(ctx, rank, &todo[i], c.Kind == model.Save), todo[i].Blocks)
		}
		for n, b := range m.blocks {
			if !planned[b.ID] {
				moved.Failed[n] = true
				moved.Err = errors.Join(moved.Err, connector.ErrDeclined)
			}
		}
	})
	return res
}

// plan is what the connector's Planner makes of a transfer. The host itself decides to replace.
func (p *player) plan(ctx context.Context, c *model.Call, m *moving) ([]connector.Transfer, error) {
	if c.Replace {
		return []connector.Transfer{m.transfer}, nil
	}
	leave, err := p.atTurn(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	return p.engine.planned(ctx, m.transfer, c.Kind == model.Save)
}

// moveOne runs a transfer on one rank, again while the connector is busy.
func (p *player) moveOne(ctx context.Context, rank int, t *connector.Transfer, save bool) error {
	own := *t
	call := p.engine.workers[rank].Load
	if save {
		call = p.engine.workers[rank].Save
	}
	for w := p.patience(soon); ; {
		err := call(ctx, &own, p.mem[rank].kv)
		if !errors.Is(err, connector.ErrBusy) || w.over() {
			return err
		}
		select {
		case <-time.After(askAgain):
		case <-ctx.Done():
			return err
		}
	}
}

// noteError notes which blocks an error names.
func (p *player) noteError(moved *model.Moved, m *moving, err error, of []connector.Block) {
	if err == nil {
		return
	}
	moved.Err = errors.Join(moved.Err, err)
	some, named := errors.AsType[*connector.BlockError](err)
	if !named {
		for _, b := range of {
			moved.Failed[m.index[b.ID]] = true
		}
		moved.Whole = len(of) == len(m.blocks)
		return
	}
	for _, id := range some.Blocks {
		n, known := m.index[id]
		if !known {
			moved.Odd = true
			continue
		}
		moved.Failed[n] = true
	}
}
