package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvport/kvport/verify/cluster"
)

// fleet is two prefill engines, two decode engines and the routers in front of them. One engine alone is
// the decode engine and the routers.
type fleet struct {
	prefills, decodes []*cluster.Process
	// straight takes the engines in turn. So does crossed, except that it takes the decode engines in reverse order:
	// with both, every prefill engine hands over to every decode engine. aimed has the first two only.
	straight, crossed, aimed *cluster.Process
}

// engines is how many there are of each role.
const engines = 2

func (f *fleet) stop(ctx context.Context) error {
	var errs []error
	seen := map[*cluster.Process]bool{nil: true}
	for _, process := range append(append([]*cluster.Process{f.straight, f.crossed, f.aimed}, f.decodes...), f.prefills...) {
		if !seen[process] {
			seen[process] = true
			errs = append(errs, process.Stop(ctx))
		}
	}
	return errors.Join(errs...)
}

func (d *demo) startFleet(ctx context.Context) (f *fleet, err error) {
	f = &fleet{}
	started := f // f is nil by then
	defer func() {
		if err != nil {
			err = errors.Join(err, started.stop(ctx))
		}
	}()
	if d.alone() {
		p, err := d.serve(ctx, "both", both)
		if err != nil {
			return nil, err
		}
		f.decodes, f.straight, f.crossed, f.aimed = []*cluster.Process{p}, p, p, p
		return f, nil
	}
	if err := d.chooseRegistrars(ctx); err != nil {
		return nil, err
	}
	if err := d.startEngines(ctx, f); err != nil {
		return nil, err
	}
	p, q := f.prefills, f.decodes
	for i, r := range []struct {
		router   **cluster.Process
		prefills []*cluster.Process
		decodes  []*cluster.Process
	}{{&f.straight, p, q}, {&f.crossed, p, []*cluster.Process{q[1], q[0]}}, {&f.aimed, p[:1], q[:1]}} {
		args := []string{"route", "--port", "0", "--prefill", urls(r.prefills), "--decode", urls(r.decodes)}
		if d.registers() {
			args = append(args, "--register", d.registrars[i])
		}
		if *r.router, err = cluster.Start(ctx, d.log, "router", filepath.Join(d.bin, "kvport"), args...); err != nil {
			return nil, err
		}
	}
	return f, d.awaitRegistrations(ctx, f)
}

// startEngines starts all engines at once.
func (d *demo) startEngines(ctx context.Context, f *fleet) error {
	f.prefills, f.decodes = make([]*cluster.Process, engines), make([]*cluster.Process, engines)
	errs := make([]error, 2*engines)
	var all sync.WaitGroup
	for i := range engines {
		all.Go(func() { f.prefills[i], errs[i] = d.serve(ctx, fmt.Sprintf("P%d", i+1), "kv_producer") })
		all.Go(func() { f.decodes[i], errs[engines+i] = d.serve(ctx, fmt.Sprintf("D%d", i+1), "kv_consumer") })
	}
	all.Wait()
	return errors.Join(errs...)
}

func urls(list []*cluster.Process) string {
	var out []string
	for _, p := range list {
		out = append(out, p.URL)
	}
	return strings.Join(out, ",")
}

// split computes the same answers with prefill and decode apart.
func (d *demo) split(ctx context.Context, prompts []prompt) (err error) {
	if d.alone() {
		fmt.Printf("2/3  one engine without a prefix cache, every prompt twice, %s as a process of its own\n", d.connector)
	} else {
		fmt.Printf("2/3  %d prefill engines, %d decode engines, each with %s as a process of its own\n", engines, engines, d.connector)
	}
	f, err := d.startFleet(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.stop(ctx)) }()
	for i, prompt := range prompts {
		r := &d.rows[i]
		if err := d.cold(ctx, f, prompt.text); err != nil {
			return err
		}
		if r.got, r.first, err = d.turn(ctx, f, f.straight, prompt.text); err != nil {
			return err
		}
		if r.got2, r.second, err = d.turn(ctx, f, f.crossed, prompt.secondTurn(r.got.Text)); err != nil {
			return err
		}
		fmt.Printf("     %-20s %s: %4d tokens, %5.1f MB in %v; second turn %s: %4d tokens; %s\n", r.name, r.first.via, r.first.external,
			float64(r.first.bytes)/1e6, r.first.time().Round(1e4), r.second.via, r.second.external, r.verdict())
	}
	if !d.strikes {
		return nil
	}
	if d.alone() {
		fmt.Println("3/3  the plugin is killed with SIGKILL; the next one finds the blocks in the host's memory")
		return d.replacePlugin(ctx, f, killPrompt(prompts))
	}
	fmt.Println("3/3  a decode engine's plugin is killed with SIGKILL while it loads")
	return d.kill(ctx, f, killPrompt(prompts))
}

