package conformance

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvport/kvport/connector"
)

// Options change how Check runs. The zero value checks the profile store.
type Options struct {
	Profiles []Profile     // a required case that is skipped has failed; nil: Store
	Seed     uint64        // of sizes, orders, bytes and random histories; keys differ in every run
	Budget   time.Duration // of each case that plays random histories; 0: 1 s
	Log      *slog.Logger  // what the connector logs (behind Wire: nothing), and its process writes to standard error, each line with its case; nil: nothing
	Deadline time.Duration // of one case; 0: 60 s, and 240 s when it runs again because the machine was busy
	Only     []string      // ids of the cases to run; nil: those of the profiles
	FailFast bool          // end the run at the first case that failed
	Progress func(Result)  // called when a case ended
}

// The defaults of Options.
const (
	defaultDeadline = 60 * time.Second
	grace           = 5 * time.Second // for a case to end after its context did, and for closing
	repeats         = 2               // of a case that was inconclusive
)

// Result is one case's outcome.
type Result struct {
	ID     string // of the case
	Rule   string // of docs/spec
	Text   string // what the case does
	Status Status
	Log    []string // why it failed or was skipped
	// Transcript is a short history of calls that fails, in a case that plays random ones: what was done, what came, and
	// what was allowed.
	Transcript []string
	Allowed    string        // what would have been right, in a case that plays random histories
	Took       time.Duration // with start and close of the connector, in all runs of the case

	// LastWords is how the connector's process ended and what it wrote to standard error last, if it ended by
	// itself in a case that failed.
	LastWords []string

	// Stacks is where the connector's process was that had to be killed, in a case without a verdict or that failed: of a Go
	// program the goroutines in the connector's own code.
	Stacks []string

	Number, Of int           // of the case among those of the run, from 1 on; 0: not known
	Left       time.Duration // about how long the cases will take that have not run yet; 0: not known, or there are none
	Again      bool          // it was inconclusive and will be repeated: this result is not the last of the case
	Profiles   []Profile     // those of the run to which the case belongs

	excused    bool   // it was skipped for what the machine or the config does not have
	undeclared bool   // it was skipped for what the connector does not say it has
	unasked    bool   // it is undeclared, and neither a profile nor a name asks for it
	away       string // it did not run since this server was not there; empty: it was
	noticed    bool   // it is the first case that is away
	optional   bool   // its profiles let it be skipped
	required   string // it did not run, and fails only for that: what is said of it; empty: it ran
}

// Check runs the cases one after another and returns a Result for each, in order. A case that hangs
// fails and is left behind: its goroutines stay until the connector lets go of them. Cases that are
// inconclusive run again when the others have ended, at most twice. When ctx ends, or a case has failed
// and o.FailFast is set, the results are those of the cases that ran until then.
func Check(ctx context.Context, newHarness Maker, o Options) []Result {
	c := checker{Options: o, newHarness: newHarness}
	c.settings = c.prepare(ctx, newHarness)
	c.all = c.cases()
	return c.run(ctx)
}

// run runs all cases, and those again that were inconclusive.
func (c *checker) run(ctx context.Context) []Result {
	for n := range c.all {
		if c.ended(ctx) {
			break
		}
		c.results = append(c.results, c.check(ctx, n, repeats > 0))
	}
	c.settings = c.settings.patient()
	for round := range repeats {
		for n := range c.results {
			if c.results[n].Again && !c.ended(ctx) {
				c.results[n] = c.check(ctx, n, round+1 < repeats)
			}
		}
	}
	for n := range c.results {
		if c.results[n].Again { // there was no time to repeat it
			c.results[n].Again = false
			c.tell(c.results[n])
		}
	}
	return c.results
}

// checker is one run.
type checker struct {
	Options
	newHarness Maker
	settings   settings
	all        []Case
	results    []Result
	failed     bool
	ran        int           // cases without a budget of their own
	took       time.Duration // by them
}

// ended reports whether no further case is to run.
func (c *checker) ended(ctx context.Context) bool { return ctx.Err() != nil || c.FailFast && c.failed }

// check runs case n.
func (c *checker) check(ctx context.Context, n int, again bool) Result {
	r := c.judge(c.all[n], checkCase(ctx, c.all[n], c.newHarness, c.settings))
	r.Number, r.Of = n+1, len(c.all)
	r.Again = again && r.Status == Inconclusive && ctx.Err() == nil
	if !c.all[n].budgeted {
		c.ran, c.took = c.ran+1, c.took+r.Took
	}
	if n < len(c.results) { // it ran before
		r.Took += c.results[n].Took
	}
	c.failed = c.failed || r.Status == Fail
	r.Left = c.left()
	c.tell(r)
	return r
}

