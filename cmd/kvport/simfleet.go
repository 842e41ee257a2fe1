package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/engine/router/policy"
	"github.com/kvport/kvport/verify/simulate/fleet"
)

type simFleetFlags struct {
	options fleet.Options
	tables  []string
	sizes   []int
	format  string
	measure bool
}

// The tables of kvport sim fleet.
const (
	tableFleet    = "fleet"
	tablePolicies = "policies"
	tableFaults   = "faults"
	tableGrowth   = "growth"
)

func newSimFleet() *cobra.Command {
	f := &simFleetFlags{}
	cmd := &cobra.Command{
		Use:   "fleet",
		Short: "Simulate the router in front of many instances: policies, faults, and traffic by the number of instances",
		Long: "Simulate the router in front of up to 1,000 instances in virtual time, with the router's own code and a trace of\n" +
			"conversations from a seed. Equal seeds give equal tables, except for the table of measurements.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	flags := cmd.Flags()
	flags.Uint64Var(&f.options.Seed, "seed", 1, "seed of the trace and of the faults")
	flags.IntVar(&f.options.Instances, "instances", 100, "instances, half of them for prefill and half for decode; at most 1,000")
	flags.IntVar(&f.options.Blocks, "blocks", 1_000_000, "blocks that the caches of all instances hold together")
	flags.IntVar(&f.options.Requests, "requests", 100_000, "requests of the trace")
	flags.Float64Var(&f.options.Rate, "rate", 2, "requests a second for each instance, in virtual time")
	flags.StringVar(&f.options.Policy, "policy", policy.PrefixAware, "policy of the tables fleet, faults and growth")
	flags.StringSliceVar(&f.tables, "tables", []string{tablePolicies, tableFaults, tableGrowth}, "tables to make: fleet (the policy alone), policies, faults, growth")
	flags.IntSliceVar(&f.sizes, "sizes", []int{10, 100, 1000}, "numbers of instances for the table growth, where each instance gets a tenth of its requests and blocks")
	flags.StringVar(&f.format, "format", "text", "text or json (a line a row)")
	flags.BoolVar(&f.measure, "measure", true, "also measure decisions a second and the memory of the index")
	return cmd
}

func (f *simFleetFlags) run(ctx context.Context, out io.Writer) error {
	if !slices.Contains([]string{"text", "json"}, f.format) {
		return fmt.Errorf("--format is %q, want text or json", f.format)
	}
	known := []string{tableFleet, tablePolicies, tableFaults, tableGrowth}
	for _, name := range f.tables {
		if !slices.Contains(known, name) {
			return fmt.Errorf("--tables has %q, want some of %s", name, strings.Join(known, ", "))
		}
	}
	if err := f.options.Check(); err != nil {
		return err
	}
	if slices.Contains(f.tables, tableGrowth) {
		if err := fleet.CheckSizes(f.reduced(), f.sizes); err != nil {
			return fmt.Errorf("--sizes, where each instance gets a tenth of its requests and blocks: %w", err)
		}
	}
	if f.measure {
		f.options.Clock = processTime
	}
	wrong := 0
	for _, name := range f.tables {
		n, err := f.table(ctx, out, name)
		if err != nil {
			return fail(err)
		}
		wrong += n
	}
	if wrong > 0 {
		return fail(fmt.Errorf("%d invariants are broken", wrong))
	}
	return nil
}

// reduced are the options of the table growth.
func (f *simFleetFlags) reduced() fleet.Options {
	small := f.options
	small.Blocks, small.Requests = small.Blocks/10, small.Requests/10
	return small
}

// processTime is the time for which processors have run the process, whatever else the machine does.
func processTime() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// table makes one table, and returns how many invariants were broken on the way.
func (f *simFleetFlags) table(ctx context.Context, out io.Writer, name string) (wrong int, err error) {
	var rows []fleet.Row
	var sizes []fleet.Size
	var problem error
	take := func(r fleet.Row) {
		rows = append(rows, r)
		wrong += len(r.Violations)
		problem = errors.Join(problem, f.tell(out, name, r))
	}
	switch name {
	case tableFleet:
		var r *fleet.Result
		if r, err = fleet.Run(ctx, f.options); err == nil {
			take(fleet.Row{Name: f.options.Policy, Result: r})
		}
	case tablePolicies:
		err = fleet.Policies(ctx, f.options, take)
	case tableFaults:
		err = fleet.Incidents(ctx, f.options, take)
	case tableGrowth:
		err = fleet.Sizes(ctx, f.reduced(), f.sizes, func(s fleet.Size) {
			sizes = append(sizes, s)
			take(fleet.Row{Name: fmt.Sprintf("%d instances", s.Instances), Result: s.Result})
		})
	}
	if err = errors.Join(err, problem); err != nil || f.format == "json" {
		return wrong, err
	}
	if name == tableGrowth {
		err = fleet.GrowthTable(out, sizes)
	} else {
		err = fleet.Table(out, rows)
	}
	if f.measure {
		err = errors.Join(err, fleet.MeasuredTable(out, rows))
	}
	return wrong, err
}

// simFleetRow is one row as JSON.
type simFleetRow struct {
	Table string `json:"table"`
	Name  string `json:"name"`
	*fleet.Result
}

// tell writes a row as JSON, or what is wrong with it.
func (f *simFleetFlags) tell(out io.Writer, table string, r fleet.Row) error {
	if f.format == "json" {
		return json.NewEncoder(out).Encode(simFleetRow{table, r.Name, r.Result})
	}
	for _, v := range r.Violations {
		if _, err := fmt.Fprintf(out, "%s: %s\n", r.Name, v); err != nil {
			return err
		}
	}
	return nil
}
