package plugin

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	pulseTicks   = 8 // the limit of an answer is counted in so many parts
	pulseStretch = 4 // a busy machine stretches it at most so much
)

// pulse asks a plugin for signs of life. It counts the time in which the plugin could have answered: not
// what it stood in line for a processor or a disk, nor what the host itself slept through. A machine with
// too much to do so costs patience, at most pulseStretch times the limit, and no plugin. One that is
// stopped or waits for a lock does not stand in line, and has the limit alone.
type pulse struct {
	limit time.Duration
	ask   func(context.Context) error
	stood func() time.Duration // in line, since it was last called
}

// beat asks once. An error says why the plugin must be ended.
func (p *pulse) beat(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answer := make(chan error, 1)
	go func() { answer <- p.ask(ctx) }()
	tick := max(p.limit/pulseTicks, 1)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	began := time.Now()
	for last, counted := began, time.Duration(0); counted < p.limit; {
		select {
		case err := <-answer:
			return err
		case <-ticker.C:
		}
		now := time.Now()
		counted += chance(now.Sub(last), tick, p.stood())
		last = now
	}
	took := time.Since(began)
	cancel()
	if err := <-answer; err != nil { // else it came in time after all
		return fmt.Errorf("no heartbeat within %s, waited %s: %w", p.limit, took.Round(time.Millisecond), err)
	}
	return nil
}

// chance is how much of the time since the last tick the plugin could have used. A host that comes late
// to its own tick was not run itself, and cannot say that the plugin was.
func chance(passed, tick, stood time.Duration) time.Duration {
	return max(min(passed, 2*tick)-stood, tick/pulseStretch)
}

// line watches how long the threads of some processes stand in line for a processor or a disk. Its zero value
// with folders is ready to use. Without schedstat (the kernel has none, /proc is hidden) nobody ever does.
type line struct {
	folders []string // /proc/PID/task
	last    time.Time
	threads map[string]turn
}

// turn is what a thread's schedstat says, in nanoseconds and counts.
type turn struct {
	ran, stood, turns uint64
}

// stood is how long the thread that waited longest did so since the last call; 0 on the first.
func (l *line) stood() time.Duration {
	now := time.Now()
	passed := now.Sub(l.last)
	var stats []string
	for _, folder := range l.folders {
		found, _ := filepath.Glob(filepath.Join(folder, "*", "schedstat")) // the pattern is good
		stats = append(stats, found...)
	}
	threads, longest := make(map[string]turn, len(stats)), time.Duration(0)
	for _, path := range stats {
		is, ok := readTurn(path)
		if !ok {
			continue
		}
		threads[path] = is
		was, known := l.threads[path]
		if !known {
			continue
		}
		longest = max(longest, time.Duration(is.stood-was.stood)) //nolint:gosec // it grows, by less than a life
		state := stateOf(filepath.Join(filepath.Dir(path), "stat"))
		if state == 'D' || state == 'R' && is == was { // the kernel adds a wait when it is over
			longest = max(longest, passed)
		}
	}
	l.last, l.threads = now, threads
	return longest
}

// readTurn reads /proc/PID/task/TID/schedstat.
func readTurn(path string) (turn, bool) {
	data, err := os.ReadFile(path) //nolint:gosec // below /proc
	fields := strings.Fields(string(data))
	if err != nil || len(fields) < 3 {
		return turn{}, false
	}
	var n [3]uint64
	for i := range n {
		if n[i], err = strconv.ParseUint(fields[i], 10, 64); err != nil {
			return turn{}, false
		}
	}
	return turn{n[0], n[1], n[2]}, true
}

// stateOf reads a thread's state from /proc/PID/task/TID/stat: R wants to run, D waits for a disk. The name before it may hold anything.
func stateOf(path string) byte {
	data, _ := os.ReadFile(path) //nolint:gosec // below /proc
	end := bytes.LastIndex(data, []byte(") "))
	if end < 0 || end+2 >= len(data) {
		return 0
	}
	return data[end+2]
}
