package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// asks sends a cache query for a request's prompt.
func (r *rig) asks(t testing.TB, req Request) Output {
	t.Helper()
	req.ID += "?"
	req.Query, req.MaxTokens, req.Ticket, req.Remote = true, 0, nil, false
	got := collect(submit(t, r, req))
	require.NoError(t, got.last.Err)
	require.Equal(t, connector.ReasonStop, got.last.Reason)
	require.Empty(t, got.tokens)
	require.Zero(t, got.last.Usage.Generated)
	require.Equal(t, len(req.Prompt), got.last.Usage.Prompt)
	require.NotNil(t, got.last.Cached)
	sum := 0
	for _, s := range got.last.Cached.Scopes {
		require.Len(t, s.Blocks, s.Tokens/r.Info().BlockSize)
		sum += s.Tokens
	}
	require.Equal(t, got.last.Usage.Local+got.last.Usage.External, sum)
	return got.last
}

// steps is how often the model has computed.
func (r *rig) steps(t testing.TB) uint64 {
	families, err := r.reg.Gather()
	require.NoError(t, err)
	i := slices.IndexFunc(families, func(f *dto.MetricFamily) bool { return f.GetName() == "kvport_step_seconds" })
	return families[i].GetMetric()[0].GetHistogram().GetSampleCount()
}

// inScopes are the tokens of an answer: engine, node, shared.
func inScopes(o Output) (tokens [3]int) {
	for i, s := range o.Cached.Scopes {
		tokens[i] = s.Tokens
	}
	return tokens
}

// prompted is a request with a prompt of n tokens that begins like all others with its first token.
func prompted(id connector.RequestID, first int32, n int) Request {
	req := Request{ID: id, MaxTokens: 1, IgnoreEOS: true, Prompt: make([]int32, n)}
	for i := range req.Prompt {
		req.Prompt[i] = (first + int32(i)) % 250
	}
	return req
}

// TestCacheQuery: the answer is what a request gets then; it computes nothing, leaves nothing and counts as no request.
func TestCacheQuery(t *testing.T) {
	r := start(t, simConfig(t))
	space := connector.KeySpace{Model: r.cfg.Model.Spec().Weights}
	for i, n := range []int{1, 16, 17, 48, 49, 100} {
		req := prompted(connector.RequestID(fmt.Sprint("r", i)), int32(40*i), n)
		require.Equal(t, [3]int{}, inScopes(r.asks(t, req)))
		collect(submit(t, r, req))
		steps, requests := r.steps(t), r.metric(t, "kvport_requests_total", "")
		answer := r.asks(t, req)
		require.Equal(t, steps, r.steps(t))
		require.Equal(t, requests, r.metric(t, "kvport_requests_total", ""))
		want := (n - 1) / 16 * 16
		require.Equal(t, [3]int{want}, inScopes(answer))
		require.True(t, slices.Equal(space.Keys(req.Prompt, 16)[:want/16], answer.Cached.Scopes[0].Blocks))
		require.Equal(t, want, collect(submit(t, r, req)).last.Usage.Local)

		other := req
		other.Salt = "another tenant"
		require.Equal(t, [3]int{}, inScopes(r.asks(t, other)), "another salt sees nothing")
	}
	require.NoError(t, r.Reset(t.Context()))
	require.Equal(t, [3]int{}, inScopes(r.asks(t, prompted("r5", 200, 100))))
	requireIdle(t, r)
}

