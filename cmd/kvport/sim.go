package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/verify/simulate"
)

type simFlags struct {
	seed       uint64
	seeds      int
	steps      int
	format     string
	mutants    bool
	transcript bool
}

func newSim() *cobra.Command {
	f := &simFlags{}
	cmd := &cobra.Command{
		Use:   "sim",
		Short: "Simulate deployments under faults, one a seed, and check every invariant",
		Long: "Simulate deployments under faults, one a seed: engines, hosts, plugins, a store, a router and clients in one\n" +
			"loop with virtual time. The first seed that breaks an invariant is made as small as it gets and told step by step.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	cmd.AddCommand(newSimFleet(), newSimServe())
	flags := cmd.Flags()
	flags.Uint64Var(&f.seed, "seed", 0, "first seed")
	flags.IntVar(&f.seeds, "seeds", 2000, "how many seeds")
	flags.IntVar(&f.steps, "steps", 1000, "steps of each, and then as many as it takes to come to rest")
	flags.StringVar(&f.format, "format", "text", "text or json (a line a result)")
	flags.BoolVar(&f.mutants, "mutants", false, "play hosts that are wrong in known ways instead; each must be noticed")
	flags.BoolVar(&f.transcript, "transcript", false, "tell the first seed step by step, even if nothing is wrong with it")
	return cmd
}

func (f *simFlags) run(cmd *cobra.Command) error {
	switch {
	case !slices.Contains([]string{"text", "json"}, f.format):
		return fmt.Errorf("--format is %q, want text or json", f.format)
	case f.seeds < 1:
		return fmt.Errorf("--seeds is %d, want at least 1", f.seeds)
	case f.steps < 1:
		return fmt.Errorf("--steps is %d, want at least 1", f.steps)
	}
	out := cmd.OutOrStdout()
	switch {
	case f.transcript:
		o := simulate.Draw(f.seed)
		o.Trace = out
		if v := simulate.Play(o, f.steps).Violation; v != nil {
			return fail(errors.New(v.String()))
		}
		return nil
	case f.mutants:
		return f.hunt(cmd.Context(), out)
	}
	return f.play(cmd.Context(), out)
}

// batch is how many seeds are played between two looks at the context.
const batch = 200

// simRow is one result as JSON: a seed that broke an invariant, or the sum of all.
type simRow struct {
	Name       string         `json:"name"` // seed, total or a mutant's
	Seed       uint64         `json:"seed"`
	Seeds      int            `json:"seeds,omitempty"`
	Steps      int            `json:"steps,omitempty"`
	Violations int            `json:"violations"`
	Rule       string         `json:"rule,omitempty"`
	Text       string         `json:"text,omitempty"`
	Transcript string         `json:"transcript,omitempty"`
	Digest     string         `json:"digest,omitempty"`
	Seen       map[string]int `json:"seen,omitempty"` // how often what happened
	OK         bool           `json:"ok"`
}

func (f *simFlags) play(ctx context.Context, out io.Writer) error {
	total := simulate.Report{}
	for first, left := f.seed, f.seeds; left > 0 && len(total.Failed) == 0; {
		n := min(left, batch)
		r := simulate.Run(first, n, f.steps, 3)
		total.Add(&r)
		first, left = first+uint64(n), left-n
		if ctx.Err() != nil {
			return fail(errors.New("interrupted"))
		}
	}
	for i := range total.Failed {
		if err := f.tell(out, &total.Failed[i], i == 0); err != nil {
			return fail(err)
		}
	}
	if err := f.sum(out, &total); err != nil {
		return fail(err)
	}
	if len(total.Failed) > 0 {
		return fail(errSilent)
	}
	return nil
}

// tell reports a seed that broke an invariant; the first one is made small.
func (f *simFlags) tell(out io.Writer, r *simulate.Result, small bool) error {
	var story strings.Builder
	if small {
		if m := simulate.Minimise(simulate.Draw(r.Seed), f.steps); m != nil {
			m.Transcript(&story)
		}
	}
	if f.format == "json" {
		return json.NewEncoder(out).Encode(simRow{
			Name: "seed", Seed: r.Seed, Steps: r.Steps, Violations: 1, Rule: string(r.Violation.Rule), Text: r.Violation.Text, Transcript: story.String(),
		})
	}
	_, err := fmt.Fprintf(out, "seed %d: %v\n%s", r.Seed, r.Violation, story.String())
	return err
}

func (f *simFlags) sum(out io.Writer, r *simulate.Report) error {
	if f.format == "json" {
		return json.NewEncoder(out).Encode(simRow{
			Name: "total", Seed: f.seed, Seeds: r.Seeds, Steps: r.Steps, Violations: len(r.Failed),
			Digest: fmt.Sprintf("%016x", r.Digest), Seen: r.Stats.Map(), OK: len(r.Failed) == 0,
		})
	}
	_, err := fmt.Fprintf(out, "%d seeds, %d steps, %d violations, digest %016x\n%s\n", r.Seeds, r.Steps, len(r.Failed), r.Digest, r.Stats.String())
	return err
}

// hunt plays every mutant.
func (f *simFlags) hunt(ctx context.Context, out io.Writer) error {
	survived := 0
	for _, m := range simulate.Mutants() {
		k := simulate.Hunt(m, min(100, f.seeds), f.seeds, f.steps)
		if ctx.Err() != nil {
			return fail(errors.New("interrupted"))
		}
		if k.First == nil {
			survived++
		}
		if err := f.tellKill(out, &k); err != nil {
			return fail(err)
		}
	}
	if survived > 0 {
		return fail(fmt.Errorf("%d mutants survived", survived))
	}
	return nil
}

func (f *simFlags) tellKill(out io.Writer, k *simulate.Kill) error {
	row := simRow{Name: k.Name, Seed: k.Seed, Seeds: k.Seeds, Violations: k.Killed, OK: k.First != nil}
	how := "SURVIVED"
	if k.First != nil {
		row.Rule, row.Text = string(k.First.Rule), k.First.Text
		how = fmt.Sprintf("seed %d: %v", k.Seed, k.First)
	}
	if f.format == "json" {
		return json.NewEncoder(out).Encode(row)
	}
	_, err := fmt.Fprintf(out, "%-18s noticed by %d of %d seeds (%s); %s\n", k.Name, k.Killed, k.Seeds, k.Incident, how)
	return err
}
