package conformance

import (
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
)

// A connector that loses a little in each call works in every test and dies after a week. So one case makes calls for
// Options.Budget, over and over the same ones, and looks at what the connector holds all the time. What counts is not how
// much that is but whether it still grows: the last third of the looks is compared with the first.

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
	r[processes] = int64(children(pid))
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
	amid, stop := context.WithTimeout(g.Context(), time.Duration(n%16)*40*time.Microsecond)
	defer stop()
	save, again := transfer(from), transfer(from)
	again.Replace = n%4 == 0
	load, miss := transfer(to), transfer(none)
	worker, kv := g.workers[0], g.kv[0]
	_ = worker.Save(g.Context(), &again, kv)
	_ = worker.Load(g.Context(), &load, kv)
	_ = worker.Load(g.Context(), &miss, kv)
	_ = worker.Load(cancelled, &load, kv)
	_ = worker.Load(amid, &load, kv)
	_ = worker.Save(cancelled, &save, kv)
	_ = worker.Save(amid, &save, kv)
	_, _ = g.scheduler.Match(g.Context(), []connector.Query{query(g.keys), query(absent)})
	_, _ = g.scheduler.Match(cancelled, []connector.Query{query(g.keys), query(absent)})
	probe := query(absent)
	probe.Request = ""
	_, _ = g.scheduler.Match(g.Context(), []connector.Query{probe})
	g.calls += 10
}

// judge compares the last third of the looks with the first, behind some to warm up.
func (g *grower) judge(began time.Time) {
	warm := len(g.looks) / 5
	looks := g.looks[warm:]
	third := len(looks) / 3
	if third < 2 {
		g.inconclusive("there was time for %d looks at what the connector holds", len(g.looks))
	}
	first, last := median(looks[:third]), median(looks[len(looks)-third:])
	for kind, name := range kindNames() {
		tolerance := tolerances()[kind]
		grown := last[kind] - first[kind]
		if grown <= tolerance || !g.stays(kind, first[kind]+tolerance) {
			continue
		}
		text := fmt.Sprintf("WORK-10: %s grow with the calls: from %d to %d in %d calls that have all returned", name, first[kind], last[kind], g.calls)
		if kind == memory && grown < 4*tolerance {
			g.overdue(began, "%s", text)
			continue
		}
		g.Errorf("%s", text)
	}
}

// stays reports whether the connector holds more than that of a kind still when nobody has called for a while.
func (g *grower) stays(kind int, most int64) bool {
	for w := g.patience(soon); !w.over(); g.pause(5 * askAgain) {
		g.look()
		if g.looks[len(g.looks)-1][kind] <= most {
			return false
		}
	}
	return true
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
