package conformance

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/machine"
)

// A connector that loses a little in each call works in every test and dies after a week. So one case makes calls for
// Options.Budget, over and over the same ones, and looks at what the connector holds all the time. What counts is not how
// much that is but whether it still grows: the last third of the looks is compared with the first. Work that goes on behind
// calls which have returned, such as a queue of writes, grows as well while calls come faster than it ends, and is right. So
// what has grown is waited for, and then as many calls are made again: what is more then and has not gone after another wait stays.

// resources is what a connector holds at one moment.
type resources [kinds]int64

// The kinds of resources.
const (
	descriptors = iota
	sockets
	threads // goroutines, where the connector runs in this process
	processes
	files // in the folder of its config
	memory
	kinds
)

// mostProcesses bounds how many processes of a connector are counted.
const mostProcesses = 1 << 12

// tolerances are by how much each may grow without a word.
func tolerances() resources {
	return resources{descriptors: 8, sockets: 8, threads: 12, processes: 2, files: 8, memory: 12 << 20}
}

func kindNames() [kinds]string {
	return [kinds]string{"file descriptors", "sockets", "threads", "processes", "files in its folder", "bytes of memory"}
}

// held is what a connector holds now. pid 0 is this process.
func held(pid int, folder string) (r resources) {
	proc := procOf(pid)
	fds, _ := os.ReadDir(proc + "/fd")
	r[descriptors] = int64(len(fds))
	for _, fd := range fds {
		if to, err := os.Readlink(filepath.Join(proc, "fd", fd.Name())); err == nil && strings.HasPrefix(to, "socket:") {
			r[sockets]++
		}
	}
	tasks, _ := filepath.Glob(proc + "/task/*")
	r[threads] = int64(len(tasks))
	r[processes] = int64(len(machine.Descendants(mostProcesses, cmp.Or(pid, os.Getpid()))))
	if folder != "" {
		_ = filepath.WalkDir(folder, func(string, fs.DirEntry, error) error {
			r[files]++
			return nil
		})
	}
	r[memory] = residentBytes(proc)
	if pid == 0 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		r[memory], r[threads] = int64(m.HeapAlloc), int64(runtime.NumGoroutine()) //nolint:gosec // less than a machine has
	}
	return r
}

// residentBytes is how much memory of its own a process has: what it shares with the engine, such as its cache, does not count.
func residentBytes(proc string) int64 {
	text, err := os.ReadFile(proc + "/statm")
	if err != nil {
		return 0
	}
	var size, resident, shared int64
	if _, err := fmt.Sscan(string(text), &size, &resident, &shared); err != nil {
		return 0
	}
	return (resident - shared) * int64(os.Getpagesize())
}

// grower makes calls and looks at what they leave.
type grower struct {
	*engine
	keys  []connector.BlockKey
	looks []resources
	calls int
}

func randomGrowth(r *rig) {
	const n, lookEvery = 8, 24
	layout := interleaved(4 * n)
	e := r.engine(setup{layout: &layout})
	g := &grower{engine: e, keys: e.keys(n)}
	e.save(blocks(0, g.keys...)...)
	g.warm()
	began := time.Now()
	for round := 0; round < 4*lookEvery || time.Since(began) < r.settings.budget; round++ {
		g.round(round)
		if every := max(1, int(time.Since(began)/(r.settings.budget/lookEvery+1))); len(g.looks) < every {
			g.look()
		}
		if time.Since(began) > slack*r.settings.budget && len(g.looks) >= lookEvery/2 || r.Context().Err() != nil {
			break
		}
	}
	g.judge(began)
	if end, bounded := r.Context().Deadline(); !bounded || time.Until(end) > r.recovery()/2 { // what comes after the case's time says nothing
		g.works(fmt.Sprintf("after %d calls, of which some missed, failed or were cancelled", g.calls))
	}
}

// warm fills what a connector keeps for each key up to a bound, such as descriptors of 256 folders: on a busy machine the calls that
// count may be too few for that.
func (g *grower) warm() {
	for range 256 {
		miss := transfer(blocks(2*len(g.keys), g.engine.keys(len(g.keys))...))
		_ = g.workers[0].Load(g.Context(), &miss, g.kv[0])
	}
}

func (g *grower) look() {
	folder := ""
	if b, ok := g.harness().(Backend); ok {
		folder = b.Folder()
	}
	g.looks = append(g.looks, held(g.inst.PID, folder))
}

