package host

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/leaktest"
	"github.com/kvport/kvport/verify/testkit"
)

// pluginFolder holds the test plugin under several names.
var pluginFolder string

func TestMain(m *testing.M) {
	SandboxMain()
	if order := os.Getenv(placerEnv); order != "" {
		fmt.Fprintln(os.Stderr, placerMain(order))
		os.Exit(1)
	}
	if os.Getenv(spinEnv) != "" {
		spinMain()
	}
	os.Exit(withPlugin(m))
}

func withPlugin(m *testing.M) int {
	dir, err := os.MkdirTemp("", "hosttest")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	pluginFolder = dir
	if os.Getenv("KVPORT_TEST_HOST") != "" {
		return m.Run() // the child of a test: it is given a plugin
	}
	os.Setenv("TMPDIR", dir) // so that the socket folders of other tests are not counted
	bin := filepath.Join(dir, "kvport-test")
	if out, err := exec.Command("go", "build", "-o", bin, "./testdata/plugin").CombinedOutput(); err != nil {
		panic(fmt.Sprintf("build the test plugin: %v\n%s", err, out))
	}
	return m.Run()
}

// alias makes the test plugin appear under another file name, alone in a folder.
func alias(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	data, err := os.ReadFile(filepath.Join(pluginFolder, "kvport-test"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, data, 0o755))
	return path
}

// The engine's prompts.
var blocksOf, transfer, query = testkit.Blocks, testkit.Transfer, testkit.Query

const (
	blockTokens = testkit.BlockTokens
	numBlocks   = 64
)

// rig is a host with a tiny engine around it.
type rig struct {
	*Host
	t       *testing.T
	dir     string
	ranks   []*Region
	kvs     []*connector.KV
	metrics *prometheus.Registry
	step    uint64
	seen    []Event
}

type rigOptions struct {
	log      *slog.Logger // nil: standard error with -v
	role     string
	dir      string
	ranks    int
	extra    map[string]any
	settings map[string]any
	engine   string
	shape    string
	path     string
	events   chan BlockReport
	change   func(*Engine) // nil: nothing
	landed   func(connector.RequestID, int)
}

func (o rigOptions) config(t *testing.T) *Config {
	t.Helper()
	if o.role == "" {
		o.role = "kv_both"
	}
	extra := map[string]any{"dir": o.dir}
	maps.Copy(extra, o.extra)
	settings := map[string]any{"heartbeat": map[string]any{"limit": "1m"}} // a busy machine is no fault
	if trust := os.Getenv(trustVariable); trust != "" {
		settings["trust"], settings["landing_bytes"] = trust, landingBytes(12)
	}
	maps.Copy(settings, o.settings)
	arg, err := json.Marshal(map[string]any{
		"kv_connector": "TestConnector", "kv_role": o.role, "kv_connector_extra_config": extra, "kvport": settings,
		"engine_id": o.engine, "kv_connector_module_path": o.path,
	})
	require.NoError(t, err)
	c, err := ParseConfig(string(arg))
	require.NoError(t, err)
	c.SandboxedBy(Self)
	return c
}

func (o *rigOptions) build(t *testing.T) (*Config, Engine, Options) {
	t.Helper()
	if o.dir == "" {
		o.dir = t.TempDir()
	}
	o.ranks = max(o.ranks, 1)
	layout, size := WithDigests(connector.Layout{
		Name: "test", Blocks: numBlocks,
		Groups: []connector.Group{{BlockTokens: blockTokens, Policy: connector.PolicyAll}},
		Segments: []connector.Segment{
			{Layer: 0, Offset: 0, BlockStride: 512, Bytes: 512},
			{Layer: 1, Offset: 512 * numBlocks, BlockStride: 512, Bytes: 512},
		},
	})
	eng := Engine{
		Model: connector.NewFingerprint("test"), Shape: connector.NewFingerprint("shape", o.shape), Layout: layout,
	}
	for range o.ranks {
		r, err := NewRegion(size)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, r.Close()) })
		eng.Ranks = append(eng.Ranks, r)
	}
	if o.change != nil {
		o.change(&eng)
	}
	opts := Options{PluginPath: []string{pluginFolder}, Metrics: prometheus.NewRegistry(), BlockEvents: o.events, Landed: o.landed}
	if testing.Verbose() {
		opts.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	}
	if o.log != nil {
		opts.Log = o.log
	}
	return o.config(t), eng, opts
}

func newRig(t *testing.T, o rigOptions) *rig {
	t.Helper()
	leaks := leaktest.Watch(t)
	cfg, eng, opts := o.build(t)
	h, err := Open(t.Context(), cfg, eng, opts)
	require.NoError(t, err)
	r := &rig{Host: h, t: t, dir: o.dir, ranks: eng.Ranks, metrics: opts.Metrics.(*prometheus.Registry)}
	for _, m := range eng.Ranks {
		kv, err := connector.NewKV(eng.Layout, [][]byte{m.Bytes()})
		require.NoError(t, err)
		r.kvs = append(r.kvs, kv)
	}
	t.Cleanup(func() {
		require.NoError(t, r.closeNow())
		leaks()
	})
	return r
}

