package serve

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/bench"
	"github.com/kvport/kvport/verify/testkit"
)

// short is traffic of a few seconds.
func short() Workload {
	w := DefaultWorkload()
	w.Requests, w.Rate, w.Think = 24, 12, 0.3
	w.System, w.Long, w.Short, w.Answer = Range{32, 64}, Range{64, 128}, Range{8, 24}, Range{4, 12}
	return w
}

func collect() (bench.Emit, map[string]bench.Row) {
	rows := map[string]bench.Row{}
	return func(r bench.Row) error {
		if _, twice := rows[r.Name]; twice {
			return fmt.Errorf("two rows are called %s", r.Name)
		}
		rows[r.Name] = r
		return nil
	}, rows
}

// TestSetups: every setup serves the same traffic, with the tokens of a single engine, and does what its name says. Counts add up.
func TestSetups(t *testing.T) {
	r := rig.New(t)
	emit, rows := collect()
	var said []string
	w := short()
	w.Answer = Range{80, 100} // by default a prefill engine computes what has fewer than 64 tokens, instead of loading it
	o := Options{
		EngineOptions: EngineOptions{Self: rig.Binary(t), Model: "sim", PluginPath: []string{filepath.Join(testkit.Root(t), "bin")}, Threads: 2, Blocks: 1024},
		Setups:        Setups(), Workload: w, Seed: *rig.Seed, Rounds: 1, SLOs: []SLO{{TTFT: time.Hour}},
		Say: func(text string) { said = append(said, text) }, Emit: emit,
	}
	results, err := Bench(r.Context(), o)
	require.NoError(t, err)
	require.Len(t, results, len(Setups()))
	tokens := 0
	for _, request := range o.Workload.Draw(*rig.Seed) {
		tokens += request.MaxTokens
	}
	for _, result := range results {
		c := result.Counts()
		require.Equal(t, 24, c.Requests)
		require.Equal(t, 24, c.Answered, "%s: %v", result.Setup, c.Failed)
		require.Equal(t, tokens, c.Tokens, "%s: every answer has all its tokens", result.Setup)
		require.Equal(t, 1.0, result.Attainment(result.SLOs[0]))
		if strings.HasPrefix(result.Setup, "pd") && result.Setup != "pd-aware" {
			require.Positive(t, result.Sources["external"], "%s: blocks went from engine to engine", result.Setup)
		}
		for _, q := range Quantiles() {
			require.Positive(t, result.Quantile(TTFT, q))
			require.GreaterOrEqual(t, result.Quantile(E2E, q), result.Quantile(TTFT, q))
		}
	}
	// The turn that follows is on P what the answer has made on D, and is loaded instead of computed.
	of := map[string]*Result{}
	for _, result := range results {
		of[result.Setup] = result
	}
	require.Less(t, of["pd-turns"].Sources["local_compute"], of["pd"].Sources["local_compute"])
	require.NotNil(t, rows["pd : chunked, TTFT p99"].Ratio)
	require.NotNil(t, rows["pd : chunked, TTFT p50, 95 % from"].Value)
	require.EqualValues(t, 24, *rows["whole-session: answered"].Value)
	ended := 0
	for _, text := range said { // more of them where the machine is slow
		if strings.Contains(text, ": 24 of 24 requests sent, 24 ended, 0 failed") {
			ended++
		}
	}
	require.GreaterOrEqual(t, ended, len(Setups()), "progress of each run")

	var table strings.Builder
	require.NoError(t, Table(&table, results))
	require.Contains(t, table.String(), "pd-turns beside chunked")
	require.Contains(t, table.String(), "100.0 %")
}

// TestStall: an engine that is stopped for two seconds keeps everybody waiting who comes meanwhile, and all of them are in the numbers.
func TestStall(t *testing.T) {
	r := rig.New(t)
	engine := r.ServeModel("sim", "stalled", "")
	w := short()
	w.Requests, w.Rate = 100, 20
	list := w.Draw(*rig.Seed)
	Join(list, Drawn(list, *rig.Seed))
	const stall = 2 * time.Second
	c := &Client{URL: engine.URL, Form: Tokens, Own: true}
	t.Cleanup(c.HTTP.CloseIdleConnections)
	s := &stopping{Client: c, at: make(chan struct{})}
	go func() { // from the first request that leaves after a second on
		<-s.at
		_ = engine.Signal(syscall.SIGSTOP)
		<-time.After(stall)
		_ = engine.Signal(syscall.SIGCONT)
	}()
	outcomes := Run(r.Context(), s, list, RunOptions{Timeout: time.Minute})
	result := &Result{Setup: "stalled", SLOs: []SLO{{TTFT: stall / 2}}}
	result.Add(outcomes)
	counts := result.Counts()
	require.Equal(t, len(list), counts.Answered, "%v", counts.Failed)

	// Those that were to leave in the first half of the stall have waited for the second half, whatever else ran on the machine.
	waited := 0
	for _, o := range outcomes {
		if o.First-o.At > stall/2 {
			waited++
		}
	}
	t.Logf("%d of %d requests waited for over %v, p99 is %.0f ms", waited, len(list), stall/2, result.Quantile(TTFT, 0.99))
	require.Greater(t, waited, 5)
	require.Greater(t, result.Quantile(TTFT, 0.99), msOf(stall/2))
	require.Less(t, result.Attainment(result.SLOs[0]), 1.0)
}