// left is about how long the cases take that have not run yet: their budget, or as long as those that have.
func (c *checker) left() (sum time.Duration) {
	if c.FailFast && c.failed {
		return 0
	}
	for _, next := range c.all[min(len(c.results)+1, len(c.all)):] {
		switch {
		case next.budgeted:
			sum += c.settings.budget
		case c.ran == 0:
			return 0
		default:
			sum += c.took / time.Duration(c.ran)
		}
	}
	return sum
}

func (c *checker) tell(r Result) {
	if c.Progress != nil {
		c.Progress(r)
	}
}

// MayBeInconclusive is a variable of the environment. Unless it is empty, Run skips a case that stays inconclusive.
const MayBeInconclusive = "KVPORT_MAY_BE_INCONCLUSIVE"

// Run runs every case as a subtest and requires the profiles; none means Store. A case that stays inconclusive fails, as
// it ends kvport conform with an exit code that is not 0: see MayBeInconclusive.
func Run(t *testing.T, newHarness Maker, profiles ...Profile) {
	t.Helper()
	o := Options{Profiles: profiles}
	s := o.prepare(t.Context(), newHarness)
	for _, c := range o.cases() {
		t.Run(c.ID, func(t *testing.T) {
			r := o.judge(c, checkCase(t.Context(), c, newHarness, s))
			for n := 0; n < repeats && r.Status == Inconclusive; n++ {
				t.Log("inconclusive, once more: ", strings.Join(r.Log, "; "))
				r = o.judge(c, checkCase(t.Context(), c, newHarness, s.patient()))
			}
			for _, line := range slices.Concat(r.Log, r.Transcript, r.LastWords, r.Stacks) {
				t.Log(line)
			}
			if why := complaint(r); why != "" {
				t.Error(why)
			} else if r.Status != Pass {
				t.SkipNow()
			}
		})
	}
}

// complaint says why a result fails a test; empty if it does not.
func complaint(r Result) string {
	switch {
	case r.Status == Fail:
		return fmt.Sprintf("rule %s: %s", r.Rule, r.Text)
	case r.Status == Inconclusive && os.Getenv(MayBeInconclusive) == "":
		why, _, _ := strings.Cut(strings.Join(r.Log, "\n"), "\n")
		return fmt.Sprintf("rule %s: there is no verdict after %d runs of the case: %s", r.Rule, repeats+1, why)
	}
	return ""
}

