package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/host"
)

// Layer-wise loads: a request whose KV arrives layer by layer is computed meanwhile. The model waits before it reads a
// layer until the host has verified that. What does not come in time is taken out of the step, so that a slow load
// costs the other requests a pause and never their step.

// errNotArrived says that a layer of a load did not come, or not in time.
var errNotArrived = errors.New("a layer of a load has not arrived")

// rest is for how many times as long as a step with other requests has waited for loads none is used early: so however many loads are
// slow, waiting for them takes a tenth of the others' time at most, and a step that is computed again is rare.
const rest = 10

// arrives has a load used from its first layers on.
func (l *loop) arrives(ev *host.Event) {
	if l.rests() {
		return
	}
	l.arriving[ev.Request] = ev.Layers
	l.sched.Arriving(ev.Step, ev.Request)
}

// early says whether another load would be used before its end. Any goroutine may ask.
func (l *loop) early() bool { return !l.full.Load() && !l.rests() }

// rests says whether a load was so slow, a moment ago, that no other is used before its end.
func (l *loop) rests() bool {
	t := l.noEarly.Load()
	return t != nil && time.Now().Before(*t)
}

// overlapped computes chunks, without those whose layers do not come, and returns the ones that it has computed.
func (l *loop) overlapped(chunks []sched.Chunk) ([]sched.Chunk, error) {
	l.batch.BeforeLayer = nil
	if !slices.ContainsFunc(chunks, func(c sched.Chunk) bool { return c.Early }) {
		l.fill(chunks)
		return chunks, l.forward()
	}
	patience, stop := context.WithTimeout(context.Background(), l.e.cfg.LayerPatience)
	defer stop()
	var waited time.Duration
	l.batch.BeforeLayer = func(layer int) error {
		began := time.Now()
		err := l.awaitLayer(patience, chunks, layer)
		waited += time.Since(began)
		return err
	}
	l.fill(chunks)
	err := l.forward()
	l.batch.BeforeLayer = nil
	if err == nil {
		began := time.Now()
		l.awaitLoads(patience, chunks)
		waited += time.Since(began)
	}
	if patience.Err() != nil || slices.ContainsFunc(chunks, func(c sched.Chunk) bool { return !c.Early }) {
		rested := time.Now().Add(rest * waited)
		l.noEarly.Store(&rested)
	}
	if errors.Is(err, errNotArrived) {
		if chunks = l.sched.Postpone(); len(chunks) == 0 {
			return nil, nil
		}
		l.fill(chunks)
		err = l.forward()
	}
	return chunks, err
}

// awaitLayer waits until a layer of all that early chunks depend on may be read.
func (l *loop) awaitLayer(patience context.Context, chunks []sched.Chunk, layer int) error {
	for i := range chunks {
		if !chunks[i].Early {
			continue
		}
		layers := l.arriving[chunks[i].Request]
		if layers == nil {
			return errNotArrived
		}
		if _, err := layers.Wait(patience, layer); err != nil {
			return fmt.Errorf("%w: layer %d: %w", errNotArrived, layer, err)
		}
	}
	return nil
}

// awaitLoads waits for the ends of the loads that early chunks depend on: until then nothing that was computed counts.
func (l *loop) awaitLoads(patience context.Context, chunks []sched.Chunk) {
	for slices.ContainsFunc(chunks, func(c sched.Chunk) bool { return c.Early && l.arriving[c.Request] != nil }) {
		select {
		case ev, open := <-l.events:
			l.event(ev, open)
		case <-patience.Done():
			return
		}
	}
}
