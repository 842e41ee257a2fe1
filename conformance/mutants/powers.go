package mutants

import (
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

// onStats plants a change of what Stats gives; calls counts them.
func onStats(change func(stats []connector.Stat, calls int) []connector.Stat) func(*backend, *wrappers) {
	return onSchedule(func(b *badScheduler) {
		var calls atomic.Int64
		b.stats = func(ctx context.Context) ([]connector.Stat, error) {
			stats, err := b.scheduler.Stats(ctx)
			return change(stats, int(calls.Add(1))), err
		}
	})
}

// onEvents plants a change of what Events gives.
func onEvents(change func(events []connector.BlockEvent) []connector.BlockEvent) func(*backend, *wrappers) {
	return onSchedule(func(b *badScheduler) {
		b.events = func(ctx context.Context) ([]connector.BlockEvent, error) {
			events, err := b.scheduler.Events(ctx)
			return change(events), err
		}
	})
}

func statFaults() []fault {
	return []fault{
		{"shows a number that it did not declare", "stat-declared", onStats(func(stats []connector.Stat, _ int) []connector.Stat {
			return append(stats, connector.Stat{Name: "surprises_total", Value: 1})
		})},
		{"leaves out a label", "stat-declared", onStats(func(stats []connector.Stat, _ int) []connector.Stat {
			stats[0].Labels = nil
			return stats
		})},
		{"shows what is no number", "stat-declared", onStats(func(stats []connector.Stat, _ int) []connector.Stat {
			stats[1].Value = math.NaN()
			return stats
		})},
		{"counts backwards", "stat-counters", onStats(func(stats []connector.Stat, calls int) []connector.Stat {
			if calls%2 == 0 {
				stats[0].Value++
			} else {
				stats[0].Value /= 2
			}
			return stats
		})},
		{"goes on counting in the next life", "stat-counters", func(b *backend, w *wrappers) {
			var total atomic.Int64
			onStats(func(stats []connector.Stat, _ int) []connector.Stat {
				stats[0].Value = float64(total.Add(int64(stats[0].Value)))
				return stats
			})(b, w)
		}},
		{"shows numbers when it has nothing else to do", "stat-soon", onSchedule(func(b *badScheduler) {
			b.stats = func(ctx context.Context) ([]connector.Stat, error) {
				time.Sleep(12 * time.Second) //nolint:forbidigo // to be slow is its fault
				return b.scheduler.Stats(ctx)
			}
		})},
	}
}

func eventFaults() []fault {
	return []fault{
		{"reports blocks as stored before all ranks are", "event-stored", func(_ *backend, w *wrappers) {
			w.worker = func(k *worker) connector.Worker {
				return &badWorker{worker: k, save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
					k.backend.mu.Lock()
					for _, b := range t.Blocks {
						k.life.tell(connector.BlocksStored, b.Key)
					}
					k.backend.mu.Unlock()
					return k.Save(ctx, t, kv)
				}}
			}
		}},
		{"reports blocks under other keys", "event-stored", onEvents(func(events []connector.BlockEvent) []connector.BlockEvent {
			for _, e := range events {
				for i := range e.Keys {
					e.Keys[i][31]++
				}
			}
			return events
		})},
		{"numbers the events of each answer anew", "event-sequence", onEvents(func(events []connector.BlockEvent) []connector.BlockEvent {
			for i := range events {
				events[i].Seq = uint64(i + 1)
			}
			return events
		})},
		{"reports a save of what is there", "event-sequence", func(_ *backend, w *wrappers) {
			w.worker = func(k *worker) connector.Worker {
				return &badWorker{worker: k, save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
					k.backend.mu.Lock()
					for _, b := range t.Blocks {
						delete(k.life.told, b.Key)
					}
					k.backend.mu.Unlock()
					return k.Save(ctx, t, kv)
				}}
			}
		}},
		{"polls for events", "event-waits", onSchedule(func(b *badScheduler) {
			b.events = func(context.Context) ([]connector.BlockEvent, error) { return nil, nil }
		})},
		{"waits for events whatever its context says", "event-waits", onSchedule(func(b *badScheduler) {
			b.events = func(context.Context) ([]connector.BlockEvent, error) {
				time.Sleep(3 * time.Second) //nolint:forbidigo // to be slow is its fault
				return nil, nil
			}
		})},
		{"does not say that all was cleared", "event-cleared", onEvents(func(events []connector.BlockEvent) []connector.BlockEvent {
			for i := range events {
				if events[i].Kind == connector.BlocksCleared {
					events[i].Kind, events[i].Keys = connector.BlocksRemoved, make([]connector.BlockKey, 1)
				}
			}
			return events
		})},
		{"says that stored blocks stay after a reset", "event-cleared", onSchedule(func(b *badScheduler) {
			b.reset = func(context.Context) (bool, error) {
				b.backend.mu.Lock()
				defer b.backend.mu.Unlock()
				clear(b.backend.blocks)
				return true, nil
			}
		})},
	}
}
