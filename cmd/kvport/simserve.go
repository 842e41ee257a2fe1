package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/verify/bench"
	"github.com/kvport/kvport/verify/bench/serve"
	"github.com/kvport/kvport/verify/bench/serve/simulated"
)

type simServe struct {
	options        simulated.Options
	rates          []float64
	ttft, itl      []time.Duration
	config, format string
	plot           string
	requests       int
}

func newSimServe() *cobra.Command {
	f := &simServe{}
	var setups []string
	for _, s := range simulated.Setups() {
		setups = append(setups, fmt.Sprintf("  %-10s%s", s.Name, s.Short))
	}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Simulate prefill and decode apart beside whole engines, with steps as long as measured on GPUs",
		Long: "Play the traffic of kvport bench serve in virtual time, against models of engines whose steps take as long as was measured with\n" +
			"Llama 2 70B on the eight GPUs of a DGX H100. Equal seeds give equal output. The setups, of which the first is what the others are compared with:\n\n" +
			strings.Join(setups, "\n"),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	flags := cmd.Flags()
	flags.Uint64Var(&f.options.Seed, "seed", 1, "first seed")
	flags.IntVar(&f.options.Rounds, "rounds", 10, "seeds; every setup plays the schedule of each")
	flags.Float64SliceVar(&f.rates, "rate", []float64{1, 2, 4, 6, 8, 10}, "requests a second; with several everything is played at each")
	flags.IntVar(&f.requests, "requests", simulated.DefaultWorkload().Requests, "requests of each seed that count")
	flags.StringVar(&f.config, "workload", "", "file with the workload as JSON")
	flags.DurationSliceVar(&f.ttft, "slo-ttft", []time.Duration{500 * time.Millisecond, time.Second}, "a good request has its first token within this time; 0: no limit")
	flags.DurationSliceVar(&f.itl, "slo-itl", []time.Duration{40 * time.Millisecond, 50 * time.Millisecond, 75 * time.Millisecond}, "and the tokens that follow within this time each, on average; 0: no limit. With several times of either each pair is an SLO")
	flags.BoolVar(&f.options.Flat, "measured-short-steps", false, "steps with up to 512 tokens of prompts take what such prompts were measured to take, instead of a time on a line from a step that only generates")
	flags.StringVar(&f.format, "format", "text", "text or json (a line a row)")
	flags.StringVar(&f.plot, "plot", "", "file for a plot of the ratios, as SVG")
	return cmd
}

func (f *simServe) run(cmd *cobra.Command) error {
	if err := f.check(cmd); err != nil {
		return err
	}
	c := &comparison{out: cmd.OutOrStdout(), asJSON: f.format == "json", plot: f.plot}
	return fail(c.at(f.rates, func(l offered, emit bench.Emit) ([]*serve.Result, error) {
		o := f.options
		o.Workload.Rate, o.Emit = l.rate, emit
		return simulated.Run(cmd.Context(), o)
	}))
}

// check completes the options, and says what is wrong with them.
func (f *simServe) check(cmd *cobra.Command) error {
	w := simulated.DefaultWorkload()
	if f.config != "" {
		if err := readWorkload(f.config, &w); err != nil {
			return fmt.Errorf("--workload: %w", err)
		}
	}
	if f.config == "" || cmd.Flags().Changed("requests") {
		w.Requests = f.requests
	}
	f.options.Workload, f.options.SLOs = w, slos(f.ttft, f.itl)
	problem := errors.Join(checkFormat(f.format), checkRates(f.rates))
	switch {
	case f.options.Rounds < 1:
		problem = fmt.Errorf("--rounds is %d, want at least 1", f.options.Rounds)
	case len(f.ttft) == 0 || len(f.itl) == 0 || min(slices.Min(f.ttft), slices.Min(f.itl)) < 0:
		problem = errors.New("--slo-ttft and --slo-itl have at least one time each, and none is negative")
	case len(f.rates) == 0:
		problem = errors.New("--rate has no rate")
	}
	for _, rate := range f.rates {
		w.Rate = rate
		problem = errors.Join(problem, w.Check())
	}
	return problem
}
