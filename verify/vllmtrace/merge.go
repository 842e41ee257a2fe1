package vllmtrace

import "fmt"

// Merge makes one log of the two sides of one engine. Their clocks have different beginnings, so the
// order is that of cause and effect: all of the worker's start before the scheduler's, and each
// step's worker calls behind the scheduler call that made the step's metadata.
func Merge(scheduler, worker []Call) (*Log, error) {
	start, steps, rest, err := splitSteps(worker)
	if err != nil {
		return nil, err
	}
	log := &Log{Calls: start}
	for _, c := range scheduler {
		if c.Kind == Shutdown {
			log.Calls, rest = append(log.Calls, rest...), nil
		}
		log.Calls = append(log.Calls, c)
		if c.Kind != BuildMeta {
			continue
		}
		batch, ok := steps[c.Step]
		if !ok {
			return nil, fmt.Errorf("%w: the worker has no step %d", ErrTrace, c.Step)
		}
		delete(steps, c.Step)
		log.Calls = append(log.Calls, batch...)
	}
	if len(steps) > 0 {
		return nil, fmt.Errorf("%w: the worker has %d steps that the scheduler has not", ErrTrace, len(steps))
	}
	log.Calls = append(log.Calls, rest...)
	log.Calls = append(log.Calls, Call{Side: ShimSide, Kind: End})
	return log, nil
}

// splitSteps cuts a worker's calls into what came before the first step, the steps by number, and
// what came behind the last.
func splitSteps(worker []Call) (start []Call, steps map[int][]Call, rest []Call, err error) {
	steps = map[int][]Call{}
	step := 0 // none
	for _, c := range worker {
		if p, ok := c.Body.(*PreemptionsCall); ok {
			step = p.Step
			if _, twice := steps[step]; twice {
				return nil, nil, nil, fmt.Errorf("%w: the worker has step %d twice", ErrTrace, step)
			}
		}
		switch {
		case c.Kind == Shutdown:
			rest = append(rest, c)
		case step == 0:
			start = append(start, c)
		default:
			steps[step] = append(steps[step], c)
		}
	}
	return start, steps, rest, nil
}

// Count says how often each kind of call occurs.
func (l *Log) Count() map[Kind]int {
	n := map[Kind]int{}
	for _, c := range l.Calls {
		n[c.Kind]++
	}
	return n
}
