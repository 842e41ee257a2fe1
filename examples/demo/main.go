// Command demo shows the main job of kvport on a real model: two prefill engines hand their KV cache to
// two decode engines through plugins that run as processes of their own, and the tokens are exactly
// those of a single node, also when a plugin is killed in the middle of a load.
//
// Run it with `make demo`. It exits with an error if one token differs or no KV was loaded.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/kvport/kvport/verify/cluster"
)

// options are the demo's flags.
type options struct {
	bin, model, connector, texts, out, config string
	tokens, prompts, blocks                   int
	verbose                                   bool
}

func main() {
	var o options
	flag.StringVar(&o.bin, "bin", "bin", "folder with kvport and its plugins")
	flag.StringVar(&o.model, "model", ".deps/model/SmolLM2-135M-Instruct.Q4_1.gguf", "model: a GGUF file, tiny-random or sim")
	flag.StringVar(&o.connector, "connector", "SharedStorageConnector", "kv_connector to use")
	flag.StringVar(&o.config, "config", "", "kv_connector_extra_config, a JSON object; default one that works")
	flag.StringVar(&o.texts, "texts", ".", "repository whose texts become prompts")
	flag.StringVar(&o.out, "out", ".deps/demo.json", "where to write the results")
	flag.IntVar(&o.tokens, "tokens", 32, "tokens to generate for each prompt")
	flag.IntVar(&o.prompts, "prompts", 6, "number of prompts")
	flag.IntVar(&o.blocks, "num-blocks", 768, "blocks of each engine's KV cache")
	flag.BoolVar(&o.verbose, "v", false, "show the logs of all processes")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, &o); err != nil {
		stop()
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o *options) (err error) {
	prompts, err := readPrompts(o.texts, o.prompts)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "kvport-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	d := &demo{options: o, store: filepath.Join(dir, "blocks"), log: io.Discard, rows: make([]row, len(prompts))}
	if o.verbose {
		d.log = os.Stderr
	}
	if err := d.single(ctx, prompts); err != nil {
		return err
	}
	if err := d.split(ctx, prompts); err != nil {
		return err
	}
	d.print(os.Stdout)
	if err := d.write(o.out); err != nil {
		return err
	}
	return d.verdict()
}

// demo holds what the two phases of a run share.
type demo struct {
	*options
	store  string
	log    io.Writer
	client cluster.Client
	rows   []row
	killed row // the extra prompt during whose load the plugin dies
	kills  int

	registrars []string // where the routers take registrations, in their order; none if engines do not register
}

// complete sends one greedy request.
func (d *demo) complete(ctx context.Context, url, prompt string) (*cluster.Completion, error) {
	return d.client.Complete(ctx, url, cluster.Request{Prompt: prompt, MaxTokens: d.tokens, IgnoreEOS: true})
}

// serve starts an engine; role is empty for one without a connector.
func (d *demo) serve(ctx context.Context, name, role string) (*cluster.Process, error) {
	port, extra := "0", d.extra()
	if d.registers() && role != "" {
		var err error
		if port, err = freePort(ctx); err != nil {
			return nil, err
		}
		extra = d.registration(name, port)
	}
	args := []string{"serve", "--model", d.model, "--port", port, "--num-blocks", fmt.Sprint(d.blocks)}
	if role != "" {
		config := fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"engine_id":%q,"kv_connector_extra_config":%s}`,
			d.connector, role, name, extra)
		args = append(args, "--kv-transfer-config", config)
	}
	if role == both {
		args = append(args, "--enable-prefix-caching=false") // so that what is loaded comes from the connector
	}
	return cluster.Start(ctx, d.log, name, filepath.Join(d.bin, "kvport"), args...)
}

// both is the role of an engine that saves and loads.
const both = "kv_both"

// alone reports whether the connector's blocks are for the engine that stored them: then the demo shows
// one engine, and every prompt twice.
func (o *options) alone() bool { return o.connector == "OffloadingConnector" }

// extra is the config of the connector.
func (d *demo) extra() string {
	if d.config != "" {
		return d.config
	}
	switch d.connector {
	case "OffloadingConnector":
		return `{"cpu_bytes_to_use":1073741824}`
	case "SharedStorageConnector", "ExampleConnector":
		return fmt.Sprintf(`{"shared_storage_path":%q}`, d.store)
	}
	return "{}" // those that send blocks from engine to engine need nothing
}

// single computes every answer on one node without a connector.
func (d *demo) single(ctx context.Context, prompts []prompt) (err error) {
	fmt.Println("1/3  single node, no connector")
	node, err := d.serve(ctx, "single", "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, node.Stop(ctx)) }()
	for i, p := range prompts {
		r := &d.rows[i]
		r.name = p.name
		if r.want, err = d.complete(ctx, node.URL, p.text); err != nil {
			return err
		}
		if r.want2, err = d.complete(ctx, node.URL, p.secondTurn(r.want.Text)); err != nil {
			return err
		}
		fmt.Printf("     %-24s %5d tokens, first token after %v\n", p.name, r.want.Prompt, r.want.TTFT.Round(1e6))
	}
	d.killed.name = "plugin killed"
	d.killed.want, err = d.complete(ctx, node.URL, killPrompt(prompts))
	return err
}
