package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/verify/bench"
)

type benchFlags struct {
	model, format, dir, python string
	server, peersDir, only     string
	connector                  string
	folders                    []string
	threads                    int
	quick, peers               bool
}

func newBench() *cobra.Command {
	f := &benchFlags{}
	cmd := &cobra.Command{
		Use:   "bench engine|transfer|store|placed|layerwise|overlap|route|digest",
		Short: "Measure the engine, block transfer, stores, hits in the memory of a plugin, layer-wise saves and loads or digests beside what limits them, or ways to route beside one another",
		Args:  cobra.ExactArgs(1), ValidArgs: benchKinds(),
		RunE: func(cmd *cobra.Command, args []string) error { return f.run(cmd, args[0]) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.format, "format", "text", "text or json (a line a row)")
	flags.StringVar(&f.model, "model", ".deps/model/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF file or tiny-random; engine, placed, layerwise, overlap and route only")
	flags.StringVar(&f.connector, "connector", "", "name of the connector that saves or loads layer by layer; layerwise (default: the one over pipes) and overlap (default: the one that holds blocks) only")
	flags.IntVar(&f.threads, "threads", 0, "threads that compute (default one for each CPU; route: for each engine, half of that)")
	flags.StringVar(&f.dir, "dir", "", "folder for stored blocks (default the system's for temporary files)")
	flags.StringVar(&f.python, "peer-python", "", "Python with xllamacpp or safetensors, to measure these beside kvport (default: not measured)")
	flags.BoolVar(&f.peers, "peers", false, "measure other people's stores beside ours; store and placed only")
	flags.StringVar(&f.peersDir, "peers-dir", ".deps/peers", "what verify/bench/peers/setup.py made; store and placed only")
	flags.StringVar(&f.only, "only", "", "measure only what has this in its name; with transfer: blocks, message, files, lookup, restart, transports or sockets; with placed: a size of blocks, such as '8 MiB'")
	flags.StringVar(&f.server, "server", "", "binary of a Redis or Valkey server (default that of make deps, else one of the PATH); store only")
	addPluginPath(flags, &f.folders)
	flags.BoolVar(&f.quick, "quick", false, "a few rounds, to see that it works; the numbers mean nothing")
	cmd.AddCommand(newBenchServe())
	return cmd
}

// benchKinds are what can be measured.
func benchKinds() []string {
	return []string{"engine", "transfer", "store", "placed", "layerwise", "overlap", "route", "digest"}
}

func (f *benchFlags) run(cmd *cobra.Command, what string) error {
	emit, isFormat := map[string]bench.Emit{"text": bench.Text(cmd.OutOrStdout()), "json": bench.JSON(cmd.OutOrStdout())}[f.format]
	switch {
	case !isFormat:
		return fmt.Errorf("--format is %q, want text or json", f.format)
	case !slices.Contains(benchKinds(), what):
		return fmt.Errorf("bench %q is none of %s", what, strings.Join(benchKinds(), ", "))
	case f.threads < 0:
		return fmt.Errorf("--threads is %d, want a positive number", f.threads)
	}
	if !slices.Contains([]string{"transfer", "store", "digest"}, what) && f.model != "tiny-random" {
		if _, err := os.Stat(f.model); err != nil {
			return fmt.Errorf("--model: %w", err)
		}
	}
	return f.measure(cmd, what, emit)
}

func (f *benchFlags) measure(cmd *cobra.Command, what string, emit bench.Emit) (err error) {
	self, err := os.Executable()
	if err != nil {
		return fail(err)
	}
	options := bench.EngineOptions{
		Model: f.model, PluginPath: pluginFolders(f.folders), Dir: f.dir, Connector: f.connector, Threads: f.threads, Quick: f.quick, Emit: emit,
	}
	switch what {
	case "layerwise":
		return fail(bench.LayerWise(cmd.Context(), options))
	case "overlap":
		return fail(bench.Overlap(cmd.Context(), options))
	case "route":
		return fail(bench.Route(cmd.Context(), bench.RouteOptions{EngineOptions: options, Self: self}))
	case "digest":
		return fail(bench.Digest(cmd.Context(), bench.DigestOptions{Quick: f.quick, Emit: emit}))
	case "placed":
		return fail(bench.Placed(cmd.Context(), bench.PlacedOptions{
			Model: f.model, Threads: f.threads, PluginPath: options.PluginPath, Only: f.only, Peers: f.peers, PeersDir: f.peersDir, Quick: f.quick, Emit: emit,
		}))
	case "store":
		return fail(bench.Store(cmd.Context(), bench.StoreOptions{
			Self: self, PluginPath: options.PluginPath, Dir: f.dir, Server: f.server,
			Only: f.only, Peers: f.peers, PeersDir: f.peersDir, Quick: f.quick, Emit: emit,
		}))
	}
	if options.Peer, err = f.peer(cmd.Context()); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, fail(options.Peer.Close())) }()
	if what == "engine" {
		return fail(bench.Engine(cmd.Context(), options))
	}
	return fail(bench.Transfer(cmd.Context(), bench.TransferOptions{
		Self: self, PluginPath: options.PluginPath, Dir: f.dir, Only: f.only, Peer: options.Peer, Quick: f.quick, Emit: emit,
	}))
}

// peer starts the Python that peers need; nil if there is none.
func (f *benchFlags) peer(ctx context.Context) (*bench.Peer, error) {
	if f.python == "" {
		return nil, nil
	}
	model, err := filepath.Abs(f.model)
	if err != nil {
		return nil, fail(err)
	}
	p, err := bench.StartPeer(ctx, f.python, model, f.threads)
	if err != nil {
		return nil, fmt.Errorf("--peer-python: %w", err)
	}
	return p, nil
}
