package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/plugins"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// Setup is a way to serve the same traffic on the same cores: one engine, or two that share its threads and its KV blocks.
type Setup struct {
	Name  string
	Short string // what it is
	// roles of the two engines, and whether they keep blocks in memory beside their cache; none: one engine without a router, or whole
	// engines behind one
	roles   []string
	offload bool
	engines int      // whole engines, if there are no roles
	step    int      // tokens of a step at most; 0: as many as by default
	route   []string // arguments of the router; nil: there is none
}

// Setups are all that kvport bench serve knows. The first is what the others are compared with, unless others are chosen.
func Setups() []Setup {
	pd := []string{"kv_producer", "kv_consumer"}
	both := []string{"kv_both", "kv_both"}
	list := []Setup{
		{Name: "chunked", Short: "one engine, prompts in chunks beside the answers that run", engines: 1},
		{Name: "chunked-128", Short: "the same with at most 128 tokens a step, so that prompts delay answers less", engines: 1, step: 128},
		{Name: "pd", Short: "a prefill and a decode engine, every prompt goes to both", roles: pd, route: []string{"--bidirectional", "0"}},
		{Name: "pd-offload", Short: "the same, each with a tier in memory", roles: both, offload: true, route: []string{"--bidirectional", "0"}},
		{Name: "pd-turns", Short: "the same without the tier; the prefill engine loads the last answer from the decode engine", roles: both, route: []string{"--bidirectional", "4096"}},
		{Name: "pd-aware", Short: "as pd, but the router skips prefill where it costs time", roles: pd, route: []string{"--policy", "pd_aware", "--bidirectional", "0"}},
	}
	for _, policy := range []string{"round_robin", "least_loaded", "prefix_aware", "session"} {
		list = append(list, Setup{
			Name: "whole-" + policy, Short: "two whole engines behind a router with --policy " + policy, engines: 2, route: []string{"--policy", policy},
		})
	}
	return list
}

// ChooseSetups finds setups by name, in the order of the names; no names are all.
func ChooseSetups(names []string) ([]Setup, error) {
	all := Setups()
	if len(names) == 0 {
		return all, nil
	}
	var known []string
	for _, s := range all {
		known = append(known, s.Name)
	}
	var out []Setup
	for i, name := range names {
		n := slices.Index(known, name)
		if n < 0 {
			return nil, fmt.Errorf("setup %q is none of %s", name, strings.Join(known, ", "))
		}
		if slices.Contains(names[:i], name) {
			return nil, fmt.Errorf("setup %q is named twice", name)
		}
		out = append(out, all[n])
	}
	return out, nil
}

// EngineOptions say how setups are started.
type EngineOptions struct {
	Self       string // kvport
	Model      string
	PluginPath []string
	Threads    int       // of all engines of a setup together
	Blocks     int       // of all engines of a setup together
	Log        io.Writer // of all processes; nil: none
}

// running is a setup that has been started.
type running struct {
	url       string
	engines   []string           // their URLs
	processes []*cluster.Process // in the order of their start
	client    cluster.Client     // for metrics
}

// start starts a setup. Its cache is empty.
func (s *Setup) start(ctx context.Context, o *EngineOptions) (_ *running, err error) {
	r := &running{}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.stop(context.WithoutCancel(ctx)))
		}
	}()
	configs := make([]string, max(s.engines, len(s.roles)))
	for i, role := range s.roles {
		if configs[i], err = s.config(role); err != nil {
			return nil, err
		}
	}
	for i, config := range configs {
		args := []string{
			"serve", "--port", "0", "--model", o.Model, "--weight-cache=false",
			"--threads", strconv.Itoa(max(1, o.Threads/len(configs))), "--num-blocks", strconv.Itoa(max(1, o.Blocks/len(configs))),
		}
		for _, folder := range o.PluginPath {
			args = append(args, "--plugin-path", folder)
		}
		if s.step > 0 {
			args = append(args, "--max-num-batched-tokens", strconv.Itoa(s.step))
		}
		if config != "" {
			args = append(args, "--kv-transfer-config", config)
		}
		if err := r.run(ctx, o, fmt.Sprintf("%s engine %d", s.Name, i), args); err != nil {
			return nil, err
		}
		r.engines = append(r.engines, r.url)
	}
	if s.route == nil {
		return r, nil
	}
	args := append([]string{"route", "--port", "0"}, s.route...)
	if s.roles == nil {
		args = append(args, "--decode", strings.Join(r.engines, ","))
	} else {
		args = append(args, "--prefill", r.engines[0], "--decode", r.engines[1])
	}
	return r, r.run(ctx, o, s.Name+" router", args)
}

// run starts a process, which is where requests go from now on.
func (r *running) run(ctx context.Context, o *EngineOptions, name string, args []string) error {
	p, err := cluster.Start(ctx, o.Log, name, o.Self, args...)
	if err != nil {
		return err
	}
	r.processes, r.url = append(r.processes, p), p.URL
	return nil
}

// sources are the prompt tokens of all engines so far, by where their KV came from.
func (r *running) sources(ctx context.Context) (map[string]float64, error) {
	sums := map[string]float64{}
	for _, url := range r.engines {
		m, err := r.client.Metrics(ctx, url)
		if err != nil {
			return nil, err
		}
		for _, source := range []string{"local_compute", "local_cache", "external"} {
			sums[source] += m.Sum("kvport_prompt_tokens_total", fmt.Sprintf("source=%q", source))
		}
	}
	return sums, nil
}

// stopTimeout is how long processes may take to end.
const stopTimeout = time.Minute

// stop ends all processes, the router first.
func (r *running) stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	r.client.HTTP.CloseIdleConnections()
	var errs []error
	for _, p := range slices.Backward(r.processes) {
		errs = append(errs, p.Stop(ctx))
	}
	return errors.Join(errs...)
}

// tierBytes is the memory beside the cache of each engine of a setup that offloads.
const tierBytes = 1 << 30

// transfer is a transfer config.
type transfer struct {
	Connector string `json:"kv_connector"`
	Role      string `json:"kv_role"`
	Extra     any    `json:"kv_connector_extra_config"`
}

// config is the transfer config of an engine with a role.
func (s *Setup) config(role string) (string, error) {
	list, err := fixture.Read(plugins.Fixtures(), "*/fixture.json")
	if err != nil {
		return "", err
	}
	peers, err := list.Typical(fixture.Peers)
	if err != nil {
		return "", err
	}
	t := transfer{peers.Connector, role, struct{}{}}
	if s.offload {
		tier, err := list.Typical(fixture.Tier)
		if err != nil {
			return "", err
		}
		filled, err := fixture.Fill(tier.Memory().Config, fixture.Values{"MEMORY_BYTES": tierBytes})
		if err != nil {
			return "", err
		}
		t = transfer{host.MultiName, role, map[string][]transfer{"connectors": {{tier.Connector, "kv_both", json.RawMessage(filled)}, t}}}
	}
	data, err := json.Marshal(t)
	return string(data), err
}
