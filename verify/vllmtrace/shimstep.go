package vllmtrace

import (
	"fmt"
	"maps"
	"slices"

	"github.com/kvport/kvport/connector"
)

// buildMeta sends what the scheduler decided since the last step. What the step computes is sent by
// waitSave, when it is computed.
func (s *Shim) buildMeta(c *Call) error {
	b, ok := c.Body.(*MetaCall)
	if !ok {
		return errBody
	}
	if err := s.freeAdmitted(); err != nil {
		return err
	}
	m := *b
	m.Loads, m.Saves, m.Scheduled, m.New = nil, nil, maps.Clone(b.Scheduled), slices.Clone(b.New)
	for i := range s.step.Admitted {
		t := &s.step.Admitted[i]
		load := LoadRef{Request: string(t.Request)}
		first := t.From / s.dst.blockSize
		for j, k := range t.Blocks {
			load.Blocks = append(load.Blocks, int(k.ID))
			load.Hashes = append(load.Hashes, s.chains[load.Request][first+j])
		}
		m.Loads = append(m.Loads, load)
		if f := s.flights[load.Request]; f.restore != nil {
			restore, err := s.engine.Fail(t.Blocks)
			if err != nil {
				return err
			}
			f.restore = restore
		}
		s.out.Loads++
	}
	for id, a := range s.local { // the forward pass does what the trace loads
		delete(s.local, id)
		from := s.lastLooks[id].Computed
		m.New = append(m.New, NewScheduled{ID: id, Prompt: a.Request.Prompt, Blocks: a.Blocks, Computed: from})
		m.Scheduled[id] = a.External
	}
	for _, id := range b.Preempted {
		s.step.Preempted = append(s.step.Preempted, connector.RequestID(id))
	}
	s.computed = nil
	s.predict(&m)
	s.meta = &m
	s.step.ID = 2 * uint64(c.Step)
	step := s.step
	s.step = connector.Step{}
	if len(step.Arrived)+len(step.Admitted)+len(step.Preempted)+len(step.Ended) > 0 {
		s.host.Step(&step)
	}
	s.recordBody(c, &m)
	return nil
}

// predict fills in the saves of a step: the blocks that it will have completed.
func (s *Shim) predict(m *MetaCall) {
	tables, from := map[string][]int{}, map[string]int{}
	for _, n := range m.New {
		tables[n.ID], from[n.ID] = slices.Concat(n.Blocks...), n.Computed
	}
	for _, n := range m.Cached {
		from[n.ID] = n.Computed
		fresh := slices.Concat(n.NewBlocks...)
		if n.Resumed {
			tables[n.ID] = fresh
		} else {
			tables[n.ID] = slices.Concat(s.dst.of(n.ID).table, fresh)
		}
	}
	size := s.dst.blockSize
	for _, id := range slices.Sorted(maps.Keys(m.Scheduled)) {
		first, end := from[id]/size, (from[id]+m.Scheduled[id])/size
		blocks := s.blocks(id, tables[id], first, end, end)
		if len(blocks) == 0 {
			continue
		}
		s.computed = append(s.computed, connector.Transfer{
			Request: connector.RequestID(id), From: first * size, Tokens: len(blocks) * size, Blocks: blocks,
		})
		for i, k := range blocks {
			m.Saves = append(m.Saves, SaveRef{Request: id, Block: int(k.ID), Hash: s.chains[id][first+i]})
		}
	}
}

// freeAdmitted waits until no save reads a block that is to be loaded: the host starts a load when
// it hears of it, long before the worker's hooks.
func (s *Shim) freeAdmitted() error {
	return s.waitSaves(func() bool {
		for _, t := range s.step.Admitted {
			for _, k := range t.Blocks {
				if len(s.dst.saving[int(k.ID)]) > 0 {
					return false
				}
			}
		}
		return true
	})
}

