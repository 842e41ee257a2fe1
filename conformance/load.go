package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/internal/machine"
)

// A right connector misses a limit of time when the machine does not let it run. So each case has a load: it
// watches how long the threads of the connector, of the processes that it starts, and of the suite wait for a processor. Waits count
// only the time in which the connector could run, up to a limit, and what still fails for time alone while the
// machine was busy is inconclusive: the case is reported and repeated, and has neither passed nor failed.

const (
	loadTick    = 100 * time.Millisecond
	loadStretch = 4  // a busy machine stretches a wait by this factor at most
	busyShare   = 3  // the machine is busy if a thread waits for a processor for a third of the time
	mostKin     = 64 // of the processes that a connector starts, that many are watched
)

// load watches some processes.
type load struct {
	mu      sync.Mutex
	threads map[string]machine.SchedStat // so far
	took    time.Duration                // the last sample
	pids    []int                        // of the connector; the processes that they start are watched as well
	marks   []mark
	stop    context.CancelFunc
	done    chan struct{}
}

// mark is how much time was lost in all up to a moment.
type mark struct {
	at   time.Time
	lost time.Duration
}

// watchLoad begins to watch this process; end ends it.
func watchLoad() *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{
		threads: maps.Collect(machine.SchedStats(foldersOf(nil)...)), marks: []mark{{at: time.Now()}},
		stop: cancel, done: make(chan struct{}),
	}
	go func() {
		defer close(l.done)
		ticker := time.NewTicker(loadTick)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				l.sample(time.Now())
			}
		}
	}()
	return l
}

func (l *load) end() {
	l.stop()
	<-l.done
}

// watch watches one process more. What its threads have waited before does not count.
func (l *load) watch(pid int) {
	if l == nil || pid == 0 {
		return
	}
	before := maps.Collect(machine.SchedStats(foldersOf([]int{pid})...))
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pids = append(l.pids, pid)
	for path, is := range before {
		if _, known := l.threads[path]; !known {
			l.threads[path] = is
		}
	}
}

// foldersOf are those of the threads that are watched: the suite's, those of some processes, and of what these have started.
func foldersOf(pids []int) []string {
	folders := []string{"/proc/self/task"}
	if len(pids) == 0 {
		return folders
	}
	for _, pid := range slices.Concat(pids, machine.Descendants(mostKin, pids...)) {
		folders = append(folders, fmt.Sprintf("/proc/%d/task", pid))
	}
	return folders
}

// sample looks at the threads that are watched.
func (l *load) sample(now time.Time) {
	l.mu.Lock()
	pids := slices.Clone(l.pids)
	l.mu.Unlock()
	threads := maps.Collect(machine.SchedStats(foldersOf(pids)...))
	took := time.Since(now)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(now, threads)
	l.took = took
}

// add adds what was lost since the last sample: what the thread that waited longest waited for a processor, or what this sample comes later than
// the last one let it. A thread that was not seen before has begun since. The caller holds mu.
func (l *load) add(now time.Time, threads map[string]machine.SchedStat) {
	last := l.marks[len(l.marks)-1]
	passed := now.Sub(last.at)
	lost := max(passed-max(loadTick, l.took), 0)
	for path, is := range threads {
		if was := l.threads[path]; is.Waited > was.Waited {
			lost = max(lost, time.Duration(is.Waited-was.Waited)) //nolint:gosec // less than a life
		}
	}
	maps.Copy(l.threads, threads) // a look may miss a thread that the next one sees
	l.marks = append(l.marks, mark{now, last.lost + min(lost, passed)})
}

// lost is how much of the time since a moment the machine took.
func (l *load) lost(since time.Time) time.Duration {
	if l == nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	at := len(l.marks) - 1
	for at > 0 && l.marks[at].at.After(since) {
		at--
	}
	// Nobody has sampled since the last mark: if that is long ago, this process was not run.
	last := l.marks[len(l.marks)-1]
	return last.lost - l.marks[at].lost + max(time.Since(last.at)-2*loadTick, 0)
}

// spent is how much of the time since a moment the connector could have used.
func (l *load) spent(since time.Time) time.Duration {
	passed := time.Since(since)
	return max(passed-l.lost(since), passed/loadStretch)
}

