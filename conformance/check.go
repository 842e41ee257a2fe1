package conformance

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvport/kvport/connector"
)

// Options change how Check runs. The zero value checks the profile store.
type Options struct {
	Profiles []Profile     // a required case that is skipped has failed; nil: Store
	Seed     uint64        // of sizes, orders and bytes; keys differ in every run
	Log      *slog.Logger  // what the connector's sides log; nil: nothing
	Deadline time.Duration // of one case; 0: 60 s
	Only     []string      // ids of the cases to run; nil: those of the profiles
	Progress func(Result)  // called after each case
}

// The defaults of Options.
const (
	defaultDeadline = 60 * time.Second
	grace           = 5 * time.Second // for a case to end after its context did, and for closing
)

// Result is one case's outcome.
type Result struct {
	ID     string // of the case
	Rule   string // of docs/spec
	Text   string // what the case does
	Status Status
	Log    []string      // why it failed or was skipped
	Took   time.Duration // with start and close of the connector
}

// Check runs the cases one after another and returns a Result for each, in order. A case that hangs
// fails and is left behind: its goroutines stay until the connector lets go of them.
func Check(ctx context.Context, newHarness Maker, o Options) []Result {
	var results []Result
	s := o.prepare(ctx, newHarness)
	for _, c := range o.cases() {
		r := o.judge(c, checkCase(ctx, c, newHarness, s))
		if o.Progress != nil {
			o.Progress(r)
		}
		results = append(results, r)
	}
	return results
}

// Run runs every case as a subtest and requires the profiles; none means Store.
func Run(t *testing.T, newHarness Maker, profiles ...Profile) {
	t.Helper()
	o := Options{Profiles: profiles}
	s := o.prepare(t.Context(), newHarness)
	for _, c := range o.cases() {
		t.Run(c.ID, func(t *testing.T) {
			r := o.judge(c, checkCase(t.Context(), c, newHarness, s))
			for _, line := range r.Log {
				t.Log(line)
			}
			switch r.Status {
			case Fail:
				t.Errorf("rule %s: %s", r.Rule, r.Text)
			case Skip:
				t.SkipNow()
			case Pass:
			}
		})
	}
}

// cases are those to run: what the profiles require, and what the connector may offer besides.
func (o *Options) cases() []Case {
	return slices.DeleteFunc(Cases(), func(c Case) bool {
		if o.Only != nil {
			return !slices.Contains(o.Only, c.ID)
		}
		required := slices.ContainsFunc(o.Profiles, func(p Profile) bool { return slices.Contains(c.Profiles, p) })
		groups := c.Groups && !o.byTicket() // its blocks are found by their keys
		return !required && c.Needs == 0 && !groups && !c.Arena
	})
}

// byTicket reports whether the profiles are those of connectors that need not find blocks by their keys.
func (o *Options) byTicket() bool {
	byTicket := []Profile{PDProducer, PDConsumer, Bidirectional, LayerWise, Reshape}
	return !slices.ContainsFunc(o.Profiles, func(p Profile) bool { return !slices.Contains(byTicket, p) })
}

// prepare fills in the defaults and asks the connector what it is. If that fails every case will
// ask, and say so.
func (o *Options) prepare(ctx context.Context, newHarness Maker) settings {
	if o.Deadline == 0 {
		o.Deadline = defaultDeadline
	}
	if len(o.Profiles) == 0 {
		o.Profiles = []Profile{Store}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	salt := make([]byte, 16)
	_, _ = rand.Read(salt) // never fails
	s := settings{seed: o.Seed, salt: hex.EncodeToString(salt), log: o.Log, deadline: o.Deadline}
	warmUp()
	checkCase(ctx, Case{Run: func(t T, h Harness) {
		r := newRig(t, h)
		defer r.close()
		info := r.describe()
		s.info = &info
	}}, newHarness, s)
	return s
}

// judge fails a case that was skipped although a profile requires it.
func (o *Options) judge(c Case, r Result) Result {
	for _, p := range o.Profiles {
		if r.Status == Skip && !c.Optional && slices.Contains(c.Profiles, p) {
			r.Status, r.Log = Fail, append(r.Log, fmt.Sprintf("profile %s requires this case", p))
		}
	}
	return r
}

// settings is what a run gives its cases.
type settings struct {
	seed     uint64
	salt     string
	log      *slog.Logger
	deadline time.Duration
	info     *connector.Info // nil: not known
}

// seeded is a Harness that carries the run's settings to the case.
type seeded struct {
	Harness
	settings settings
}

// checkCase runs one case and waits until everything it started is gone, or its time is over.
func checkCase(ctx context.Context, c Case, newHarness Maker, s settings) Result {
	start := time.Now()
	s.salt += c.ID
	ctx, cancel := context.WithTimeout(ctx, s.deadline)
	defer cancel()
	rec := &recorder{ctx: ctx, status: Pass}
	before := takeSnapshot()
	h, err := newHarness()
	if err != nil {
		rec.Errorf("start: %v", err)
		return rec.result(c, start)
	}
	hung := !within(ctx, func() { runCase(c, rec, seeded{h, s}) })
	if hung {
		rec.Errorf("still running %v after its deadline of %v; left behind:\n%s", grace, s.deadline, stacks())
	}
	closed := make(chan error, 1)
	go func() { closed <- h.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			rec.Errorf("close: %v", err)
		}
	case <-time.After(2 * grace):
		rec.Errorf("the connector does not close")
		hung = true
	}
	if !hung && !rec.failed() { // a case that gave up has left things
		if leak := before.waitForLeaks(grace); leak != "" {
			rec.Errorf("left after the case: %s", leak)
		}
	}
	return rec.result(c, start)
}

// within runs f and reports whether it ended before ctx plus grace.
func within(ctx context.Context, f func()) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	select {
	case <-done:
		return true
	case <-time.After(grace):
		return false
	}
}

func runCase(c Case, rec *recorder, h Harness) {
	defer func() {
		if p := recover(); p != nil {
			rec.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	c.Run(rec, h)
}

// recorder is the T of a command. After result was taken it ignores what a case left behind says.
type recorder struct {
	ctx context.Context //nolint:containedctx // what T.Context gives

	mu     sync.Mutex
	status Status
	log    []string
	sealed bool
}

// Context implements T.
func (r *recorder) Context() context.Context { return r.ctx }

// Helper implements T.
func (r *recorder) Helper() {}

// Errorf implements T.
func (r *recorder) Errorf(format string, args ...any) {
	r.note(Fail, fmt.Sprintf(format, args...))
}

// FailNow implements T.
func (r *recorder) FailNow() { runtime.Goexit() }

// Skipf implements T.
func (r *recorder) Skipf(format string, args ...any) {
	r.note(Skip, fmt.Sprintf(format, args...))
	runtime.Goexit()
}

func (r *recorder) note(s Status, line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sealed {
		return
	}
	if r.status != Fail {
		r.status = s
	}
	r.log = append(r.log, line)
}

func (r *recorder) failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status == Fail
}

func (r *recorder) result(c Case, start time.Time) Result {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sealed = true
	return Result{ID: c.ID, Rule: c.Rule, Text: c.Text, Status: r.status, Log: r.log, Took: time.Since(start)}
}

// stacks is where all goroutines are, cut to what a report can bear.
func stacks() string {
	buf := make([]byte, 16<<10)
	return string(buf[:runtime.Stack(buf, true)])
}
