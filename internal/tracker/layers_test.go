package tracker

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

func computing(id connector.RequestID) *connector.Step {
	return &connector.Step{ID: 7, Computing: []connector.Transfer{{
		Request: id, Tokens: 16, Blocks: []connector.Block{{Key: connector.BlockKey{1}, ID: 3}},
	}}}
}

// Rule LAYER-08: a save of what is being computed starts at once, and its time begins when that is done.
func TestComputingHasTime(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Ranks = 1 })
	b.got(b.Step(b.now, computing("a"), nil))
	m := one[Move](b)
	require.True(t, m.Computing)
	require.EqualValues(t, 7, m.Step)
	b.after(10 * b.cfg.Save)
	require.Empty(t, all[Kill](b), "the engine may take its time")
	require.Empty(t, all[CancelCall](b))
	b.got(b.Computed(b.now, 7))
	b.after(b.cfg.Save - time.Second)
	require.Empty(t, all[CancelCall](b))
	b.after(time.Second)
	require.Equal(t, m.ID, one[CancelCall](b).ID)
	b.after(b.cfg.Grace)
	one[Kill](b)
	b.got(b.Reaped(b.now, 1))
	e := b.event()
	require.Equal(t, Saved, e.Kind)
	require.Len(t, e.Failed, 1)
	require.True(t, b.Idle())
}

// A plugin that dies gets the save again in its next life, as any other.
func TestComputingIsRetried(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Ranks = 1 })
	b.got(b.Step(b.now, computing("a"), nil))
	b.got(b.Reaped(b.now, 1))
	require.Empty(t, all[Tell](b))
	b.got(b.Up(b.now, 2))
	m := one[Move](b)
	require.True(t, m.Computing)
	b.got(b.Moved(b.now, m.ID, Outcome{}))
	require.Empty(t, b.event().Failed)
}

// computed ends the computing of the last step.
func (w *world) computed() { w.do("computed", w.b.Computed(w.now, w.computing)) }

// save adds a save to a step, in one of three steps layer by layer.
func (w *world) save(s *connector.Step, t connector.Transfer) {
	if w.steps%3 == 0 {
		s.Computing = append(s.Computing, t)
	} else {
		s.Computed = append(s.Computed, t)
	}
}