// preemptions waits until no save reads a block that the step will write (invariant 32).
func (s *Shim) preemptions(c *Call) error {
	err := s.waitSaves(func() bool {
		return !slices.ContainsFunc(s.dst.written(), func(block int) bool { return len(s.dst.saving[block]) > 0 })
	})
	if err != nil {
		return err
	}
	return s.record(c)
}

// waitSaves takes events until enough saves are over.
func (s *Shim) waitSaves(enough func() bool) error {
	if enough() {
		return nil
	}
	s.out.Waits++
	for !enough() {
		if err := s.take(); err != nil {
			return err
		}
	}
	return nil
}

func (s *Shim) bind(c *Call) error {
	s.recordBody(c, &BindCall{Loads: s.meta.Loads, Saves: len(s.meta.Saves)})
	return nil
}

func (s *Shim) startLoad(c *Call) error {
	b, ok := c.Body.(*StartLoadCall)
	if !ok {
		return errBody
	}
	none := *b
	none.Bytes = 0 // they move whenever the host likes
	s.recordBody(c, &none)
	return nil
}

// waitSave comes after the forward pass: the step's blocks have their content and can be saved.
func (s *Shim) waitSave(c *Call) error {
	b, ok := c.Body.(*WaitSaveCall)
	if !ok {
		return errBody
	}
	s.engine.Write(s.forward())
	if len(s.computed) > 0 {
		for _, t := range s.computed {
			id := string(t.Request)
			s.saves[id] = append(s.saves[id], t)
			s.out.Saves++
			s.out.Blocks += len(t.Blocks)
		}
		s.host.Step(&connector.Step{ID: 2*uint64(c.Step) + 1, Computed: s.computed})
	}
	none := *b
	none.Bytes = 0
	s.recordBody(c, &none)
	if s.opts.Eager {
		return nil
	}
	for len(s.saves) > 0 {
		if err := s.take(); err != nil {
			return err
		}
	}
	return nil
}

// forward is what the step's forward pass writes, loads left out.
func (s *Shim) forward() []connector.Block {
	var out []connector.Block
	size := s.dst.blockSize
	for id, n := range s.dst.meta.Scheduled {
		r := s.dst.of(id)
		out = append(out, s.blocks(id, r.table, r.from/size, (r.from+n+size-1)/size, (r.from+n)/size)...)
	}
	return out
}

// results waits for the loads that the trace reports now, and reports all that are over.
func (s *Shim) results(c *Call) error {
	b, ok := c.Body.(*ResultsCall)
	if !ok {
		return errBody
	}
	for _, id := range b.Recving {
		if f := s.flights[id]; f != nil {
			if err := s.until(func() bool { return f.over }); err != nil {
				return err
			}
		}
	}
	for _, id := range b.Sending {
		if err := s.until(func() bool { return s.freed(id) }); err != nil {
			return err
		}
	}
	r := &ResultsCall{FinishedRequests: b.FinishedRequests}
	s.invalid = nil
	for _, id := range slices.Sorted(maps.Keys(s.flights)) {
		f := s.flights[id]
		if !f.over {
			continue
		}
		r.Recving = append(r.Recving, id)
		for _, block := range f.failed {
			s.invalid = append(s.invalid, int(block))
		}
		delete(s.flights, id)
	}
	for _, id := range slices.Sorted(maps.Keys(s.finished)) {
		if known := s.dst.of(id); known.told && s.freed(id) {
			r.Sending = append(r.Sending, id)
			delete(s.finished, id)
		}
	}
	s.lastSeen = r
	s.recordBody(c, r)
	if len(s.invalid) > 0 {
		_ = s.record(&Call{Side: WorkerSide, Kind: LoadErrors, Step: c.Step, Body: &BlocksCall{Blocks: s.invalid}})
	}
	return nil
}

// freed says that nothing of an ended request is under way.
func (s *Shim) freed(id string) bool {
	return s.finished[id] && len(s.saves[id]) == 0 && s.flights[id] == nil
}