// round makes one call of each kind: what is there, what is not, what is cancelled before and amid the call.
func (g *grower) round(n int) {
	absent := g.engine.keys(len(g.keys))
	from, to, none := blocks(0, g.keys...), blocks(len(g.keys), g.keys...), blocks(2*len(g.keys), absent...)
	cancelled, cancel := context.WithCancel(g.Context())
	cancel()
	save, again := transfer(from), transfer(from)
	again.Replace = n%4 == 0
	load, miss := transfer(to), transfer(none)
	worker, kv := g.workers[0], g.kv[0]
	began := time.Now()
	_ = worker.Save(g.Context(), &again, kv)
	saved := time.Since(began)
	_ = worker.Load(g.Context(), &load, kv)
	loaded := time.Since(began) - saved
	_ = worker.Load(g.Context(), &miss, kv)
	_ = worker.Load(cancelled, &load, kv)
	g.amid(n, loaded, func(ctx context.Context) { _ = worker.Load(ctx, &load, kv) })
	_ = worker.Save(cancelled, &save, kv)
	g.amid(n, saved, func(ctx context.Context) { _ = worker.Save(ctx, &save, kv) })
	_, _ = g.scheduler.Match(g.Context(), []connector.Query{query(g.keys), query(absent)})
	_, _ = g.scheduler.Match(cancelled, []connector.Query{query(g.keys), query(absent)})
	probe := query(absent)
	probe.Request = ""
	_, _ = g.scheduler.Match(g.Context(), []connector.Query{probe})
	g.calls += 10
}

// amid makes a call whose context ends while it runs: behind some part of the time that such a call takes.
func (g *grower) amid(n int, took time.Duration, call func(context.Context)) {
	ctx, stop := context.WithTimeout(g.Context(), took*time.Duration(n%16)/16)
	defer stop()
	call(ctx)
}

// judge compares the last third of the looks with the first, behind some to warm up.
func (g *grower) judge(began time.Time) {
	warm := len(g.looks) / 5
	looks := g.looks[warm:]
	third := len(looks) / 3
	if third < 2 {
		g.inconclusive("there was time for %d looks at what the connector holds", len(g.looks))
	}
	suspects := grown(median(looks[:third]), median(looks[len(looks)-third:]))
	if len(suspects) == 0 {
		return
	}
	calls, before := g.calls, g.settled()
	g.again()
	after := g.gone(before)
	for _, kind := range grown(before, after) {
		if !slices.Contains(suspects, kind) {
			continue
		}
		text := fmt.Sprintf("WORK-10: %s grow with the calls: from %d to %d in %d calls that have all returned", kindNames()[kind], before[kind], after[kind], calls)
		if kind == memory && after[kind]-before[kind] < 4*tolerances()[kind] {
			g.overdue(began, "%s", text)
			continue
		}
		g.Errorf("%s", text)
	}
}

// grown are the kinds of which there is more than before, by more than the tolerance.
func grown(before, after resources) (more []int) {
	for kind, tolerance := range tolerances() {
		if after[kind]-before[kind] > tolerance {
			more = append(more, kind)
		}
	}
	return more
}

// settled is what the connector holds when nobody calls and nothing of it has become less for a while.
func (g *grower) settled() (least resources) {
	least = g.now()
	from := least
	for w := g.patience(soon); !w.over(); {
		for kind, now := range g.now() {
			least[kind] = min(least[kind], now)
			if now < from[kind]-tolerances()[kind]/8 {
				w, from = g.patience(soon), least
			}
		}
	}
	return least
}

// behindCalls is how long work may go on behind the last call.
const behindCalls = 10 * time.Second

// gone is what the connector holds when nobody calls and there is no more than before, or behindCalls is over.
func (g *grower) gone(before resources) resources {
	for w := g.patience(behindCalls); ; {
		if now := g.now(); w.over() || len(grown(before, now)) == 0 {
			return now
		}
	}
}

// now is what the connector holds after a moment.
func (g *grower) now() resources {
	g.wait(5 * askAgain)
	if g.Context().Err() != nil {
		g.inconclusive("there was no time to wait for the work behind the calls")
	}
	g.look()
	return g.looks[len(g.looks)-1]
}

// again makes as many calls as were made.
func (g *grower) again() {
	for round, end := 0, 2*g.calls; g.calls < end; round++ {
		if g.Context().Err() != nil {
			g.inconclusive("there was no time to make the calls once more")
		}
		g.round(round)
	}
}

// median is the median of each kind.
func median(looks []resources) (m resources) {
	for kind := range m {
		values := make([]int64, len(looks))
		for i, l := range looks {
			values[i] = l[kind]
		}
		slices.Sort(values)
		m[kind] = values[len(values)/2]
	}
	return m
}