// stopping says when the first request leaves after a second.
type stopping struct {
	*Client
	at   chan struct{}
	once sync.Once
}

func (s *stopping) Send(ctx context.Context, r *Request, piece func()) (Answer, error) {
	if r.At > time.Second {
		s.once.Do(func() { close(s.at) })
	}
	return s.Client.Send(ctx, r, piece)
}

// TestDrive: servers that run already take turns, and a server that refuses is in the numbers.
func TestDrive(t *testing.T) {
	r := rig.New(t)
	one := r.ServeModel("sim", "one", "")
	emit, rows := collect()
	o := Options{Workload: short(), Seed: 5, Rounds: 1, SLOs: []SLO{{TTFT: time.Hour}}, Say: func(string) {}, Emit: emit}
	var targets []Target
	for _, form := range []Form{Tokens, Text, Chat} {
		c := &Client{URL: one.URL, Form: form, Own: form == Tokens}
		t.Cleanup(c.HTTP.CloseIdleConnections)
		targets = append(targets, Target{string(form), c})
	}
	targets = append(targets, Target{"nobody", &Client{URL: "http://127.0.0.1:1", Form: Tokens}})
	results, err := Drive(r.Context(), targets, o)
	require.NoError(t, err)
	for _, result := range results[:3] {
		c := result.Counts()
		require.Equal(t, 24, c.Answered, "%s: %v", result.Setup, c.Failed)
	}
	require.Equal(t, map[string]int{"connect": 24}, results[3].Counts().Failed)
	require.EqualValues(t, 24, *rows["nobody: failed, connect"].Value)
	require.Nil(t, rows["nobody : tokens, TTFT p50"].Value, "nothing came")
	require.Zero(t, *rows["nobody : tokens, good requests"].Value)
	var table strings.Builder
	require.NoError(t, Table(&table, results))
	require.Contains(t, table.String(), "nobody: 24 of 24 requests failed: connect, such as connect: ")

	ctx, cancel := context.WithCancel(r.Context())
	cancel()
	_, err = Drive(ctx, targets[:1], o)
	require.ErrorIs(t, err, context.Canceled)
}

// TestSmallSteps: the engine of chunked-128 computes no more than 128 tokens in a step: a prompt of 500 takes 4 steps, and those of others one.
func TestSmallSteps(t *testing.T) {
	r := rig.New(t)
	steps := func(name string) float64 {
		chosen, err := ChooseSetups([]string{name})
		require.NoError(t, err)
		running, err := chosen[0].start(r.Context(), &EngineOptions{Self: rig.Binary(t), Model: "sim", Threads: 1, Blocks: 256})
		require.NoError(t, err)
		defer func() { require.NoError(t, running.stop(r.Context())) }()
		c := &Client{URL: running.url, Form: Tokens, Own: true}
		defer c.HTTP.CloseIdleConnections()
		_, err = c.Send(r.Context(), &Request{Parts: [][]int32{slices.Repeat([]int32{7}, 500)}, MaxTokens: 1}, func() {})
		require.NoError(t, err)
		m, err := running.client.Metrics(r.Context(), running.url)
		require.NoError(t, err)
		return m.Sum("kvport_step_seconds_count")
	}
	require.EqualValues(t, 3, steps("chunked-128")-steps("chunked"))
}

func TestChooseSetups(t *testing.T) {
	all, err := ChooseSetups(nil)
	require.NoError(t, err)
	require.Equal(t, Setups(), all)
	some, err := ChooseSetups([]string{"pd", "chunked"})
	require.NoError(t, err)
	require.Equal(t, []string{"pd", "chunked"}, []string{some[0].Name, some[1].Name})
	_, err = ChooseSetups([]string{"pdd"})
	require.ErrorContains(t, err, `setup "pdd" is none of chunked, chunked-128, pd,`)
	_, err = ChooseSetups([]string{"pd", "pd"})
	require.ErrorContains(t, err, "twice")
}