// busy reports whether the machine took a large part of the time since a moment, so that nobody can be blamed for
// being late.
func (l *load) busy(since time.Time) bool {
	lost := l.lost(since)
	return lost >= loadTick && lost >= time.Since(since)/busyShare
}

// wait is a wait that began at a moment for something that should come soon.
type wait struct {
	load  *load
	began time.Time
	limit time.Duration
}

// patience begins a wait.
func (r *rig) patience(limit time.Duration) wait { return wait{r.watched(), time.Now(), limit} }

// over reports whether what should have come had its time.
func (w wait) over() bool { return w.load.spent(w.began) >= w.limit }

// awaited receives what should come within a limit of the time in which the connector can run.
func awaited[V any](r *rig, from <-chan V, limit time.Duration) (v V, came bool) {
	const look = 5 * time.Millisecond
	ticker := time.NewTicker(look)
	defer ticker.Stop()
	for w := r.patience(limit); ; {
		select {
		case v = <-from:
			return v, true
		case <-ticker.C:
			if w.over() {
				return v, false
			}
		}
	}
}

// watched is the load of the case; nil where nobody watches.
func (r *rig) watched() *load {
	if rec, ok := r.T.(*recorder); ok {
		return rec.load
	}
	return nil
}

// late fails the case for what did not happen in time since a moment, and ends it. Where the machine was busy
// that says nothing, and the case is inconclusive.
func (r *rig) late(since time.Time, format string, args ...any) {
	r.Helper()
	r.overdue(since, format, args...)
	r.FailNow()
}

// overdue is late in a case that goes on if it failed.
func (r *rig) overdue(since time.Time, format string, args ...any) {
	r.Helper()
	if r.watched().busy(since) {
		r.inconclusive("%s; the machine was busy: of %v the connector or the suite waited for a processor for %v",
			fmt.Sprintf(format, args...), time.Since(since).Round(time.Millisecond), r.watched().lost(since).Round(time.Millisecond))
	}
	r.Errorf(format, args...)
}

// unfit ends the case as one that asks for something which the machine or the config does not have: it is skipped, also where a profile
// requires it.
func (r *rig) unfit(why string) {
	r.Helper()
	if rec, ok := r.T.(*recorder); ok {
		rec.excuse()
	}
	r.Skipf("%s", why)
}

// undeclared ends the case as one about something that the connector does not say it has.
func (r *rig) undeclared(format string, args ...any) {
	r.Helper()
	if rec, ok := r.T.(*recorder); ok {
		rec.mu.Lock()
		rec.undeclared = true
		rec.mu.Unlock()
	}
	r.Skipf(format, args...)
}

// blame is recorder.blame.
func (r *rig) blame(rule string) {
	if rec, ok := r.T.(*recorder); ok {
		rec.blame(rule)
	}
}

// inconclusive ends the case without a verdict.
func (r *rig) inconclusive(format string, args ...any) {
	r.Helper()
	if rec, ok := r.T.(*recorder); ok {
		rec.note(Inconclusive, fmt.Sprintf(format, args...))
		rec.FailNow()
	}
	r.Skipf("inconclusive: "+format, args...)
}

// busyError is an error of a limit of time on a busy machine.
type busyError struct{ error }

func (e busyError) Unwrap() error { return e.error }

// timed marks an error of a deadline as one that a busy machine explains, if it does.
func (r *rig) timed(since time.Time, err error) error {
	if errors.Is(err, context.DeadlineExceeded) && r.watched().busy(since) {
		return busyError{err}
	}
	return err
}

// check fails the case if err is not nil. One that a busy machine explains, or that is the control program's, says nothing of the connector.
func (r *rig) check(err error, format string, args ...any) {
	r.Helper()
	var busy busyError
	switch {
	case errors.As(err, &busy):
		if rec, ok := r.T.(*recorder); ok {
			rec.note(Inconclusive, fmt.Sprintf("%s: %v; the machine was busy", fmt.Sprintf(format, args...), err))
		}
	case errors.Is(err, errControl):
		if rec, ok := r.T.(*recorder); ok {
			rec.note(Inconclusive, fmt.Sprintf("%s: %v", fmt.Sprintf(format, args...), err))
		}
	case err != nil:
		r.Errorf("%s: %v", fmt.Sprintf(format, args...), err)
	}
}
