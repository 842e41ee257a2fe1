// Attack runs kvport's binaries and does to them what an attacker would: a client, a web page, another user of the machine,
// somebody who can write a store, a server that lies, and the author of a plugin. Each probe is one such attempt, and says
// whether kvport held. docs/attacks.md lists them.
//
//	go run ./verify/attack                     all of them
//	go run ./verify/attack -run 'plugin/.*'    some
//	go run ./verify/attack -sample 90s         as many as that time has room for, picked by -seed
//
// Many probes have a door: a config that permits what the probe tries. The probe is then run against the open door as well, and
// must notice that: so it is known to be able to fail.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == strangerArg {
		os.Exit(beStranger(os.Args[2:], os.Stdin, os.Stdout))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// options are the flags.
type options struct {
	list, asJSON, doors bool
	run                 string
	sample              time.Duration
	seed                uint64
	logs                bool
}

func run(ctx context.Context, args []string, out, errOut io.Writer) int {
	o := options{}
	flags := flag.NewFlagSet("attack", flag.ContinueOnError)
	flags.SetOutput(errOut)
	flags.BoolVar(&o.list, "list", false, "list the probes and do nothing")
	flags.BoolVar(&o.asJSON, "json", false, "print a JSON object a line for each probe")
	flags.BoolVar(&o.doors, "doors", true, "run probes against their open door as well")
	flags.StringVar(&o.run, "run", "", "run the probes whose name matches this regular expression")
	flags.DurationVar(&o.sample, "sample", 0, "run as many probes as this time has room for")
	flags.Uint64Var(&o.seed, "seed", 1, "which probes a sample has, and what random bytes are")
	flags.BoolVar(&o.logs, "logs", false, "show what the processes say")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	picked, err := pick(table(), o.run)
	if err != nil || flags.NArg() > 0 {
		fmt.Fprintln(errOut, "attack:", errors.Join(err, unknownArguments(flags.Args())))
		return 2
	}
	if o.list {
		for _, p := range picked {
			fmt.Fprintf(out, "%-34s %-14s %s\n", p.id, p.group, p.does)
		}
		return 0
	}
	var log io.Writer
	if o.logs {
		log = errOut
	}
	r, err := newRig(ctx, log, o.seed)
	if err != nil {
		fmt.Fprintln(errOut, "attack:", err)
		return 2
	}
	report := reporter(out, o.asJSON)
	results := r.attack(ctx, picked, o, report)
	r.close()
	return summary(results, len(picked), out, o.asJSON)
}

func unknownArguments(args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("there are no arguments, only flags: %q", args)
}

// pick is those whose name matches.
func pick(all []probe, pattern string) ([]probe, error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return nil, fmt.Errorf("-run: %w", err)
	}
	var out []probe
	for _, p := range all {
		if re.MatchString(p.id) {
			out = append(out, p)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("-run: no probe is called %q", pattern)
	}
	return out, nil
}

// result is what became of a probe.
type result struct {
	ID      string  `json:"id"`
	Group   string  `json:"group"`
	Verdict string  `json:"verdict"`
	Seen    string  `json:"seen,omitempty"`
	Door    string  `json:"door,omitempty"` // what the open door let through
	Seconds float64 `json:"seconds"`
}

// Verdicts.
const (
	held    = "held"
	notHeld = "NOT HELD"
	notRun  = "not run"
	broken  = "BROKEN" // the probe itself
)

// attack runs probes one after the other.
func (r *rig) attack(ctx context.Context, probes []probe, o options, report func(result)) []result {
	began := time.Now()
	if o.sample > 0 {
		probes = shuffled(probes, o.seed)
	}
	var out []result
	for _, p := range probes {
		if ctx.Err() != nil {
			break
		}
		if o.sample > 0 && time.Since(began)+p.takes() > o.sample {
			continue
		}
		res := r.probe(ctx, &p, o.doors)
		report(res)
		out = append(out, res)
	}
	return out
}

// probe runs one, and then its door.
func (r *rig) probe(ctx context.Context, p *probe, doors bool) result {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	res := result{ID: p.id, Group: p.group}
	if p.waits != "" {
		res.Verdict, res.Seen = notRun, "waits for this: "+p.waits
		return res
	}
	seen, err := p.run(ctx, r, false)
	r.stopAll()
	res.Verdict, res.Seen = judge(seen, err)
	if res.Verdict == held && p.door != "" && doors {
		_, err := p.run(ctx, r, true)
		r.stopAll()
		var h *hole
		var s *skipped
		switch {
		case errors.As(err, &h) && !h.unserved:
			res.Door = p.door + ": " + h.seen
		case errors.As(err, &s): // it stays without that proof, and is not counted among those that have it
			res.Seen += "; its door was not tried: " + s.why
		case err == nil:
			res.Verdict, res.Seen = broken, "it does not notice the open door: "+p.door
		default:
			res.Verdict, res.Seen = broken, fmt.Sprintf("with the open door (%s): %v", p.door, err)
		}
	}
	res.Seconds = time.Since(began).Seconds()
	return res
}

// probeLimit is the most that a probe may take.
const probeLimit = 4 * time.Minute

// judge makes a verdict of what a probe returns.
func judge(seen string, err error) (verdict, text string) {
	var h *hole
	var s *skipped
	switch {
	case err == nil:
		return held, seen
	case errors.As(err, &h):
		return notHeld, h.seen
	case errors.As(err, &s):
		return notRun, s.why
	}
	return broken, err.Error()
}

// reporter prints results as they come.
func reporter(out io.Writer, asJSON bool) func(result) {
	if asJSON {
		encoder := json.NewEncoder(out)
		return func(r result) { _ = encoder.Encode(r) }
	}
	return func(r result) {
		fmt.Fprintf(out, "%-8s %-34s %-14s %5.1f s  %s\n", r.Verdict, r.ID, r.Group, r.Seconds, r.Seen)
		if r.Door != "" {
			fmt.Fprintf(out, "%8s %34s with the open door it does not hold: %s\n", "", "", r.Door)
		}
	}
}

// summary counts, and gives the exit code. A run in which nothing held, since nothing could be run, has shown nothing.
func summary(results []result, of int, out io.Writer, asJSON bool) int {
	counts := map[string]int{}
	doors := 0
	for _, r := range results {
		counts[r.Verdict]++
		if r.Door != "" {
			doors++
		}
	}
	if !asJSON {
		fmt.Fprintf(out, "attack: %d of %d probes: %d held (%d of them were seen to fail with an open door), %d not held, %d not run, %d broken\n",
			len(results), of, counts[held], doors, counts[notHeld], counts[notRun], counts[broken])
	}
	if counts[notHeld]+counts[broken] > 0 || counts[held] == 0 {
		return 1
	}
	return 0
}
