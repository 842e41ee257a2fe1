// Package serve is what kvport bench serve does: it plays one schedule of requests against several ways to serve them, and says what
// clients saw. The load is open: requests leave at times that were drawn before, whether or not earlier ones have been answered, and times are
// counted from when a request was to leave. So a server that stalls is measured with all requests that would have come meanwhile.
package serve

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/verify/bench"
)

// Options say what is measured, and how.
type Options struct {
	EngineOptions
	Setups   []Setup // the first is what the others are compared with
	Workload Workload
	Trace    []Request  // instead of Workload
	Seed     uint64     // of the first round
	Rounds   int        // schedules, one for each seed from Seed on; each setup plays each of them
	Before   int        // loads that were measured before this one: Drive plays other seeds for each, since servers keep what they have seen
	SLOs     []SLO      // requests are good by each of them or not
	Run      RunOptions // Report is not used
	Say      func(text string)
	Keep     func(*Played) error // is told each run when it is over; nil: nobody is
	Emit     bench.Emit
}

// keep adds a run to a result, and hands it to Keep.
func (o *Options) keep(into *Result, seed uint64, outcomes []Outcome, sources map[string]float64) error {
	into.Add(outcomes)
	into.count(sources)
	if o.Keep == nil {
		return nil
	}
	return o.Keep(&Played{Setup: into.Setup, Seed: seed, Sources: sources, Outcomes: outcomes})
}

// Bench starts each setup again for each seed, the setups in another order each time, plays the seed's schedule and emits the rows of what it
// measured. The results are in the order of the setups.
func Bench(ctx context.Context, o Options) ([]*Result, error) {
	schedules, err := o.schedules(ctx)
	if err != nil {
		return nil, err
	}
	results := make([]*Result, len(o.Setups))
	for i := range results {
		results[i] = &Result{Setup: o.Setups[i].Name, SLOs: o.SLOs, Sources: map[string]float64{}}
	}
	for round := range o.Rounds {
		for turn := range o.Setups {
			i := (round + turn) % len(o.Setups)
			if err := o.play(ctx, &o.Setups[i], round, schedules[round], results[i]); err != nil {
				return nil, fmt.Errorf("%s: %w", o.Setups[i].Name, err)
			}
		}
	}
	return results, Rows(results, o.Emit)
}

// schedules are those of all seeds, with the answers that a single engine gives.
func (o *Options) schedules(ctx context.Context) (all [][]Request, err error) {
	for round := range o.Rounds {
		all = append(all, o.schedule(o.Seed+uint64(round)))
	}
	o.Say("a single engine answers all requests, so that the turns that follow can be made before anything is measured")
	alone := Setups()[0]
	r, err := alone.start(ctx, &o.EngineOptions)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop(context.WithoutCancel(ctx))) }()
	for _, list := range all {
		if err := record(ctx, &Client{URL: r.url, Form: Tokens, Own: true}, list); err != nil {
			return nil, fmt.Errorf("the engine whose answers are recorded: %w", err)
		}
	}
	return all, nil
}

func (o *Options) schedule(seed uint64) []Request {
	if o.Trace != nil {
		return slices.Clone(o.Trace)
	}
	return o.Workload.Draw(seed)
}

// recordedAtOnce is how many conversations are recorded side by side.
const recordedAtOnce = 4

// record fills in what each request is answered, and with that the prompts of the turns that follow.
func record(ctx context.Context, to Sender, list []Request) error {
	var conversations [][]int
	for i := range list {
		if c := list[i].Conversation; c < len(conversations) {
			conversations[c] = append(conversations[c], i)
		} else {
			conversations = append(conversations, []int{i})
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(recordedAtOnce)
	for _, turns := range conversations {
		g.Go(func() error {
			for _, i := range turns {
				r := &list[i]
				r.join(list, func(i int) []int32 { return list[i].Want })
				a, err := to.Send(ctx, r, func() {})
				if err != nil {
					return fmt.Errorf("request %d: %w", i, err)
				}
				r.Want = a.Tokens
			}
			return nil
		})
	}
	return g.Wait()
}

// warmUps are requests before those that are measured: connections are made, and plugins have served once.
const warmUps = 2

func (o *Options) play(ctx context.Context, s *Setup, round int, list []Request, into *Result) (err error) {
	r, err := s.start(ctx, &o.EngineOptions)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.stop(context.WithoutCancel(ctx))) }()
	client := &Client{URL: r.url, Form: Tokens, Own: true}
	defer client.HTTP.CloseIdleConnections()
	for i := range warmUps {
		warm := Request{Parts: [][]int32{slices.Repeat([]int32{int32(i)}, 64)}, MaxTokens: 4}
		if _, err := client.Send(ctx, &warm, func() {}); err != nil {
			return fmt.Errorf("before anything is measured: %w", err)
		}
	}
	before, err := r.sources(ctx)
	if err != nil {
		return err
	}
	outcomes, err := o.measure(ctx, client, fmt.Sprintf("%s, seed %d (%d of %d)", s.Name, o.Seed+uint64(round), round+1, o.Rounds), list)
	if err != nil {
		return err
	}
	sources, err := r.sources(ctx)
	for source := range sources {
		sources[source] -= before[source]
	}
	return errors.Join(err, o.keep(into, o.Seed+uint64(round), outcomes, sources))
}

// measure plays a schedule and says how far it is.
func (o *Options) measure(ctx context.Context, to Sender, what string, list []Request) ([]Outcome, error) {
	run := o.Run
	run.Report = func(p Progress) {
		o.Say(fmt.Sprintf("%s: %d of %d requests sent, %d ended, %d failed", what, p.Sent, p.Planned, p.Ended, p.Failed))
	}
	outcomes := Run(ctx, to, list, run)
	return outcomes, ctx.Err()
}

// Target is a server that runs already.
type Target struct {
	Name string
	To   Sender
}

// Drive plays the schedules against servers that run already; they take turns, and the first is what the others are compared with. What their answers will
// be is not known, so that the turns that follow go on from answers that were drawn. Each load has seeds of its own: what a server has cached of the load
// before would make first tokens come sooner than at that load.
func Drive(ctx context.Context, targets []Target, o Options) ([]*Result, error) {
	results := make([]*Result, len(targets))
	for i := range results {
		results[i] = &Result{Setup: targets[i].Name, SLOs: o.SLOs}
	}
	for round := range o.Rounds {
		seed := o.Seed + uint64(o.Before*o.Rounds+round)
		list := o.schedule(seed)
		Join(list, Drawn(list, seed))
		for turn := range targets {
			i := (round + turn) % len(targets)
			outcomes, err := o.measure(ctx, targets[i].To, fmt.Sprintf("%s, seed %d (%d of %d)", targets[i].Name, seed, round+1, o.Rounds), list)
			if err != nil {
				return nil, err
			}
			if err := o.keep(results[i], seed, outcomes, nil); err != nil {
				return nil, err
			}
		}
	}
	return results, Rows(results, o.Emit)
}
