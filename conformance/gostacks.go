package conformance

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// ownModule is the module of the sdk, which calls connectors.
const ownModule = "github.com/kvport/kvport"

// goroutineHead is the first line of a goroutine in a trace of the Go runtime; it says for what the goroutine waits. Number 0 is the
// scheduler's.
var goroutineHead = regexp.MustCompile(`^goroutine [1-9]\d* .*?\[(.*)\]:$`)

// goroutine is one of a trace.
type goroutine struct {
	waits  string   // for what, and for how long
	own    []string // frames in the connector's own code, the innermost first
	called bool     // the sdk has called the connector
	serves bool     // it is the one that called sdk.Serve
}

// ownStacks are the goroutines of a trace that are in a connector's own code: the package main, and its module. Each is one
// line. First come those in which the sdk has called it, since these are what a host waits for. count is that of all goroutines.
func ownStacks(trace []string, module string) (count int, own []string) {
	var others []string
	for _, g := range parseTrace(trace, module) {
		count++
		switch {
		case len(g.own) == 0 || g.serves:
		case g.called:
			own = append(own, g.line())
		default:
			others = append(others, g.line())
		}
	}
	return count, append(own, others...)
}

// line is a goroutine as people read it.
func (g *goroutine) line() string {
	const most = 3 // the frames next to the wait
	return "[" + g.waits + "] " + strings.Join(g.own[:min(most, len(g.own))], " < ")
}

// parseTrace reads a trace: goroutines one after another, each with a line for a function and one for its place in turn.
func parseTrace(trace []string, module string) (all []*goroutine) {
	var g *goroutine
	function := ""
	for _, line := range trace {
		head := goroutineHead.FindStringSubmatch(line)
		place, isPlace := strings.CutPrefix(line, "\t")
		switch {
		case head != nil:
			g = &goroutine{waits: head[1]}
			all = append(all, g)
		case g == nil: // the lines before the first
		case line == "":
			g = nil // registers may follow
		case isPlace:
			g.add(function, place, module)
		default:
			function = line
		}
	}
	return all
}

// add adds a frame.
func (g *goroutine) add(function, place, module string) {
	name, created := strings.CutPrefix(function, "created by ")
	if created {
		name, _, _ = strings.Cut(name, " in goroutine ")
	} else if args := strings.LastIndexByte(name, '('); args > 0 {
		name = name[:args]
	}
	g.called = g.called || !created && strings.HasPrefix(name, ownModule+"/sdk.")
	g.serves = g.serves || name == ownModule+"/sdk.Serve"
	if !isOwn(name, module) {
		return
	}
	place, _, _ = strings.Cut(place, " +0x")
	frame := filepath.Base(name) + " (" + filepath.Base(place) + ")"
	if created {
		frame = "started by " + frame
	}
	g.own = append(g.own, frame)
}

// isOwn reports whether a function is of a connector's own code.
func isOwn(name, module string) bool {
	if strings.HasPrefix(name, "main.") {
		return true
	}
	rest, inside := strings.CutPrefix(name, module)
	if module == "" || !inside || !strings.HasPrefix(rest, "/") && !strings.HasPrefix(rest, ".") {
		return false
	}
	return module != ownModule || !slices.ContainsFunc(callers(), func(folder string) bool { return strings.HasPrefix(rest, folder) })
}

// callers begin, in ownModule, what is between a host and a connector, also one of that module.
func callers() []string {
	return []string{"/connector.", "/sdk.", "/sdk/internal/", "/internal/", "/proto/"}
}
