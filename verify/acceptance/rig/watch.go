package rig

import (
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/kvport/kvport/verify/cluster"
)

// Watch looks again and again at what processes and those that they have started have.
type Watch struct {
	client  cluster.Client
	roots   []*cluster.Process
	took    time.Duration        // of Run
	looks   int                  // in that time
	columns map[column][]float64 // one value for each look; NaN where the process was not there
}

// column is one thing that one process has.
type column struct {
	kind  string // engines, or their plugins
	owner string // the process that Watch was given
	pid   int
	what  string
}

// What a Watch counts.
const (
	watchMemory      = "KiB of memory"
	watchDescriptors = "descriptors"
	watchThreads     = "threads"
	watchGoroutines  = "goroutines"
	watchProcesses   = "processes"
)

// NewWatch makes a watch of processes.
func NewWatch(roots ...*cluster.Process) *Watch {
	return &Watch{roots: roots, columns: map[column][]float64{}}
}

// Run looks at all processes at that interval until ctx is done.
func (w *Watch) Run(ctx context.Context, every time.Duration) {
	began := time.Now()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			w.took = time.Since(began)
			return
		case <-tick.C:
			w.look(ctx)
		}
	}
}

func (w *Watch) look(ctx context.Context) {
	for _, root := range w.roots {
		w.process("engines and routers", root.Name, root.PID())
		if m, err := w.client.Metrics(ctx, root.URL); err == nil { // else it is missing in this look
			w.add(column{"engines and routers", root.Name, root.PID(), watchGoroutines}, m.Sum("go_goroutines"))
		}
		below := cluster.Descendants(root.PID())
		w.add(column{"engines and routers", root.Name, root.PID(), watchProcesses}, float64(len(below)))
		for _, pid := range below {
			w.process("plugins", root.Name, pid)
		}
	}
	w.looks++
}

func (w *Watch) process(kind, owner string, pid int) {
	use, err := cluster.Weigh(pid)
	if err != nil {
		return // it has ended
	}
	w.add(column{kind, owner, pid, watchMemory}, float64(use.Memory)/1024)
	w.add(column{kind, owner, pid, watchDescriptors}, float64(use.Descriptors))
	w.add(column{kind, owner, pid, watchThreads}, float64(use.Threads))
}

func (w *Watch) add(c column, value float64) {
	for len(w.columns[c]) < w.looks {
		w.columns[c] = append(w.columns[c], math.NaN())
	}
	w.columns[c] = append(w.columns[c], value)
}

// second is the second half of a column, or nil if the process was not there all the time. A value that is missing is the one before it.
func (w *Watch) second(values []float64) []float64 {
	if len(values) < w.looks-1 {
		return nil
	}
	out := slices.Clone(values[w.looks/2:])
	missing := 0
	for i, v := range out {
		if !math.IsNaN(v) {
			continue
		}
		if missing++; i == 0 || missing > len(out)/20 {
			return nil
		}
		out[i] = out[i-1]
	}
	return out
}

// tally is what all processes of a kind have of one thing.
type tally struct {
	sum       []float64
	processes int
	worst     column // whose trend is the highest for sure
	most      Trend
}

// Trends are those of the second half, of each process that was there all that time and of all of a kind together: as a table of the latter,
// and those that grow. All of them go to out.
func (w *Watch) Trends(out io.Writer) (table string, grows []string, err error) {
	tallies := map[string]*tally{}
	minutes := w.took.Minutes() / 2
	for c, values := range w.columns {
		second := w.second(values)
		if second == nil {
			continue
		}
		t, err := TrendOf(second, minutes)
		if err != nil {
			return "", nil, err
		}
		line := fmt.Sprintf("%s of process %d (%s of %s): %s", c.what, c.pid, c.kind, c.owner, t)
		fmt.Fprintln(out, line)
		if t.Grows() {
			grows = append(grows, line)
		}
		of := c.what + " of %d " + c.kind
		all := tallies[of]
		if all == nil {
			all = &tally{sum: make([]float64, len(second)), worst: c, most: t}
			tallies[of] = all
		}
		all.processes++
		if t.Low > all.most.Low {
			all.worst, all.most = c, t
		}
		for i := range min(len(second), len(all.sum)) { // one may have been looked at once more, as the watch ended
			all.sum[i] += second[i]
		}
	}
	var lines []string
	for _, of := range slices.Sorted(maps.Keys(tallies)) {
		all := tallies[of]
		t, err := TrendOf(all.sum, minutes)
		if err != nil {
			return "", nil, err
		}
		title := fmt.Sprintf(of, all.processes)
		if t.Grows() {
			grows = append(grows, title+": "+t.String())
		}
		lines = append(lines, fmt.Sprintf("%s: %s; most of one: %s (%s)", title, t, all.most, all.worst.owner))
	}
	return strings.Join(lines, "\n"), grows, nil
}
