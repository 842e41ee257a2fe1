package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kvport/kvport/internal/cluster"
)

// pair is a prefill engine, a decode engine and the router in front of them. One engine alone is both
// the decode engine and the router.
type pair struct {
	prefill, decode, router *cluster.Process
}

func (p *pair) stop(ctx context.Context) error {
	var errs []error
	for i, process := range []*cluster.Process{p.router, p.decode, p.prefill} {
		if process != nil && (i > 0 || process != p.decode) {
			errs = append(errs, process.Stop(ctx))
		}
	}
	return errors.Join(errs...)
}

func (d *demo) startPair(ctx context.Context) (p *pair, err error) {
	p = &pair{}
	started := p // p is nil by then
	defer func() {
		if err != nil {
			err = errors.Join(err, started.stop(ctx))
		}
	}()
	if d.alone() {
		p.decode, err = d.serve(ctx, "both", both)
		p.router = p.decode
		return p, err
	}
	if p.prefill, err = d.serve(ctx, "prefill", "kv_producer"); err != nil {
		return nil, err
	}
	if p.decode, err = d.serve(ctx, "decode", "kv_consumer"); err != nil {
		return nil, err
	}
	p.router, err = cluster.Start(ctx, d.log, "router", filepath.Join(d.bin, "kvport"), "route", "--port", "0",
		"--prefill", p.prefill.URL, "--decode", p.decode.URL)
	return p, err
}

// split computes the same answers with prefill and decode apart.
func (d *demo) split(ctx context.Context, prompts []prompt) (err error) {
	source := "prefill engine"
	if d.alone() {
		source = "memory tier"
		fmt.Printf("2/3  one engine without a prefix cache, every prompt twice, %s as a process of its own\n", d.connector)
	} else {
		fmt.Printf("2/3  prefill engine + decode engine + router, %s as a process of its own\n", d.connector)
	}
	p, err := d.startPair(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop(ctx)) }()
	for i, prompt := range prompts {
		r := &d.rows[i]
		if err := d.firstTurn(ctx, p, r, prompt.text); err != nil {
			return err
		}
		if r.got2, err = d.complete(ctx, p.router.URL, prompt.secondTurn(r.got.Text)); err != nil {
			return err
		}
		fmt.Printf("     %-24s %5d tokens from the %s, first token after %v, %s\n",
			r.name, r.external, source, r.got.TTFT.Round(1e6), r.verdict())
	}
	if d.alone() {
		fmt.Println("3/3  the plugin is killed with SIGKILL; the next one finds the blocks in the host's memory")
		return d.replacePlugin(ctx, p, killPrompt(prompts))
	}
	fmt.Println("3/3  the decode engine's plugin is killed with SIGKILL while it loads")
	return d.kill(ctx, p, killPrompt(prompts))
}

// cold has one engine alone compute a prompt, so that it has something to load.
func (d *demo) cold(ctx context.Context, p *pair, text string) error {
	if !d.alone() {
		return nil
	}
	_, err := d.complete(ctx, p.router.URL, text)
	return err
}

// firstTurn sends a prompt that no cache has seen and reads from the decode engine's metrics what
// was loaded for it.
func (d *demo) firstTurn(ctx context.Context, p *pair, r *row, text string) error {
	if err := d.cold(ctx, p, text); err != nil {
		return err
	}
	before, err := d.client.Metrics(ctx, p.decode.URL)
	if err != nil {
		return err
	}
	if r.got, err = d.complete(ctx, p.router.URL, text); err != nil {
		return err
	}
	after, err := d.client.Metrics(ctx, p.decode.URL)
	if err != nil {
		return err
	}
	delta := func(name, label string) float64 { return after.Sum(name, label) - before.Sum(name, label) }
	r.external = int(delta("kvport_prompt_tokens_total", `source="external"`))
	r.bytes = int64(delta("kvport_transfer_bytes_total", `direction="load"`))
	r.seconds = delta("kvport_transfer_seconds_sum", `direction="load"`)
	return nil
}

// kill sends a prompt and kills the decode engine's plugin once it has read part of the KV.
func (d *demo) kill(ctx context.Context, p *pair, text string) error {
	plugins := cluster.Plugins(p.decode.PID())
	if len(plugins) != 1 {
		return fmt.Errorf("the decode engine has %d plugin processes, want 1", len(plugins))
	}
	answered := make(chan struct{})
	var lost error
	err := d.client.StrikeLoad(ctx, p.decode, plugins[0], syscall.SIGKILL, func() <-chan struct{} {
		go func() {
			defer close(answered)
			d.killed.got, lost = d.complete(ctx, p.router.URL, text)
		}()
		return answered
	})
	<-answered
	if err = errors.Join(err, lost); err != nil {
		return err
	}
	health, err := d.client.Health(ctx, p.decode.URL)
	if err != nil {
		return err
	}
	d.kills = health.Connector.Restarts
	fmt.Printf("     killed pid %d, %d restart, answer %s\n", plugins[0], d.kills, d.killed.verdict())
	return nil
}

// replacePlugin kills the plugin between storing a prompt and loading it.
func (d *demo) replacePlugin(ctx context.Context, p *pair, text string) error {
	if err := d.cold(ctx, p, text); err != nil {
		return err
	}
	plugins := cluster.Plugins(p.decode.PID())
	if len(plugins) != 1 {
		return fmt.Errorf("the engine has %d plugin processes, want 1", len(plugins))
	}
	if err := syscall.Kill(plugins[0], syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill plugin %d: %w", plugins[0], err)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for d.kills == 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		health, err := d.client.Health(ctx, p.decode.URL)
		if err != nil {
			return err
		}
		if health.Connector.State == "ready" {
			d.kills = health.Connector.Restarts
		}
	}
	before, err := d.client.Metrics(ctx, p.decode.URL)
	if err != nil {
		return err
	}
	if d.killed.got, err = d.complete(ctx, p.router.URL, text); err != nil {
		return err
	}
	after, err := d.client.Metrics(ctx, p.decode.URL)
	if err != nil {
		return err
	}
	const name, label = "kvport_prompt_tokens_total", `source="external"`
	d.killed.external = int(after.Sum(name, label) - before.Sum(name, label))
	if d.killed.external == 0 {
		return errors.New("nothing was loaded from the memory that outlived the plugin")
	}
	fmt.Printf("     killed pid %d, %d restart, %d tokens from the memory tier, answer %s\n", plugins[0], d.kills, d.killed.external, d.killed.verdict())
	return nil
}
