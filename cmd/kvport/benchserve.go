package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/internal/strictjson"
	"github.com/kvport/kvport/verify/bench"
	"github.com/kvport/kvport/verify/bench/serve"
)

// serveBench are the flags of kvport bench serve.
type serveBench struct {
	config, trace, plot, format     string
	outcomes, from                  string
	model, apiKeyFile, name, prompt string
	setups, urls, folders           []string
	seed                            uint64
	rounds, requests                int
	threads, blocks, traceBlock     int
	speed                           float64
	rates                           []float64
	ttft, itl                       []time.Duration
	timeout                         time.Duration
	vllm, quick                     bool
}

func newBenchServe() *cobra.Command {
	f := &serveBench{}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Send the same traffic to several ways to serve a model, and compare what clients see",
		Long: "Send the same traffic to several ways to serve a model on the same cores, or to servers that run already, and compare what clients\n" +
			"see: times to the first token, between tokens and to the end, and how many requests keep to an SLO. The load is open: requests leave at\n" +
			"times drawn beforehand, whether or not earlier ones have been answered.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&f.setups, "setups", nil, "setups that are compared with the first of them (default all): "+strings.Join(setupNames(), ", "))
	flags.StringSliceVar(&f.urls, "url", nil, "measure servers or routers that run already instead, given as URL or NAME=URL; the first is what the others are compared with")
	flags.StringVar(&f.prompt, "prompts", string(serve.Tokens), "with --url: tokens (their ids) or text to /v1/completions, or chat")
	flags.BoolVar(&f.vllm, "vllm-fields", false, "with --url: send ignore_eos and return_token_ids, too, so that every answer has all its tokens")
	flags.StringVar(&f.name, "served-model-name", "", "with --url: the model's name there (default the first that it lists)")
	flags.StringVar(&f.apiKeyFile, "api-key-file", "", "with --url: file with the API key")
	flags.StringVar(&f.config, "workload", "", "file with the workload as JSON (default one for a small model on two cores)")
	flags.IntVar(&f.requests, "requests", 0, "requests of each seed, instead of the workload's; with --trace as many from its beginning")
	flags.Float64SliceVar(&f.rates, "rate", nil, "requests a second, instead of the workload's; with several everything is measured at each, and rows are named after the rate")
	flags.StringVar(&f.trace, "trace", "", "play this trace, JSON Lines as Mooncake's, instead of a workload")
	flags.Float64Var(&f.speed, "trace-speed", 1, "how many times as fast as it was recorded")
	flags.IntVar(&f.traceBlock, "trace-block-tokens", 512, "tokens of a hash id of the trace; with fewer all its lengths shrink")
	flags.Uint64Var(&f.seed, "seed", 1, "first seed")
	flags.IntVar(&f.rounds, "rounds", 5, "seeds; every setup plays the schedule of each")
	flags.DurationSliceVar(&f.ttft, "slo-ttft", []time.Duration{2 * time.Second}, "a good request has its first token within this time; 0: no limit")
	flags.DurationSliceVar(&f.itl, "slo-itl", []time.Duration{100 * time.Millisecond}, "and the tokens that follow within this time each, on average; 0: no limit. With several times of either each pair is an SLO")
	flags.DurationVar(&f.timeout, "timeout", 10*time.Minute, "for one request")
	flags.StringVar(&f.model, "model", ".deps/model/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF file, tiny-random or sim")
	flags.IntVar(&f.threads, "threads", 0, "threads that compute, of all engines of a setup together (default one for each CPU)")
	flags.IntVar(&f.blocks, "num-blocks", 1024, "blocks of the KV caches of all engines of a setup together")
	flags.StringVar(&f.format, "format", "text", "text or json (a line a row)")
	flags.StringVar(&f.plot, "plot", "", "file for a plot of the ratios, as SVG")
	flags.StringVar(&f.outcomes, "outcomes", "", "file that gets a line for each run, with what every request took: --from makes the numbers again")
	flags.StringVar(&f.from, "from", "", "send nothing, and make the numbers of the runs in this file, which --outcomes has written")
	flags.BoolVar(&f.quick, "quick", false, "a few short requests, to see that it works; the numbers mean nothing")
	addPluginPath(flags, &f.folders)
	return cmd
}

