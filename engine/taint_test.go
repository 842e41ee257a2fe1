package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
)

// tested is the config of an engine with the host's test connector, whose blocks are files in a directory. It
// misbehaves as fields say.
func tested(t testing.TB, cfg Config, dir string, fields map[string]any, settings string) Config {
	key := filepath.Join(dir, "..", "ticket.key")
	require.NoError(t, os.WriteFile(key, []byte("0123456789abcdef0123456789abcdef"), 0o600))
	all := map[string]any{"dir": dir}
	maps.Copy(all, fields)
	extra, err := json.Marshal(all)
	require.NoError(t, err)
	c, err := host.ParseConfig(fmt.Sprintf(`{"kv_connector": "TestConnector", "kv_role": "kv_both", "kv_connector_extra_config": %s, "kvport": %s}`, extra, settings))
	require.NoError(t, err)
	c.Settings.TicketKeyFile = key
	cfg.Connector, cfg.PluginPath = c, []string{plugins}
	return cfg
}

// stored are the names of the files that a directory has.
func stored(t testing.TB, dir string) (names []string) {
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names
}

// goesOn is a request whose prompt is another one's with its answer.
func goesOn(id connector.RequestID, req Request, answer []int32) Request {
	req.ID, req.Ticket, req.Remote, req.Turn = id, nil, false, false
	req.Prompt = slices.Concat(req.Prompt, answer)
	return req
}

// TestUnverifiedStaysWithItsRequest: a lossy connector brings wrong bytes, which no digest would tell. One request has
// wrong tokens, as its operator accepts. Nothing that it loaded or computed is saved, found by other requests, named in
// events, or held for its next turn.
func TestUnverifiedStaysWithItsRequest(t *testing.T) {
	cfg, dir := simConfig(t), storage(t)
	req := prompted("a", 1, 200)
	req.MaxTokens = 80
	want := collect(submit(t, start(t, cfg), req)).tokens
	p := start(t, tested(t, cfg, dir, nil, "{}"))
	prefill(t, p, []Request{req})
	requireIdle(t, p)
	before, told := stored(t, dir), &gathered{}
	cfg.Events = told
	d := start(t, tested(t, cfg, dir, map[string]any{"lossy": true, "fault": "damage"}, `{"allow_lossy": true}`))
	published := func() int {
		n := make(chan int)
		d.do(func(*loop) { n <- len(*told) })
		return <-n
	}
	first := req
	first.Remote, first.Turn = true, true
	got := collect(submit(t, d, first))
	requireIdle(t, d)
	require.Positive(t, got.last.Usage.External)
	require.Positive(t, d.metric(t, "kvport_unverified_blocks_total", "lossy"))
	require.NotEqual(t, want, got.tokens, "the wrong bytes were used")
	require.Equal(t, before, stored(t, dir), "nothing of it is saved")
	require.Nil(t, got.last.Ticket, "nothing of it is handed over")
	require.Zero(t, published(), "nothing of it is in the prefix cache")
	again := req
	again.ID, again.MaxTokens = "b", 1
	require.Zero(t, collect(submit(t, d, again)).last.Usage.Local)
}

// TestUnverifiedSharesNothing: requests that run at the same time as one with wrong bytes, and have its prompt, are
// not touched by them.
func TestUnverifiedSharesNothing(t *testing.T) {
	cfg, dir := simConfig(t), storage(t)
	req := prompted("a", 1, 200)
	req.MaxTokens = 20
	want := collect(submit(t, start(t, cfg), req)).tokens
	prefill(t, start(t, tested(t, cfg, dir, nil, "{}")), []Request{req})
	g := &gate{Model: cfg.Model, open: make(chan struct{})}
	cfg.Model = g
	d := start(t, tested(t, cfg, dir, map[string]any{"lossy": true, "fault": "damage", "once": true}, `{"allow_lossy": true}`))
	first := req
	first.MaxTokens = 800
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	running, err := d.Submit(ctx, first)
	require.NoError(t, err)
	g.open <- struct{}{} // it has loaded, and the model computes what follows; then it waits again
	var others []<-chan Output
	for i := range 6 {
		other := req
		other.ID = connector.RequestID(fmt.Sprint("other", i))
		others = append(others, submit(t, d, other))
	}
	close(g.open) // the next step looks for blocks that the others can share
	for _, other := range others {
		require.Equal(t, want, collect(other).tokens)
	}
	cancel()
	got := collect(running)
	require.Greater(t, len(got.tokens), len(want))
	require.NotEqual(t, want, got.tokens[:len(want)])
}

// TestLossyStaysWithItsRequest: what a connector loads that may change bytes is not the beginning of what is saved.
// What is computed without a load is saved as ever.
func TestLossyStaysWithItsRequest(t *testing.T) {
	cfg, dir := simConfig(t), storage(t)
	req := prompted("a", 1, 100)
	req.MaxTokens = 60
	plain := start(t, cfg)
	want := collect(submit(t, plain, req)).tokens
	short := req
	short.ID, short.MaxTokens = "s", 1
	e := start(t, tested(t, cfg, dir, nil, "{}"))
	collect(submit(t, e, short))
	requireIdle(t, e)
	before := stored(t, dir)
	require.Len(t, before, 6)

	lossy := start(t, tested(t, cfg, dir, map[string]any{"lossy": true, "fault": "damage"}, `{"allow_lossy": true}`))
	got := collect(submit(t, lossy, req))
	requireIdle(t, lossy)
	require.Equal(t, 96, got.last.Usage.External)
	require.NotEqual(t, want, got.tokens, "the wrong bytes were used")
	require.Equal(t, before, stored(t, dir))
	require.Equal(t, 6, lossy.metric(t, "kvport_unverified_blocks_total", "lossy"))
	again := req
	again.ID = "b"
	require.Zero(t, collect(submit(t, lossy, again)).last.Usage.Local)
	next := goesOn("c", req, got.tokens)
	require.Equal(t, collect(submit(t, plain, next)).tokens, collect(submit(t, e, next)).tokens, "another engine loads what was saved")

	requireIdle(t, e)
	before = stored(t, dir)
	fresh := prompted("d", 101, 100)
	collect(submit(t, lossy, fresh))
	requireIdle(t, lossy)
	require.Len(t, stored(t, dir), len(before)+6, "what is computed is saved")
}
