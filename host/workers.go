package host

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvport/kvport/connector"
)

// startWorkers opens the worker sides of a connector in this process: see Options.Workers.
func (h *Host) startWorkers() (*generation, error) {
	var err error
	if h.metrics, err = newMetrics(h.opts.Metrics, h.cfg.Connector, h.cfg.Settings.Trust); err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	workers, err := h.opts.Workers(h.mapped())
	if err == nil && len(workers) != len(h.ranks) {
		err = fmt.Errorf("Options.Workers opened %d worker sides for %d ranks: %w", len(workers), len(h.ranks), ErrConfig)
	}
	if err != nil {
		h.metrics.set.Unregister()
		return nil, err
	}
	h.info = connector.Info{Name: h.cfg.Connector}
	for _, w := range workers {
		h.info.Capabilities |= connector.CapabilitiesOf(w)
	}
	g := h.newGeneration(1, &thisProcess{done: make(chan struct{})}, noScheduler{})
	g.workers = workers
	return g, nil
}

// thisProcess is the body of a connector in this process: it ends with the host, and nothing kills it before.
type thisProcess struct {
	ending sync.Once
	done   chan struct{}
}

// Done implements body.
func (p *thisProcess) Done() <-chan struct{} { return p.done }

// Err implements body.
func (p *thisProcess) Err() error { return nil }

// Close implements body.
func (p *thisProcess) Close(context.Context) error {
	p.KillFor(errClosing)
	return nil
}

// KillFor implements body.
func (p *thisProcess) KillFor(reason error) {
	if errors.Is(reason, errClosing) {
		p.ending.Do(func() { close(p.done) })
	}
}

// noScheduler is the scheduler side of a connector that has none.
type noScheduler struct{}

// Match implements connector.Scheduler.
func (noScheduler) Match(_ context.Context, queries []connector.Query) ([]connector.Match, error) {
	return make([]connector.Match, len(queries)), nil
}

// Close implements connector.Scheduler.
func (noScheduler) Close() error { return nil }