// inProcess is a rig whose scheduler side is in this process. It may have a clock of its own (testing/synctest).
func inProcess(t *testing.T, o rigOptions, sched connector.Scheduler) *rig {
	t.Helper()
	cfg, eng, opts := o.build(t)
	h := newHost(cfg, eng, opts)
	require.NoError(t, errors.Join(h.identify(), h.openRanks()))
	var err error
	h.metrics, err = newMetrics(opts.Metrics, cfg.Connector, cfg.Settings.Trust)
	require.NoError(t, err)
	h.info = connector.Info{Name: cfg.Connector, Capabilities: connector.CapabilitiesOf(sched)}
	h.begin(h.newGeneration(1, &thisProcess{done: make(chan struct{})}, sched))
	r := &rig{Host: h, t: t, ranks: eng.Ranks, metrics: opts.Metrics.(*prometheus.Registry)}
	t.Cleanup(func() { require.NoError(t, r.closeNow()) })
	return r
}

// closeNow closes the host while somebody reads its events.
func (r *rig) closeNow() error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e := range r.Events() {
			r.seen = append(r.seen, e)
		}
	}()
	err := r.Close(context.WithoutCancel(r.t.Context())) // in Cleanup the test's context is over
	<-done
	return err
}

// keys are those of a prompt of n full blocks; seed tells prompts apart.
func keys(seed, n int) []connector.BlockKey {
	space := connector.KeySpace{Salt: strconv.Itoa(seed)}
	return space.Keys(make([]int32, n*blockTokens), blockTokens)
}

// fill writes what belongs under the blocks' keys; wipe removes it.
func (r *rig) fill(blocks []connector.Block) { r.each(blocks, func(s, want []byte) { copy(s, want) }) }
func (r *rig) wipe(blocks []connector.Block) { r.each(blocks, func(s, _ []byte) { clear(s) }) }

// same reports whether every layer of the blocks holds what belongs there.
func (r *rig) same(blocks []connector.Block) bool {
	same := true
	r.each(blocks, func(s, want []byte) { same = same && bytes.Equal(s, want) })
	return same
}

func (r *rig) each(blocks []connector.Block, visit func(s, want []byte)) {
	for rank, kv := range r.kvs {
		for _, b := range blocks {
			for layer, segment := range kv.Segments(b.Group)[:2] {
				visit(kv.View(segment, b.ID), wantOf(b, rank, layer))
			}
		}
	}
}

// wantOf is what belongs into one layer of a block.
func wantOf(b connector.Block, rank, layer int) []byte {
	want := bytes.Repeat(b.Key[:], 16)
	binary.LittleEndian.PutUint32(want, uint32(rank<<8|layer))
	return want
}

func (r *rig) send(s *connector.Step) uint64 {
	r.step++
	s.ID = r.step
	r.Step(s)
	return s.ID
}

// next waits for the next event of a kind and keeps all others.
func (r *rig) next(kind EventKind) Event {
	r.t.Helper()
	timeout := time.NewTimer(time.Minute)
	defer timeout.Stop()
	for {
		select {
		case e, ok := <-r.Events():
			require.True(r.t, ok, "events are closed")
			r.seen = append(r.seen, e)
			if e.Kind == kind {
				return e
			}
		case <-timeout.C:
			require.FailNow(r.t, "no event", "of kind %d", kind)
		}
	}
}

// save stores blocks and waits until they are.
func (r *rig) save(id string, ks []connector.BlockKey, first connector.BlockID) Event {
	r.t.Helper()
	tr := transfer(id, ks, first)
	r.fill(tr.Blocks)
	r.send(&connector.Step{Arrived: []connector.Query{query(id, ks)}, Computed: []connector.Transfer{tr}})
	e := r.next(Saved)
	require.Equal(r.t, connector.RequestID(id), e.Request)
	return e
}

// load loads blocks and waits until that is over.
func (r *rig) load(id string, ks []connector.BlockKey, first connector.BlockID) Event {
	r.t.Helper()
	tr := transfer(id, ks, first)
	r.wipe(tr.Blocks)
	r.send(&connector.Step{Admitted: []connector.Transfer{tr}})
	e := r.next(Loaded)
	require.Equal(r.t, connector.RequestID(id), e.Request)
	return e
}

func (r *rig) end(id string, tokens int, remote bool, blocks ...connector.Block) Event {
	r.t.Helper()
	r.send(&connector.Step{Ended: []connector.Ended{{
		Request: connector.RequestID(id), Reason: connector.ReasonLength, Tokens: tokens, Remote: remote, Blocks: blocks,
	}}})
	e := r.next(Finished)
	require.Equal(r.t, connector.RequestID(id), e.Request)
	return e
}

// match asks until the answer is not Later.
func (r *rig) match(q connector.Query, ticket []byte) connector.Match {
	r.t.Helper()
	for {
		m := r.Match(q, ticket)
		if !m.Later {
			return m
		}
		e := r.next(Answered)
		require.Equal(r.t, q.Request, e.Request)
	}
}

// metric is the sum of a counter or gauge over its labels.
func (r *rig) metric(name string) float64 {
	r.t.Helper()
	families, err := r.metrics.Gather()
	require.NoError(r.t, err)
	sum := 0.0
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}
