package vllmtrace

import (
	"errors"
	"fmt"
	"slices"
)

// inv1: one instance of each side, made before any other call to it.
func inv1(s *state, c *Call) error {
	switch made := s.inits[c.Side] != nil; {
	case c.Side == ShimSide:
		return nil
	case c.Kind == Init && made:
		return fmt.Errorf("a second %s side", c.Side)
	case c.Kind != Init && !made:
		return fmt.Errorf("the %s side does not exist yet", c.Side)
	}
	return nil
}

// inv2: all sides of an engine know the same engine id, and there is one.
func inv2(s *state, c *Call) error {
	b, ok := c.Body.(*InitCall)
	if !ok {
		return nil
	}
	if b.EngineID == "" {
		return errors.New("no engine id")
	}
	for _, other := range s.inits {
		if other.EngineID != b.EngineID {
			return fmt.Errorf("engine ids %q and %q", other.EngineID, b.EngineID)
		}
	}
	return nil
}

// inv3: the cache is registered once, before any step, as one storage.
func inv3(s *state, c *Call) error {
	switch b := c.Body.(type) {
	case *RegisterCall:
		if s.register != nil || s.step > 0 || !b.OneStorage {
			return errors.New("not once, not first or not one storage")
		}
	case *MetaCall:
		if s.register == nil {
			return errors.New("a step before the cache is registered")
		}
	}
	return nil
}

// inv4: every block lies where the strides say, inside the storage.
func inv4(s *state, c *Call) error {
	b, ok := c.Body.(*RegisterCall)
	if !ok || s.inits[c.Side] == nil {
		return nil
	}
	_, _, err := LayoutOf(s.inits[c.Side], b)
	return err
}

// inv24: every step, also an empty one, makes its metadata, in order.
func inv24(s *state, c *Call) error {
	if c.Kind == BuildMeta && c.Step != s.step+1 {
		return fmt.Errorf("step %d follows step %d", c.Step, s.step)
	}
	return nil
}

// inv25: new blocks are appended to a request's table, or replace it when it was resumed.
func inv25(s *state, c *Call) error {
	switch b := c.Body.(type) {
	case *MetaCall:
		for _, n := range b.New {
			if table := slices.Concat(n.Blocks...); !slices.Equal(table, s.of(n.ID).table) {
				return fmt.Errorf("request %s: blocks %v, allocated were %v", n.ID, table, s.of(n.ID).table)
			}
		}
		for _, n := range b.Cached {
			if table := slices.Concat(n.NewBlocks...); n.Resumed && !slices.Equal(table, s.of(n.ID).table) {
				return fmt.Errorf("request %s was resumed with blocks %v, allocated were %v", n.ID, table, s.of(n.ID).table)
			}
		}
	case *FinishedCall:
		if r := s.of(b.Request.ID); !slices.Equal(b.Blocks, r.table) {
			return fmt.Errorf("request %s ends with blocks %v, has %v", b.Request.ID, b.Blocks, r.table)
		}
	}
	return nil
}

// inv26: loads start before the forward pass if one is synchronous, else behind it.
func inv26(s *state, c *Call) error {
	b, ok := c.Body.(*StartLoadCall)
	if !ok || !b.AttnMeta {
		return nil
	}
	if s.meta.SyncLoads != (s.worker.layers == 0) {
		return fmt.Errorf("after %d layers, synchronous loads: %t", s.worker.layers, s.meta.SyncLoads)
	}
	return nil
}

// inv27: waiting for a layer needs metadata.
func inv27(s *state, c *Call) error {
	if c.Kind == WaitLayer && !s.worker.bound {
		return errors.New("no metadata is bound")
	}
	return nil
}

// inv28: saving a layer sees the whole cache of it.
func inv28(s *state, c *Call) error {
	b, ok := c.Body.(*SaveLayerCall)
	if ok && s.register != nil && !slices.Equal(b.Shape, s.register.Shape) {
		return fmt.Errorf("shape %v, registered was %v", b.Shape, s.register.Shape)
	}
	return nil
}

// inv29: saves are waited for once a step, with metadata bound.
func inv29(s *state, c *Call) error {
	switch {
	case c.Kind == WaitSave && (!s.worker.bound || s.worker.saved):
		return errors.New("no metadata, or a second time")
	case c.Kind == Clear && !s.worker.saved:
		return errors.New("the step's saves were not waited for")
	}
	return nil
}

// inv31: metadata is there inside a step's hooks and nowhere else.
func inv31(s *state, c *Call) error {
	switch c.Kind {
	case Bind:
		if s.worker.bound {
			return errors.New("metadata is bound already")
		}
	case StartLoad, SaveLayer, GetFinished, TransferResults, LoadErrors, Clear:
		if !s.worker.bound {
			return errors.New("no metadata is bound")
		}
	case BuildMeta, End:
		if s.worker.bound {
			return errors.New("metadata of the step before is still bound")
		}
	default: // may come at any time
	}
	return nil
}

// inv32: preemptions are handled first, and then no save reads a block that the step may write.
func inv32(s *state, c *Call) error {
	switch b := c.Body.(type) {
	case *PreemptionsCall:
		if s.worker.bound || b.Step != s.step {
			return fmt.Errorf("too late, or for step %d in step %d", b.Step, s.step)
		}
	case *BindCall:
		if !s.worker.preempted {
			return errors.New("preemptions were not handled")
		}
		for _, block := range s.written() {
			if len(s.saving[block]) > 0 {
				return fmt.Errorf("block %d is written while it is being saved", block)
			}
		}
	}
	return nil
}

// written are the blocks that the current step may write.
func (s *state) written() []int {
	var blocks []int
	for _, l := range s.meta.Loads {
		blocks = append(blocks, l.Blocks...)
	}
	for id, n := range s.meta.Scheduled {
		r := s.of(id)
		first, end := r.from/s.blockSize, (r.from+n+s.blockSize-1)/s.blockSize
		if n > 0 && first < len(r.table) {
			blocks = append(blocks, r.table[first:min(end, len(r.table))]...)
		}
	}
	return blocks
}

// inv51: the worker hears of every ended request in the next step, once.
func inv51(s *state, c *Call) error {
	switch b := c.Body.(type) {
	case *MetaCall:
		for _, id := range b.Finished {
			if r := s.of(id); !r.ended || r.told {
				return fmt.Errorf("request %s has not ended, or is told twice", id)
			}
		}
		for id, r := range s.requests {
			if r.ended && !r.told && !slices.Contains(b.Finished, id) {
				return fmt.Errorf("request %s has ended and is not told", id)
			}
		}
	case *ResultsCall:
		if !sameSet(b.FinishedRequests, s.meta.Finished) {
			return fmt.Errorf("worker is told %v, the step says %v", b.FinishedRequests, s.meta.Finished)
		}
	}
	return nil
}

func sameSet(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// inv60: nothing is called after shutdown.
func inv60(s *state, c *Call) error {
	if s.down[c.Side] && c.Kind != Shutdown {
		return fmt.Errorf("the %s side was shut down", c.Side)
	}
	return nil
}