// cases are those to run: what the profiles require, and whatever else the connector may offer. An id of Only
// that no case has is a case that fails.
func (o *Options) cases() []Case {
	all := Cases()
	for _, id := range o.Only {
		if !slices.ContainsFunc(all, func(c Case) bool { return c.ID == id }) {
			all = append(all, Case{ID: id, Text: "There is no such case.", Run: func(t T, _ Harness) { t.Errorf("no case is called %q", id) }})
		}
	}
	return slices.DeleteFunc(all, func(c Case) bool {
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
	fixed := o.Deadline != 0
	o.Deadline = cmp.Or(o.Deadline, defaultDeadline)
	if o.Budget <= 0 {
		o.Budget = defaultBudget
	}
	if len(o.Profiles) == 0 {
		o.Profiles = []Profile{Store}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	salt := make([]byte, 16)
	_, _ = rand.Read(salt) // never fails
	s := settings{seed: o.Seed, salt: hex.EncodeToString(salt), log: o.Log, deadline: o.Deadline, fixed: fixed, budget: o.Budget, seen: new(sighting)}
	warmUp()
	checkCase(ctx, Case{ID: "before", Run: func(t T, h Harness) {
		r := newRig(t, h)
		defer r.close()
		info := r.describe()
		s.info = &info
	}}, newHarness, s)
	return s
}

// judge says to which profiles a case belongs, and fails one that was skipped although they require it. Power requires only what the connector declares.
func (o *Options) judge(c Case, r Result) Result {
	r.unasked = r.undeclared && o.Only == nil && !slices.ContainsFunc(o.Profiles, func(p Profile) bool { return slices.Contains(c.Profiles, p) })
	for _, p := range o.Profiles {
		if !slices.Contains(c.Profiles, p) {
			continue
		}
		r.Profiles, r.optional = append(r.Profiles, p), c.Optional
		if r.Status == Skip && !c.Optional && !r.excused && (p != Power || !r.undeclared) {
			r.required = fmt.Sprintf("profile %s requires this case", p)
			r.Status, r.Log = Fail, append(r.Log, r.required)
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
	fixed    bool // somebody has set it
	again    bool // the case was inconclusive before, and gets more time
	budget   time.Duration
	info     *connector.Info // nil: not known
	fresh    Maker           // of the case's connector, with a backend of its own
	seen     *sighting       // of the servers behind relays; nil: nobody looks
	hung     *hung           // of the case; nil: nobody asks
}

// harness makes a harness whose connector logs to the log of the run, and is asked where it is before it is killed.
func (s *settings) harness(newHarness Maker) (Harness, error) {
	h, err := newHarness()
	if l, ok := h.(interface {
		logTo(log *slog.Logger, hung *hung)
	}); ok && err == nil {
		l.logTo(s.log, s.hung)
	}
	return h, err
}

// patient are the settings of a case that runs again: a machine that was busy may be so still. A deadline that somebody has set stays what it is.
func (s settings) patient() settings {
	s.again = !s.fixed
	return s
}

// limit is how long a case may run.
func (s *settings) limit() time.Duration {
	if s.again {
		return s.deadline + (loadStretch-1)*defaultDeadline
	}
	return s.deadline
}

// secret is a key that all engines of a case have.
func (s *settings) secret(purpose string) connector.Secret {
	f := connector.NewFingerprint("conformance key", s.salt, purpose)
	return f[:]
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
	s.log = cmp.Or(s.log, slog.New(slog.DiscardHandler)).With("case", c.ID)
	s.hung = cmp.Or(s.hung, &hung{log: s.log}) // a case that runs others reports theirs
	s.fresh = func() (Harness, error) { return s.harness(newHarness) }
	if c.budgeted {
		s.deadline += slack * s.budget
	}
	run := ctx
	ctx, cancel := context.WithTimeout(ctx, s.limit())
	defer cancel()
	before := takeSnapshot()
	rec := &recorder{run: run, ctx: ctx, start: start, status: Pass, load: watchLoad(), hung: s.hung}
	defer rec.load.end()
	h := rec.begin(&c, &s)
	if h == nil {
		return rec.result(c)
	}
	patience := grace
	if hasControl(h) { // its program may have to undo what a case did
		patience += controlLimit
	}
	hung := !within(ctx, patience, func() { runCase(c, rec, seeded{h, s}) })
	switch {
	case run.Err() != nil:
		rec.note(Inconclusive, "interrupted before it had ended")
	case hung:
		rec.Errorf("still running %v after its deadline of %v; left behind:\n%s", patience, s.limit(), stacks())
	}
	if d, ok := h.(interface{ lastWords() []string }); ok && rec.is(Fail) {
		rec.words = append(d.lastWords(), rec.words...)
	}
	hung = !rec.closes(h, s.limit(), grace+patience) || hung
	rec.load.end()                   // it would be left, too
	if !hung && rec.is(Pass, Skip) { // a case that gave up has left things
		rec.leaves(before)
	}
	return rec.result(c)
}

// closes ends the harness of a case and reports whether that has come to an end. What it has left to do is the suite's own work, such as to remove
// all that a store has written, which takes long on a busy machine or a busy disk. So it has the time of a case, and where that is too short
// it says nothing of the connector. After an interruption, patience is left.
func (r *recorder) closes(h Harness, limit, patience time.Duration) bool {
	began := time.Now()
	ctx, cancel := context.WithTimeout(r.run, limit)
	defer cancel()
	ended := within(ctx, patience, func() {
		if err := h.Close(); err != nil {
			r.trouble("close", err)
		}
	})
	if !ended {
		r.note(Inconclusive, fmt.Sprintf("what the case ran with does not close within %v", time.Since(began).Round(time.Second)))
	}
	return ended
}

// leaves says what is left after a case. What a busy machine ends late is waited for longer, and says nothing after that.
func (r *recorder) leaves(before snapshot) {
	now, began := watchLoad(), time.Now()
	defer now.end()
	before.goroutines++ // the one that watches
	leak := before.waitForLeaks(grace)
	for n := 1; n < loadStretch && leak != "" && now.busy(began); n++ {
		leak = before.waitForLeaks(grace)
	}
	switch {
	case leak == "":
	case now.busy(began):
		r.note(Inconclusive, fmt.Sprintf("left after the case: %s; the machine is busy", leak))
	default:
		r.Errorf("left after the case: %s", leak)
	}
}

// begin makes the harness of a case; nil if the case cannot run, and has its status.
func (r *recorder) begin(c *Case, s *settings) Harness {
	if lacks := lacking(c.Needs, c.Groups, s.info); lacks != "" { // before a harness has its server mended for nothing
		r.undeclared = true
		r.note(Skip, lacks)
		return nil
	}
	h, err := s.fresh()
	if err != nil {
		r.trouble("start", err)
		return nil
	}
	if r.away, r.noticed = s.seen.look(r.ctx, h, c.ID); r.away == "" {
		return h
	}
	r.note(Inconclusive, r.away)
	if err := h.Close(); err != nil {
		r.trouble("close", err)
	}
	return nil
}

// within runs f and reports whether it ended before ctx, or not long after it.
func within(ctx context.Context, after time.Duration, f func()) bool {
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
	case <-time.After(after):
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
	run   context.Context //nolint:containedctx // of all cases
	ctx   context.Context //nolint:containedctx // what T.Context gives
	start time.Time
	load  *load
	hung  *hung
	words []string
	rule  string // that was broken; empty: the case's

	blamed string // the rule of a case that fails, where no history broke one; empty: the case's

	transcript []string
	allowed    string
	excused    bool
	undeclared bool
	away       string
	noticed    bool

	mu     sync.Mutex
	status Status
	log    []string
	more   int // lines that are not in log
	sealed bool
}

// logLines is how many messages of a case are kept: one that is wrong in each byte says so of each.
const logLines = 50

// Context implements T.
func (r *recorder) Context() context.Context { return r.ctx }

// Helper implements T.
func (r *recorder) Helper() {}

// Errorf implements T. What fails when the case's time is over has failed for that: on a busy machine, or when
// the run was ended, it says nothing.
func (r *recorder) Errorf(format string, args ...any) {
	status := Fail
	if r.run.Err() != nil || errors.Is(r.ctx.Err(), context.DeadlineExceeded) && r.load.busy(r.start) {
		status = Inconclusive
	}
	r.note(status, fmt.Sprintf(format, args...))
}

// trouble says that a harness failed. That its control program did says nothing of the connector.
func (r *recorder) trouble(where string, err error) {
	if errors.Is(err, errControl) {
		r.note(Inconclusive, fmt.Sprintf("%s: %v", where, err))
		return
	}
	r.Errorf("%s: %v", where, err)
}

// FailNow implements T.
func (r *recorder) FailNow() { runtime.Goexit() }

// Skipf implements T.
func (r *recorder) Skipf(format string, args ...any) {
	r.note(Skip, fmt.Sprintf(format, args...))
	runtime.Goexit()
}

// note adds a line. A case that failed stays so, and what one says that has become inconclusive may follow
// from just that.
func (r *recorder) note(s Status, line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sealed {
		return
	}
	if r.status != Fail && r.status != Inconclusive {
		r.status = s
	}
	if len(r.log) == logLines {
		r.more++
		return
	}
	r.log = append(r.log, line)
}

// broken says which rule a history broke, what it allows, and how it was broken.
func (r *recorder) broken(rule, allowed string, transcript, words []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.sealed {
		r.rule, r.allowed, r.transcript, r.words = rule, allowed, transcript, words
	}
}

// blame names the rule that is broken by what is about to be said, where that is another than the case's. Something else that failed
// before stays what the case is about.
func (r *recorder) blame(rule string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.sealed && r.status != Fail && r.blamed == "" {
		r.blamed = rule
	}
}

// excuse lets the case be skipped where a profile requires it.
func (r *recorder) excuse() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.excused = true
}

func (r *recorder) is(statuses ...Status) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Contains(statuses, r.status)
}

func (r *recorder) result(c Case) Result {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sealed = true
	if r.more > 0 {
		r.log = append(r.log, fmt.Sprintf("and %d messages more", r.more))
	}
	var stacks []string
	if r.status == Fail || r.status == Inconclusive {
		stacks = r.hung.told()
	}
	blamed := r.blamed
	if r.status != Fail { // it was interrupted, or late on a busy machine
		blamed = ""
	}
	return Result{
		ID: c.ID, Rule: cmp.Or(r.rule, blamed, c.Rule), Text: c.Text, Status: r.status, Log: r.log, Transcript: r.transcript, Allowed: r.allowed,
		LastWords: r.words, Stacks: stacks, Took: time.Since(r.start), excused: r.excused, undeclared: r.undeclared,
		away: r.away, noticed: r.noticed,
	}
}

// stacks is where all goroutines are, cut to what a report can bear.
func stacks() string {
	buf := make([]byte, 16<<10)
	return string(buf[:runtime.Stack(buf, true)])
}
