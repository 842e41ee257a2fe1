package bench

import (
	"context"
	"slices"
	"time"
)

// turns measures several ways to do something that take turns: in each round every one is run once,
// each time in another order. It goes on for about a second and for at least few rounds.
type turns struct {
	few    int                  // 0: 15 rounds
	budget time.Duration        // 0: one second
	clock  func() time.Duration // nil: wall time
}

// took are the durations of one way.
type took []time.Duration

// measure is rounds with each way's durations sorted.
func (t turns) measure(ctx context.Context, ways ...func(round int) error) ([]took, error) {
	all, err := t.rounds(ctx, ways...)
	for _, a := range all {
		slices.Sort(a)
	}
	return all, err
}

// rounds runs the ways, each of which is told the round, and returns the durations of each by round. The first round does not count.
func (t turns) rounds(ctx context.Context, ways ...func(round int) error) ([]took, error) {
	if t.few == 0 {
		t.few = 15
	}
	if t.budget == 0 {
		t.budget = time.Second
	}
	if t.clock == nil {
		begin := time.Now()
		t.clock = func() time.Duration { return time.Since(begin) }
	}
	all := make([]took, len(ways))
	begin := time.Now()
	for round := 0; round <= t.few || time.Since(begin) < t.budget; round++ {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		for turn := range ways {
			way := (round + turn) % len(ways)
			start := t.clock()
			if err := ways[way](round); err != nil {
				return nil, err
			}
			if round > 0 {
				all[way] = append(all[way], t.clock()-start)
			}
		}
	}
	return all, nil
}

// quantile of sorted durations; 0.5 is the median.
func (t took) quantile(q float64) time.Duration {
	return t[min(int(q*float64(len(t))), len(t)-1)]
}

func (t took) median() time.Duration { return t.quantile(0.5) }

func (t took) micros() float64 { return float64(t.median()) / float64(time.Microsecond) }

func (t took) millis() float64 { return float64(t.median()) / float64(time.Millisecond) }

// speed is bytes in the median time, in GB/s.
func (t took) speed(bytes int64) float64 { return float64(bytes) / t.median().Seconds() / 1e9 }