func setupNames() (names []string) {
	for _, s := range serve.Setups() {
		names = append(names, s.Name)
	}
	return names
}

func (f *serveBench) run(cmd *cobra.Command) (err error) {
	c := &comparison{out: cmd.OutOrStdout(), asJSON: f.format == "json", plot: f.plot}
	if f.from != "" {
		return f.again(c)
	}
	o, err := f.options(cmd)
	if err != nil {
		return err
	}
	kept, err := f.keeping()
	if err != nil {
		return fmt.Errorf("--outcomes: %w", err)
	}
	defer func() { err = errors.Join(err, kept.Close()) }()
	return fail(c.at(f.rates, func(l offered, emit bench.Emit) ([]*serve.Result, error) {
		one := *o
		one.Emit, one.Before = emit, l.number
		if f.outcomes != "" {
			one.Keep = func(p *serve.Played) error {
				p.Rate = l.rate
				return p.Write(kept)
			}
		}
		one.Say = func(text string) { fmt.Fprintln(cmd.ErrOrStderr(), l.name+text) }
		if l.rate > 0 {
			one.Workload.Rate = l.rate
		}
		return f.measure(cmd.Context(), &one)
	}))
}

// keeping opens the file of --outcomes.
func (f *serveBench) keeping() (*os.File, error) {
	if f.outcomes == "" {
		return os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	}
	return os.Create(filepath.Clean(f.outcomes))
}

// again makes the numbers of runs that were kept.
func (f *serveBench) again(c *comparison) error {
	if err := f.check(); err != nil {
		return err
	}
	file, err := os.Open(filepath.Clean(f.from))
	if err != nil {
		return fmt.Errorf("--from: %w", err)
	}
	defer func() { _ = file.Close() }() // it was only read
	list, err := serve.ReadPlayed(file)
	if err != nil {
		return fmt.Errorf("--from: %s: %w", f.from, err)
	}
	return fail(c.at(serve.Rates(list), func(l offered, emit bench.Emit) ([]*serve.Result, error) {
		return serve.Again(list, l.rate, f.setups, slos(f.ttft, f.itl), emit)
	}))
}

func (f *serveBench) measure(ctx context.Context, o *serve.Options) ([]*serve.Result, error) {
	if len(f.urls) == 0 {
		return serve.Bench(ctx, *o)
	}
	targets, err := f.targets(ctx)
	if err != nil {
		return nil, err
	}
	return serve.Drive(ctx, targets, *o)
}

// options are the flags as the bench takes them.
func (f *serveBench) options(cmd *cobra.Command) (*serve.Options, error) {
	o := &serve.Options{
		Seed: f.seed, Rounds: f.rounds, SLOs: slos(f.ttft, f.itl), Run: serve.RunOptions{Timeout: f.timeout},
		EngineOptions: serve.EngineOptions{Model: f.model, PluginPath: pluginFolders(f.folders), Threads: f.threads, Blocks: f.blocks},
	}
	if err := f.check(); err != nil {
		return nil, err
	}
	if f.threads == 0 {
		o.Threads = runtime.GOMAXPROCS(0)
	}
	var err error
	if o.Setups, err = serve.ChooseSetups(f.setups); err != nil {
		return nil, fmt.Errorf("--setups: %w", err)
	}
	if o.Self, err = os.Executable(); err != nil {
		return nil, fail(err)
	}
	if o.Trace, err = f.readTrace(); err != nil {
		return nil, fmt.Errorf("--trace: %w", err)
	}
	if o.Trace != nil {
		return o, nil
	}
	o.Workload, err = f.workload(cmd)
	return o, err
}