// cold has one engine alone compute a prompt, so that it has something to load.
func (d *demo) cold(ctx context.Context, f *fleet, text string) error {
	if !d.alone() {
		return nil
	}
	_, err := d.complete(ctx, f.straight.URL, text)
	return err
}

// turn sends a prompt and reads from the engines' metrics who served it and what was loaded.
func (d *demo) turn(ctx context.Context, f *fleet, router *cluster.Process, text string) (*cluster.Completion, moved, error) {
	before, err := d.metrics(ctx, f)
	if err != nil {
		return nil, moved{}, err
	}
	answer, err := d.complete(ctx, router.URL, text)
	if err != nil {
		return nil, moved{}, err
	}
	after, err := d.metrics(ctx, f)
	if err != nil {
		return nil, moved{}, err
	}
	m := moved{}
	for i, p := range append(slices.Clone(f.prefills), f.decodes...) {
		delta := func(name, label string) float64 { return after[i].Sum(name, label) - before[i].Sum(name, label) }
		if delta("kvport_prompt_tokens_total", "") == 0 {
			continue
		}
		m.via = strings.TrimPrefix(m.via+"-"+p.Name, "-")
		m.external += int(delta("kvport_prompt_tokens_total", `source="external"`))
		m.bytes += int64(delta("kvport_transfer_bytes_total", `direction="load"`))
		m.seconds += delta("kvport_transfer_seconds_sum", `direction="load"`)
	}
	return answer, m, nil
}

// metrics scrapes all engines, the prefill engines first.
func (d *demo) metrics(ctx context.Context, f *fleet) (out []cluster.Metrics, err error) {
	for _, p := range append(slices.Clone(f.prefills), f.decodes...) {
		m, err := d.client.Metrics(ctx, p.URL)
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}

// moved is what a turn had loaded.
type moved struct {
	via      string // the engines that served it
	external int    // tokens
	bytes    int64
	seconds  float64
}

func (m *moved) time() time.Duration { return time.Duration(m.seconds * float64(time.Second)) }

func (m *moved) gbps() float64 {
	if m.seconds == 0 {
		return 0
	}
	return float64(m.bytes) / m.seconds / 1e9
}

// killAttempts is how many prompts are tried until the kill meets a load.
const killAttempts = 5

// kill sends a prompt and kills the decode engine's plugin while that loads. It tries others where the load
// was over before.
func (d *demo) kill(ctx context.Context, f *fleet, text string) error {
	decode := f.decodes[0]
	plugins := cluster.Plugins(decode.PID())
	if len(plugins) != 1 {
		return fmt.Errorf("the decode engine has %d plugin processes, want 1", len(plugins))
	}
	var err error
	for try := range killAttempts {
		answered := make(chan struct{})
		prompt := strings.Repeat("Again. ", try) + text
		var lost error
		err = d.client.SignalLoad(ctx, decode, plugins[0], syscall.SIGKILL, func() <-chan struct{} {
			go func() {
				defer close(answered)
				d.killed.got, lost = d.complete(ctx, f.aimed.URL, prompt)
			}()
			return answered
		})
		<-answered
		if err = errors.Join(err, lost); !errors.Is(err, cluster.ErrTooLate) {
			if err == nil && try > 0 { // another text than the one known
				d.killed.want, err = d.complete(ctx, f.prefills[1].URL, prompt)
			}
			break
		}
	}
	if err != nil {
		return err
	}
	health, err := d.client.Health(ctx, decode.URL)
	if err != nil {
		return err
	}
	d.kills = health.Connector.Restarts
	fmt.Printf("     killed pid %d, %d restart, answer %s\n", plugins[0], d.kills, d.killed.verdict())
	return nil
}

// replacePlugin kills the plugin between storing a prompt and loading it.
func (d *demo) replacePlugin(ctx context.Context, f *fleet, text string) error {
	if err := d.cold(ctx, f, text); err != nil {
		return err
	}
	plugins := cluster.Plugins(f.decodes[0].PID())
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
		health, err := d.client.Health(ctx, f.decodes[0].URL)
		if err != nil {
			return err
		}
		if health.Connector.State == "ready" {
			d.kills = health.Connector.Restarts
		}
	}
	var err error
	if d.killed.got, d.killed.first, err = d.turn(ctx, f, f.straight, text); err != nil {
		return err
	}
	if d.killed.first.external == 0 {
		return errors.New("nothing was loaded from the memory that outlived the plugin")
	}
	fmt.Printf("     killed pid %d, %d restart, %d tokens from the memory tier, answer %s\n", plugins[0], d.kills, d.killed.first.external, d.killed.verdict())
	return nil
}
