// Command demo shows the main job of kvport on a real model: two prefill engines hand their KV cache to
// two decode engines through plugins that run as processes of their own, and the tokens are exactly
// those of a single node, also when a plugin is killed in the middle of a load.
//
// Run it with `make demo`. It exits with an error if one token differs or no KV was loaded.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/kvport/kvport/internal/machine"
	"github.com/kvport/kvport/plugins"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// options are the demo's flags.
type options struct {
	bin, model, connector, texts, out, config string
	tokens, prompts, blocks                   int
	strikes, verbose                          bool
}

func main() {
	if err := start(); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// start reads the flags and runs the demo.
func start() error {
	list, err := fixture.Read(plugins.Fixtures(), "*/fixture.json")
	if err != nil {
		return err
	}
	usual, err := list.Typical(fixture.Store)
	if err != nil {
		return err
	}
	var o options
	flag.StringVar(&o.bin, "bin", "bin", "folder with kvport and its plugins")
	flag.StringVar(&o.model, "model", ".deps/model/SmolLM2-135M-Instruct.Q4_1.gguf", "model: a GGUF file, tiny-random or sim")
	flag.StringVar(&o.connector, "connector", usual.Connector, "kv_connector to use")
	flag.StringVar(&o.config, "config", "", "kv_connector_extra_config, a JSON object; default the one of the plugin's fixture.json")
	flag.StringVar(&o.texts, "texts", ".", "repository whose texts become prompts")
	flag.StringVar(&o.out, "out", ".deps/demo.json", "where to write the results")
	flag.IntVar(&o.tokens, "tokens", 32, "tokens to generate for each prompt")
	flag.IntVar(&o.prompts, "prompts", 6, "number of prompts")
	flag.IntVar(&o.blocks, "num-blocks", 768, "blocks of each engine's KV cache")
	flag.BoolVar(&o.strikes, "kill", true, "kill a plugin at the end, while it loads if it is not alone")
	flag.BoolVar(&o.verbose, "v", false, "show the logs of all processes")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return run(ctx, &o, list)
}

func run(ctx context.Context, o *options, list fixture.List) (err error) {
	prompts, err := readPrompts(o.texts, o.prompts)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "kvport-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	d := &demo{options: o, dir: dir, log: io.Discard, rows: make([]row, len(prompts))}
	if d.fixture, err = o.find(ctx, list); err != nil {
		return err
	}
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
	fixture *fixture.Fixture // nil: a connector of somebody else
	dir     string           // a folder of the connector's own
	log     io.Writer
	client  cluster.Client
	rows    []row
	killed  row // the extra prompt during whose load the plugin dies
	kills   int

	registrars []string // where the routers take registrations, in their order; none if engines do not register
}

// complete sends one greedy request.
func (d *demo) complete(ctx context.Context, url, prompt string) (*cluster.Completion, error) {
	return d.client.Complete(ctx, url, cluster.Request{Prompt: prompt, MaxTokens: d.tokens, IgnoreEOS: true})
}

// serve starts an engine; role is empty for one without a connector.
func (d *demo) serve(ctx context.Context, name, role string) (*cluster.Process, error) {
	args := []string{"serve", "--model", d.model, "--num-blocks", fmt.Sprint(d.blocks)}
	port := "0"
	if role != "" {
		values := fixture.Values{"TMP": d.dir, "NAME": "demo", "ROLE": role}
		if d.registers() {
			var err error
			if port, err = machine.FreePort(ctx); err != nil {
				return nil, err
			}
			values["ROUTERS"], values["HTTP_PORT"] = d.routersOf(name), json.Number(port)
		}
		extra, err := fixture.Fill(d.template(), values)
		if err != nil {
			return nil, fmt.Errorf("%s: --config can give one that works here: %w", d.connector, err)
		}
		config := fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"engine_id":%q,"kv_connector_extra_config":%s}`,
			d.connector, role, name, extra)
		args = append(args, "--kv-transfer-config", config)
	}
	args = append(args, "--port", port)
	if role == both {
		args = append(args, "--enable-prefix-caching=false") // so that what is loaded comes from the connector
	}
	return cluster.Start(ctx, d.log, name, filepath.Join(d.bin, "kvport"), args...)
}

// both is the role of an engine that saves and loads.
const both = "kv_both"

// alone reports whether the connector's blocks are for the engine that stored them: then the demo shows
// one engine, and every prompt twice.
func (d *demo) alone() bool { return d.fixture != nil && d.fixture.Demo != nil && d.fixture.Demo.Alone }

// template is the connector's config, with placeholders.
func (d *demo) template() json.RawMessage {
	switch {
	case d.config != "":
		return json.RawMessage(d.config)
	case d.fixture == nil:
		return json.RawMessage("{}")
	case d.fixture.Demo != nil && d.fixture.Demo.Config != nil:
		return d.fixture.Demo.Config
	}
	return d.fixture.Setups[0].Config
}

// find gives the fixture of the connector, which may be called by an alias in its plugin's manifest.
func (o *options) find(ctx context.Context, list fixture.List) (*fixture.Fixture, error) {
	if f := list.Of(o.connector); f != nil {
		return f, nil
	}
	for _, f := range list {
		out, err := exec.CommandContext(ctx, filepath.Join(o.bin, "kvport-"+f.Folder), "--manifest").Output()
		if err != nil {
			return nil, fmt.Errorf("manifest of kvport-%s: %w", f.Folder, err)
		}
		var manifest struct {
			Aliases []string `json:"aliases"`
		}
		if err := json.Unmarshal(out, &manifest); err != nil {
			return nil, fmt.Errorf("manifest of kvport-%s: %w", f.Folder, err)
		}
		if slices.Contains(manifest.Aliases, o.connector) {
			return f, nil
		}
	}
	return nil, nil // somebody else's has no fixture
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
	if !d.strikes {
		return nil
	}
	d.killed.name = "plugin killed"
	d.killed.want, err = d.complete(ctx, node.URL, killPrompt(prompts))
	return err
}