func (s *Shim) until(enough func() bool) error {
	for !enough() {
		if err := s.take(); err != nil {
			return err
		}
	}
	return nil
}

// loadErrors has been dealt with: the host reports failed blocks and the end of their load at once.
func (s *Shim) loadErrors(*Call) error { return nil }

func (s *Shim) output(c *Call) error {
	b, ok := c.Body.(*OutputCall)
	if !ok || s.lastSeen == nil {
		return errBody
	}
	s.recordBody(c, &OutputCall{
		Sending: s.lastSeen.Sending, Recving: s.lastSeen.Recving, Invalid: s.invalid, Expected: b.Expected,
	})
	return nil
}

func (s *Shim) end(c *Call) error {
	if err := s.until(func() bool { return len(s.saves) == 0 && len(s.flights) == 0 }); err != nil {
		return err
	}
	return s.record(c)
}

// take deals with the next event. One that nobody waits for ends the replay: exactly one is due for
// each transfer and each ended request.
func (s *Shim) take() error {
	e, err := s.host.Next()
	if err != nil {
		return err
	}
	id := string(e.Request)
	switch e.Kind {
	case Loaded:
		return s.loaded(id, &e)
	case Saved:
		return s.saved(id, &e)
	case Finished:
		if r := s.dst.of(id); s.finished[id] || !r.ended || r.sent {
			return fmt.Errorf("finished %s, which has not ended or was finished before", id)
		}
		s.finished[id] = true
	case Answered:
		s.answered[id] = true
	default:
		return fmt.Errorf("unknown event %d for %s", e.Kind, id)
	}
	return nil
}

// saved notes the end of a save, which must be one of those under way.
func (s *Shim) saved(id string, e *Event) error {
	list := s.saves[id]
	i := slices.IndexFunc(list, func(t connector.Transfer) bool {
		return slices.EqualFunc(t.Blocks, e.Blocks, func(k connector.Block, id connector.BlockID) bool { return k.ID == id })
	})
	if i < 0 || len(e.Failed) > 0 {
		return fmt.Errorf("a save of %s is over, of blocks %v, failed %v; %d are under way", id, e.Blocks, e.Failed, len(list))
	}
	if s.saves[id] = slices.Delete(list, i, i+1); len(s.saves[id]) == 0 {
		delete(s.saves, id)
	}
	s.note(SaveOver, &BlocksCall{Request: id, Blocks: numbers(e.Blocks)})
	return nil
}

// loaded notes the end of a load, which must be what the trace says.
func (s *Shim) loaded(id string, e *Event) error {
	f := s.flights[id]
	if f == nil || f.over {
		return fmt.Errorf("a load of %s is over, and none was under way", id)
	}
	f.over, f.failed = true, e.Failed
	if f.restore == nil && len(e.Failed) > 0 {
		return fmt.Errorf("the load of %s failed: blocks %v", id, e.Failed)
	}
	if f.restore != nil {
		f.restore()
		if len(e.Failed) != len(f.blocks) {
			return fmt.Errorf("the load of %s should have failed as in the trace, failed are %v", id, e.Failed)
		}
		s.out.Failed++
	}
	var arrived []connector.Block
	for _, k := range f.blocks {
		if !slices.Contains(e.Failed, k.ID) {
			arrived = append(arrived, k)
		}
	}
	s.verify(id, arrived)
	return nil
}

// verify looks at the bytes of blocks that must have their content.
func (s *Shim) verify(id string, blocks []connector.Block) {
	if len(blocks) == 0 {
		return
	}
	s.out.Verified += len(blocks)
	b := &BlocksCall{Request: id, Wrong: numbers(s.engine.Wrong(blocks))}
	for _, k := range blocks {
		b.Blocks = append(b.Blocks, int(k.ID))
	}
	s.note(Verified, b)
}

func numbers(ids []connector.BlockID) []int {
	out := make([]int, 0, len(ids))
	for _, id := range ids {
		out = append(out, int(id))
	}
	return out
}