// TestCacheQueryNeedsNoPlace: whoever asks while every place is taken is answered after the step that runs.
func TestCacheQueryNeedsNoPlace(t *testing.T) {
	cfg := simConfig(t)
	cfg.MaxSeqs, cfg.MaxBatchedTokens = 1, 1
	g := &gate{Model: cfg.Model, open: make(chan struct{})}
	cfg.Model = g
	r := start(t, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	running, err := r.Submit(ctx, Request{ID: "long", Prompt: []int32{1}, MaxTokens: 1000, IgnoreEOS: true})
	require.NoError(t, err)
	waiting, err := r.Submit(ctx, Request{ID: "waiting", Prompt: []int32{1}, MaxTokens: 1000, IgnoreEOS: true})
	require.NoError(t, err)
	g.open <- struct{}{}
	query := prompted("query", 1, 100)
	query.Query, query.MaxTokens = true, 0
	answer, err := r.Submit(t.Context(), query)
	require.NoError(t, err)
	var last Output
	for over := false; !over; { // the model takes a step whenever it may
		select {
		case g.open <- struct{}{}:
		case got, more := <-answer:
			if over = !more; more {
				last = got
			}
		}
	}
	require.NoError(t, last.Err)
	require.NotNil(t, last.Cached)
	require.Equal(t, 2, r.Health().Running+r.Health().Waiting)
	cancel()
	defer close(g.open)
	var aborted [2]result
	g.steps(t, func() { aborted = [2]result{collect(running), collect(waiting)} })
	require.Equal(t, connector.ReasonAbort, aborted[0].last.Reason)
	require.Equal(t, connector.ReasonAbort, aborted[1].last.Reason)
	requireIdle(t, r)
}

// TestCacheQueryRefusals: what a cache query cannot be is refused before it is queued.
func TestCacheQueryRefusals(t *testing.T) {
	r := start(t, simConfig(t))
	for name, req := range map[string]Request{
		"with a ticket":      {Query: true, Ticket: []byte("t")},
		"for a consumer":     {Query: true, Remote: true},
		"for the next turn":  {Query: true, Turn: true},
		"hold without query": {Hold: true, MaxTokens: 1},
	} {
		req.ID, req.Prompt = "q", []int32{1}
		_, err := r.Submit(t.Context(), req)
		require.ErrorIs(t, err, ErrInvalid, name)
	}
}

// TestCacheQueryOfStore: what a shared store has is named with its scope, nothing of it is loaded, and a request then
// gets just that. The prefix cache comes first.
func TestCacheQueryOfStore(t *testing.T) {
	dir := storage(t)
	p := start(t, shared(t, simConfig(t), connector.RoleProducer, dir, ""))
	reqs := []Request{prompted("a", 1, 100), prompted("b", 101, 17), prompted("c", 201, 16)}
	prefill(t, p, reqs)
	require.Equal(t, [3]int{96}, inScopes(p.asks(t, reqs[0])), "a producer loads nothing")
	d := start(t, shared(t, simConfig(t), connector.RoleBoth, dir, ""))
	for i, want := range []int{96, 16, 0} {
		answer := d.asks(t, reqs[i])
		require.Equal(t, [3]int{0, 0, want}, inScopes(answer))
		require.False(t, answer.Cached.Scopes[2].Unknown)
		require.Zero(t, d.metric(t, "kvport_prompt_tokens_total", "external"))
		require.Zero(t, d.metric(t, "kvport_transfer_bytes_total", ""))
		requireIdle(t, d)
	}
	other := reqs[0]
	other.Salt = "another tenant"
	require.Equal(t, [3]int{}, inScopes(d.asks(t, other)))
	require.Equal(t, 96, collect(submit(t, d, reqs[0])).last.Usage.External)
	longer := reqs[0]
	longer.ID, longer.Prompt = "longer", append(slices.Clone(longer.Prompt), 7, 7, 7)
	prefill(t, p, []Request{prompted("more", 1, 200)})
	require.Equal(t, [3]int{96, 0, 80}, inScopes(d.asks(t, prompted("more", 1, 180))), "the rest is in the store alone")
	require.Equal(t, [3]int{96}, inScopes(d.asks(t, longer)))
	requireIdle(t, d)
}

// several is the config of an engine with a store that all engines share and one of the node.
func several(t testing.TB, dir, node, extra, settings string) Config {
	role := connector.RoleConsumer
	cfg := shared(t, simConfig(t), role, dir, "")
	path, err := json.Marshal(dir)
	require.NoError(t, err)
	key := cfg.Connector.Settings.TicketKeyFile
	cfg.Connector, err = host.ParseConfig(fmt.Sprintf(`{"kv_connector": "MultiConnector", "kv_role": %q, "kvport": %s, "kv_connector_extra_config": {"connectors": [
		{"kv_connector": %q, "kv_role": %q, "kv_connector_extra_config": {"shared_storage_path": %s}},
		{"kv_connector": "TestConnector", "kv_role": %q, "kv_connector_extra_config": {"dir": %q%s}}]}}`,
		role, settings, testkit.Typical(t, fixture.Store).Connector, role, path, role, node, extra))
	require.NoError(t, err)
	cfg.Connector.Settings.TicketKeyFile = key
	return cfg
}

// TestCacheQueryOfSeveral: each part of a prompt is named with the scope of the child that has it.
func TestCacheQueryOfSeveral(t *testing.T) {
	dir, node := storage(t), t.TempDir()
	p := shared(t, simConfig(t), connector.RoleProducer, dir, "")
	prefill(t, start(t, p), []Request{prompted("a", 1, 50)})
	key, err := host.ParseConfig(fmt.Sprintf(`{"kv_connector": "TestConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"dir": %q}}`, node))
	require.NoError(t, err)
	key.Settings.TicketKeyFile = p.Connector.Settings.TicketKeyFile // else the digests of one are misses for the other
	cfg := simConfig(t)
	cfg.Connector, cfg.PluginPath = key, []string{plugins}
	w := start(t, cfg)
	collect(submit(t, w, prompted("b", 1, 100)))
	requireIdle(t, w)

	m := start(t, several(t, dir, node, "", "{}"))
	answer := m.asks(t, prompted("c", 1, 100))
	require.Equal(t, [3]int{0, 48, 48}, inScopes(answer))
	all := (&connector.KeySpace{Model: cfg.Model.Spec().Weights}).Keys(prompted("c", 1, 100).Prompt, 16)
	require.Equal(t, all[:3], answer.Cached.Scopes[2].Blocks)
	require.Equal(t, all[3:6], answer.Cached.Scopes[1].Blocks)
	require.Equal(t, 96, collect(submit(t, m, prompted("c", 1, 100))).last.Usage.External)
	require.Equal(t, [3]int{96}, inScopes(m.asks(t, prompted("c", 1, 100))))
}

// TestCacheQueryUnknown: a connector that does not answer in time has nothing for the request, and the answer says that
// this is not known.
func TestCacheQueryUnknown(t *testing.T) {
	unknown := func(o Output) (list []bool) {
		for _, s := range o.Cached.Scopes {
			list = append(list, s.Unknown)
		}
		return list
	}
	dir, node := storage(t), t.TempDir()
	prefill(t, start(t, shared(t, simConfig(t), connector.RoleProducer, dir, "")), []Request{prompted("a", 1, 50)})
	m := start(t, several(t, dir, node, `, "fault": "hang_match"`, `{"heartbeat": {"limit": "1m"}}`))
	answer := m.asks(t, prompted("a", 1, 50))
	require.Equal(t, [3]int{0, 0, 48}, inScopes(answer), "the others answer without it")
	require.Equal(t, []bool{false, true, false}, unknown(answer))

	c, err := host.ParseConfig(fmt.Sprintf(`{"kv_connector": "TestConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"dir": %q, "match_ms": 3000},
		"kvport": {"deadlines": {"later": "50ms"}}}`, node))
	require.NoError(t, err)
	cfg := simConfig(t)
	cfg.Connector, cfg.PluginPath = c, []string{plugins}
	r := start(t, cfg)
	answer = r.asks(t, prompted("a", 1, 50))
	require.Equal(t, [3]int{}, inScopes(answer))
	require.Equal(t, []bool{false, true, false}, unknown(answer))
}

// TestCacheQueryHolds: the ticket of a query brings another engine what the prefix cache had, though nothing is kept for
// it, and nothing wrong when that is gone.
func TestCacheQueryHolds(t *testing.T) {
	dir := sockets(t)
	p := start(t, peered(t, simConfig(t), connector.RoleBoth, dir, ""))
	d := start(t, peered(t, simConfig(t), connector.RoleBoth, dir, ""))
	want := start(t, simConfig(t))
	hold := func(req Request) Output {
		req.Hold = true
		return p.asks(t, req)
	}
	a, b := prompted("a", 1, 100), prompted("b", 101, 100)
	a.MaxTokens, b.MaxTokens = 4, 4
	require.Equal(t, "the prefix cache has nothing of the prompt", hold(a).Cached.NotHeld)
	for _, req := range []Request{a, b} {
		collect(submit(t, p, req))
		requireIdle(t, p) // its digests are made
		answer := hold(req)
		require.Empty(t, answer.Cached.NotHeld)
		require.Equal(t, [3]int{96}, inScopes(answer))
		requireIdle(t, p)
		if req.ID == "b" { // its blocks are reused before anybody comes
			for i := range 20 {
				collect(submit(t, p, prompted(connector.RequestID(fmt.Sprint("flood", i)), int32(7*i), 500)))
			}
		}
		req.Ticket = answer.Ticket
		got := collect(submit(t, d, req))
		require.Equal(t, collect(submit(t, want, req)).tokens, got.tokens)
		require.Equal(t, req.ID == "a", got.last.Usage.External == 96, "%+v", got.last.Usage)
	}
	require.Zero(t, d.metric(t, "kvport_integrity_failures_total", ""))
	requireIdle(t, p)
	requireIdle(t, d)
}

// TestCacheQueryCannotHold: the answer says why nothing is held.
func TestCacheQueryCannotHold(t *testing.T) {
	req := prompted("a", 1, 50)
	for want, cfg := range map[string]Config{
		"no connector":     simConfig(t),
		"does not hold":    shared(t, simConfig(t), connector.RoleBoth, storage(t), ""),
		"kv_consumer":      peered(t, simConfig(t), connector.RoleConsumer, sockets(t), ""),
		"only kv_both can": peered(t, simConfig(t), connector.RoleProducer, sockets(t), ""),
	} {
		r := start(t, cfg)
		collect(submit(t, r, req))
		requireIdle(t, r)
		q := req
		q.Hold = true
		answer := r.asks(t, q)
		require.Equal(t, [3]int{48}, inScopes(answer), want)
		require.Contains(t, answer.Cached.NotHeld, want)
		require.Nil(t, answer.Ticket)
	}
}
