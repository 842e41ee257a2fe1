//go:build kvport_fault

package faultsuite

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/engine/tokenizer"
	"github.com/kvport/kvport/host"
)

// The workload runs in a process of its own, which a failpoint may kill. Its environment:
const (
	workFolder  = "KVPORT_SUITE_FOLDER"  // where it works: the store and the ticket key are kept there
	workPlugins = "KVPORT_SUITE_PLUGINS" // folder of plugin binaries
	workTrust   = "KVPORT_SUITE_TRUST"   // trust level
	workKind    = "KVPORT_SUITE_KIND"    // "split": prefill and decode apart; "hold": a connector that holds blocks; "lend": one that lends slots ahead of saves
	workMount   = "KVPORT_SUITE_MOUNT"   // "full": the store is a tiny tmpfs; "read-only": it becomes so
)

// workload is one run: an engine for each role, or one whose connector holds blocks.
type workload struct {
	folder, plugins, trust, kind, mount string

	requests []engine.Request
	want     [][]int32
	compared int // tokens
	external int // prompt tokens that were loaded
	failed   int // blocks that could not be saved
	running  []*node
}

type node struct {
	*engine.Engine
	metrics *prometheus.Registry
}

// work is the whole life of the process.
func work() error {
	w := &workload{
		folder: os.Getenv(workFolder), plugins: os.Getenv(workPlugins), trust: os.Getenv(workTrust),
		kind: os.Getenv(workKind), mount: os.Getenv(workMount),
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range 6 {
		prompt := make([]int32, 60+20*i)
		for j := range prompt {
			prompt[j] = rng.Int32N(256)
		}
		w.requests = append(w.requests, engine.Request{ID: connector.RequestID(fmt.Sprintf("fetched-%d", i)), Prompt: prompt, MaxTokens: 8, IgnoreEOS: true})
	}
	err := w.mountStore()
	if err == nil {
		err = w.run()
	}
	for _, n := range w.running {
		err = errors.Join(err, w.end(n))
	}
	if err == nil {
		fmt.Fprintf(os.Stdout, "tokens %d external %d failed_saves %d\n", w.compared, w.external, w.failed)
	}
	return err
}

func (w *workload) store() string { return filepath.Join(w.folder, "blocks") }

// mountStore puts a file system of its own at the store's place.
func (w *workload) mountStore() error {
	if w.mount == "" {
		return nil
	}
	if err := os.MkdirAll(w.store(), 0o700); err != nil {
		return err
	}
	size := "size=1m"
	if w.mount == "full" {
		size = "size=64k"
	}
	return syscall.Mount("tmpfs", w.store(), "tmpfs", 0, size)
}

func (w *workload) run() error {
	single, err := w.open(nil)
	if err != nil {
		return err
	}
	for _, r := range w.requests {
		tokens, _, err := ask(single, r)
		if err != nil {
			return err
		}
		w.want = append(w.want, tokens)
	}
	switch w.kind {
	case "hold":
		return w.holds()
	case "lend":
		return w.lends(single)
	}
	p, err := w.open(w.config("SharedStorageConnector", "kv_producer", fmt.Sprintf(`"shared_storage_path":%q,"max_bytes":49152`, w.store())))
	if err != nil {
		return err
	}
	d, err := w.open(w.config("SharedStorageConnector", "kv_consumer", fmt.Sprintf(`"shared_storage_path":%q`, w.store())))
	if err != nil {
		return err
	}
	steps := []func() error{
		func() error { return w.split(p, d, 0, 4) },
		w.damageOne,
		func() error { return w.split(p, d, 0, 4) },
		func() error { return w.restart(d) },
		func() error { return w.split(p, d, 0, 4) },
		w.removeStore,
		func() error { return w.split(p, d, 2, 6) },
	}
	for i, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}

// config is the transfer config of one engine. Fields of extra are JSON members.
func (w *workload) config(name, role, extra string) *host.Config {
	trust := w.trust
	if name == "TestConnector" {
		trust = "in-place" // holds need it
	}
	c, err := host.ParseConfig(fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":{%s},"kvport":{"trust":%q,"landing_bytes":16384,
		"deadlines":{"transfer":"2s","save":"2s","hold":"1s","later":"500ms"},"heartbeat":{"limit":"1m"},"breaker":{"deaths":1000,"backoff_max":"20ms"}}}`, name, role, extra, trust))
	if err != nil {
		panic(err)
	}
	c.Settings.TicketKeyFile = filepath.Join(w.folder, "ticket.key")
	return c
}

// open starts an engine. One whose plugin dies before it has answered does not start, and is started
// again, as an operator would.
func (w *workload) open(c *host.Config) (*node, error) {
	var errs error
	for range 3 {
		m, err := sim.New(sim.Options{Layers: 3, BytesPerToken: 32, Seed: 1, MaxTokens: 1024})
		if err != nil {
			return nil, err
		}
		n := &node{metrics: prometheus.NewRegistry()}
		n.Engine, err = engine.New(context.Background(), engine.Config{
			Model: m, Tokenizer: tokenizer.Bytes(), NumBlocks: 200, Connector: c, PluginPath: []string{w.plugins},
			Metrics: n.metrics, Log: slog.New(slog.DiscardHandler),
		})
		if err == nil {
			w.running = append(w.running, n)
			return n, nil
		}
		errs = errors.Join(errs, err)
	}
	return nil, errs
}

// ask sends one request and waits for its end.
func ask(n *node, r engine.Request) (tokens []int32, last engine.Output, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	out, err := n.Submit(ctx, r)
	if err != nil {
		return nil, last, err
	}
	for o := range out {
		tokens = append(tokens, o.Tokens...)
		last = o
	}
	return tokens, last, last.Err
}

// split runs requests as a router does: prefill on p, decode on d, all at once.
func (w *workload) split(p, d *node, from, to int) error {
	errs := make(chan error)
	for i := from; i < to; i++ {
		go func() { errs <- w.splitOne(p, d, i) }()
	}
	var all error
	for i := from; i < to; i++ {
		all = errors.Join(all, <-errs)
	}
	for i := from; i < to; i++ {
		w.compared += len(w.want[i])
	}
	return all
}

func (w *workload) splitOne(p, d *node, i int) error {
	r := w.requests[i]
	r.MaxTokens, r.Remote = 1, true
	_, last, err := ask(p, r)
	if err != nil {
		return fmt.Errorf("prefill of request %d: %w", i, err)
	}
	r = w.requests[i]
	r.Ticket = last.Ticket
	tokens, _, err := ask(d, r)
	if err == nil && !slices.Equal(tokens, w.want[i]) {
		err = fmt.Errorf("tokens are %v, want %v", tokens, w.want[i])
	}
	if err != nil {
		return fmt.Errorf("decode of request %d: %w", i, err)
	}
	return nil
}

// files lists the stored blocks.
func (w *workload) files() (out []string) {
	_ = filepath.WalkDir(w.store(), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && len(d.Name()) == 64 {
			out = append(out, path)
		}
		return nil
	})
	return out
}

// damageOne changes a byte of the header of a stored block of every prompt, so that whoever reads
// one removes it.
func (w *workload) damageOne() error {
	for i, path := range w.files() {
		data, err := os.ReadFile(path)
		if err != nil || len(data) < 10 || i%4 != 0 {
			continue
		}
		data[9] ^= 1
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return err
		}
	}
	if w.mount == "read-only" {
		return syscall.Mount("", w.store(), "", syscall.MS_REMOUNT|syscall.MS_RDONLY|syscall.MS_BIND, "")
	}
	return nil
}

// removeStore deletes the store under the plugins.
func (w *workload) removeStore() (err error) {
	if w.mount != "" {
		return nil
	}
	for range 3 { // somebody may write into it meanwhile
		if err = os.RemoveAll(w.store()); err == nil {
			break
		}
	}
	return err
}

// pause lets others go on for a moment.
func pause() {
	timer := time.NewTimer(time.Millisecond)
	defer timer.Stop()
	<-timer.C
}

// restart kills an engine's plugin and waits for the next.
func (w *workload) restart(n *node) error {
	deadline := time.Now().Add(time.Minute)
	killed := 0
	for {
		h := n.Health().Host
		switch {
		case h.State != "ready":
		case killed == 0:
			if err := syscall.Kill(h.PID, syscall.SIGKILL); err == nil {
				killed = h.PID
			}
		case h.PID != killed:
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the plugin is not back: %+v", *h)
		}
		pause()
	}
}

// holds runs requests on an engine whose connector keeps the blocks of ended requests.
func (w *workload) holds() error {
	dir := filepath.Join(w.folder, "held")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	n, err := w.open(w.config("TestConnector", "kv_both", fmt.Sprintf(`"dir":%q,"fault":"hold"`, dir)))
	if err != nil {
		return err
	}
	for i := range 3 {
		r := w.requests[i]
		r.Remote = true
		tokens, _, err := ask(n, r)
		if err != nil || !slices.Equal(tokens, w.want[i]) {
			return fmt.Errorf("request %d with a hold: %v, want %v: %w", i, tokens, w.want[i], err)
		}
		w.compared += len(tokens)
	}
	return nil
}

// What an engine whose connector lends slots is asked: enough for some saves into lent slots, and for the engine to forget the first prompts.
const (
	leastLent    = 20 // blocks saved into lent slots
	leastPrompts = 40
	mostPrompts  = 2000 // after which slots should long have been lent
)

// lends runs requests on an engine whose connector lends slots ahead of saves, and once more after the plugin was killed.
func (w *workload) lends(single *node) error {
	n, err := w.open(w.config("OffloadingConnector", "kv_both", `"cpu_bytes_to_use":8388608`))
	if err != nil {
		return err
	}
	w.requests, w.want = nil, nil
	rng := rand.New(rand.NewPCG(5, 6))
	for len(w.requests) < leastPrompts || n.sum("kvport_placed_saved_blocks_total") < leastLent {
		if len(w.requests) == mostPrompts {
			return fmt.Errorf("%v blocks of %d prompts were saved into lent slots", n.sum("kvport_placed_saved_blocks_total"), mostPrompts)
		}
		r := engine.Request{ID: connector.RequestID(fmt.Sprintf("lent-%d", len(w.requests))), Prompt: make([]int32, 100), MaxTokens: 4, IgnoreEOS: true}
		for i := range r.Prompt {
			r.Prompt[i] = rng.Int32N(256)
		}
		want, _, err := ask(single, r)
		if err != nil {
			return err
		}
		w.requests, w.want = append(w.requests, r), append(w.want, want)
		if err := w.same(n, len(w.requests)-1); err != nil {
			return err
		}
	}
	if err := w.restart(n); err != nil {
		return err
	}
	found := n.sum("kvport_placed_blocks_total")
	for i := range w.requests {
		if err := w.same(n, i); err != nil {
			return fmt.Errorf("in the next life: %w", err)
		}
	}
	if n.sum("kvport_placed_blocks_total") == found {
		return errors.New("the next life has nothing of what was saved")
	}
	return nil
}

// same compares what an engine answers to a request.
func (w *workload) same(n *node, i int) error {
	tokens, _, err := ask(n, w.requests[i])
	if err != nil || !slices.Equal(tokens, w.want[i]) {
		return fmt.Errorf("request %d: %v, want %v: %w", i, tokens, w.want[i], err)
	}
	w.compared += len(tokens)
	return nil
}

// sum is what a metric of an engine says, over its labels.
func (n *node) sum(name string) (sum float64) {
	families, err := n.metrics.Gather()
	if err != nil {
		return 0
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			sum += m.GetCounter().GetValue()
		}
	}
	return sum
}

// end waits until an engine has all its blocks back and closes it.
func (w *workload) end(n *node) error {
	deadline := time.Now().Add(time.Minute)
	for {
		h := n.Health()
		if h.Running+h.Waiting == 0 && h.Blocks == (engine.Blocks{Free: n.Info().NumBlocks}) {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("blocks are not free: %+v", h)
		}
		pause()
	}
	w.count(n)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return n.Close(ctx)
}

func (w *workload) count(n *node) {
	families, err := n.metrics.Gather()
	if err != nil {
		return
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				switch {
				case f.GetName() == "kvport_prompt_tokens_total" && l.GetValue() == "external":
					w.external += int(m.GetCounter().GetValue())
				case f.GetName() == "kvport_transfer_failed_blocks_total" && l.GetValue() == "save":
					w.failed += int(m.GetCounter().GetValue())
				}
			}
		}
	}
}