func (f *serveBench) check() error {
	forms := []serve.Form{serve.Tokens, serve.Text, serve.Chat}
	switch {
	case f.rounds < 1:
		return fmt.Errorf("--rounds is %d, want at least 1", f.rounds)
	case len(f.ttft) == 0 || len(f.itl) == 0 || min(slices.Min(f.ttft), slices.Min(f.itl)) < 0:
		return errors.New("--slo-ttft and --slo-itl have at least one time each, and none is negative")
	case min(f.threads, f.requests) < 0 || len(f.rates) > 0 && slices.Min(f.rates) < 0:
		return errors.New("--threads, --requests and --rate may not be negative")
	case f.timeout <= 0 || min(f.blocks, f.traceBlock) < 1 || f.speed <= 0:
		return errors.New("--timeout, --num-blocks, --trace-speed and --trace-block-tokens must be positive")
	case !slices.Contains(forms, serve.Form(f.prompt)):
		return fmt.Errorf("--prompts is %q, want one of %q", f.prompt, forms)
	case len(f.urls) > 0 && len(f.setups) > 0:
		return errors.New("--url and --setups do not go together: start kvport serve and route yourself, and name their URLs")
	}
	problem := errors.Join(checkFormat(f.format), checkRates(f.rates))
	if len(f.urls) == 0 {
		return errors.Join(f.checkModel(), problem)
	}
	return problem
}

func (f *serveBench) checkModel() error {
	if f.from != "" || slices.Contains([]string{"sim", "tiny-random"}, f.model) {
		return nil
	}
	if _, err := os.Stat(f.model); err != nil {
		return fmt.Errorf("--model: %w", err)
	}
	return nil
}

// quickWorkload is for --quick.
func quickWorkload() serve.Workload {
	w := serve.DefaultWorkload()
	w.Requests, w.Rate, w.Think = 8, 8, 0.2
	w.System, w.Long, w.Short, w.Answer = serve.Range{Min: 16, Max: 32}, serve.Range{Min: 40, Max: 80}, serve.Range{Min: 4, Max: 8}, serve.Range{Min: 2, Max: 8}
	return w
}

func (f *serveBench) workload(cmd *cobra.Command) (serve.Workload, error) {
	w := serve.DefaultWorkload()
	if f.quick {
		w = quickWorkload()
	}
	if f.config != "" {
		if err := readWorkload(f.config, &w); err != nil {
			return w, fmt.Errorf("--workload: %w", err)
		}
	}
	if cmd.Flags().Changed("requests") {
		w.Requests = f.requests
	}
	err := w.Check()
	for _, rate := range f.rates {
		w.Rate = rate
		err = errors.Join(err, w.Check())
	}
	return w, err
}

func readWorkload(path string, w *serve.Workload) error {
	text, err := os.ReadFile(filepath.Clean(path))
	if err != nil {
		return err
	}
	v, err := strictjson.Parse(text)
	if err == nil {
		err = strictjson.Options{}.Decode(v, w)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func (f *serveBench) readTrace() (_ []serve.Request, err error) {
	if f.trace == "" {
		return nil, nil
	}
	if f.config != "" || len(f.rates) > 0 {
		return nil, errors.New("--workload and --rate do not go with it: a trace has its own times; --trace-speed changes them")
	}
	file, err := os.Open(filepath.Clean(f.trace))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	list, err := serve.ReadTrace(file, serve.TraceOptions{Speed: f.speed, BlockTokens: f.traceBlock, Requests: f.requests, Seed: f.seed})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.trace, err)
	}
	return list, nil
}

// targets are the servers of --url.
func (f *serveBench) targets(ctx context.Context) ([]serve.Target, error) {
	key := ""
	if f.apiKeyFile != "" {
		text, err := os.ReadFile(filepath.Clean(f.apiKeyFile))
		if err != nil {
			return nil, fmt.Errorf("--api-key-file: %w", err)
		}
		key = strings.TrimSpace(string(text))
	}
	var out []serve.Target
	for _, text := range f.urls {
		name, url, named := strings.Cut(text, "=")
		if !named || strings.Contains(name, "/") {
			name, url = text, text
		}
		c := &serve.Client{URL: strings.TrimSuffix(url, "/"), Model: f.name, Key: key, Form: serve.Form(f.prompt), Own: f.vllm}
		if c.Model == "" {
			var err error
			if c.Model, err = c.Name(ctx); err != nil {
				return nil, fmt.Errorf("--url: %w; --served-model-name names the model", err)
			}
		}
		out = append(out, serve.Target{Name: name, To: c})
	}
	return out, nil
}
